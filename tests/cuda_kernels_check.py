"""Checks the CUDA kernels on a machine with an NVIDIA GPU; not collected by pytest.

Use, from the repository's root (where the package is not installed, `.cache/types/cowbeam/{decoder,kernels,ui}` are
links to the folders):

    PYTHONPATH=.cache/types python3 tests/cuda_kernels_check.py [--seed N] [--cases N] [--shard I/N]

Inputs are fresh random forests in a pool poisoned with NaN. Prints a line per case with ‖out − reference‖ / ‖reference‖
against the float64 reference and one JSON line last. Exit code 1 if a bound is passed.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cowbeam.kernels import attention
from cowbeam.kernels import plan as plan_module
from cowbeam.kernels.attention import paged_attention
from cowbeam.kernels.attention_torch import paged_attention_torch
from cowbeam.kernels.cache_ops import copy_blocks, layer_pointers, write_kv
from cowbeam.kernels.draw_tokens import draw_tokens
from cowbeam.kernels.plan import Plan, build_plan, rows_per_window
from cowbeam.kernels.prefill import packed_causal_attention
from cowbeam.kernels.reference import (
    causal_attention_reference,
    copy_blocks_reference,
    paged_attention_reference,
    write_kv_reference,
)
from cowbeam.kernels.top_candidates import top_candidates
from forests import Rows, relative_error
from test_advance import Walk
from test_draw_tokens import Draw
from test_draw_tokens import disagreement as draw_disagreement
from test_top_candidates import Step, all_at_once, disagreement, of_one_group

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--cases", type=int, help="so many attention cases, drawn by the seed; every one compiles anew")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th attention case from the i-th on")
    options = parser.parse_args()
    print(f"seed {options.seed}, {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    shard, shards = map(int, options.shard.split("/"))
    errors = check_attention(options.seed, options.cases, shard, shards)
    if shard == 0:
        errors |= check_rest(options.seed)
    failed = [name for name, (error, bound) in errors.items() if not error <= bound]
    print("FAILED: " + "; ".join(failed) if failed else f"all {len(errors)} cases within their bounds")
    report = {
        "seed": options.seed,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cases": len(errors),
        "failed": failed,
        "worst": {
            str(bound): max((e for e, b in errors.values() if b == bound), default=0.0) for bound in BOUNDS.values()
        },
    }
    print(json.dumps(report))
    return 1 if failed else 0


def forest(seed: int, block_size: int = 16) -> Rows:
    rng = random.Random(seed)
    rows = Rows(block_size, 16384 // block_size + 256, seed)
    rows.beams(rng.randrange(200, 700), rng.randrange(5, 24), rng.randrange(5, 40))
    for length in (1, 15, 16, 17, 63, rng.randrange(64, 1000)):
        rows.beams(length, 1, 0)
    rows.beams(rng.randrange(17, 200), rng.randrange(2, 6), rng.randrange(20))
    rows.samples(rng.randrange(300), [rng.randrange(90) for _ in range(7)])
    return rows.chunk(rng.randrange(200), rng.randrange(10, 40)).padding(rng.randrange(4))


def cases() -> list[dict]:
    """Keyword arguments of `attend`. Every case costs a compilation, so float16 meets only the widths."""
    found: list[dict] = [{"dtype": torch.float16, "dim": dim} for dim in (64, 80, 128, 256)]
    for dtype in (torch.float32, torch.bfloat16):
        found += [{"dtype": dtype, "dim": dim} for dim in (64, 80, 96, 128, 256)]
        found += [{"dtype": dtype, "heads": heads, "dim": 64} for heads in HEAD_COUNTS]
        found += [{"dtype": dtype, "block_size": size, "dim": 64} for size in (8, 128)]
        found += [{"dtype": dtype, "sliding_window": 100}, {"dtype": dtype, "softcap": 50.0, "sinks": True}]
        found += [{"dtype": dtype, "sliding_window": 50, "block_size": 128, "dim": 64}]
        found += [{"dtype": dtype, "sinks": True, "sliding_window": 128, "dim": 64}]
        found += [{"dtype": dtype, "softcap": 30.0, "dim": 256, "sliding_window": 333}]
        found += [{"dtype": dtype, "value_dim": 64}, {"dtype": dtype, "narrow": True}]
        found += [{"dtype": dtype, "narrow": True, "dim": dim, "sinks": True} for dim in (64, 256)]
    for dtype in (torch.float16, torch.bfloat16):
        wide = {"dtype": dtype, "lines": 128}
        found += [wide, wide | {"dim": 64, "heads": (32, 2)}, wide | {"sinks": True, "sliding_window": 300}]
        found += [wide | {"block_size": size, "dim": 64, "heads": (27, 9)} for size in (4, 64)]
    return found


HEAD_COUNTS = [(8, 8), (27, 9), (14, 2), (32, 2), (71, 1)]  # query heads, kv heads


def attend(
    seed: int,
    *,
    dtype: torch.dtype,
    dim: int = 128,
    heads: tuple[int, int] = (8, 2),
    block_size: int = 16,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    value_dim: int | None = None,
    narrow: bool = False,
    lines: int = 64,
) -> dict[str, float]:
    """Relative errors of the Triton kernels and of the torch path on one random forest."""
    torch.manual_seed(seed)
    rows = forest(seed, block_size)
    tables, lengths, starts = rows.tensors()
    tables, lengths, flags = tables.cuda(), lengths.cuda(), torch.tensor(starts, device="cuda")
    caches = tuple(cache.cuda() for cache in rows.pool(heads[1], dim, dtype, sliding_window, value_dim))
    if value_dim is None:
        kv = torch.stack(caches, 1)
        caches = (kv[:, 0], kv[:, 1])
    query = torch.randn(len(starts), heads[0], dim, device="cuda").to(dtype)
    sink = torch.randn(heads[0], device="cuda") if sinks else None
    common = {"scale": dim**-0.5, "softcap": softcap}
    per_window = rows_per_window(*heads, 1 if narrow else 64, lines)
    make_plan = partial(
        build_plan, tables, lengths, flags, block_size=block_size, rows_per_window=per_window,
        sliding_window=sliding_window,
    )  # fmt: skip
    plan, torch_plan = make_plan(), without_triton(make_plan)
    truth = paged_attention_reference(
        query.double(),
        *(cache.double() for cache in caches),
        tables,
        lengths,
        sliding_window=sliding_window,
        sinks=None if sink is None else sink.double(),
        **common,
    )
    poison_free_memory()
    return {
        "triton": relative_error(paged_attention(query, *caches, plan, sinks=sink, **common), truth),
        "triton, the same schedule": relative_error(paged_attention(query, *caches, plan, sinks=sink, **common), truth),
        "triton, the general kernel": relative_error(
            without_hopper(lambda: paged_attention(query, *caches, make_plan(), sinks=sink, **common)), truth
        ),
        "torch": relative_error(paged_attention_torch(query, *caches, plan, sinks=sink, **common), truth),
        "triton over the torch plan": relative_error(
            paged_attention(query, *caches, torch_plan, sinks=sink, **common), truth
        ),
    }


def without_triton(make_plan: Callable[[], Plan]) -> Plan:
    """The plan as plain torch makes it on the device."""
    limit, plan_module.MAX_TRITON_ROWS = plan_module.MAX_TRITON_ROWS, 0
    try:
        return make_plan()
    finally:
        plan_module.MAX_TRITON_ROWS = limit


def without_hopper(attend: Callable[[], Tensor]) -> Tensor:
    """As other GPUs compute it."""
    has_hopper_form, attention._has_hopper_form = attention._has_hopper_form, lambda *_: False
    try:
        return attend()
    finally:
        attention._has_hopper_form = has_hopper_form


def poison_free_memory() -> None:
    """What the kernels get as empty memory shall hold NaN, not an earlier call's good result."""
    blocks = [torch.full((size,), float("nan"), device="cuda") for size in (1 << 14, 1 << 18, 1 << 20, 1 << 23)]
    del blocks


