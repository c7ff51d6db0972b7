"""Parallel sampling and beam sampling: transformers' distribution, and streams that depend on nothing but the seed."""

import random
from typing import Any

import pytest
import torch

from cowbeam.decoder import BeamSearchParams, Completion, SamplingParams
from fakes import BLOCK_SIZES, FAMILIES, VOCABULARY, random_prompt, tiny_decoder, tiny_model
from oracles import Expected, drawing_beams, drawing_samples, last_logits, transformers_generate
from test_exact_beams import numbers_of

CHUNKS, SETTINGS_A_CHUNK = 4, 20


def random_warpers(rng: random.Random) -> dict[str, Any]:
    return {
        "temperature": rng.choice([1.0, 0.5, 0.8, 1.7]),
        "top_k": rng.choice([0, 0, 1, 5, 20]),
        "top_p": rng.choice([1.0, 0.95, 0.7, 0.2]),
        "min_p": rng.choice([0.0, 0.0, 0.05, 0.3]),
        "repetition_penalty": rng.choice([1.0, 1.3]),
        "no_repeat_ngram_size": rng.choice([0, 0, 2]),
        "renormalize_logits": rng.random() < 0.3,
        "eos_token_id": sorted(rng.sample(range(VOCABULARY), rng.choice([0, 1, 2, 6]))),
        "seed": rng.randrange(2**64),
    }


def assert_same(want: list[Expected], got: tuple[Completion, ...], case: str) -> None:
    assert [tuple(w.token_ids) for w in want] == [g.token_ids for g in got], case
    for w, g in zip(want, got, strict=True):
        assert g.logprobs == pytest.approx(w.logprobs, abs=1e-4), case
        assert w.score is None or g.score == pytest.approx(w.score, abs=1e-4), case
        assert not w.beams or g.beams == tuple(w.beams), case


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_samples_are_drawn_from_transformers_distribution(chunk: int) -> None:
    """transformers' own sampling loop, given the same uniform numbers, draws the same tokens."""
    for seed in range(chunk * SETTINGS_A_CHUNK, (chunk + 1) * SETTINGS_A_CHUNK):
        rng = random.Random(seed)
        family, block_size, prompt = rng.choice(sorted(FAMILIES)), rng.choice(BLOCK_SIZES), random_prompt(rng)
        settings = random_warpers(rng) | {
            "num_return_sequences": rng.randint(1, 6),
            "max_new_tokens": rng.randint(1, 12),
            "min_new_tokens": rng.choice([0, 1]),
        }
        with drawing_samples(settings["seed"]):
            (want,) = transformers_generate(tiny_model(family), [prompt], settings, do_sample=True)
        result = tiny_decoder(family, block_size).generate(prompt, SamplingParams(**settings))
        tiny_decoder(family, block_size).check_integrity()
        assert_same(want, result.completions, f"seed {seed}: {family} {block_size} {prompt} {settings}")
        numbers_of([result], settings | {"length_penalty": 1.0})
        assert [completion.index for completion in result.completions] == list(range(len(want)))


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_sampled_beams_equal_transformers(chunk: int) -> None:
    """transformers' beam sampling, given the same generators, chooses the same tokens and parents."""
    for seed in range(chunk * SETTINGS_A_CHUNK, (chunk + 1) * SETTINGS_A_CHUNK):
        rng = random.Random(seed)
        family, block_size, prompt = rng.choice(sorted(FAMILIES)), rng.choice(BLOCK_SIZES), random_prompt(rng)
        num_beams = rng.randint(2, 6)
        settings = random_warpers(rng) | {
            "num_beams": num_beams,
            "num_return_sequences": rng.randint(1, num_beams),
            "max_new_tokens": rng.randint(1, 12),
            "min_new_tokens": rng.choice([0, 1]),
            "length_penalty": rng.choice([1.0, -1.0, 2.0]),
            "early_stopping": rng.choice([True, False, "never"]),
        }
        with drawing_beams(settings["seed"]):
            (want,) = transformers_generate(tiny_model(family), [prompt], settings, do_sample=True)
        params = BeamSearchParams(do_sample=True, **settings)
        result = tiny_decoder(family, block_size).generate(prompt, params)
        assert_same(want, result.completions, f"seed {seed}: {family} {block_size} {prompt} {settings}")
        numbers_of([result], settings)


