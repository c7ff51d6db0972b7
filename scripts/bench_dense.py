"""The dense part of a decode step: a model's layers as they are, with fused projections, compiled, and both.

    python scripts/bench_dense.py --shape llama-8b --rows 16 --rows 64
    python scripts/bench_dense.py --case fused+compiled --shape llama-1b --prompt 8192
    python scripts/bench_dense.py --device cpu --shape tiny --dtype float32       # no figures, only whether it works

"dense" is a step whose attention is a copy of a tensor; "step" is the same with blocks, plan and attention over
``--prompt`` shared tokens. On CUDA both are replays of a captured graph, without the choice of tokens. "products" is
the matrix products alone, fused, by the same library. "compile" is what the first step of a variant takes beyond the
second; a second run of this script finds torch's cache on disk. Logits are compared with those of a float32 step before
anything is timed: none may be half as far again from it as the eager one. The last line is JSON.
"""

import argparse
import contextlib
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from bench_header import print_header
from bench_models import SHAPES, random_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from cowbeam.decoder import attend
from cowbeam.decoder.attend import AttentionCall
from cowbeam.decoder.batch import DecodeInputs
from cowbeam.decoder.kv_cache import KVCache
from cowbeam.decoder.model_adapter import ModelAdapter

VARIANTS = ("eager", "fused", "compiled", "fused+compiled")
BLOCK_SIZE = 16


