"""What a fork costs, and the free that undoes it: `python scripts/bench_fork.py`.

A branch shares every block and token of its parent through the last of each, so neither cost may depend on the
length of the context. Beside the time, the number of executed lines is counted: it has no noise at all.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from bench_header import print_header

from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.branches import Branch, BranchTree

BLOCK_SIZE = 16
LENGTHS = (1_000, 100_000)
BATCH = 200  # operations between two looks at the clock
REPEATS = 200


@dataclass(frozen=True)
class Cost:
    """Nanoseconds an operation: median and quartiles over batches, and the fastest batch; lines of Python executed."""

    median_ns: float
    low_quartile_ns: float
    high_quartile_ns: float
    best_ns: float
    lines: int


@dataclass(frozen=True)
class ForkCosts:
    """Fork and free of one branch of ``num_tokens`` tokens."""

    num_tokens: int
    fork: Cost
    free: Cost


def grow(num_tokens: int) -> tuple[BranchTree, Branch]:
    """A branch of ``num_tokens`` tokens, all but one of them generated."""
    tree = BranchTree(BlockPool(num_tokens // BLOCK_SIZE + 2, BLOCK_SIZE))
    branch = tree.plant(1)
    for _ in range(num_tokens - 1):
        tree.append_token(branch, token_id=0, logprob=0.0, beam=0)
        tree.append_slot(branch)
    return tree, branch


def measure(num_tokens: int, repeats: int = REPEATS) -> ForkCosts:
    """Fork and free in turns, in batches."""
    tree, branch = grow(num_tokens)
    fork_ns: list[float] = []
    free_ns: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter_ns()
        children = [tree.fork(branch) for _ in range(BATCH)]
        forked = time.perf_counter_ns()
        for child in children:
            tree.free(child)
        freed = time.perf_counter_ns()
        fork_ns.append((forked - started) / BATCH)
        free_ns.append((freed - forked) / BATCH)
    tree.pool.check_integrity([branch.last_block])
    children = []
    fork_lines = lines_executed(lambda: children.append(tree.fork(branch)))
    free_lines = lines_executed(lambda: tree.free(children.pop()))
    return ForkCosts(num_tokens, _cost(fork_ns, fork_lines), _cost(free_ns, free_lines))


def lines_executed(action: Callable[[], Any]) -> int:
    """How many lines of Python ``action`` executes, in everything it calls."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def _cost(samples: Sequence[float], lines: int) -> Cost:
    low, median, high = statistics.quantiles(samples, n=4)
    return Cost(median, low, high, min(samples), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"batches of {BATCH} operations")
    options = parser.parse_args()
    facts = print_header("Fork and free of a branch, by context length")
    print(f"{'tokens':>8}  {'':5}{'median ns':>10}  {'quartiles':>16}{'lines':>7}")
    results = [measure(length, options.repeats) for length in LENGTHS]
    for result in results:
        for name, cost in (("fork", result.fork), ("free", result.free)):
            spread = f"{cost.low_quartile_ns:.0f} to {cost.high_quartile_ns:.0f}"
            print(f"{result.num_tokens:>8}  {name:5}{cost.median_ns:>10.0f}  {spread:>16}{cost.lines:>7}")
    ratios = {
        name: getattr(results[-1], name).median_ns / getattr(results[0], name).median_ns for name in ("fork", "free")
    }
    print(json.dumps({"benchmark": "fork", **facts, "results": [asdict(r) for r in results], "ratio": ratios}))


if __name__ == "__main__":
    main()
