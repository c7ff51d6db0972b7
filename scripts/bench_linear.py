"""Matrix products of few rows: torch's own (cuBLAS) beside `kernels/skinny_linear.py`, in its variants.

    python scripts/bench_linear.py --shape llama-8b --rows 16 --rows 64

Every product of a decode step with q/k/v and gate/up fused. Each launch of a captured graph reads other weights, more
of them than L2 holds, as in a step. Every variant is compared with torch before it is timed. "sum" is the whole step's
products with the best variant of each; the last line is JSON. Needs CUDA.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from bench_decode import SHAPES
from bench_header import print_header
from torch import Tensor

from cowbeam.kernels.skinny_linear import Variant, Workspace, skinny_linear

VARIANTS = [
    Variant(64, 128, 4, 4, 2),
    Variant(64, 128, 4, 3, 3),
    Variant(64, 64, 4, 6, 3),
    Variant(64, 64, 4, 4, 3),
    Variant(64, 256, 4, 3, 2),
    Variant(128, 64, 4, 5, 2),
    Variant(128, 128, 8, 4, 1),
    Variant(128, 128, 8, 3, 2),
    Variant(64, 128, 4, 4, 2, early=True),
    Variant(64, 64, 4, 6, 3, early=True),
    Variant(128, 64, 4, 5, 2, early=True),
]
WEIGHT_BYTES = 600e6  # read by one replay


def products(shape: str) -> dict[str, tuple[int, int, int]]:
    """name: (outputs, inputs, how often in a step)."""
    s = SHAPES[shape]
    head_dim = s.get("head_dim", s["hidden_size"] // s["num_attention_heads"])
    heads, hidden, layers = s["num_attention_heads"], s["hidden_size"], s["num_hidden_layers"]
    return {
        "qkv": ((heads + 2 * s["num_key_value_heads"]) * head_dim, hidden, layers),
        "o": (hidden, heads * head_dim, layers),
        "gate_up": (2 * s["intermediate_size"], hidden, layers),
        "down": (hidden, s["intermediate_size"], layers),
        "head": (s["vocab_size"], hidden, 1),
    }


def microseconds(call: Callable[[Tensor], Any], weights: list[Tensor], repeats: int) -> float:
    """Median of one launch."""
    with torch.cuda.stream(torch.cuda.Stream()):
        call(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(weights))
    return statistics.median(times[3:])


def run_product(outputs: int, inputs: int, rows: int, repeats: int, workspace: Workspace) -> dict[str, float]:
    count = max(2, round(WEIGHT_BYTES / (outputs * inputs * 2)))
    weights = [torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
    want = x.double() @ weights[0].double().T
    found = {"torch": microseconds(lambda weight: torch.nn.functional.linear(x, weight), weights, repeats)}
    for variant in VARIANTS:
        name = "/".join(map(str, variant[:5])) + ("/early" if variant.early else "")
        try:
            got = skinny_linear(x, weights[0], None, workspace.partial, workspace.counters, variant).double()
        except Exception as error:  # a variant may want more shared memory than there is
            print(f"    {name}: {str(error).splitlines()[0]:.100}")
            continue
        difference = float((got - want).norm() / want.norm())
        assert difference < 0.01, f"{name} is off by {difference:.1e}"
        found[name] = microseconds(
            lambda weight, variant=variant: skinny_linear(
                x, weight, None, workspace.partial, workspace.counters, variant
            ),
            weights,
            repeats,
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=sorted(SHAPES))
    parser.add_argument("--rows", action="append", type=int)
    parser.add_argument("--case", action="append", help="qkv, o, gate_up, down or head")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    about = print_header("Matrix products of few rows, bfloat16, µs")
    workspace = Workspace(torch.device("cuda"))
    cases = []
    for shape in options.shape or ["llama-8b"]:
        for rows in options.rows or [16]:
            sums = {"torch": 0.0, "best": 0.0, "bytes": 0.0}
            for name, (outputs, inputs, times) in products(shape).items():
                if options.case and name not in options.case:
                    continue
                found = run_product(outputs, inputs, rows, options.repeats, workspace)
                size = outputs * inputs * 2
                sums["torch"] += times * found["torch"]
                sums["best"] += times * min(found.values())
                sums["bytes"] += times * size
                cases.append({"shape": shape, "rows": rows, "product": name, "bytes": size, "us": found})
                line = ", ".join(f"{key} {value:.1f}" for key, value in sorted(found.items(), key=lambda i: i[1]))
                best = size / min(found.values()) / 1e6
                print(f"{shape} {rows:3} rows {name:8} {size / 1e6:7.1f} MB: {line}; best {best:.2f} TB/s", flush=True)
            print(
                f"{shape} {rows:3} rows sum: torch {sums['torch'] / 1e3:.3f} ms, best {sums['best'] / 1e3:.3f} ms, "
                f"{sums['bytes'] / 1e9:.2f} GB",
                flush=True,
            )
    print(json.dumps({**about, "cases": cases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
