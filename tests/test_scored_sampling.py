"""Best of n, and a user's function that re-ranks samples on the way: by fork and free, on true histories."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from cowbeam.decoder import AsyncDecoder, BranchScorer, BranchView, Decoder, DecodeResult, SamplingParams
from fakes import BLOCK_SIZES, FAMILIES, VOCABULARY, random_prompt, tiny_decoder, tiny_model
from test_token_logprobs import check
from text import tiny_tokenizer


def sample(decoder: Decoder, prompt: list[int], **fields: Any) -> DecodeResult:
    return decoder.generate(prompt, SamplingParams(**fields))


def test_best_of_are_the_best_samples() -> None:
    """The same samples as without, those with the greatest mean log-prob first."""
    for seed in range(10):
        decoder = tiny_decoder(sorted(FAMILIES)[seed], 4)
        fields = {"max_new_tokens": 9, "eos_token_id": [4, 5, 6, 7], "seed": seed, "temperature": 0.8}
        everyone = sample(decoder, [3, 1, 4], num_return_sequences=7, **fields).completions
        best = sample(decoder, [3, 1, 4], num_return_sequences=3, best_of=7, **fields).completions
        wanted = sorted(everyone, key=lambda c: -sum(c.logprobs) / len(c.logprobs))[:3]
        assert [c.token_ids for c in best] == [c.token_ids for c in wanted]
        assert [c.index for c in best] == [0, 1, 2]
        assert [c.score for c in best] == sorted((c.score for c in everyone), reverse=True)[:3]


def by_hash(branches: Sequence[BranchView]) -> list[float]:
    """Arbitrary, but the same whenever it is asked; some samples are hopeless."""
    numbers = [random.Random(str(branch.token_ids)).random() for branch in branches]
    return [-math.inf if number < 0.2 else 3 * number for number in numbers]


def random_scorer(rng: random.Random, width: int) -> BranchScorer:
    return BranchScorer(score=by_hash, every=rng.choice([1, 2, 3, 5]), keep=rng.choice([None, 1, min(2, width), width]))


@pytest.mark.parametrize("chunk", range(2))
def test_histories_are_true(chunk: int) -> None:
    """After any number of forks each token's log-prob is that of a full forward pass over its own history.

    A copy that read another's blocks, or blocks that were given back too early, would show in the log-probs.
    """
    reranked = 0
    for seed in range(chunk * 20, chunk * 20 + 20):
        rng = random.Random(seed)
        decoder = Decoder(
            tiny_model(sorted(FAMILIES)[seed % len(FAMILIES)]), block_size=rng.choice(BLOCK_SIZES), num_blocks=512
        )
        width = rng.choice([1, 2, 5, 8])
        fields = {
            "num_return_sequences": width,
            "max_new_tokens": rng.randint(2, 14),
            "eos_token_id": rng.sample(range(VOCABULARY), rng.choice([0, 2, 9])),
            "seed": seed,
            "logprobs": 0,
        }
        params = SamplingParams(**fields, branch_scorer=random_scorer(rng, width))  # type: ignore[arg-type]
        other = SamplingParams(num_return_sequences=2, max_new_tokens=9, seed=1)
        runs = [decoder.add_request(random_prompt(rng), one) for one in (params, other)]
        while not all(run.is_over for run in runs):
            decoder.step()
            decoder.check_integrity()
        result = runs[0].result
        assert result is not None, runs[0].error
        assert [c.index for c in result.completions] == list(range(width))
        check(decoder, result, 0)
        for completion in result.completions:
            assert sum(completion.logprobs) == pytest.approx(completion.cumulative_logprob, abs=1e-5)
        assert decoder.num_free_blocks == decoder.num_blocks
        reranked += len({c.token_ids[:1] for c in result.completions}) < width
    assert reranked


def test_a_scorer_without_opinion_changes_nothing() -> None:
    """Equal weights: each sample goes on once, whatever the draw; so do all where nobody is worth it."""
    fields = {"num_return_sequences": 6, "max_new_tokens": 12, "eos_token_id": [4, 5], "seed": 3}
    wanted = [c.token_ids for c in sample(tiny_decoder("llama"), [3, 1, 4], **fields).completions]
    for number in (0.0, -math.inf):
        scorer = BranchScorer(score=lambda branches, number=number: [number] * len(branches), every=2)
        got = sample(tiny_decoder("llama"), [3, 1, 4], **fields, branch_scorer=scorer).completions
        assert [c.token_ids for c in got] == wanted


def test_the_best_goes_on_everywhere() -> None:
    """`keep=1` after four tokens: all share that sample's beginning and its blocks, and part behind it."""
    plain = {"num_return_sequences": 5, "max_new_tokens": 12, "eos_token_id": [], "seed": 3}
    free = sample(tiny_decoder("llama", 4), [3, 1, 4], **plain).completions
    seen: list[Sequence[BranchView]] = []

    def prefers_third(branches: Sequence[BranchView]) -> list[float]:
        seen.append(branches)
        return [1.0 if branch.index == 3 and len(branch.token_ids) == 4 else 0.0 for branch in branches]

    scorer = BranchScorer(score=prefers_third, every=4, keep=1)
    params = SamplingParams(**plain, branch_scorer=scorer)  # type: ignore[arg-type]
    frames = list(tiny_decoder("llama", 4).stream([3, 1, 4], params))
    assert frames[-1].result is not None
    assert [view.token_ids for view in seen[0]] == [c.token_ids[:4] for c in free]
    assert len(seen) == 2, "at 4 and 8 tokens; not at the end, where nothing is left to choose"
    completions = frames[-1].result.completions
    assert {c.token_ids[:4] for c in completions} == {free[3].token_ids[:4]}
    assert len({c.token_ids[:8] for c in completions}) == 1, "the first place went on at 8"
    assert len({c.token_ids for c in completions}) == 5, "copies draw numbers of their own"
    assert len({branch.block_table[:1] for branch in frames[4].branches}) == 1


