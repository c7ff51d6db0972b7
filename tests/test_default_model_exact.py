"""The default model, with real weights, a real tokenizer and real text, against transformers."""

from typing import Any

import pytest
import torch

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams
from oracles import drawing_samples, transformers_generate

TEXTS = ("The capital of France is", "Once upon a time")
QUESTIONS = ("What is the capital of France?", "Name three colours.")


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder.from_pretrained(dtype=torch.float32, num_blocks=256)


def eos_ids(decoder: Decoder) -> list[int]:
    own = decoder.model.generation_config.eos_token_id
    return [own] if isinstance(own, int) else list(own)


def assert_equal_beams(decoder: Decoder, prompts: list[list[int]], settings: dict[str, Any]) -> None:
    settings = {**settings, "eos_token_id": eos_ids(decoder)}
    want = transformers_generate(decoder.model, prompts, settings)
    got = decoder.generate(prompts, BeamSearchParams(**settings))
    for wanted, result in zip(want, got, strict=True):
        assert [completion.token_ids for completion in result.completions] == [tuple(w.token_ids) for w in wanted]
        assert [completion.beams for completion in result.completions] == [tuple(w.beams) for w in wanted]
        assert [c.score for c in result.completions] == pytest.approx([w.score for w in wanted], abs=1e-4)
    decoder.check_integrity()
    assert decoder.num_free_blocks == decoder.num_blocks


def test_beams_equal_transformers(decoder: Decoder) -> None:
    """Two prompts of different lengths: the batch is left-padded on transformers' side."""
    assert decoder.tokenizer is not None
    prompts = [decoder.tokenizer(text).input_ids for text in TEXTS]
    settings = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 6, "early_stopping": False}
    assert_equal_beams(decoder, prompts, settings)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 4, "num_return_sequences": 2, "early_stopping": False, "length_penalty": 1.0},
        {"num_beams": 3, "num_return_sequences": 3, "early_stopping": True, "length_penalty": 2.0},
    ],
)
def test_beams_of_a_chat_equal_transformers(decoder: Decoder, settings: dict[str, Any]) -> None:
    assert_equal_beams(decoder, chats(decoder), settings | {"max_new_tokens": 24})


def chats(decoder: Decoder) -> list[list[int]]:
    assert decoder.tokenizer is not None
    return [
        decoder.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


@pytest.mark.long
def test_samples_equal_transformers(decoder: Decoder) -> None:
    (prompt, _) = chats(decoder)
    settings: dict[str, Any] = {
        "num_return_sequences": 4,
        "max_new_tokens": 8,
        "temperature": 0.9,
        "top_p": 0.95,
        "eos_token_id": eos_ids(decoder),
        "seed": 5,
    }
    with drawing_samples(5):
        (want,) = transformers_generate(decoder.model, [prompt], settings, do_sample=True)
    result = decoder.generate(prompt, SamplingParams(**settings))
    assert [completion.token_ids for completion in result.completions] == [tuple(w.token_ids) for w in want]


def test_text_in_text_out(decoder: Decoder) -> None:
    """The prompt's text goes through the tokenizer, the completion's text is its tokens', specials left out."""
    assert decoder.tokenizer is not None
    result = decoder.generate("The capital of France is", BeamSearchParams(num_beams=4, max_new_tokens=5))
    best = result.completions[0]
    assert "Paris" in best.text
    assert result.prompt_token_ids == tuple(decoder.tokenizer("The capital of France is").input_ids)
    assert best.text == decoder.tokenizer.decode(best.token_ids, skip_special_tokens=True)
    with pytest.raises(ValueError, match="the prompt is empty"):
        decoder.generate("", BeamSearchParams(max_new_tokens=2))
    *frames, last = decoder.stream("The capital of France is", BeamSearchParams(num_beams=4, max_new_tokens=5))
    assert last.result is not None
    assert last.result.completions == result.completions
    assert any("Paris" in branch.text for branch in frames[-1].branches)
