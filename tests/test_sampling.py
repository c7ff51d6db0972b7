"""Parallel sampling without a model: streams, ranks that close up, and what a finished sample says."""

import random
from itertools import pairwise, product

import pytest

import oracles
from cowbeam.decoder import SamplingParams
from cowbeam.decoder.branches import Token
from cowbeam.decoder.sampling import Sampling, uniforms
from cowbeam.decoder.strategy import Candidate


def uniform(seed: int, index: int, position: int) -> float:
    (number,) = uniforms([seed], [index], [position])
    return number


def test_numbers_are_those_of_numpys_generator() -> None:
    """The published algorithm, by other people's code; all at once or one by one."""
    rng = random.Random(5)
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1, *(rng.getrandbits(rng.randint(1, 64)) for _ in range(500))]
    indices, positions = ([rng.getrandbits(rng.choice([1, 9, 33, 62])) for _ in seeds] for _ in range(2))
    keys = list(zip(seeds, indices, positions, strict=True))
    theirs = [oracles.uniform(*key) for key in keys]
    assert uniforms(seeds, indices, positions) == theirs
    assert [uniform(*key) for key in keys] == theirs


def test_numbers_depend_on_seed_sample_and_position_alone() -> None:
    keys = list(product((0, 1, 2**63, 2**64 - 1), range(8), range(8)))
    numbers = uniforms(*zip(*keys, strict=True))
    assert len(set(numbers)) == len(keys), "two streams share a number"
    assert all(0 <= number < 1 for number in numbers)
    shuffled = random.Random(0).sample(keys, len(keys))
    again = uniforms(*zip(*shuffled, strict=True))
    assert dict(zip(shuffled, again, strict=True)) == dict(zip(keys, numbers, strict=True))


def test_streams_are_not_shifts_of_each_other() -> None:
    """Seeds that differ by one, or sample i's stream started one later, gave overlapping streams elsewhere."""
    streams = [uniforms([seed] * 50, [index] * 50, range(50)) for seed in (7, 8) for index in (0, 1)]
    for one, other in product(range(4), repeat=2):
        if one != other:
            assert not set(streams[one]) & set(streams[other])


def test_numbers_are_uniform_and_uncorrelated() -> None:
    """Mean and lag correlation across each of the three keys, at 4.5 standard errors of fixed draws."""
    draws = 4000
    along = {
        "seed": uniforms(range(draws), [3] * draws, [5] * draws),
        "index": uniforms([3] * draws, range(draws), [5] * draws),
        "position": uniforms([3] * draws, [5] * draws, range(draws)),
    }
    for name, numbers in along.items():
        mean = sum(numbers) / draws
        assert abs(mean - 0.5) < 4.5 * (1 / 12 / draws) ** 0.5, name
        pairs = pairwise(numbers)
        covariance = sum((a - 0.5) * (b - 0.5) for a, b in pairs) / (draws - 1)
        assert abs(covariance) < 4.5 / 12 / draws**0.5, name


def step(sampling: Sampling, tokens: list[int], chains: list[Token | None]) -> list[Token | None]:
    candidates = [Candidate(-1.0 - token / 10, rank, token) for rank, token in enumerate(tokens)]
    return [Token(chains[c.beam], c.token_id, c.logprob, c.beam) for c in sampling.select(candidates, chains)]


def test_samples_keep_their_index_when_others_finish() -> None:
    """Outputs overwrote each other or shared an index (vLLM #14280, #12584)."""
    sampling = Sampling(SamplingParams(num_return_sequences=4, max_new_tokens=3), frozenset([0]))
    chains = step(sampling, [5, 0, 6, 7], [None] * 4)
    assert sampling.indices == [0, 2, 3]
    chains = step(sampling, [0, 8, 9], chains)
    assert sampling.indices == [2, 3]
    step(sampling, [4, 0], chains)
    assert sampling.is_done
    found = sampling.hypotheses
    assert [h.index for h in found] == [0, 1, 2, 3]
    assert [h.finish_reason for h in found] == ["eos", "eos", "length", "eos"]
    assert [h.stop_reason for h in found] == [0, 0, None, 0]
    # What sample 3 says of itself: tokens 7, 9, 0 at log-probs −1.7, −1.9, −1.0.
    assert found[3].cumulative_logprob == pytest.approx(-4.6)
    assert found[3].score == pytest.approx(-4.6 / 3)
    assert [h.last.token_id for h in found] == [0, 0, 4, 0]
    assert found[3].prefix is not None
    assert found[3].prefix.token_id == 9


def test_a_token_is_wanted_of_every_live_sample() -> None:
    sampling = Sampling(SamplingParams(num_return_sequences=3), frozenset())
    with pytest.raises(AssertionError, match="one candidate a sample"):
        sampling.select([Candidate(-1.0, 0, 1)], [None] * 3)
