"""The plain model's log-probs of each token: those of an independent forward pass, through every fork and ending."""

import dataclasses
import json
import random
from typing import Any

import pytest
import torch

from cowbeam.decoder import BeamSearchParams, Completion, Decoder, DecodeResult, SamplingParams
from fakes import BLOCK_SIZES, FAMILIES, VOCABULARY, make_model, random_beam_settings, random_prompt, tiny_decoder
from oracles import last_logits

TOLERANCE = 1e-4


def check(decoder: Decoder, result: DecodeResult, number: int) -> None:
    for completion in result.completions:
        told = completion.token_logprobs
        assert told is not None
        assert [one.token_id for one in told] == list(completion.token_ids), "none lost, none shifted"
        for position, one in enumerate(told):
            before = [*result.prompt_token_ids, *completion.token_ids[:position]]
            wanted = torch.log_softmax(last_logits(decoder.model, before), -1)
            assert one.logprob == pytest.approx(float(wanted[one.token_id]), abs=TOLERANCE)
            assert len(one.top) == len({token_id for token_id, _ in one.top}) == min(number, VOCABULARY)
            assert [value for _, value in one.top] == sorted((value for _, value in one.top), reverse=True)
            best = wanted.topk(len(one.top)).values.tolist()
            assert [value for _, value in one.top] == pytest.approx(best, abs=TOLERANCE)
            assert all(value == pytest.approx(float(wanted[t]), abs=TOLERANCE) for t, value in one.top)


def random_sample_settings(rng: random.Random) -> dict[str, Any]:
    return {
        "num_return_sequences": rng.choice([1, 2, 5]),
        "max_new_tokens": rng.randint(1, 9),
        "temperature": rng.choice([1.0, 0.6, 1.7]),
        "top_k": rng.choice([0, 5]),
        "repetition_penalty": rng.choice([1.0, 1.3]),
        "eos_token_id": rng.sample(range(VOCABULARY), rng.choice([0, 2, 15])),
        "seed": rng.randrange(100),
    }


@pytest.mark.parametrize("chunk", range(3))
def test_they_are_the_plain_models(chunk: int) -> None:
    """Whatever penalties, warpers, forks, block sizes and endings there are, for beams, sampled beams and samples.

    B14 (vLLM #10792): more than ten beams asked for more log-probs than an engine gives; here they are no limit.
    """
    for seed in range(chunk * 20, (chunk + 1) * 20):
        rng = random.Random(seed)
        decoder = tiny_decoder(sorted(FAMILIES)[seed % len(FAMILIES)], rng.choice(BLOCK_SIZES))
        number = rng.choice([0, 1, 3, VOCABULARY + 5])
        prompts = [random_prompt(rng) for _ in range(2)]
        beams = random_beam_settings(rng)
        params: list[Any] = [
            BeamSearchParams(**beams, logprobs=number),
            SamplingParams(**random_sample_settings(rng), logprobs=number),
        ]
        if beams["num_beams"] > 1:
            params[0] = dataclasses.replace(params[0], do_sample=rng.random() < 0.3)
        for result in decoder.generate(prompts, params):
            check(decoder, result, number)


def test_asking_changes_nothing_else() -> None:
    """Neither tokens nor scores, with steps in flight or without; who does not ask gets none."""
    decoder = Decoder(make_model("llama", FAMILIES["llama"]), block_size=4, num_blocks=256)

    def run(**more: Any) -> list[tuple[Completion, ...]]:
        params = [
            BeamSearchParams(num_beams=5, num_return_sequences=5, max_new_tokens=9, eos_token_id=[4, 5], **more),
            SamplingParams(num_return_sequences=4, seed=1, max_new_tokens=9, eos_token_id=[4, 5], **more),
        ]
        return [result.completions for result in decoder.generate([[3, 1, 4]] * 2, params)]

    wanted = run()
    assert all(c.token_logprobs is None for completions in wanted for c in completions)
    asked = run(logprobs=2)
    decoder._engine._looks_ahead = True  # type: ignore[union-attr]
    assert run(logprobs=2) == asked
    without = [[dataclasses.replace(c, token_logprobs=None) for c in completions] for completions in asked]
    assert without == [list(completions) for completions in wanted]


def test_processed_and_plain() -> None:
    """`logprobs` make the score and are of the processed distribution; `token_logprobs` are the model's."""
    params = SamplingParams(max_new_tokens=6, temperature=0.3, seed=2, logprobs=0, eos_token_id=[])
    (completion,) = tiny_decoder("llama").generate([3, 1, 4], params).completions
    assert sum(completion.logprobs) == pytest.approx(completion.score * 6, abs=1e-5)
    assert completion.token_logprobs is not None
    assert all(abs(a - b.logprob) > 1e-3 for a, b in zip(completion.logprobs, completion.token_logprobs, strict=True))
    assert all(one.top == () for one in completion.token_logprobs)
    assert json.loads(json.dumps(dataclasses.asdict(completion)))["token_logprobs"][0]["top"] == []


def test_an_aborted_request_that_asked_leaves_nothing_behind() -> None:
    """D14 (vLLM PR #56249): an abort gave `logprobs=[]` and an IndexError."""
    decoder = Decoder(make_model("llama", FAMILIES["llama"]), block_size=4, num_blocks=64)
    params = BeamSearchParams(num_beams=3, max_new_tokens=8, eos_token_id=[], logprobs=2)
    for steps in (0, 1, 3):
        run = decoder.add_request([3, 1, 4], params)
        for _ in range(steps):
            decoder.step()
        decoder.abort(run)
        assert decoder.num_free_blocks == decoder.num_blocks
    check(decoder, decoder.generate([3, 1, 4], params), 2)


@pytest.mark.parametrize("value", [-1, True, 1.0, "3"])
def test_unusable_numbers_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="logprobs must be an integer of at least 0"):
        SamplingParams(logprobs=value)
