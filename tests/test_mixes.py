"""Whatever runs beside it, comes or goes, and however small the pool: a request has the result of a run alone."""

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest

from cowbeam.decoder import BeamSearchParams, Decoder, DecodeResult, Run, SamplingParams, scheduler
from cowbeam.decoder.counters import Counters
from cowbeam.decoder.group import Request
from cowbeam.decoder.scheduler import worst_case_blocks
from fakes import FAMILIES, assert_unused, random_beam_settings, random_prompt, tiny_model

TOLERANCE = 1e-4


class Job(NamedTuple):
    """A request, the turn in which it comes, and the one in which its caller drops it, if so."""

    prompt: list[int]
    params: BeamSearchParams | SamplingParams
    arrival: int
    abort: int | None


def random_params(rng: random.Random) -> BeamSearchParams | SamplingParams:
    if rng.random() < 0.5:
        settings = random_beam_settings(rng)
        if rng.random() < 0.2 and settings["num_beams"] > 1:
            settings |= {"do_sample": True, "seed": rng.randrange(2**32)}
        return BeamSearchParams(**settings)
    return SamplingParams(
        num_return_sequences=rng.choice([1, 2, 3, 8]),
        max_new_tokens=rng.randint(1, 24),
        temperature=rng.uniform(0.6, 1.5),
        top_k=rng.choice([0, 0, 5]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        seed=rng.randrange(2**32),
        eos_token_id=sorted(rng.sample(range(67), rng.choice([0, 2, 6]))),
    )


def random_jobs(rng: random.Random) -> list[Job]:
    """Most prompts begin like others, some are others with an answer behind, some are the same."""
    begins = [random_prompt(rng, 8, 30) for _ in range(2)]
    jobs = []
    for _ in range(rng.randint(6, 12)):
        begin = rng.choice([[], *begins])
        prompt = [*begin[: rng.randint(0, len(begin))], *random_prompt(rng, 1, 12)]
        if jobs and rng.random() < 0.2:
            prompt = rng.choice(jobs).prompt
        arrival = rng.choice([0, 0, rng.randint(0, 40)])
        abort = arrival + rng.randint(0, 12) if rng.random() < 0.15 else None
        jobs.append(Job(prompt, random_params(rng), arrival, abort))
    return jobs


def run_mix(decoder: Decoder, jobs: list[Job]) -> list[Run]:
    """Turn the engine; requests come and are dropped between two turns."""
    runs: dict[int, Run] = {}
    turn = 0
    while len(runs) < len(jobs) or not all(run.is_over for run in runs.values()):
        for index, job in enumerate(jobs):
            if job.arrival == turn:
                runs[index] = decoder.add_request(job.prompt, job.params)
            if job.abort == turn:
                decoder.abort(runs[index])
        decoder.step()
        decoder.check_integrity()
        turn += 1
        assert turn < 5000, "somebody waits for ever"
    return [runs[index] for index in range(len(jobs))]


def assert_equal(got: DecodeResult, want: DecodeResult, what: str) -> None:
    assert got.seed == want.seed
    for one, other in zip(got.completions, want.completions, strict=True):
        assert (one.token_ids, one.beams, one.finish_reason) == (other.token_ids, other.beams, other.finish_reason), (
            what
        )
        # A negative length penalty multiplies the sum of log-probs by up to the length: its error too.
        assert one.score == pytest.approx(other.score, rel=1e-5, abs=TOLERANCE), what
        assert one.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE), what


@contextmanager
def passes_of(num_tokens: int) -> Iterator[None]:
    with (
        mock.patch.object(scheduler, "MAX_PASS_TOKENS", num_tokens),
        mock.patch.object(scheduler, "SHARE_OF_LONG", max(1, num_tokens // 2)),
    ):
        yield


@functools.cache
def decoder_for_one(family: str, block_size: int) -> Decoder:
    """Where each request runs alone, from its first token on."""
    return Decoder(tiny_model(family), block_size=block_size, num_blocks=4096 // block_size, prefix_reuse=False)


def check_mix(seed: int) -> Counters:
    """One random mix against runs alone."""
    rng = random.Random(seed)
    family, block_size = rng.choice(sorted(FAMILIES)), rng.choice([1, 2, 4, 8, 16])
    jobs = random_jobs(rng)
    least = max(
        worst_case_blocks(Request(tuple(job.prompt), job.params, frozenset(), None), block_size) for job in jobs
    )
    num_blocks = least + rng.choice([0, 0, 1, least // 4, 2 * least])
    reuse = rng.random() < 0.7
    alone = decoder_for_one(family, block_size)
    looks_ahead, pass_tokens = rng.random() < 0.5, rng.choice([3, 10, 4096])
    decoder = Decoder(
        tiny_model(family),
        block_size=block_size,
        num_blocks=num_blocks,
        prefix_reuse=reuse,
        max_rows=rng.choice([1, 8, *[512] * 8]),
        swap_memory=rng.choice([0, 2**17, 2**30, 2**30]),
    )
    assert decoder._engine is not None
    decoder._engine._looks_ahead = looks_ahead
    with passes_of(pass_tokens):
        runs = run_mix(decoder, jobs)
    what: Any = f"seed {seed}: {family}, blocks of {block_size}"
    for index, (run, job) in enumerate(zip(runs, jobs, strict=True)):
        if run.result is None:
            assert job.abort is not None, f"{what}: request {index} has {run.error!r}"
            assert "aborted" in str(run.error)
        else:
            assert_equal(run.result, alone.generate(job.prompt, job.params), f"{what}, request {index}")
    assert_unused(decoder)
    counters = decoder.counters()
    assert counters.live_blocks == 0
    assert reuse or counters.reused_tokens == counters.cached_blocks == 0
    return counters


def test_random_mixes() -> None:
    """Preemption loses a group's beams (vLLM #8844), mixes up rows of different widths (TensorRT-LLM #7368)."""
    outcomes = [check_mix(seed) for seed in range(40)]
    for name, least in (("preemptions", 10), ("reused_tokens", 10), ("recomputed_tokens", 5), ("swapped_blocks", 5)):
        assert sum(getattr(counters, name) > 0 for counters in outcomes) >= least, name


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40, 240))
def test_more_random_mixes(seed: int) -> None:
    check_mix(seed)
