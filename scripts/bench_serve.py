"""Many requests on one pool: output tokens a second, prefill and host work counted, beside transformers.

    python scripts/bench_serve.py --shape llama-8b                         # random weights; all cases
    python scripts/bench_serve.py --shape llama-8b --case 64x8-samples     # prompts x branches
    python scripts/bench_serve.py --shape llama-8b --case 64x8-samples --peers --profile    # no peer; which kernels
    python scripts/bench_serve.py --shape tiny --case 6x3-beams@20+7       # no figures, only whether it works

All requests are handed in at once, with random prompts that differ in every run. "cold" is a decoder's first run of a
case, with compilation and the capture of graphs; "warm" are the runs after it. "device" is one more warm run with the
spans of its device work (`device_clock.py`): what is missing to the wall time, the device waited for the host. "floor"
is worked out from bytes and operations (`serve_floor.py`). Before anything is timed, every request of small loads must
have the tokens that it has alone, on a tiny model in float32. transformers' `generate` and its continuous batching run
after, on the same model, for about --budget seconds each. The last line is JSON.
"""

import argparse
import gc
import json
import sys
import time
from typing import Any

import torch
import transformers
from bench_header import print_header
from bench_models import SHAPES, random_model, saved_model, spread
from device_clock import DeviceClock, kernel_seconds
from serve_floor import Peaks, floor_of
from serve_load import SIZES, Load, check_equality, serve
from serve_peers import PEERS
from transformers import PreTrainedModel

from cowbeam.decoder import Decoder
from cowbeam.decoder.garbage import old_objects_left_alone

CHECKED = ("6x3-samples@40+12", "5x4-beams@33+9")


def check(device: str, attention: str) -> bool:
    """On pools that hold all requests, and so few blocks that some are preempted. False where one has other tokens."""
    model = random_model("tiny", device, torch.float32)
    for num_blocks, swap_memory in ((200, 0), (24, 0), (24, 2**28)):
        knobs = {"num_blocks": num_blocks, "swap_memory": swap_memory}
        with Decoder(model, block_size=8, attention=attention, compile=False, **knobs) as decoder:
            for name in CHECKED:
                try:
                    served = check_equality(decoder, Load.parse(name), seed=7)
                except AssertionError as error:
                    print(f"{name}, {num_blocks} blocks: {error}")
                    return False
                print(f"{name}: every request as alone, {num_blocks} blocks, {served.preemptions} preemptions, "
                      f"{served.swapped_blocks} blocks swapped")  # fmt: skip
    return True


def run_cowbeam(decoder: Decoder, load: Load, options: argparse.Namespace) -> dict[str, Any]:
    cold = serve(decoder, load, seed=1000)
    warm = [serve(decoder, load, seed=1000 * (2 + i)) for i in range(options.repeats)]
    seconds = spread([run.seconds for run in warm])
    clock = DeviceClock(on_cuda=decoder.model.device.type == "cuda")
    with clock.running():
        clocked = serve(decoder, load, seed=1)
    row: dict[str, Any] = {
        "cold_seconds": cold.seconds,
        "seconds": seconds,
        "tokens_per_second": load.output_tokens / seconds["median"],
        "clocked_seconds": clocked.seconds,
        "device": clock.seconds(),
        "num_blocks": decoder.num_blocks,
    }
    names = ("longest_wait", "peak_blocks", "turns", "preemptions", "recomputed_tokens", "swapped_blocks", "cow_copies")
    row |= {name: getattr(clocked, name) for name in names}
    if options.profile and clock.on_cuda:
        busy, kernels = kernel_seconds(lambda: serve(decoder, load, seed=2))
        row |= {"kernel_seconds": busy, "kernels": kernels}
    return row


def show_cowbeam(load: Load, row: dict[str, Any]) -> None:
    low, high = (load.output_tokens / row["seconds"][name] for name in ("p80", "p20"))
    print(f"  cowbeam     {row['tokens_per_second']:,.0f} tokens a second ({low:,.0f}–{high:,.0f}), warm;")
    print(f"              {row['seconds']['median']:.2f} s warm, {row['cold_seconds']:.2f} s cold; {row['turns']} turns"
          f", all requests have begun after {row['longest_wait']:.2f} s")  # fmt: skip
    spans = row["device"].items()
    parts = ", ".join(f"{kind} {s['seconds']:.3f} s in {s['spans']:.0f} spans" for kind, s in spans)
    device = sum(span["seconds"] for _, span in spans)
    print(f"  device      {device:.3f} s of {row['clocked_seconds']:.3f} s: {parts};")
    print(f"              the wall time is {row['clocked_seconds'] / device - 1:.1%} above their sum")
    print(f"  pool        {row['peak_blocks']:,} of {row['num_blocks']:,} blocks at the peak, {row['preemptions']} "
          f"preemptions of {load.prompts} requests, {row['recomputed_tokens']:,} tokens computed once more, "
          f"{row['swapped_blocks']:,} blocks swapped, {row['cow_copies']:,} copies")  # fmt: skip
    for name, count, seconds in row.get("kernels", []):
        print(f"  kernel      {seconds:.3f} s in {count:,} x {name[:90]}")
    if "kernel_seconds" in row:
        print(f"  kernels     {row['kernel_seconds']:.3f} s in all, without the gaps between them")


