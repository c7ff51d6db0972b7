"""Diverse beam search is that of transformers until 4.5x: by an oracle of its formulas over full forward passes.

``scripts/compare_group_beams.py`` compares with a transformers of that time itself.
"""

import copy
import functools
import random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams, attach, custom_generate
from cowbeam.decoder.diverse_beams import DiverseBeamSearch
from cowbeam.decoder.params import Params
from cowbeam.decoder.strategy import Candidate
from fakes import BLOCK_SIZES, FAMILIES, VOCABULARY, random_prompt, tiny_decoder, tiny_model
from group_beams import diverse_beams
from oracles import last_logits

TOLERANCE = 1e-4


def random_settings(rng: random.Random) -> dict[str, Any]:
    num_beam_groups, size = rng.choice([2, 2, 3, 4]), rng.choice([1, 2, 3])
    num_beams = num_beam_groups * size
    return {
        "num_beams": num_beams,
        "num_beam_groups": num_beam_groups,
        "diversity_penalty": rng.choice([0.1, 0.5, 1.0, 3.0]),
        "num_return_sequences": rng.randint(1, num_beams),
        "max_new_tokens": rng.randint(1, 9),
        "length_penalty": rng.choice([1.0, 0.0, -1.0, 0.5, 2.0]),
        "early_stopping": rng.choice([False, True, "never"]),
        "eos_token_id": sorted(rng.sample(range(VOCABULARY), rng.choice([0, 1, 2, 6, 15]))),
    }


def repetition(prompt: list[int], penalty: float, tokens: list[int], scores: list[float]) -> list[float]:
    seen = {*prompt, *tokens}
    return [(x * penalty if x < 0 else x / penalty) if token in seen else x for token, x in enumerate(scores)]


def difference(seed: int, dtype: torch.dtype) -> str | None:
    rng = random.Random(seed)
    family, block_size = sorted(FAMILIES)[seed % len(FAMILIES)], rng.choice(BLOCK_SIZES)
    prompt, settings, penalty = random_prompt(rng), random_settings(rng), rng.choice([1.0, 1.0, 1.4])
    decoder = tiny_decoder(family, block_size, dtype)

    @functools.cache
    def logprobs(tokens: tuple[int, ...]) -> list[float]:
        return torch.log_softmax(last_logits(decoder.model, [*prompt, *tokens]).float(), -1).tolist()

    wanted = diverse_beams(
        lambda tokens: logprobs(tuple(tokens)), **settings, penalize=functools.partial(repetition, prompt, penalty)
    )
    result = decoder.generate(prompt, BeamSearchParams(**settings, repetition_penalty=penalty))
    decoder.check_integrity()
    assert decoder.num_free_blocks == decoder.num_blocks
    assert len(wanted) == len(result.completions)
    for want, got in zip(wanted, result.completions, strict=True):
        assert sum(got.logprobs) == pytest.approx(got.cumulative_logprob, abs=1e-4)
        ended = got.token_ids[-1] in settings["eos_token_id"]
        assert got.finish_reason == ("eos" if ended else "length")
        if list(got.token_ids) != want.token_ids or got.score != pytest.approx(want.score, abs=TOLERANCE):
            return f"{got.token_ids} {got.score}, wanted {want}, {family}, {settings}"
    return None


def check(seeds: range) -> None:
    """A difference in float32 counts only if it stands in float64 (rounding may swap near ties)."""
    for seed in seeds:
        if difference(seed, torch.float32) is not None:
            found = difference(seed, torch.float64)
            assert found is None, f"seed {seed}: {found}"


def test_they_are_those_of_the_formulas() -> None:
    check(range(10))


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(1, 10))
def test_they_are_those_of_the_formulas_at_length(chunk: int) -> None:
    check(range(10 * chunk, 10 * chunk + 10))


