"""One decode layer's attention beside its peers, in the same run: SDPA, FlexAttention and, where installed, FlashInfer.

    python scripts/bench_attention.py                       # the cases below
    python scripts/bench_attention.py --case 8192x16        # one prompt of 8192 tokens, 16 branches
    python scripts/bench_attention.py --case 4096x1x64      # 64 groups of one branch: nothing is shared
    python scripts/bench_attention.py --sweep --plot roofline.png

Needs an NVIDIA GPU. A case is PROMPTxBRANCHES[xGROUPS]; each branch has 64 tokens of its own behind the prompt of its
group. 32 query heads, 8 kv heads, dim 128, bfloat16, blocks of 16 in random order. Times are µs of one layer: captured
graphs replay layers with pools of their own, so that the L2 cache is cold; plans are not counted. The floor is the
unique bytes of K and V over the bandwidth of a copying kernel on this device. Every result is first checked against
float64.

SDPA gets keys laid out for each branch, FlexAttention those of a group once under a mask, both contiguous and for
nothing: no peer but FlashInfer reads blocks. The last line is JSON.
"""

import argparse
import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from bench_header import print_header
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from cowbeam.kernels.attention import most_lines, paged_attention
from cowbeam.kernels.plan import build_plan, rows_per_window

HEADS, KV_HEADS, DIM, OWN, BLOCK_SIZE = 32, 8, 128, 64, 16
SCALE = DIM**-0.5
CASES = ["2048x4", "2048x16", "2048x64", "8192x4", "8192x16", "8192x64", "32768x8", "32768x32", "8192x1", "4096x1x64"]
TOLERANCE = 1e-2  # ‖out − truth‖ / ‖truth‖, bfloat16
COLD_BYTES = 200e6  # of all layers together: several times the L2 cache
SWEEP_PROMPTS = [512 << n for n in range(8)]
SWEEP_BRANCHES = [1 << n for n in range(9)]

Attend = Callable[[int], Tensor]  # a layer's number → [rows, heads, dim]


class Case(NamedTuple):
    """Groups of branches over one prompt each."""

    prompt: int
    branches: int
    groups: int = 1

    @classmethod
    def parse(cls, text: str) -> "Case":
        parts = text.split("x")
        if len(parts) not in (2, 3) or not all(part.isdigit() and int(part) for part in parts):
            raise argparse.ArgumentTypeError(f"a case is PROMPTxBRANCHES or PROMPTxBRANCHESxGROUPS, not {text!r}")
        case = cls(*map(int, parts))
        if case.prompt % BLOCK_SIZE:
            raise argparse.ArgumentTypeError(f"the prompt must be a multiple of {BLOCK_SIZE}, not {case.prompt}")
        return case

    @property
    def rows(self) -> int:
        return self.branches * self.groups

    @property
    def length(self) -> int:
        return self.prompt + OWN

    @property
    def unique_tokens(self) -> int:
        return self.groups * (self.prompt + self.branches * OWN)

    @property
    def unique_bytes(self) -> int:
        return self.unique_tokens * KV_HEADS * DIM * 2 * 2

    def __str__(self) -> str:
        return "x".join(map(str, self if self.groups > 1 else self[:2]))