def test_finished_samples_are_chosen_among_too() -> None:
    """One that is finished can be given up for a fork of a live one, and can fill other places itself."""

    def likes(finished: bool) -> BranchScorer:
        return BranchScorer(
            score=lambda branches: [float(branch.is_finished == finished) for branch in branches], every=3, keep=1
        )

    fields = {"num_return_sequences": 6, "max_new_tokens": 12, "eos_token_id": list(range(20)), "seed": 5}
    free = sample(tiny_decoder("llama"), [3, 1, 4], **fields).completions
    early = [c for c in free if len(c.token_ids) <= 3]
    assert 0 < len(early) < 6, "the case tries something"
    ended = sample(tiny_decoder("llama"), [3, 1, 4], **fields, branch_scorer=likes(True)).completions
    assert {c.token_ids for c in ended} == {early[0].token_ids}
    assert [c.index for c in ended] == list(range(6))
    alive = sample(tiny_decoder("llama"), [3, 1, 4], **fields, branch_scorer=likes(False)).completions
    assert all(len(c.token_ids) > 3 for c in alive)


def test_best_of_by_the_scorers_last_word() -> None:
    fields = {"max_new_tokens": 8, "eos_token_id": [], "seed": 3}
    scorer = BranchScorer(score=lambda branches: [-float(branch.token_ids[-1]) for branch in branches], every=100)
    everyone = sample(tiny_decoder("llama"), [3, 1, 4], **fields, num_return_sequences=6).completions
    best = sample(tiny_decoder("llama"), [3, 1, 4], **fields, num_return_sequences=2, best_of=6, branch_scorer=scorer)
    wanted = sorted(everyone, key=lambda c: c.token_ids[-1])[:2]
    assert [c.token_ids for c in best.completions] == [c.token_ids for c in wanted]


def test_stop_strings_and_texts_follow_the_forks() -> None:
    decoder = Decoder(tiny_model("llama"), tiny_tokenizer(VOCABULARY), block_size=4, num_blocks=256)
    texts: list[str] = []

    def score(branches: Sequence[BranchView]) -> list[float]:
        texts.extend(branch.text for branch in branches)
        return by_hash(branches)

    for seed in range(10):
        fields = {"num_return_sequences": 5, "max_new_tokens": 20, "eos_token_id": [], "seed": seed}
        scorer = BranchScorer(score=score, every=1)
        result = sample(decoder, [3, 1, 4], **fields, branch_scorer=scorer, stop_strings=["he q", "ox"])
        for completion in result.completions:
            whole = decoder.text_of(completion.token_ids)
            assert completion.text in whole
            assert (completion.finish_reason == "stop") == ("he q" in whole or "ox" in whole)
    assert any(texts)


