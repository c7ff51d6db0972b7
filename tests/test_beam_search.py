"""Beam search without a model: what is selected, kept and returned, on tables small enough to see through."""

import random

import pytest

from cowbeam.decoder import BeamSearchParams
from cowbeam.decoder.beam_search import MASK, BeamSearch, penalized
from cowbeam.decoder.strategy import Candidate
from fakes import search_table
from oracles import best_of_all

EOS = 0


def random_table(seed: int, vocabulary: int, *, spread: float = 2.0):
    """Log-probs that depend on the whole history, by a seeded draw for each."""

    def next_logprobs(tokens: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{seed} {tokens}")
        return [rng.gauss(-2.0, spread) for _ in range(vocabulary)]

    return next_logprobs


@pytest.mark.parametrize("length_penalty", [-1.0, -0.3, 0.0, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(12))
def test_a_wide_search_finds_the_best_of_all(seed: int, length_penalty: float) -> None:
    """V^(L−1) beams can hold every open sequence; "never" must not stop while a better one may come."""
    vocabulary, length = 3, 4
    table = random_table(seed, vocabulary)
    ranked = best_of_all(table, max_new_tokens=length, eos_ids=frozenset([EOS]), length_penalty=length_penalty)
    params = BeamSearchParams(
        num_beams=vocabulary ** (length - 1),
        num_return_sequences=4,
        max_new_tokens=length,
        length_penalty=length_penalty,
        early_stopping="never",
    )
    run = search_table(params, [EOS], table)
    assert [tokens for _, tokens in run.found] == [tokens for _, tokens in ranked[:4]]
    assert [score for score, _ in run.found] == pytest.approx([score for score, _ in ranked[:4]], rel=1e-5)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("seed", range(20))
def test_laws_of_a_search(seed: int, early_stopping: bool | str) -> None:
    """Live beams are distinct and full in number; the returned are distinct, in order, and end as they should."""
    rng = random.Random(seed)
    eos_ids = set(rng.sample(range(12), rng.randint(0, 3)))
    num_beams = rng.randint(2, 6)
    params = BeamSearchParams(
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=rng.randint(1, 7),
        length_penalty=rng.uniform(-1, 2),
        early_stopping=early_stopping,  # type: ignore[arg-type]
    )
    run = search_table(params, eos_ids, random_table(seed, 12))
    for live in run.live:
        assert len(set(live)) == len(live)
        assert not any(set(tokens) & eos_ids for tokens in live), "a live beam holds an EOS"
    scores = [score for score, _ in run.found]
    assert scores == sorted(scores, reverse=True)
    assert len({tokens for _, tokens in run.found}) == len(run.found) == num_beams
    for (_, tokens), reason in zip(run.found, run.reasons, strict=True):
        assert not set(tokens[:-1]) & eos_ids
        assert reason == ("eos" if tokens[-1] in eos_ids else "length")
        assert reason == "eos" or len(tokens) == params.max_new_tokens


def test_scores_are_float32() -> None:
    """In float64 ties that transformers sees would fall otherwise."""
    assert penalized(-1.0, 3, 1.0) != -1 / 3
    assert penalized(-1.0, 3, 1.0) == pytest.approx(-1 / 3, rel=1e-7)
    assert penalized(-7.5, 4, 0.0) == -7.5
    assert penalized(-1.0, 2, -1.0) == -2.0


def test_the_first_step_stands_on_the_prompt_once() -> None:
    """Without the mask all beams would take the same best token."""
    assert BeamSearch(BeamSearchParams(num_beams=3), frozenset()).scores == [0.0, MASK, MASK]
    run = search_table(BeamSearchParams(num_beams=3, max_new_tokens=1, num_return_sequences=3), [], random_table(1, 9))
    assert len({tokens for _, tokens in run.found}) == 3


def test_ties_go_to_the_lower_rank_then_the_lower_token() -> None:
    """Candidates come best first in the order of rank · V + token, and stay in it."""
    params = BeamSearchParams(num_beams=2, num_return_sequences=2, max_new_tokens=2)
    run = search_table(params, [], lambda _: [-1.0, -1.0, -1.0])
    assert run.live[0] == [(0,), (1,)]
    assert [tokens for _, tokens in run.found] == [(0, 0), (0, 1)]


def test_a_finished_candidate_outside_the_first_ranks_is_lost() -> None:
    """transformers takes an EOS only among the num_beams best candidates (its item 6); a pool of all would differ."""
    logprobs = [-3.0, -1.0, -2.0]  # the EOS is the third best
    run = search_table(
        BeamSearchParams(num_beams=2, num_return_sequences=2, max_new_tokens=2), [EOS], lambda _: logprobs
    )
    assert [tokens for _, tokens in run.found] == [(1, 1), (1, 2)]


def test_a_live_beam_that_only_equals_the_worst_ends_the_search() -> None:
    """transformers asks for better, not for as good: with ties the first found stay, and no step is wasted."""
    params = BeamSearchParams(num_beams=2, num_return_sequences=2, max_new_tokens=9)
    run = search_table(params, [0, 1], lambda _: [-1.0, -1.0, -1.0, -1.0])
    assert [tokens for _, tokens in run.found] == [(0,), (1,)]
    assert len(run.live) == 1


def test_never_with_a_negative_penalty_counts_on_the_present_length() -> None:
    """Longer is worse there: counting on the greatest length would end the search before a better one is found."""
    table = {(): [-1.0, -1.5, -9.0], (1,): [-2.5, -0.1, -9.0], (1, 1): [-0.1, -9.0, -9.0]}
    params = BeamSearchParams(
        num_beams=2, num_return_sequences=2, max_new_tokens=50, length_penalty=-1.0, early_stopping="never"
    )
    run = search_table(params, [EOS], lambda tokens: table.get(tokens, [-9.0] * 3))
    assert run.found == [(-1.0, (0,)), (pytest.approx(-5.1), (1, 1, 0))], "(1, 0) with −8 was full house at length 2"


def test_surplus_beams_fill_no_place() -> None:
    """More beams than tokens: what ends on a hopeless rank must not stop the search by filling the finished set."""
    params = BeamSearchParams(num_beams=6, max_new_tokens=3, early_stopping=True, length_penalty=1.0)
    run = search_table(params, [EOS], lambda tokens: [-2.0, -0.1] if len(tokens) < 2 else [-0.1, -2.0])
    assert run.found[0][1] == (1, 1, 0)


@pytest.mark.parametrize("length_penalty", [-12.0, 12.0])
def test_an_extreme_length_penalty_still_returns_the_longest_search(length_penalty: float) -> None:
    """Scores below −1e9 were taken for empty places: nothing was returned."""
    params = BeamSearchParams(num_beams=2, num_return_sequences=2, max_new_tokens=12, length_penalty=length_penalty)
    run = search_table(params, [], random_table(3, 5))
    assert [len(tokens) for _, tokens in run.found] == [12, 12]


def test_dead_beams_end_the_search_with_what_is_finished() -> None:
    params = BeamSearchParams(num_beams=2, max_new_tokens=9, early_stopping="never", length_penalty=2.0)
    dead = [float("-inf")] * 3
    run = search_table(params, [EOS], lambda tokens: dead if len(tokens) == 2 else [-1.0, -1.1, -1.2])
    assert run.found == [(pytest.approx(-2.1 / 4), (1, 0))]
    assert len(run.live) == 3


def test_a_masked_candidate_never_outranks_a_live_one() -> None:
    search = BeamSearch(BeamSearchParams(num_beams=2, max_new_tokens=5), frozenset([EOS]))
    candidates = [Candidate(-0.1, 0, EOS), Candidate(-5.0, 0, 1), Candidate(-9.0, 0, 2), Candidate(MASK, 1, 1)]
    assert [c.token_id for c in search.select(candidates, [None, None])] == [1, 2]
    assert search.scores == [-5.0, -9.0]
    assert [h.last.token_id for h in search.hypotheses] == [EOS]