class Setup:
    """A case's layers: pools, queries, block tables."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.num_layers = max(8, math.ceil(COLD_BYTES / case.unique_bytes))
        shared, own = case.prompt // BLOCK_SIZE, OWN // BLOCK_SIZE
        ids = torch.randperm(case.unique_tokens // BLOCK_SIZE, device="cuda", dtype=torch.int32)
        trunks, tails = ids.split([case.groups * shared, case.rows * own])
        self.trunks = trunks.view(case.groups, shared)  # block ids
        self.tails = tails.view(case.rows, own)
        self.tables = torch.cat([self.trunks.repeat_interleave(case.branches, 0), self.tails], 1)
        self.lengths = torch.full((case.rows,), case.length, dtype=torch.int32, device="cuda")
        self.starts = torch.arange(case.rows, device="cuda") % case.branches == 0
        shape = (len(ids), 2, KV_HEADS, BLOCK_SIZE, DIM)
        self.pools = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(self.num_layers)]
        self.query = torch.randn(case.rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)

    def keys_and_values(self, layer: int, blocks: Tensor) -> Tensor:
        """[2, n, kv_heads, tokens, dim] of block ids [n, blocks]."""
        n, columns = blocks.shape
        gathered = self.pools[layer][blocks.flatten()].view(n, columns, 2, KV_HEADS, BLOCK_SIZE, DIM)
        return gathered.permute(2, 0, 3, 1, 4, 5).reshape(2, n, KV_HEADS, columns * BLOCK_SIZE, DIM)

    def truth(self) -> Tensor:
        """Of layer 0, in float64."""
        out = []
        for row in range(self.case.rows):
            key, value = self.keys_and_values(0, self.tables[row : row + 1])[:, 0].double()
            query = self.query[row].double().view(KV_HEADS, HEADS // KV_HEADS, DIM)
            out.append((torch.softmax(query @ key.mT * SCALE, -1) @ value).view(HEADS, DIM))
        return torch.stack(out)


def cowbeam(setup: Setup) -> Attend:
    lines = most_lines(setup.query, DIM, None, setup.tables.shape[1] * BLOCK_SIZE)
    rows = rows_per_window(HEADS, KV_HEADS, setup.case.branches, lines)
    plan = build_plan(setup.tables, setup.lengths, setup.starts, block_size=BLOCK_SIZE, rows_per_window=rows)
    return lambda layer: paged_attention(
        setup.query, setup.pools[layer][:, 0], setup.pools[layer][:, 1], plan, scale=SCALE
    )


def sdpa(setup: Setup) -> Attend:
    laid_out = [setup.keys_and_values(layer, setup.tables) for layer in range(setup.num_layers)]
    query = setup.query[:, :, None]

    def attend(layer: int) -> Tensor:
        key, value = laid_out[layer]
        return scaled_dot_product_attention(query, key, value, scale=SCALE, enable_gqa=True)[:, :, 0]

    return attend


def flex(setup: Setup) -> Attend:
    """A group is one sequence: its prompt once, then every branch's own tokens; the mask says whose they are."""
    case = setup.case
    blocks = torch.cat([setup.trunks, setup.tails.reshape(case.groups, -1)], 1)
    laid_out = [setup.keys_and_values(layer, blocks) for layer in range(setup.num_layers)]
    query = setup.query.view(case.groups, case.branches, HEADS, DIM).transpose(1, 2).contiguous()

    def is_seen(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key < case.prompt) | ((key - case.prompt) // OWN == row)

    tokens = laid_out[0].shape[3]
    mask = create_block_mask(is_seen, None, None, case.branches, tokens, device="cuda")
    torch._dynamo.reset()  # it keeps at most eight compilations of a function
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)

    def attend(layer: int) -> Tensor:
        key, value = laid_out[layer]
        out = compiled(query, key, value, block_mask=mask, scale=SCALE, enable_gqa=True)
        return out.transpose(1, 2).reshape(case.rows, HEADS, DIM)

    return attend


def flashinfer_decode(setup: Setup) -> Attend:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    rows, columns = setup.tables.shape
    starts = torch.arange(rows + 1, dtype=torch.int32) * columns
    full = torch.full((rows,), BLOCK_SIZE, dtype=torch.int32)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(_workspace(), "HND", use_tensor_cores=True)
    wrapper.plan(
        starts, setup.tables.flatten(), full, HEADS, KV_HEADS, DIM, BLOCK_SIZE, q_data_type=torch.bfloat16,
        data_type=torch.bfloat16, sm_scale=SCALE,
    )  # fmt: skip
    return lambda layer: wrapper.run(setup.query, setup.pools[layer])


def flashinfer_cascade(setup: Setup) -> Attend:
    from flashinfer import MultiLevelCascadeAttentionWrapper

    case = setup.case
    levels = []
    for tables, rows in ((setup.trunks, case.branches), (setup.tails, 1)):
        lines, columns = tables.shape
        count = torch.arange(lines + 1, dtype=torch.int32, device="cuda")
        full = torch.full((lines,), BLOCK_SIZE, dtype=torch.int32, device="cuda")
        levels.append((count * rows, count * columns, tables.flatten().contiguous(), full))
    wrapper = MultiLevelCascadeAttentionWrapper(2, _workspace(), "HND")
    wrapper.plan(*map(list, zip(*levels, strict=True)), HEADS, KV_HEADS, DIM, BLOCK_SIZE, q_data_type=torch.bfloat16)
    return lambda layer: wrapper.run(setup.query, setup.pools[layer])


def _workspace() -> Tensor:
    return torch.zeros(256 * 2**20, dtype=torch.uint8, device="cuda")


PEERS: dict[str, Callable[[Setup], Attend]] = {"SDPA": sdpa, "FlexAttention": flex}
if importlib.util.find_spec("flashinfer"):
    PEERS |= {"FlashInfer decode": flashinfer_decode, "FlashInfer cascade": flashinfer_cascade}