def test_groups_differ_where_beams_are_alike() -> None:
    """What it is for: with a high penalty the groups' first tokens are all different."""
    params = BeamSearchParams(
        num_beams=6,
        num_beam_groups=6,
        diversity_penalty=50.0,
        num_return_sequences=6,
        max_new_tokens=4,
        eos_token_id=[],
    )
    completions = tiny_decoder("llama").generate([3, 1, 4], params).completions
    assert len({completion.token_ids[0] for completion in completions}) == 6
    plain = BeamSearchParams(num_beams=6, num_return_sequences=6, max_new_tokens=4, eos_token_id=[])
    alike = tiny_decoder("llama").generate([3, 1, 4], plain).completions
    assert len({completion.token_ids[0] for completion in alike}) < 6


def test_one_group_of_one_beam_a_time_is_greedy_first() -> None:
    """The first group knows nothing of the others: it is a beam search of its own."""
    params = BeamSearchParams(
        num_beams=3, num_beam_groups=3, diversity_penalty=2.0, num_return_sequences=3, max_new_tokens=6, eos_token_id=[]
    )
    completions = tiny_decoder("qwen2").generate([3, 1, 4], params).completions
    greedy = BeamSearchParams(num_beams=1, max_new_tokens=6, eos_token_id=[])
    (first,) = tiny_decoder("qwen2").generate([3, 1, 4], greedy).completions
    assert first.token_ids in {completion.token_ids for completion in completions}


def test_a_group_that_is_done_holds_no_blocks() -> None:
    """Its ranks are gone, the others move up, and the search goes on over what is left."""
    params = BeamSearchParams(
        num_beams=4, num_beam_groups=2, diversity_penalty=1.0, early_stopping=True, max_new_tokens=5
    )
    search = DiverseBeamSearch(params, frozenset([0]))
    first = [Candidate(-1.0, 0, 0), Candidate(-1.1, 0, 1), Candidate(-1.2, 0, 2), Candidate(-1.3, 0, 3)]
    other = [Candidate(-1.0, 2, 4), Candidate(-1.1, 2, 5), Candidate(-1.2, 2, 6), Candidate(-1.3, 2, 7)]
    assert [c.beam for c in search.select([*first, *other], [None] * 4)] == [0, 0, 2, 2]
    last = [None] * 4
    first = [Candidate(-2.0, 0, 0), Candidate(-2.1, 1, 0), Candidate(-2.2, 0, 2), Candidate(-2.3, 0, 3)]
    other = [Candidate(-2.0, 2, 4), Candidate(-2.1, 3, 5), Candidate(-2.2, 2, 6), Candidate(-2.3, 2, 7)]
    assert [c.beam for c in search.select([*first, *other], last)] == [2, 3]
    assert search.live_groups == [(0, 2)]
    assert search.scores == [-2.0, -2.1]
    assert not search.is_done


def test_beside_other_searches_with_steps_in_flight() -> None:
    decoder = Decoder(tiny_decoder("llama").model, block_size=4, num_blocks=512)
    diverse = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7, "eos_token_id": [5, 6, 7]}
    params: list[Params] = [
        BeamSearchParams(**diverse, max_new_tokens=12, logprobs=2),  # type: ignore[arg-type]
        BeamSearchParams(num_beams=3, max_new_tokens=9, eos_token_id=[]),
        SamplingParams(num_return_sequences=3, seed=1, max_new_tokens=10),
    ]
    wanted = [[c.token_ids for c in result.completions] for result in decoder.generate([[3, 1, 4]] * 3, params)]
    decoder._engine._looks_ahead = True  # type: ignore[union-attr]
    for _ in range(2):
        got = [[c.token_ids for c in result.completions] for result in decoder.generate([[3, 1, 4]] * 3, params)]
        assert got == wanted
    frames = list(decoder.stream([3, 1, 4], params[0]))
    assert frames[-1].result is not None
    assert [c.token_ids for c in frames[-1].result.completions] == wanted[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beam_groups": 0}, "num_beam_groups must be an integer of at least 1, got 0"),
        ({"num_beam_groups": 3}, "num_beam_groups=3 does not divide num_beams=4"),
        ({"num_beam_groups": 2}, "diversity_penalty=0 makes all num_beam_groups alike"),
        ({"diversity_penalty": 0.5}, "diversity_penalty=0.5 has no effect without num_beam_groups"),
        ({"diversity_penalty": -1}, "diversity_penalty must be a finite number at least 0, got -1"),
        ({"num_beam_groups": 2, "diversity_penalty": 1.0, "do_sample": True}, "do_sample does not go with"),
        ({"num_beam_groups": 2, "diversity_penalty": 1.0, "stop_strings": "a"}, "stop_strings does not go with"),
    ],
)
def test_unusable_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        BeamSearchParams(**fields)