def show_floor(load: Load, row: dict[str, Any]) -> None:
    floor, mine = row["floor"], row["cowbeam"]["seconds"]["median"]
    print(f"  floor       {floor['seconds']:.3f} s, {load.output_tokens / floor['seconds']:,.0f} tokens a second: "
          f"prefill {floor['prefill']:.3f} s, products of steps {floor['products']:.3f} s, attention of steps "
          f"{floor['attention']:.3f} s; cowbeam takes {mine / floor['seconds']:.2f} times as long")  # fmt: skip


def show_peer(name: str, found: dict[str, Any], mine: float) -> None:
    if "error" in found:
        print(f"{name}: {found['error']}", flush=True)
        return
    what = ", ".join(f"{key} {value}" for key, value in found.items() if key not in ("tokens_per_second", "seconds"))
    rate = found["tokens_per_second"]
    print(f"{name}: {rate:,.0f} tokens a second ({found['seconds']:.1f} s; {what}); cowbeam's are "
          f"{mine / rate:.2f} times as many", flush=True)  # fmt: skip


def make_model(options: argparse.Namespace) -> PreTrainedModel:
    dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    if options.shape is not None:
        return random_model(options.shape, options.device, dtype)
    return saved_model(options.model, options.device, dtype)


def run_cases(model: PreTrainedModel, loads: dict[str, Load], options: argparse.Namespace) -> list[dict[str, Any]]:
    """cowbeam on all cases, by one decoder; then, with its pool given back, the peers."""
    peaks = Peaks.of(model.device, model.dtype)
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    knobs = {
        name: getattr(options, name) for name in ("block_size", "num_blocks", "swap_memory", "attention", "compile")
    }
    # As in `cowbeam batch`: no collection of garbage goes through all that torch and the compiler have made.
    with Decoder(model, **knobs) as decoder, old_objects_left_alone():
        print(f"The decoder was made in {time.perf_counter() - started:.1f} s.", flush=True)
        for name, load in loads.items():
            print(f"{name}: {load.prompt_length} tokens of prompt, {load.output_tokens:,} output tokens", flush=True)
            row: dict[str, Any] = {"case": name, "cowbeam": run_cowbeam(decoder, load, options)}
            show_cowbeam(load, row["cowbeam"])
            if peaks is not None:
                floor = floor_of(load, model, peaks)
                row["floor"] = {**floor._asdict(), "seconds": floor.seconds}
                show_floor(load, row)
            rows.append(row)
    del decoder
    gc.collect()
    model.generation_config.eos_token_id = None
    for row, load in zip(rows, loads.values(), strict=True):
        prompts = load.make_prompts(model.config.vocab_size, seed=1)
        for name in options.peers:
            row[name] = PEERS[name](model, load, prompts, options.budget)
            show_peer(f"{row['case']}, {name}", row[name], row["cowbeam"]["tokens_per_second"])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help=f"{', '.join(SIZES)}, or as 6x3-beams@20+7 (all of the first)")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--model", help="hub name or path instead (SmolLM2-135M-Instruct)")
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=sorted(PEERS))
    parser.add_argument("--budget", type=float, default=45.0, help="seconds for a peer (45)")
    parser.add_argument("--repeats", type=int, default=3, help="warm runs (3)")
    parser.add_argument("--profile", action="store_true", help="one more run by torch's profiler: time by kernel")
    parser.add_argument("--num-blocks", type=int, help="a pool of this size, to see preemption")
    parser.add_argument("--swap-memory", type=int, help="bytes on the host for preempted requests (4 GiB; 0: compute)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    loads = {name: Load.parse(name) for name in options.case or SIZES}
    model_name = options.shape or options.model or "SmolLM2-135M-Instruct"
    about = print_header(f"Many requests on one pool, {model_name}") | {"model": model_name}
    is_equal = check(options.device, options.attention)
    gc.collect()
    model = make_model(options)
    rows = run_cases(model, loads, options)
    print(json.dumps({"benchmark": "serve", **about, "dtype": str(model.dtype), "equal": is_equal, "cases": rows}))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
