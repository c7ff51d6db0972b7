"""The repository as a package: what is in the wheel, what an import costs, and the folder named `kernels`."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TENSORLESS = next(
    contract["source_modules"]
    for contract in PROJECT["tool"]["importlinter"]["contracts"]
    if contract["name"] == "bookkeeping knows no tensors"
)


def run_python(program: str, cwd: Path = ROOT) -> str:
    """What `python -c program` prints. From the root, `-c` puts the root on sys.path: `kernels` is then our folder."""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=cwd)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_transformers_works_from_the_root() -> None:
    """transformers probes for Hugging Face's package `kernels`; finding our folder has made it die on import."""
    program = """
import torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
print(tuple(LlamaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits.shape))
"""
    assert run_python(program) == "(1, 3, 32)"


def test_kernels_as_a_top_level_name_is_empty() -> None:
    """Our folder, found under the published package's name, offers a version that every transformers refuses."""
    program = "import sys, kernels; print(kernels.__version__, kernels.__file__, 'triton' in sys.modules)"
    assert run_python(program) == f"0.0.0 {ROOT / 'kernels' / '__init__.py'} False"


def test_kernels_gives_way_to_the_published_package(tmp_path: Path) -> None:
    """With Hugging Face's `kernels` installed, importing it from the root must give theirs."""
    published = tmp_path / "kernels"
    published.mkdir()
    (published / "__init__.py").write_text("from kernels.inner import name\n__version__ = '9.9'\n")
    (published / "inner.py").write_text("name = 'published'\n")
    program = (
        f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; print(kernels.__version__, kernels.name)"
    )
    assert run_python(program) == "9.9 published"


@pytest.mark.parametrize("module", ["cowbeam.decoder", *TENSORLESS])
def test_bookkeeping_imports_no_tensors(module: str) -> None:
    """import-linter sees import lines; this sees what an import really loads, `decoder/__init__.py` included."""
    program = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'triton'}} & set(sys.modules)))"
    assert run_python(program, cwd=Path("/")) == "[]"


def test_wheel_holds_the_three_packages_and_nothing_else(tmp_path: Path) -> None:
    """A `decoder` or `kernels` at the top level of site-packages would break other packages.

    Built from a copy, so that no `build/` of an earlier state leaks in and none stays in the checkout.
    """
    source = tmp_path / "source"
    for name in ("decoder", "kernels", "ui"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-P", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run = subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()

    info = f"cowbeam-{PROJECT['project']['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {"cowbeam", info}
    assert {name.split("/")[1] for name in names if name.startswith("cowbeam/")} == {"decoder", "kernels", "ui"}
    assert f"{info}/licenses/LICENSE" in names
    files = {
        f"cowbeam/{path.relative_to(source).as_posix()}"
        for folder in ("decoder", "kernels", "ui")
        for path in (source / folder).rglob("*")
        if path.is_file()
    }
    assert files == {name for name in names if name.startswith("cowbeam/")}, "package-data in pyproject.toml?"


@pytest.mark.parametrize("folder", ["decoder", "kernels", "ui", "scripts"])
def test_the_readme_names_every_file(folder: str) -> None:
    """And none that is not there. Seven modules of `decoder` were missing, a third of them from everywhere in it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme.partition("## The tree")[2].split("```")[1]
    lines = re.split(r"^(?=\w+/)", tree, flags=re.MULTILINE)
    (part,) = (lines for lines in lines if lines.startswith(f"{folder}/"))
    # Names stand in front of two spaces, what they are behind them.
    left = [re.split(r" {2,}", line.strip())[0] for line in part.removeprefix(f"{folder}/").splitlines()]
    named = set(" ".join(left).split()) - {"static/"}
    files = (path for path in (ROOT / folder).iterdir() if path.suffix in (".py", ".sh") and path.stem != "__init__")
    assert named == {path.stem if path.suffix == ".py" else path.name for path in files}
    linked = re.findall(rf"\]\(({folder}/[^)]+)\)", readme)
    assert [path for path in linked if not (ROOT / path).exists()] == []
