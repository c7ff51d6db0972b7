"""Beam search (or parallel samples) beside transformers, in the same run: prefill and time a step.

    python scripts/bench_decode.py                        # default model, prompts 64, 512, 2048 × beams 4, 8, 16
    python scripts/bench_decode.py --case 2048x16
    python scripts/bench_decode.py --shape llama-8b --case 8192x16     # random weights of that shape
    python scripts/bench_decode.py --shape llama-8b --case 8192x16 --samples

A step of cowbeam is (time of all tokens - time of 8) / (tokens - 8) of whole calls, host work included, repeated;
prefill is the time of one token. A step of transformers is the mean span between the beginnings of two forward passes,
which holds all of it too.

Beams in float32 must give the same tokens on both sides, or the script fails. In half precision other row counts round
differently, and two beams that are nearly as good may change places: then the scores of both answers stand beside each
other. Samples are drawn by generators of their own and not compared. On CUDA the peak of torch's memory beside weights
and pool is reported. The last line is JSON.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from typing import Any, NamedTuple

import torch
import transformers
from bench_header import print_header
from bench_models import SHAPES, random_model, saved_model, spread
from transformers import PreTrainedModel

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams

FEW_TOKENS = 8
DEFAULT_CASES = [f"{prompt}x{beams}" for prompt in (64, 512, 2048) for beams in (4, 8, 16)]


class StepClock:
    """Notes when each forward pass of the model begins."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def __enter__(self) -> "StepClock":
        self.beginnings: list[float] = []
        self._hook = self._model.register_forward_pre_hook(lambda *_: self.beginnings.append(time.perf_counter()))
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    @property
    def timing(self) -> "Timing":
        """Prefill is the first span; a step is the mean of the others."""
        first, second, *_, last = self.beginnings
        return Timing(second - first, [(last - second) / (len(self.beginnings) - 2)])


class Timing(NamedTuple):
    prefill: float  # seconds to the first token
    steps: list[float]  # seconds of a step, measured several times


class Search(NamedTuple):
    """What is timed: ``width`` beams, or samples, of ``new_tokens`` tokens."""

    width: int
    new_tokens: int
    is_samples: bool

    def params(self, new_tokens: int) -> BeamSearchParams | SamplingParams:
        if self.is_samples:
            return SamplingParams(
                num_return_sequences=self.width, max_new_tokens=new_tokens, eos_token_id=[], seed=new_tokens
            )
        return BeamSearchParams(num_beams=self.width, max_new_tokens=new_tokens, eos_token_id=[])

    @property
    def settings(self) -> dict[str, Any]:
        """The same for transformers."""
        if self.is_samples:
            return {"do_sample": True, "num_return_sequences": self.width, "top_k": 0}
        return {"do_sample": False, "num_beams": self.width}


def run_transformers(model: PreTrainedModel, prompt: list[int], search: Search) -> tuple[list[int], Timing]:
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode(), StepClock(model) as clock:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=search.new_tokens, eos_token_id=None,
            pad_token_id=0, **search.settings,
        )  # fmt: skip
    return out[0, len(prompt) :].tolist(), clock.timing


def run_cowbeam(decoder: Decoder, prompt: list[int], search: Search) -> tuple[list[int], Timing]:
    seconds = {}
    for count in (1, FEW_TOKENS, search.new_tokens):
        start = time.perf_counter()
        result = decoder.generate(prompt, search.params(count))
        seconds[count] = time.perf_counter() - start
    step = (seconds[search.new_tokens] - seconds[FEW_TOKENS]) / (search.new_tokens - FEW_TOKENS)
    return list(result.completions[0].token_ids), Timing(seconds[1], [step])


