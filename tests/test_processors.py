"""Penalties and processors of the user's: transformers' own decision, per branch with its true history."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams
from fakes import FAMILIES, VOCABULARY, make_model, random_beam_settings, random_prompt, tiny_decoder, tiny_model
from oracles import drawing_samples


class FollowsHistory(LogitsProcessor):
    """Looks at the whole history, so a branch with another's history gets other scores."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        weights = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
        favoured = (input_ids * weights).sum(1) % VOCABULARY
        return scores.scatter_add(1, favoured[:, None], torch.full_like(scores[:, :1], 1.5))


def doubles(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A plain function; in place, which is the user's right."""
    return scores.mul_(1.0 + 0.1 * (input_ids.shape[1] % 2))


def random_settings(rng: random.Random) -> dict[str, Any]:
    def some(count: int) -> list[int]:
        return rng.sample(range(VOCABULARY), count)

    possible = {
        "sequence_bias": lambda: [[some(1), 2.0], [some(2), -3.0], [some(1), -1.5]],
        "bad_words_ids": lambda: [some(1), some(1), some(2), some(3)],
        "suppress_tokens": lambda: some(9),
        "begin_suppress_tokens": lambda: some(20),
        "repetition_penalty": lambda: rng.choice([1.3, 0.8]),
        "no_repeat_ngram_size": lambda: rng.choice([1, 2]),
    }
    return {name: possible[name]() for name in rng.sample(sorted(possible), rng.choice([1, 2, 3]))}


def random_processors(rng: random.Random) -> list[Any]:
    possible = [FollowsHistory(), doubles, TopKLogitsWarper(20), RepetitionPenaltyLogitsProcessor(1.7)]
    return rng.sample(possible, rng.choice([0, 1, 2, 3]))


def own(decoder: Decoder, prompt: list[int], settings: dict[str, Any], users: list[Any]) -> list[tuple[list[int], Any]]:
    settings = {k: v for k, v in settings.items() if k != "seed"} | {"pad_token_id": 0}
    settings["eos_token_id"] = settings["eos_token_id"] or None
    out = decoder.model.generate(  # type: ignore[operator]
        torch.tensor([prompt], device=decoder.model.device),
        **settings,
        logits_processor=LogitsProcessorList(users),
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for number, row in enumerate(out.sequences[:, len(prompt) :].tolist()):
        if out.get("beam_indices") is not None:
            row = row[: int((out.beam_indices[number] >= 0).sum())]
        elif settings["eos_token_id"]:
            ends = [i for i, token in enumerate(row) if token in settings["eos_token_id"]]
            row = row[: ends[0] + 1] if ends else row
        found.append((row, float(out.sequences_scores[number]) if out.get("sequences_scores") is not None else None))
    return found


def difference(family: str, dtype: torch.dtype, prompt: list[int], settings: dict[str, Any], users: list[Any]) -> Any:
    decoder = tiny_decoder(family, 4, dtype)
    result = decoder.generate(prompt, BeamSearchParams(**settings, logits_processors=users))
    for completion, (row, score) in zip(result.completions, own(decoder, prompt, settings, users), strict=True):
        if list(completion.token_ids) != row:
            return completion.token_ids, row
        if score is not None and completion.score != pytest.approx(score, abs=1e-4):
            return completion.score, score
    return None


@pytest.mark.parametrize("chunk", range(3))
def test_beams_are_transformers(chunk: int) -> None:
    """B6 (vLLM #21546): processors had no effect on the scores of beams. Tokens and scores, beams and greedy search."""
    for seed in range(chunk * 30, (chunk + 1) * 30):
        rng = random.Random(seed)
        family, prompt = sorted(FAMILIES)[seed % len(FAMILIES)], random_prompt(rng)
        settings, users = random_beam_settings(rng) | random_settings(rng), random_processors(rng)
        # With few tokens allowed fewer sequences exist than are asked for; transformers fills up.
        settings["num_return_sequences"] = 1
        if difference(family, torch.float32, prompt, settings, users):
            assert difference(family, torch.float64, prompt, settings, users) is None, (seed, settings, users)


def test_samples_are_transformers() -> None:
    """The same numbers drawn from the same processed distribution; processors get logits, not log-probs."""
    for seed in range(40):
        rng = random.Random(seed)
        family, prompt = sorted(FAMILIES)[seed % len(FAMILIES)], random_prompt(rng)
        decoder, users = tiny_decoder(family, 4), random_processors(rng)
        settings: dict[str, Any] = {
            "num_return_sequences": rng.choice([1, 3]),
            "max_new_tokens": rng.randint(1, 9),
            "eos_token_id": rng.sample(range(VOCABULARY), rng.choice([0, 3])),
            "temperature": rng.choice([0.7, 1.0]),
            "top_k": rng.choice([0, 30]),
            **random_settings(rng),
        }
        params = SamplingParams(**settings, seed=seed, logits_processors=users)
        got = [list(completion.token_ids) for completion in decoder.generate(prompt, params).completions]
        with drawing_samples(seed):
            wanted = own(decoder, prompt, settings | {"do_sample": True}, users)
        assert got == [row for row, _ in wanted], (seed, settings, users)


def test_called_once_a_step_with_every_live_branch() -> None:
    """B9 (TensorRT-LLM #7368): called for one sequence only. One row a live beam, each with its own tokens."""
    seen: list[Tensor] = []

    def records(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0]
        seen.append(input_ids)
        return scores

    decoder = Decoder(tiny_model("llama"), block_size=4, num_blocks=128)
    for looks_ahead in (False, True):  # not called for steps that are dropped
        decoder._engine._looks_ahead = looks_ahead  # type: ignore[union-attr]
        seen.clear()
        params = BeamSearchParams(num_beams=4, max_new_tokens=6, eos_token_id=[], logits_processors=[records])
        frames = list(decoder.stream([3, 1, 4], params))
        assert [tuple(ids.shape) for ids in seen] == [(1, 3), *((4, length) for length in range(4, 9))]
        assert all(ids[:, :3].tolist() == [[3, 1, 4]] * len(ids) for ids in seen)
        for frame, ids in zip(frames, seen[1:], strict=False):
            assert [branch.token_id for branch in frame.branches] == ids[:, -1].tolist()


def test_all_but_one_token_forbidden() -> None:
    """B6: a processor that sets all but token 7 to -inf, by the user's function and by `suppress_tokens`."""

    def only_seven(_: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf).index_copy(1, torch.tensor([7]), scores[:, 7:8])

    others = [token for token in range(VOCABULARY) if token != 7]
    for more in ({"logits_processors": [only_seven]}, {"suppress_tokens": others}):
        params = BeamSearchParams(num_beams=3, max_new_tokens=5, eos_token_id=[], **more)
        assert tiny_decoder("llama").generate([3, 1, 4], params).completions[0].token_ids == (7,) * 5


def test_an_error_is_the_requests_alone() -> None:
    """A user's mistake in the middle of a step fails his request, with his error, and no other."""
    decoder = Decoder(make_model("llama", FAMILIES["llama"]), block_size=4, num_blocks=256)
    good = BeamSearchParams(num_beams=3, max_new_tokens=8, eos_token_id=[])
    wanted = decoder.generate([3, 1, 4], good).completions[0].token_ids

    def fails(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > 5:
            raise KeyError("mine")
        return scores

    mistakes: list[tuple[Any, type[Exception], str]] = [
        (fails, KeyError, "mine"),
        (lambda _, scores: scores[:, :3], ValueError, r"must return scores of shape \[1, 67\], got \[1, 3\]"),
        (lambda *_: None, ValueError, r"must return scores of shape \[1, 67\], got NoneType"),
    ]
    for processor, kind, message in mistakes:
        bad = decoder.add_request([9, 2], BeamSearchParams(num_beams=2, logits_processors=[processor]))
        other = decoder.add_request([3, 1, 4], good)
        while not (bad.is_over and other.is_over):
            decoder.step()
        assert other.result is not None
        assert other.result.completions[0].token_ids == wanted
        with pytest.raises(kind, match=message):
            raise bad.error or AssertionError("no error")
        assert decoder.num_free_blocks == decoder.num_blocks
        decoder.check_integrity()


def test_what_a_user_keeps_is_his() -> None:
    """Scores that a processor puts aside are not written over by later steps; a history that it changes is not ours."""
    kept: list[Tensor] = []
    copies: list[Tensor] = []

    def keeps(input_ids: Tensor, scores: Tensor) -> Tensor:
        input_ids.zero_()
        kept.append(scores)
        copies.append(scores.clone())
        return scores

    params = {"num_beams": 3, "max_new_tokens": 6, "eos_token_id": [], "repetition_penalty": 1.5}
    wanted = tiny_decoder("gpt2").generate([3, 1, 4], BeamSearchParams(**params)).completions  # type: ignore[arg-type]
    asked = BeamSearchParams(**params, logits_processors=[keeps])  # type: ignore[arg-type]
    assert tiny_decoder("gpt2").generate([3, 1, 4], asked).completions == wanted
    assert all(torch.equal(one, copy) for one, copy in zip(kept, copies, strict=True))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bad_words_ids", [[3], []], "bad_words_ids holds a sequence without token ids"),
        ("bad_words_ids", [3], "each sequence of bad_words_ids must be a list, got 3"),
        ("bad_words_ids", ["bad"], "each sequence of bad_words_ids must be a list, got 'bad'"),
        ("bad_words_ids", [["a"]], "a token id of each sequence of bad_words_ids must be an integer"),
        ("sequence_bias", {3: 1.0}, "each sequence of sequence_bias must be a list, got 3"),
        ("sequence_bias", {(3,): "high"}, "a bias of sequence_bias must be a finite number at most 3.4"),
        ("sequence_bias", [3], "sequence_bias must map token sequences to numbers, got 3"),
        ("suppress_tokens", 0, "suppress_tokens must be a list, got 0"),
        ("suppress_tokens", [-1], "a token id of suppress_tokens must be an integer of at least 0, got -1"),
        ("logits_processors", [3], "logits_processors must be functions, got 3"),
        ("logits_processors", doubles, "logits_processors must be a list, got <function"),
        ("logits_processors", [dict], "logits_processors must be functions, got the class dict: give"),
    ],
)
def test_unusable_values_are_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        BeamSearchParams(**{field: value})


@pytest.mark.parametrize(
    "fields", [{"bad_words_ids": [[3, 67]]}, {"suppress_tokens": [67]}, {"sequence_bias": {(67,): 1.0}}]
)
def test_ids_that_the_model_lacks_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(fields))} holds 67; the model knows ids 0 to 66"):
        tiny_decoder("llama").generate([3], BeamSearchParams(**fields))


def test_an_eos_id_alone_is_no_bad_word() -> None:
    """As in transformers, which refuses a list of nothing else; there it has no effect."""
    params = {"num_beams": 3, "max_new_tokens": 9, "eos_token_id": [5, 6, 7, 8]}
    free = tiny_decoder("llama").generate([3, 1], BeamSearchParams(**params))  # type: ignore[arg-type]
    banned = BeamSearchParams(**params, bad_words_ids=[[5], [6]])  # type: ignore[arg-type]
    assert tiny_decoder("llama").generate([3, 1], banned).completions == free.completions
