"""Every check of this repository, by one command: `python scripts/check.py`.

--fast  no tests                    --all  also the tests marked `long`

Runs all steps, prints each one's name, time and outcome, and exits with the first failure's code. Tests marked `cuda`
run where there is a GPU: `pytest -m cuda`.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("decoder", "kernels", "ui")
BIN = Path(
    sys.executable
).parent  # console scripts keep the root off sys.path, where kernels/ would hide a published one
TYPES = ROOT / ".cache" / "types"
# One thread a test process: with two processes on two cores, torch's own threads would only wait for each other.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def run(*command: str) -> int:
    """Run a command of this environment from the root; what it says is shown when it fails."""
    environment = {**os.environ, **ENVIRONMENT, "MYPYPATH": str(TYPES)}
    outcome = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if outcome.returncode != 0:
        print(outcome.stdout, flush=True)
    return outcome.returncode


def check_format() -> int:
    return run(f"{BIN}/ruff", "format", "--check", ".")


def check_lint() -> int:
    return run(f"{BIN}/ruff", "check", ".")


def check_types() -> int:
    """mypy wants folders named as the packages are, so `.cache/types/cowbeam/decoder` is a link to `decoder`."""
    links = TYPES / "cowbeam"
    links.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        link = links / name
        if not link.is_symlink():
            link.symlink_to(os.path.relpath(ROOT / name, links))
    return run(f"{BIN}/mypy", "--strict", "--namespace-packages", "-p", "cowbeam")


def check_imports() -> int:
    return run(f"{BIN}/lint-imports")


def check_words() -> int:
    """A block is never a page: one word for one thing. (ui/ is left out, since a browser does show pages.)"""
    page = re.compile(r"(?<![a-z])pages?(?![a-z])", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: say block, not page: {line.strip()}"
        for folder in ("decoder", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if page.search(line)
    ]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


def check_tests(long_too: bool) -> int:
    """Not captured: pytest's lines appear as they come."""
    marks = "not cuda" if long_too else "not cuda and not long"
    command = [f"{BIN}/pytest", "-q", "-n", "2", "-m", marks]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}).returncode


def report_lines() -> None:
    """The size of each folder, so that growth is seen."""
    counts = []
    for folder in (*PACKAGES, "scripts", "tests"):
        paths = (path for suffix in ("py", "js", "css", "html", "sh") for path in (ROOT / folder).rglob(f"*.{suffix}"))
        counts.append(f"{folder} {sum(len(path.read_text(encoding='utf-8').splitlines()) for path in paths)}")
    print("lines   " + ", ".join(counts), flush=True)


def run_step(name: str, step: Callable[[], int]) -> int:
    started = time.perf_counter()
    code = step()
    print(f"{name:8}{'ok' if code == 0 else 'FAILED'}  {time.perf_counter() - started:.1f} s", flush=True)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--fast", action="store_true", help="no tests")
    amount.add_argument("--all", action="store_true", help="also the tests marked long")
    options = parser.parse_args()

    steps: list[tuple[str, Callable[[], int]]] = [
        ("format", check_format),
        ("lint", check_lint),
        ("types", check_types),
        ("imports", check_imports),
        ("words", check_words),
    ]
    if not options.fast:
        steps.append(("tests", lambda: check_tests(options.all)))
    report_lines()
    failures = [code for name, step in steps if (code := run_step(name, step)) != 0]
    return failures[0] if failures else 0


if __name__ == "__main__":
    sys.exit(main())