ATTACHED: list[dict[str, Any]] = [
    {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 0.5, "num_return_sequences": 4},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 3.0, "length_penalty": 2.0, "early_stopping": True},
    {"num_beams": 4, "num_beam_groups": 4, "diversity_penalty": 1.0, "repetition_penalty": 1.4, "min_new_tokens": 3},
]


@pytest.mark.parametrize("settings", ATTACHED)
@pytest.mark.parametrize("as_object", [False, True])
def test_through_an_attached_model(settings: dict[str, Any], as_object: bool) -> None:
    """``generate`` answers where transformers 5 names a repository: a left-padded batch, a user's processor."""
    model: Any = attach(copy.deepcopy(tiny_model("llama")), block_size=4)
    eos_ids = [5, 9, 11, 23]

    def favours(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([17], device=scores.device), -1.0)

    common = {**settings, "max_new_tokens": 8, "eos_token_id": eos_ids, "do_sample": False}
    more = {"pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True}
    config = {"generation_config": GenerationConfig(**common, **more)} if as_object else {**common, **more}
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    ids = torch.tensor([prompts[0], [0, 0, 0, *prompts[1]]], device=model.device)
    out = model.generate(ids, attention_mask=(ids != 0).int(), logits_processor=[favours], **config)
    del common["do_sample"]
    wanted = tiny_decoder("llama").generate(prompts, BeamSearchParams(**common, logits_processors=[favours]))
    each = settings.get("num_return_sequences", 1)
    assert out.sequences[:, :5].tolist() == ids.repeat_interleave(each, 0).tolist()
    rows = zip(out.sequences[:, 5:].tolist(), out.sequences_scores.tolist(), strict=True)
    for completion, (row, score) in zip((c for result in wanted for c in result.completions), rows, strict=True):
        assert row == [*completion.token_ids, *[0] * (len(row) - len(completion.token_ids))]
        assert score == pytest.approx(completion.score, abs=TOLERANCE)


def test_what_groups_of_an_attached_model_do_not_take() -> None:
    """Named, before any work; nothing is ignored."""
    model: Any = attach(copy.deepcopy(tiny_model("llama")))
    ids, groups = torch.tensor([[3, 1, 4]], device=model.device), {"num_beams": 4, "num_beam_groups": 2}
    for more, message in (
        ({"stopping_criteria": [lambda *_: True]}, "stopping_criteria does not go with num_beam_groups"),
        ({"stop_strings": ["a"]}, "stop_strings does not go with num_beam_groups"),
        ({}, "diversity_penalty=0 makes all num_beam_groups alike"),
        ({"diversity_penalty": 1.0, "num_beams": 5}, "num_beam_groups=2 does not divide num_beams=5"),
        ({"diversity_penalty": 1.0, "max_time": 3.0}, "max_time=3.0"),
        ({"diversity_penalty": 1.0, "use_cache": False}, "use_cache=False is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(ids, **{**groups, **more}, max_new_tokens=4, pad_token_id=0)
    with pytest.raises(ValueError, match="does no group beam search"):
        model.generate(ids, **groups, diversity_penalty=1.0, max_new_tokens=4, custom_generate=custom_generate)