def make_inputs(rows: int, prompt: int, device: str) -> tuple[DecodeInputs, int]:
    """One group of ``rows`` branches that share the prompt and have one block each of their own; blocks in all."""
    shared = prompt // BLOCK_SIZE
    own = torch.arange(shared, shared + rows, dtype=torch.int32)
    tables = torch.cat([torch.arange(shared, dtype=torch.int32).expand(rows, -1), own[:, None]], 1)
    position = shared * BLOCK_SIZE + 3
    inputs = DecodeInputs(
        token_ids=torch.arange(rows, device=device) + 5,
        positions=torch.full((rows,), position, device=device),
        slots=(own.long() * BLOCK_SIZE + 3).to(device),
        lengths=torch.full((rows,), position + 1, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        group_starts=torch.arange(rows, device=device) == 0,
        widest_group=rows,
        copy_sources=torch.zeros(rows, dtype=torch.long, device=device),
        copy_destinations=torch.zeros(rows, dtype=torch.long, device=device),
    )
    return inputs, shared + rows


@contextlib.contextmanager
def without_attention() -> Iterator[None]:
    """Attention's place is taken by a copy, one small kernel."""

    def copied(_step: Any, call: AttentionCall) -> Tensor:
        return call.query[..., : call.value.shape[-1]].clone()

    with mock.patch.object(attend, "_write_and_attend", copied):
        yield


def make_adapter(model: PreTrainedModel, variant: str) -> ModelAdapter:
    adapter = ModelAdapter(model, "triton" if model.device.type == "cuda" else "torch")
    shapes = adapter.probe(2)
    if "fused" in variant:
        adapter.fuse_linears()
    if "compiled" in variant:
        adapter.compile_layers(shapes)
    return adapter


class Timer:
    """Times a function that only launches kernels: by replays of a graph on CUDA, by calls elsewhere."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = self.call = function
        self.on_cuda = torch.cuda.is_available()
        if self.on_cuda:
            with torch.cuda.stream(torch.cuda.Stream()):
                function()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                function()
            self.call = graph.replay

    def milliseconds(self, repeats: int) -> dict[str, float]:
        for _ in range(3):
            self.call()
        times = sorted(self._seconds() * 1e3 for _ in range(repeats))
        return {"median": statistics.median(times), "p20": times[len(times) // 5], "p80": times[len(times) * 4 // 5]}

    def _seconds(self) -> float:
        """Of one call among ten in a row, so that the device never waits for the host."""
        if not self.on_cuda:
            started = time.perf_counter()
            self.call()
            return time.perf_counter() - started
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            self.call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e4

    def kernels(self) -> dict[str, int]:
        """How often each kernel runs in one call."""
        if not self.on_cuda:
            return {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.call()
            torch.cuda.synchronize()
        counts: dict[str, int] = {}
        for event in profile.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                counts[event.name] = counts.get(event.name, 0) + 1
        return counts


def products(adapter: ModelAdapter, rows: int) -> Callable[[], Any]:
    """The matrix products of one step and nothing else, members of a group as one."""
    grouped = {member: group for group in adapter._fused.groups for member in group.members}
    weights = [group.weight for group in adapter._fused.groups]
    weights += [m.weight for m in adapter.model.modules() if isinstance(m, nn.Linear) and m not in grouped]
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=w.dtype, device=w.device) for w in weights}

    def run() -> None:
        with torch.inference_mode():
            for weight in weights:
                nn.functional.linear(inputs[weight.shape[1]], weight)

    return run


def difference(logits: Tensor, reference: Tensor) -> float:
    return float((logits.float() - reference).norm() / reference.norm())


def exact_logits(model: PreTrainedModel, cache: KVCache, inputs: DecodeInputs, blocks: int) -> Tensor:
    """The step in float32: 16-bit steps round in their own ways, but none may be further off than the eager one."""
    adapter = make_adapter(copy.deepcopy(model).float(), "eager")
    exact = KVCache(adapter.probe(2), blocks, BLOCK_SIZE)
    for layer, rounded in zip(exact.layers, cache.layers, strict=True):
        for tensor, values in zip(layer.tensors, rounded.tensors, strict=True):
            tensor.copy_(values)
    return adapter.decode(exact, inputs).clone()


def run_variant(
    model: PreTrainedModel,
    variant: str,
    cache: KVCache,
    inputs: DecodeInputs,
    reference: Tensor,
    allowed: float,
    repeats: int,
) -> dict[str, Any]:
    counters.clear()
    adapter = make_adapter(model, variant)
    firsts = []
    for _ in range(2):
        started = time.perf_counter()
        logits = adapter.decode(cache, inputs).float()
        float(logits.sum())  # waits for the device
        firsts.append(time.perf_counter() - started)
    row: dict[str, Any] = {
        "compile_s": firsts[0] - firsts[1],
        "difference": difference(logits, reference),
        "max_difference": float((logits - reference).abs().max() / reference.abs().max()),
        "graphs": counters["stats"]["unique_graphs"],
        "cache_hits": counters["inductor"]["fxgraph_cache_hit"],
        "is_compiled": adapter.is_compiled,
    }
    assert adapter.is_compiled == ("compiled" in variant), f"{variant}: the layers did not compile"
    assert row["difference"] <= allowed, f"{variant}: the logits are off by {row['difference']:.1e}, not {allowed:.1e}"
    row["step"] = Timer(lambda: adapter.decode(cache, inputs)).milliseconds(repeats)
    with without_attention():
        timer = Timer(lambda: adapter.decode(cache, inputs))
        row["dense"] = timer.milliseconds(repeats)
        row["kernels"] = timer.kernels()
    if "fused" in variant:
        row["products"] = Timer(products(adapter, len(inputs.token_ids))).milliseconds(repeats)
    assert counters["stats"]["unique_graphs"] == row["graphs"], "layers were compiled anew"
    return row


def show(rows: int, variant: str, row: dict[str, Any]) -> None:
    def ms(name: str) -> str:
        return f"{row[name]['median']:8.3f} ({row[name]['p20']:.3f}–{row[name]['p80']:.3f})" if name in row else ""

    kernels = sum(row["kernels"].values())
    print(
        f"{rows:4} {variant:14} | {ms('dense'):24} | {ms('step'):24} | {ms('products'):24} | {kernels:5} | "
        f"{row['compile_s']:6.1f} s ({row['graphs']} graphs, {row['cache_hits']} cached) | "
        f"{row['difference']:.1e}, max {row['max_difference']:.1e}",
        flush=True,
    )


def run_rows(model: PreTrainedModel, rows: int, options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    inputs, blocks = make_inputs(rows, options.prompt, options.device)
    eager = make_adapter(model, "eager")
    cache = KVCache(eager.probe(2), blocks, BLOCK_SIZE)
    for layer in cache.layers:
        for tensor in layer.tensors:
            tensor.normal_()
    reference = exact_logits(model, cache, inputs, blocks)
    allowed = 1e-5 + 1.5 * difference(eager.decode(cache, inputs), reference)
    for variant in options.case or VARIANTS:
        row = run_variant(model, variant, cache, inputs, reference, allowed, options.repeats)
        show(rows, variant, row)
        if options.list_kernels:
            for name, count in sorted(row["kernels"].items(), key=lambda item: -item[1]):
                print(f"    {count:5} × {name:.140}")
        yield variant, row


def set_inductor_options(settings: list[str]) -> None:
    """``name=value`` into torch._inductor.config, for experiments."""
    from torch._inductor import config

    pairs = (setting.split("=") for setting in settings)
    config.load_config({name: json.loads(value) for name, value in pairs})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES))
    parser.add_argument("--rows", action="append", type=int)
    parser.add_argument("--case", action="append", choices=VARIANTS)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--list-kernels", action="store_true")
    parser.add_argument("--inductor", action="append", default=[], metavar="NAME=JSON", help="an option of inductor's")
    options = parser.parse_args()
    set_inductor_options(options.inductor)
    about = print_header(f"Dense part of a decode step, {options.dtype}, prompt of {options.prompt} tokens")
    found: list[dict[str, Any]] = []
    for shape in options.shape or ["llama-8b", "llama-1b", "smollm2-135m"]:
        model = random_model(shape, options.device, getattr(torch, options.dtype))
        weights = sum(p.nbytes for p in model.parameters())
        print(f"{shape}: {weights / 1e9:.2f} GB of weights")
        print("rows variant        | dense ms                 | step ms                  | products ms              |"
              " kernels | compile | logits against eager")  # fmt: skip
        for rows in options.rows or [16]:
            for variant, row in run_rows(model, rows, options):
                found.append({"shape": shape, "rows": rows, "variant": variant, **row})
        if options.device == "cuda":
            print(f"peak beside weights {(torch.cuda.max_memory_allocated() - weights) / 1e9:.2f} GB (blocks too)")
        del model
        if options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    print(json.dumps({**about, "dtype": options.dtype, "prompt": options.prompt, "cases": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
