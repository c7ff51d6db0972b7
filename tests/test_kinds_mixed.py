"""Random mixes of every kind of search, on small pools, with all that may come in between; each equals a run alone.

``test_mixes`` mixes widths and arrivals of plain searches; here are the searches that carry more along: stop strings,
grammars, log-probs, processors, a scorer's turns, groups of beams, dense states. In float64, so that no draw falls
within rounding of an edge.
"""

import asyncio
import functools
import random
from typing import Any
from unittest import mock

import pytest
import torch

from cowbeam.decoder import (
    AsyncDecoder,
    BeamSearchParams,
    BranchScorer,
    Decoder,
    DecodeResult,
    Grammar,
    SamplingParams,
    scheduler,
)
from cowbeam.decoder.group import Request
from cowbeam.decoder.params import Params
from cowbeam.decoder.scheduler import worst_case_blocks
from fakes import FAMILIES, assert_unused, make_model
from families import LEVEL_2, LEVEL_3, UNLIKE_THEMSELVES, family_model
from test_mixes import Job, assert_equal, passes_of, run_mix
from text import json_tokenizer

TOKENIZER = json_tokenizer()
GRAMMARS = [
    Grammar.regex("(red|green|[a-z]{2,9}){2,9}"),
    Grammar.json_schema({"type": "array", "items": {"enum": ["red", "green", "reddish"]}, "maxItems": 4}),
]
EOS, END = 2, 3
# Their own code, or the check of their logits, takes no float64. Without those whose logits all at once are others than
# step by step: what is computed again after a preemption differs.
SINGLE = {*LEVEL_3, "xglm"} - {*UNLIKE_THEMSELVES}
FAMILIES_ALIKE = ["gemma2", "gpt2", "llama", "qwen3_moe", *sorted(LEVEL_2.keys() - SINGLE)]


@functools.cache
def model_of(family: str) -> Any:
    if family in FAMILIES:
        model = make_model(family, {**FAMILIES[family], "vocab_size": len(TOKENIZER)}).to(torch.float64)
    else:
        model = family_model(family, scale=0.3)
        model = model if family in SINGLE else model.to(torch.float64)
    if model.dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product takes no float64
    return model


def decoder_of(family: str, **knobs: Any) -> Decoder:
    return Decoder(model_of(family), TOKENIZER if family in FAMILIES else None, **knobs)


@functools.cache
def decoder_for_one(family: str) -> Decoder:
    """Where each request runs alone, from its first token on."""
    return decoder_of(family, num_blocks=512, prefix_reuse=False)