def test_an_error_is_the_requests_alone() -> None:
    decoder = Decoder(tiny_model("llama"), block_size=4, num_blocks=256)
    mistakes: list[tuple[Any, type[Exception], str]] = [
        (lambda _: [0.0], ValueError, "branch_scorer gave 1 scores for 4 branches"),
        (lambda _: None, ValueError, "branch_scorer gave None: it must give a score for each of its branches"),
        (lambda _: [math.nan] * 4, ValueError, "a score is a number or -inf"),
        (lambda branches: branches[99], IndexError, "index"),
    ]
    for score, kind, message in mistakes:
        params = SamplingParams(num_return_sequences=4, branch_scorer=BranchScorer(score=score, every=3))
        bad = decoder.add_request([9, 2], params)
        good = decoder.add_request([3, 1, 4], SamplingParams(seed=1, max_new_tokens=9))
        while not (bad.is_over and good.is_over):
            decoder.step()
        assert good.result is not None
        with pytest.raises(kind, match=message):
            raise bad.error or AssertionError("no error")
        assert decoder.num_free_blocks == decoder.num_blocks


def test_resampling_is_in_proportion() -> None:
    """Systematic: each goes on ⌊n·w⌋ or ⌈n·w⌉ times, n in all, and n·w on average over the draws."""
    for seed in range(200):
        rng = random.Random(seed)
        scores = [rng.choice([-math.inf, rng.uniform(-3, 3), 0.0]) for _ in range(rng.randint(1, 9))]
        if max(scores) == -math.inf:
            continue
        weights = [math.exp(score) for score in scores]
        wanted = [len(scores) * weight / sum(weights) for weight in weights]
        scorer, sums = BranchScorer(score=lambda _: []), Counter[int]()
        for draw in range(200):
            parents = scorer.parents(scores, (draw + 0.5) / 200)
            counts = Counter(parents)
            sums += counts
            assert len(parents) == len(scores)
            assert all(parents[place] == place for place in counts), "who goes on keeps its place"
            for place, share in enumerate(wanted):
                assert math.floor(share - 1e-9) <= counts[place] <= math.ceil(share + 1e-9)
        for place, share in enumerate(wanted):
            assert sums[place] / 200 == pytest.approx(share, abs=0.01)


def test_the_best_few_share_the_places() -> None:
    scorer = BranchScorer(score=lambda _: [], keep=2)
    assert scorer.parents([0.0, 5.0, 1.0, 4.0, 2.0], 0.3) == [1, 1, 1, 3, 3]
    assert scorer.parents([-math.inf, 5.0, -math.inf], 0.3) == [1, 1, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"best_of": 0}, "best_of must be an integer of at least 1, got 0"),
        ({"best_of": 2, "num_return_sequences": 3}, "best_of=2 is less than num_return_sequences=3"),
        ({"branch_scorer": len}, "branch_scorer must be a BranchScorer, got <built-in"),
        ({"branch_scorer": BranchScorer(score=len, keep=3)}, "keep=3 of the branch_scorer exceeds the 1 samples"),
    ],
)
def test_unusable_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        SamplingParams(**fields)
    for wrong in ({"every": 0}, {"keep": 0}, {"score": 3}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be"):
            BranchScorer(**{"score": len, **wrong})  # type: ignore[arg-type]


def test_tokens_of_samples_that_may_be_given_up_are_not_streamed() -> None:
    async def stream(params: SamplingParams) -> None:
        async with AsyncDecoder(tiny_decoder("llama")) as decoding:
            async for _ in decoding.tokens([3], params):
                pass

    for params in (SamplingParams(best_of=2), SamplingParams(branch_scorer=BranchScorer(score=by_hash))):
        with pytest.raises(ValueError, match="samples may be given up again"):
            asyncio.run(stream(params))
