"""Loads of `bench_serve.py`: many prompts at once, each with several samples or beams, on one pool."""

import random
import re
import time
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams
from cowbeam.decoder.counters import Counters
from cowbeam.decoder.outputs import DecodeResult
from cowbeam.decoder.params import Params

SIZES = {
    "64x8-samples": (1024, 256),
    "16x16-samples": (4096, 256),
    "8x64-samples": (8192, 128),
    "64x4-beams": (1024, 32),
}


@dataclass(frozen=True)
class Load:
    """So many random prompts of ``prompt_length`` tokens, each with ``width`` branches of ``new_tokens``."""

    prompts: int
    width: int
    kind: Literal["samples", "beams"]
    prompt_length: int
    new_tokens: int

    @classmethod
    def parse(cls, name: str) -> "Load":
        """``64x8-samples``, a name in ``SIZES``, or ``6x3-beams@20+7`` of any size: prompt and new tokens."""
        match = re.fullmatch(r"(\d+)x(\d+)-(samples|beams)(?:@(\d+)\+(\d+))?", name)
        if match is None or (match[4] is None and name not in SIZES):
            raise ValueError(f"{name!r} is none of {', '.join(SIZES)}, nor of the form 6x3-beams@20+7")
        prompt_length, new_tokens = (int(match[4]), int(match[5])) if match[4] else SIZES[name]
        kind: Literal["samples", "beams"] = "beams" if match[3] == "beams" else "samples"
        return cls(int(match[1]), int(match[2]), kind, prompt_length, new_tokens)

    @property
    def output_tokens(self) -> int:
        """Of all branches."""
        return self.prompts * self.width * self.new_tokens

    def make_prompts(self, vocabulary_size: int, seed: int) -> list[list[int]]:
        """Others for every load and seed, so that no run finds the prefixes of one before."""
        draw = random.Random(f"{self} {seed}")
        return [draw.choices(range(3, vocabulary_size), k=self.prompt_length) for _ in range(self.prompts)]

    def params(self, seed: int) -> list[Params]:
        """One a prompt; no EOS ends a branch early."""
        if self.kind == "samples":
            return [
                SamplingParams(
                    num_return_sequences=self.width, max_new_tokens=self.new_tokens, eos_token_id=[], seed=seed + i
                )
                for i in range(self.prompts)
            ]
        beams = BeamSearchParams(
            num_beams=self.width, num_return_sequences=self.width, max_new_tokens=self.new_tokens, eos_token_id=[]
        )
        return [beams] * self.prompts


class Served(NamedTuple):
    """One run of a load: seconds from the first request to the last result, and what happened on the way."""

    seconds: float
    longest_wait: float  # seconds until the last request had its first token
    peak_blocks: int
    turns: int
    preemptions: int
    recomputed_tokens: int
    swapped_blocks: int
    cow_copies: int
    results: list[DecodeResult]


def serve(decoder: Decoder, load: Load, seed: int) -> Served:
    """Hand in all requests at once and turn the decoder until all are over. Raises what a request raises."""
    prompts, params = load.make_prompts(decoder.model.config.vocab_size, seed), load.params(seed)
    before = decoder.counters()
    peak = 0
    longest_wait: float | None = None
    _synchronize(decoder)
    started = time.perf_counter()
    runs = [decoder.add_request(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    while not all(run.is_over for run in runs):
        decoder.step()
        peak = max(peak, decoder.num_blocks - decoder.num_free_blocks)
        if longest_wait is None and all(run.has_begun for run in runs):
            longest_wait = time.perf_counter() - started
    _synchronize(decoder)
    seconds = time.perf_counter() - started
    results: list[DecodeResult] = []
    for run in runs:
        if run.result is None:
            raise run.error or AssertionError("a run is over without result or error")
        results.append(run.result)
    assert longest_wait is not None, "all are over, so all have begun"
    return _served(load, seconds, longest_wait, peak, before, decoder.counters(), results)


def _served(
    load: Load,
    seconds: float,
    longest_wait: float,
    peak: int,
    before: Counters,
    after: Counters,
    results: list[DecodeResult],
) -> Served:
    tokens = sum(len(completion.token_ids) for result in results for completion in result.completions)
    assert tokens == load.output_tokens, f"{tokens} tokens came out of {load}, not {load.output_tokens}"
    preemptions = after.preemptions - before.preemptions
    # Who was preempted finds its own prompt again.
    assert preemptions or after.reused_tokens == before.reused_tokens, "a prompt begins like one of another run"
    return Served(
        seconds,
        longest_wait,
        peak,
        after.turns - before.turns,
        preemptions,
        after.recomputed_tokens - before.recomputed_tokens,
        after.swapped_blocks - before.swapped_blocks,
        after.cow_copies - before.cow_copies,
        results,
    )


def check_equality(decoder: Decoder, load: Load, seed: int) -> Served:
    """Assert that every request of the load has the tokens that it has alone."""
    served = serve(decoder, load, seed)
    prompts, params = load.make_prompts(decoder.model.config.vocab_size, seed), load.params(seed)
    for i, (prompt, one, result) in enumerate(zip(prompts, params, served.results, strict=True)):
        alone = decoder.generate(prompt, one)
        for mine, other in zip(result.completions, alone.completions, strict=True):
            assert mine.token_ids == other.token_ids, f"request {i}, branch {mine.index}: other tokens than alone"
    return served


def _synchronize(decoder: Decoder) -> None:
    if decoder.model.device.type == "cuda":
        torch.cuda.synchronize()