def score(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> float:
    """Mean log-prob of ``tokens`` by one plain forward pass: what either search was after."""
    ids = torch.tensor([prompt + tokens], device=model.device)
    with torch.inference_mode():
        logits = model(ids, use_cache=False, logits_to_keep=len(tokens) + 1).logits[0, :-1].float()
    return float(logits.log_softmax(-1).gather(1, ids[0, -len(tokens) :, None]).mean())


def run_case(decoder: Decoder, case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both sides in turn, ours first and last, so that a machine that slows down or speeds up does it to both."""
    prompt_length, width = (int(part) for part in case.split("x"))
    search = Search(width, options.new_tokens, options.samples)
    peer = not options.no_peer
    generator = torch.Generator().manual_seed(prompt_length)
    prompt = torch.randint(3, decoder.model.config.vocab_size, (prompt_length,), generator=generator).tolist()
    if decoder.model.device.type == "cuda":
        gc.collect()  # the peer's cache of the case before
        torch.cuda.reset_peak_memory_stats()
    run_cowbeam(decoder, prompt, search)  # compiles kernels, captures graphs
    ours, timing = run_cowbeam(decoder, prompt, search)
    row: dict[str, Any] = {"case": case, "search": "samples" if search.is_samples else "beams"}
    if decoder.model.device.type == "cuda":
        row["bytes_beside"] = bytes_beside_weights_and_pool(decoder)
    timings: dict[str, list[Timing]] = {"cowbeam": [timing], "transformers": []}
    for _ in range(2 if prompt_length * width > 4096 else 7):
        if peer:
            theirs, timing = run_transformers(decoder.model, prompt, search)
            timings["transformers"].append(timing)
        timings["cowbeam"].append(run_cowbeam(decoder, prompt, search)[1])
    for side, of_side in timings.items():
        if of_side:
            prefill = statistics.median(timing.prefill for timing in of_side)
            row[side] = {"prefill": prefill, "step": spread([step for timing in of_side for step in timing.steps])}
    if peer:
        if not search.is_samples:
            row["same_tokens"] = ours == theirs
            row["score"] = {
                "cowbeam": score(decoder.model, prompt, ours),
                "transformers": score(decoder.model, prompt, theirs),
            }
        row["prefill_ratio"] = row["transformers"]["prefill"] / row["cowbeam"]["prefill"]
        row["step_ratio"] = row["transformers"]["step"]["median"] / row["cowbeam"]["step"]["median"]
    return row


def bytes_beside_weights_and_pool(decoder: Decoder) -> int:
    """The peak of torch's memory in a case's first calls, less what stays: activations, graphs, workspaces."""
    weights = sum(tensor.nbytes for tensor in (*decoder.model.parameters(), *decoder.model.buffers()))
    pool = decoder.num_blocks * decoder.block_size * decoder.kv_layout.per_token
    return torch.cuda.max_memory_allocated() - weights - pool


def show(row: dict[str, Any]) -> None:
    def side(name: str) -> str:
        if name not in row:
            return f"{'':>30}"
        step = row[name]["step"]
        return (
            f"{row[name]['prefill'] * 1e3:10.1f} {step['median'] * 1e3:8.2f} "
            f"({step['p20'] * 1e3:.2f}–{step['p80'] * 1e3:.2f})"
        )

    ratios = f"{row['prefill_ratio']:6.1f} × {row['step_ratio']:6.2f} ×" if "step_ratio" in row else ""
    same = ""
    if "same_tokens" in row:
        scores = "scores {cowbeam:.4f}, {transformers:.4f}".format(**row["score"])
        same = "same tokens" if row["same_tokens"] else f"TOKENS DIFFER, {scores}"
    if "bytes_beside" in row:
        same += f", {row['bytes_beside'] / 1e9:.2f} GB beside weights and pool"
    print(f"{row['case']:>9} | {side('cowbeam'):<34} | {side('transformers'):<34} | {ratios} {same}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", metavar="PROMPTxBEAMS")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="random weights of this shape instead of the default model"
    )
    parser.add_argument("--samples", action="store_true", help="parallel samples, not beams")
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--no-peer", action="store_true", help="time cowbeam alone")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    title = f"Beams of {options.shape or 'SmolLM2-135M-Instruct'}, {dtype}, beside transformers"
    about = print_header(title) | {"model": options.shape or "SmolLM2-135M-Instruct", "dtype": str(dtype)}
    if options.shape is None:
        model = saved_model(None, options.device, dtype)
    else:
        model = random_model(options.shape, options.device, dtype)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    decoder = Decoder(
        model, block_size=options.block_size, attention=options.attention,
        memory_fraction=0.3, prefix_reuse=False,
    )  # fmt: skip
    print(f"The decoder was made in {time.perf_counter() - started:.1f} s.")
    print(f"{'P x W':>9} | {'cowbeam: prefill ms, step ms':<34} | {'transformers':<34} | prefill, step ratio")
    rows = []
    for case in options.case or DEFAULT_CASES:
        rows.append(run_case(decoder, case, options))
        show(rows[-1])
    print(json.dumps({**about, "cases": rows}))
    differs = options.device == "cpu" and any(row.get("same_tokens") is False for row in rows)
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main())