def check_attention(seed: int, count: int | None, shard: int, shards: int) -> dict[str, tuple[float, float]]:
    errors = {}
    drawn = cases() if count is None else random.Random(seed).sample(cases(), count)
    for index, case in list(enumerate(drawn))[shard::shards]:
        start = time.perf_counter()
        name = ", ".join(f"{key}={str(value).removeprefix('torch.')}" for key, value in case.items())
        for path, error in attend(seed + index, **case).items():
            errors[f"{path}: {name}"] = (error, BOUNDS[case["dtype"]])
            mark = "" if error <= BOUNDS[case["dtype"]] else "   <-- over the bound"
            print(f"{error:9.2e}  {path:27s}  {name}  ({time.perf_counter() - start:.1f} s){mark}", flush=True)
    return errors


def check_rest(seed: int) -> dict[str, tuple[float, float]]:
    """Cache writes and copies are exact; prefill and candidates are within their bounds."""
    torch.manual_seed(seed)
    errors = {}
    for dtype, bound in BOUNDS.items():
        kv = torch.randn(3, 64, 2, 8, 16, 128, device="cuda").to(dtype)
        truth = kv.clone()
        qkv = torch.randn(200, 24, 128, device="cuda").to(dtype)
        slots = torch.randperm(64 * 16, device="cuda")[:200]
        write_kv(qkv[:, 8:16], qkv[:, 16:], kv[0, :, 0], kv[0, :, 1], slots)
        write_kv_reference(qkv[:, 8:16], qkv[:, 16:], truth[0, :, 0], truth[0, :, 1], slots)
        order = torch.randperm(64, device="cuda")
        sources, destinations = order[:20], order[20:40]
        copy_blocks(list(kv), sources, destinations, pointers=layer_pointers(list(kv)))
        copy_blocks_reference(list(truth), sources, destinations)
        errors[f"write_kv and copy_blocks {dtype}"] = (float((kv != truth).sum()), 0.0)
        lengths, q = [300, 17, 1, 600], torch.randn(918, 8, 128, device="cuda").to(dtype)
        k, v = torch.randn(2, 918, 2, 128, device="cuda").to(dtype)
        for window in (None, 256):
            out = packed_causal_attention(q, k, v, lengths, scale=0.09, sliding_window=window)
            exact = causal_attention_reference(
                q.double(), k.double(), v.double(), lengths, scale=0.09, sliding_window=window
            )
            errors[f"prefill {dtype}, window {window}"] = (relative_error(out, exact), bound)
    for index, block_size in enumerate((1, 8, 16, 64)):
        Walk(seed + index, block_size, "cuda").go(30)  # asserts
        errors[f"advance_rows, block_size {block_size}"] = (0.0, 0.0)
    for width in (16, 64):
        step = Step.random(seed, width, 128256, 2 * width, torch.bfloat16, "cuda")
        found = of_one_group(captured(top_candidates, step.arguments))
        errors[f"top_candidates, width {width}"] = (disagreement(found, step, lower_first=True), 1e-6)
        steps = [step, *(step._replace(rows=step.rows.flip(0), running=step.running * k) for k in (2, 3))]
        worst = max(
            disagreement(found, of_step, lower_first=True)
            for found, of_step in zip(all_at_once(partial(captured_with, top_candidates), steps), steps, strict=True)
        )
        errors[f"top_candidates, width {width}, groups"] = (worst, 1e-6)
        draw = Draw.random(seed, width, 128256, torch.bfloat16, "cuda")
        errors[f"draw_tokens, width {width}"] = (draw_disagreement(captured(draw_tokens, draw), draw), 1e-6)
    for name, (error, _) in errors.items():
        print(f"{error:9.2e}  {name}", flush=True)
    return errors


def captured_with(function: Callable[..., tuple[Tensor, ...]], *arguments: Any) -> tuple[Tensor, ...]:
    return captured(function, arguments)


def captured(function: Callable[..., tuple[Tensor, ...]], arguments: tuple) -> tuple[Tensor, ...]:
    """The function's results by a graph's replay."""
    function(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function(*arguments)
    graph.replay()
    return tuple(tensor.clone() for tensor in found)


if __name__ == "__main__":
    sys.exit(main())