def random_fields(rng: random.Random, vocabulary: int, *, has_text: bool) -> dict[str, Any]:
    """What beams and samples have in common."""
    fields: dict[str, Any] = {
        "max_new_tokens": rng.choice([3, 8, 20, 30, 40]),
        "eos_token_id": sorted(rng.sample(range(vocabulary), rng.choice([0, 0, 2, vocabulary // 20]))),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.2]),
        "no_repeat_ngram_size": rng.choice([0, 0, 2]),
        "logprobs": rng.choice([None, None, None, 0, 2]),
    }
    if rng.random() < 0.15:
        fields["logits_processors"] = [lambda ids, scores: scores - 0.1 * (ids.shape[1] % 3)]
    if has_text and rng.random() < 0.3:
        fields |= {"grammar": rng.choice(GRAMMARS), "eos_token_id": rng.choice([[EOS], [EOS, END]])}
    return fields


def random_params(rng: random.Random, vocabulary: int, *, has_text: bool) -> Params:
    fields = random_fields(rng, vocabulary, has_text=has_text)
    kind = rng.choice(["greedy", "beams", "sampled beams", "diverse", "samples", "samples", "best of", "scored"])
    width, seed = rng.choice([2, 3, 4, 6]), rng.randrange(2**32)
    if has_text and kind not in ("diverse", "best of") and rng.random() < 0.4:
        fields["stop_strings"] = rng.choice([["a"], ["red", "q"], ["in", '"'], ["e"]])
    if kind == "greedy":
        return BeamSearchParams(num_beams=1, **fields)
    if kind == "beams":
        early_stopping = rng.choice([False, True, "never"])
        return BeamSearchParams(num_beams=width, num_return_sequences=2, early_stopping=early_stopping, **fields)
    if kind == "sampled beams":
        return BeamSearchParams(num_beams=width, do_sample=True, seed=seed, **fields)
    if kind == "diverse":
        fields.pop("logits_processors", None)
        return BeamSearchParams(num_beams=6, num_beam_groups=rng.choice([2, 3]), diversity_penalty=0.7, **fields)
    if kind == "best of":
        return SamplingParams(best_of=width, seed=seed, **fields)
    if kind == "scored":
        fields["branch_scorer"] = BranchScorer(
            score=lambda branches: [float(sum(branch.token_ids) % 13) for branch in branches],
            every=rng.choice([1, 3, 5]),
            keep=rng.choice([None, 1, 2]),
        )
    return SamplingParams(num_return_sequences=width, temperature=rng.choice([0.7, 1.4]), seed=seed, **fields)


def random_jobs(rng: random.Random, family: str) -> list[Job]:
    vocabulary = model_of(family).get_input_embeddings().weight.shape[0]
    begins: list[list[int]] = [[], *(rng.choices(range(4, vocabulary), k=rng.randint(8, 30)) for _ in range(2))]
    jobs = []
    for _ in range(rng.randint(5, 9)):
        prompt = [*rng.choice(begins), *rng.choices(range(4, vocabulary), k=rng.randint(1, 12))]
        arrival = rng.choice([0, 0, 0, rng.randint(0, 20)])
        abort = arrival + rng.randint(0, 15) if rng.random() < 0.15 else None
        jobs.append(Job(prompt, random_params(rng, vocabulary, has_text=family in FAMILIES), arrival, abort))
    return jobs


def small_decoder(rng: random.Random, family: str, jobs: list[Job]) -> Decoder:
    """With hardly more blocks than the greatest request may need."""
    block_size = rng.choice([1, 2, 4, 8, 16])
    requests = [Request(tuple(job.prompt), job.params, frozenset(), None) for job in jobs]
    least = max(worst_case_blocks(request, block_size) for request in requests)
    decoder = decoder_of(
        family,
        block_size=block_size,
        num_blocks=least + rng.choice([0, 0, 1, least // 6]),
        prefix_reuse=rng.random() < 0.7,
        max_rows=rng.choice([8, *[512] * 5]),
    )
    engine = decoder._engine
    assert engine is not None
    engine._looks_ahead = engine._adapter.can_look_ahead and rng.random() < 0.5
    return decoder


def check_outcome(got: DecodeResult | BaseException | None, family: str, job: Job, what: str) -> None:
    """The result of a run alone; or its error, where a grammar and a penalty leave no token."""
    run = decoder_for_one(family).add_request(job.prompt, job.params)
    while not run.is_over:
        decoder_for_one(family).step()
    if run.result is None:
        assert str(got) == str(run.error), what
        return
    want = run.result
    assert isinstance(got, DecodeResult), f"{what}: {got!r}"
    assert_equal(got, want, what)
    assert [c.text for c in got.completions] == [c.text for c in want.completions], what
    assert [c.stop_reason for c in got.completions] == [c.stop_reason for c in want.completions], what
    assert [c.token_logprobs is None for c in got.completions] == [c.token_logprobs is None for c in want.completions]


def check_kinds(seed: int, families: list[str]) -> int:
    """One random mix against runs alone; how often somebody was preempted."""
    rng = random.Random(seed)
    family = rng.choice(families)
    jobs = random_jobs(rng, family)
    decoder = small_decoder(rng, family, jobs)
    what = f"seed {seed}: {family}, {decoder.num_blocks} blocks of {decoder.block_size}"
    # Nothing is set aside for growth: as many as can begin do, and have to go.
    with passes_of(rng.choice([3, 10, 4096])), mock.patch.object(scheduler, "GROWTH_SET_ASIDE", 0.0):
        runs = run_mix(decoder, jobs)
    for index, (run, job) in enumerate(zip(runs, jobs, strict=True)):
        if job.abort is None or "aborted" not in str(run.error):
            check_outcome(run.result or run.error, family, job, f"{what}, request {index}")
    assert_unused(decoder)
    return decoder.counters().preemptions


@pytest.mark.parametrize(("families", "count", "least"), [(FAMILIES_ALIKE, 24, 6), (sorted(SINGLE), 6, 1)])
def test_random_kinds(families: list[str], count: int, least: int) -> None:
    preemptions = [check_kinds(seed, families) for seed in range(count)]
    assert sum(number > 0 for number in preemptions) >= least


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 200))
def test_more_random_kinds(seed: int) -> None:
    check_kinds(seed, [*FAMILIES_ALIKE, *sorted(SINGLE)])


async def run_tasks(decoder: Decoder, rng: random.Random, jobs: list[Job]) -> list[Any]:
    """A task for each job, some cancelled after a random while: results and what was raised."""
    async with AsyncDecoder(decoder) as shared:
        tasks = [asyncio.create_task(shared.generate(job.prompt, job.params)) for job in jobs]
        for task in tasks:
            if rng.random() < 0.35:
                asyncio.get_running_loop().call_later(rng.uniform(0, 0.3), task.cancel)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)


@pytest.mark.parametrize("seed", range(12))
def test_tasks_cancelled_while_others_are_preempted(seed: int) -> None:
    """A cancelled task may be waiting with tokens and no blocks, or be who the others made room for."""
    rng = random.Random(seed)
    family = rng.choice(["llama", "gemma2", "bloom"])
    jobs = random_jobs(rng, family)
    decoder = small_decoder(rng, family, jobs)
    with mock.patch.object(scheduler, "GROWTH_SET_ASIDE", 0.0):
        outcomes = asyncio.run(run_tasks(decoder, rng, jobs))
    for index, (outcome, job) in enumerate(zip(outcomes, jobs, strict=True)):
        if not isinstance(outcome, asyncio.CancelledError):
            check_outcome(outcome, family, job, f"seed {seed}: {family}, request {index}")
    assert_unused(decoder)