def time_layer(attend: Attend, num_layers: int, repetitions: int = 9) -> dict[str, float]:
    """µs of one layer, median and range over replays of all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # else it reads a plan that is not made yet
    with torch.cuda.stream(stream):
        attend(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(num_layers):
            attend(layer)
    times = []
    for _ in range(repetitions + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / num_layers)
    times = sorted(times[2:])
    return {"median": statistics.median(times), "least": times[0], "most": times[-1]}


def measure(setup: Setup, make: Callable[[Setup], Attend], truth: Tensor | None) -> dict[str, float] | str:
    """Times, or why there are none."""
    try:
        attend = make(setup)
        if truth is not None:
            error = float((attend(0).double() - truth).norm() / truth.norm())
            if not error < TOLERANCE:
                return f"wrong by {error:.1e}"
        return time_layer(attend, setup.num_layers)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
    finally:
        torch.cuda.empty_cache()


def copy_bandwidth() -> float:
    """Bytes read and written a µs by a kernel that copies 2 GB; the copy engine, which `copy_` takes, is slower."""
    source = torch.ones(2**29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_layer(lambda _: torch.neg(source, out=target), 4)["least"]


def compare(cases: list[Case], peers: list[str], bandwidth: float) -> tuple[list[dict[str, Any]], bool]:
    """A line a case; and whether cowbeam was right in all of them."""
    found = []
    for case in cases:
        setup = Setup(case)
        truth = setup.truth()
        floor = case.unique_bytes / bandwidth
        times = {"cowbeam": measure(setup, cowbeam, truth)}
        times |= {name: measure(setup, PEERS[name], truth) for name in peers}
        found.append({"case": str(case), "floor": floor, "times": times})
        print(
            f"{case!s:>12}  floor {floor:6.1f}  " + "  ".join(f"{n} {_shown(t)}" for n, t in times.items()), flush=True
        )
    return found, all(isinstance(line["times"]["cowbeam"], dict) for line in found)


def _shown(times: dict[str, float] | str) -> str:
    if isinstance(times, str):
        return f"({times})"
    return f"{times['median']:.1f} ({times['least']:.1f}–{times['most']:.1f})"


def summary(lines: list[dict[str, Any]]) -> float | None:
    """Geometric mean of the best peer's time over cowbeam's, of the cases in which something is shared."""
    ratios = []
    for line in lines:
        case = Case.parse(line["case"])
        peers = [
            times["median"] for name, times in line["times"].items() if name != "cowbeam" and isinstance(times, dict)
        ]
        if case.branches > 1 and peers and isinstance(line["times"]["cowbeam"], dict):
            ratios.append(min(peers) / line["times"]["cowbeam"]["median"])
    return statistics.geometric_mean(ratios) if ratios else None


def sweep(bandwidth: float) -> list[dict[str, float]]:
    """cowbeam alone over prompts and branches."""
    points = []
    for prompt in SWEEP_PROMPTS:
        for branches in SWEEP_BRANCHES:
            case = Case(prompt, branches)
            setup = Setup(case)
            times = measure(setup, cowbeam, None)
            assert isinstance(times, dict), f"{case}: {times}"
            points.append(
                {"prompt": prompt, "branches": branches, "us": times["median"], "floor": case.unique_bytes / bandwidth}
            )
        print(
            f"{prompt:>6}  " + "  ".join(f"{point['us']:.1f}" for point in points[-len(SWEEP_BRANCHES) :]), flush=True
        )
    return points


def cliffs(points: list[dict[str, float]]) -> list[str]:
    """Points that take more than 5 % longer than a neighbour with more work."""
    us = {(point["prompt"], point["branches"]): point["us"] for point in points}
    return [
        f"{prompt}x{branches} {time:.1f} µs, {more[0]}x{more[1]} {us[more]:.1f} µs"
        for (prompt, branches), time in us.items()
        for more in ((2 * prompt, branches), (prompt, 2 * branches))
        if more in us and time > 1.05 * us[more]
    ]


def plot(points: list[dict[str, float]], path: str) -> None:
    """Time against the floor, a line for each number of branches."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5))
    colours = plt.get_cmap("viridis")
    for index, branches in enumerate(SWEEP_BRANCHES):
        line = [point for point in points if point["branches"] == branches]
        axes.plot(
            [point["prompt"] for point in line], [point["us"] for point in line], marker="o", markersize=3,
            color=colours(index / len(SWEEP_BRANCHES)), label=f"{branches} branches" if index else "1 branch",
        )  # fmt: skip
    for branches, style in ((1, "--"), (SWEEP_BRANCHES[-1], ":")):
        line = [point for point in points if point["branches"] == branches]
        axes.plot(
            [point["prompt"] for point in line], [point["floor"] for point in line], style, color="grey",
            label=f"floor, {branches} branch{'es' if branches > 1 else ''}: every byte read once",
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="prompt, tokens", ylabel="attention of one layer, µs")
    axes.set_xticks(SWEEP_PROMPTS, [str(prompt) for prompt in SWEEP_PROMPTS], minor=False)
    axes.legend(fontsize=7, ncol=2)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", type=Case.parse)
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="default: all that are installed")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="cowbeam alone, prompts 512 … 65536 × branches 1 … 256")
    parser.add_argument("--plot", help="picture of the sweep")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    facts: dict[str, Any] = dict(print_header("Attention of one decode layer, µs"))
    bandwidth = copy_bandwidth()
    print(f"A copy reads and writes {bandwidth / 1e6:.2f} TB/s.", flush=True)
    is_right = True
    if options.sweep:
        points = sweep(bandwidth)
        facts |= {"points": points, "cliffs": cliffs(points)}
        print(f"Slower than a neighbour with more work: {', '.join(facts['cliffs']) or 'none'}.")
        if options.plot:
            plot(points, options.plot)
    else:
        peers = [] if options.no_peer else options.peer or list(PEERS)
        lines, is_right = compare(options.case or [Case.parse(case) for case in CASES], peers, bandwidth)
        facts |= {"cases": lines, "times the best peer": summary(lines)}
        if facts["times the best peer"]:
            print(f"Where something is shared: {facts['times the best peer']:.2f} times as fast as the best peer.")
    print(json.dumps(facts | {"bandwidth": bandwidth}))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
