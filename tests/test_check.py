"""The scripts that decide whether a change is good."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINTS = ("format", "lint", "types", "imports", "words")


def load_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check", ROOT / "scripts" / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/check.py with every step green."""
    module = load_check()
    for name in LINTS:
        monkeypatch.setattr(module, f"check_{name}", lambda: 0)
    monkeypatch.setattr(module, "check_tests", lambda _long_too: 0)
    monkeypatch.setattr("sys.argv", ["check.py"])
    return module


@pytest.mark.parametrize("failing", [*LINTS, "tests"])
def test_one_red_step_fails_and_hides_no_other(
    check: ModuleType, failing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A red step among green ones must reach the exit code, and the steps behind it must still run."""
    monkeypatch.setattr(check, f"check_{failing}", lambda *_: 3)
    assert check.main() == 3
    outcomes = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if not line.startswith("lines")]
    assert outcomes == [[name, "FAILED" if name == failing else "ok"] for name in (*LINTS, "tests")]


def test_green_is_zero(check: ModuleType) -> None:
    assert check.main() == 0


def test_a_command_that_fails_fails(check: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """What a failing tool said must be seen; what a passing one said is noise."""
    assert check.run("bash", "-c", "echo heard; exit 5") == 5
    assert "heard" in capsys.readouterr().out
    assert check.run("bash", "-c", "echo noise") == 0
    assert "noise" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "code"),
    [("num_pages = 1", 1), ("# a Page table", 1), ("# paged attention", 0), ("# PagedAttention", 0), ("homepage", 0)],
)
def test_a_block_is_no_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, code: int) -> None:
    module = load_check()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "plan.py").write_text(text)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    assert module.check_words() == code


@pytest.mark.parametrize("path", ["scripts/test.sh", "scripts/quickstart.sh", "scripts/environment.sh", ".ci/run"])
def test_scripts_parse(path: str) -> None:
    run = subprocess.run(["bash", "-n", str(ROOT / path)], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
