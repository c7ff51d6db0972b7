"""A fork costs the same at any length (vLLM #1646: a copied sequence object took most of the host's time)."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def bench_fork(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bench_fork")


def test_fork_and_free_cost_the_same_at_1_000_and_100_000_tokens(bench_fork: ModuleType):
    short, long = bench_fork.measure(1_000, repeats=60), bench_fork.measure(100_000, repeats=60)
    for name in ("fork", "free"):
        near, far = getattr(short, name), getattr(long, name)
        assert near.lines == far.lines, f"{name} executes more lines at 100 times the length"
        assert far.best_ns < 2 * near.best_ns, f"{name}: {far.best_ns:.0f} ns after {near.best_ns:.0f} ns"


def test_the_line_count_would_notice_a_walk_along_the_table(bench_fork: ModuleType):
    counts = []
    for length in (1_000, 2_000):
        _, branch = bench_fork.grow(length)
        counts.append(bench_fork.lines_executed(lambda branch=branch: branch.block_table))
    assert counts[1] > 1.5 * counts[0]


def test_the_last_line_is_json():
    command = [sys.executable, str(SCRIPTS / "bench_fork.py"), "--repeats", "5"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    last = json.loads(output.splitlines()[-1])
    assert last["benchmark"] == "fork"
    assert [result["num_tokens"] for result in last["results"]] == [1_000, 100_000]
    assert last["commit"]