def token_ids(completions: tuple[Completion, ...]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


PROMPT = [5, 9, 2, 33, 41, 7, 7]
SIXTEEN = SamplingParams(num_return_sequences=16, max_new_tokens=12, seed=11, eos_token_id=[])


def test_a_seed_gives_different_streams() -> None:
    """n equal completions under one seed were reported again and again (vLLM PR #11898, SGLang #28805)."""
    result = tiny_decoder("llama").generate(PROMPT, SIXTEEN)
    assert len(set(token_ids(result.completions))) == 16
    assert result.seed == 11


def test_a_sample_does_not_depend_on_how_many_there_are() -> None:
    decoder = tiny_decoder("llama")
    all_of_them = token_ids(decoder.generate(PROMPT, SIXTEEN).completions)
    for n in (1, 2, 5, 15):
        params = SamplingParams(num_return_sequences=n, max_new_tokens=12, seed=11, eos_token_id=[])
        assert token_ids(decoder.generate(PROMPT, params).completions) == all_of_them[:n]


def test_a_sample_does_not_depend_on_who_finishes_before_it() -> None:
    """With an EOS other samples end early and the ranks close up; the streams of the rest must not shift."""
    decoder = tiny_decoder("llama")
    free = token_ids(decoder.generate(PROMPT, SIXTEEN).completions)
    eos = free[0][3]
    params = SamplingParams(num_return_sequences=16, max_new_tokens=12, seed=11, eos_token_id=eos)
    ended = token_ids(decoder.generate(PROMPT, params).completions)
    for whole, cut in zip(free, ended, strict=True):
        assert cut == (whole[: whole.index(eos) + 1] if eos in whole else whole)
    assert len({len(tokens) for tokens in ended}) > 2, "the samples should end at different times"


def test_a_sample_does_not_depend_on_its_neighbours_or_the_block_size() -> None:
    alone = token_ids(tiny_decoder("qwen3", 16).generate(PROMPT, SIXTEEN).completions)
    neighbours = [SamplingParams(seed=3, num_return_sequences=3), BeamSearchParams(num_beams=5, max_new_tokens=20)]
    for block_size in BLOCK_SIZES:
        decoder = tiny_decoder("qwen3", block_size)
        crowd = decoder.generate([[1, 2, 3], PROMPT, list(range(1, 40))], [neighbours[0], SIXTEEN, neighbours[1]])
        assert token_ids(crowd[1].completions) == alone


def test_equal_prompts_draw_equally_only_with_an_explicit_seed() -> None:
    """A batch of equal prompts whose rows were all the same, by a fixed default seed (TensorRT-LLM #212, #2411)."""
    decoder = tiny_decoder("llama")
    fresh = decoder.generate([PROMPT] * 8, SamplingParams(max_new_tokens=12, eos_token_id=[]))
    assert len({result.completions[0].token_ids for result in fresh}) == 8
    assert len({result.seed for result in fresh}) == 8
    again = SamplingParams(max_new_tokens=12, eos_token_id=[], seed=fresh[3].seed)
    assert decoder.generate(PROMPT, again).completions[0].token_ids == fresh[3].completions[0].token_ids
    seeded = decoder.generate([PROMPT] * 8, SamplingParams(max_new_tokens=12, eos_token_id=[], seed=4))
    assert len({result.completions[0].token_ids for result in seeded}) == 1


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_extreme_seeds_are_seeds(seed: int) -> None:
    decoder = tiny_decoder("llama")
    params = SamplingParams(num_return_sequences=4, max_new_tokens=8, seed=seed, eos_token_id=[])
    first, second = (token_ids(decoder.generate(PROMPT, params).completions) for _ in range(2))
    assert first == second
    assert len(set(first)) == 4


@pytest.mark.parametrize("across", ["samples", "seeds", "positions"])
def test_draws_follow_the_distribution(across: str) -> None:
    """Chi-square of 4096 draws against the model's own distribution, whichever of (seed, index, position) varies.

    The critical value is the one that a right sampler exceeds once in a thousand runs; the seeds are fixed.
    """
    decoder, model = tiny_decoder("llama"), tiny_model("llama")
    draws = 4096
    probabilities = torch.softmax(last_logits(model, PROMPT).double() / 3.0, -1)
    if across == "samples":
        drawn = [
            completion.token_ids[0]
            for start in range(16)
            for completion in decoder.generate(
                PROMPT,
                SamplingParams(
                    num_return_sequences=draws // 16, max_new_tokens=1, temperature=3.0, seed=start, eos_token_id=[]
                ),
            ).completions
        ]
    elif across == "seeds":
        params = [
            SamplingParams(max_new_tokens=1, temperature=3.0, seed=seed, eos_token_id=[]) for seed in range(draws)
        ]
        drawn = [result.completions[0].token_ids[0] for result in decoder.generate([PROMPT] * draws, params)]
    else:
        drawn = _draws_by_position(probabilities.tolist(), draws)
    assert len(drawn) == draws
    statistic, freedom = chi_square(drawn, probabilities.tolist())
    assert statistic < chi_square_critical(freedom), f"{statistic:.1f} at {freedom} degrees of freedom"


def _draws_by_position(probabilities: list[float], draws: int) -> list[int]:
    """One stream's numbers, position after position: also what one branch sees must be uniform."""
    from oracles import first_above, uniform

    return [first_above(probabilities, uniform(5, 0, position)) for position in range(draws)]


def chi_square(drawn: list[int], probabilities: list[float]) -> tuple[float, int]:
    """Pearson's statistic; outcomes expected fewer than five times are pooled."""
    expected = [probability * len(drawn) for probability in probabilities]
    common = [token for token, count in enumerate(expected) if count >= 5]
    observed = [drawn.count(token) for token in common]
    terms = [(o - expected[token]) ** 2 / expected[token] for o, token in zip(observed, common, strict=True)]
    rest = len(drawn) - sum(expected[token] for token in common)
    if rest >= 5:
        terms.append((len(drawn) - sum(observed) - rest) ** 2 / rest)
    return sum(terms), len(terms) - 1


def chi_square_critical(freedom: int) -> float:
    """The value with P(χ² > value) = 0.001, from the regularized incomplete gamma function by bisection."""
    low, high = 0.0, 10.0 * freedom + 50.0
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    for _ in range(100):
        middle = (low + high) / 2
        tail = float(torch.special.gammaincc(half, torch.tensor(middle / 2, dtype=torch.float64)))
        low, high = (middle, high) if tail > 0.001 else (low, middle)
    return high


def test_the_chi_square_test_would_notice() -> None:
    """The critical value is the tables'; a slightly flattened distribution is told from the true one."""
    assert chi_square_critical(10) == pytest.approx(29.588, abs=1e-3)
    rng = random.Random(0)
    wrong = [0.5 * p + 0.5 / 8 for p in (0.3, 0.3, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05)]
    drawn = rng.choices(range(8), wrong, k=4096)
    statistic, freedom = chi_square(drawn, [0.3, 0.3, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05])
    assert statistic > chi_square_critical(freedom)
