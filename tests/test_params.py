"""Params: every field refuses what it cannot use, by name and value, and none is dropped silently."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams
from fakes import tiny_model

HUGE = 10**400


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_beams": 0}, "num_beams must be an integer of at least 1, got 0"),
        ({"num_beams": 2.0}, "num_beams must be an integer of at least 1, got 2.0"),
        ({"num_beams": True}, "num_beams must be an integer of at least 1, got True"),
        ({"num_beams": "4"}, "num_beams must be an integer of at least 1, got '4'"),
        ({"num_beams": None}, "num_beams must be an integer of at least 1, got None"),
        ({"num_return_sequences": 0}, "num_return_sequences must be an integer of at least 1, got 0"),
        ({"num_return_sequences": 5}, "num_return_sequences=5 exceeds num_beams=4"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
        ({"max_new_tokens": None}, "max_new_tokens must be an integer of at least 1, got None"),
        ({"min_new_tokens": -1}, "min_new_tokens must be an integer of at least 0, got -1"),
        ({"min_new_tokens": 65}, "min_new_tokens=65 exceeds max_new_tokens=64"),
        ({"length_penalty": float("nan")}, "length_penalty must be a finite number, got nan"),
        ({"length_penalty": float("inf")}, "length_penalty must be a finite number, got inf"),
        ({"length_penalty": "1"}, "length_penalty must be a finite number, got '1'"),
        ({"length_penalty": HUGE}, r"length_penalty must be a finite number, got 10+\.\.\.0+$"),
        ({"length_penalty": 1e9}, "length_penalty=1000000000.0 is out of range: max_new_tokens=64 to this power"),
        ({"length_penalty": -30}, "length_penalty=-30 is out of range"),
        ({"early_stopping": "ever"}, "early_stopping must be True, False or \"never\", got 'ever'"),
        ({"early_stopping": 1}, 'early_stopping must be True, False or "never", got 1'),
        ({"early_stopping": None}, 'early_stopping must be True, False or "never", got None'),
        ({"repetition_penalty": 0}, "repetition_penalty must be a finite number above 0, got 0"),
        ({"repetition_penalty": True}, "repetition_penalty must be a finite number above 0, got True"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size must be an integer of at least 0, got -1"),
        ({"renormalize_logits": 1}, "renormalize_logits must be True or False, got 1"),
        ({"do_sample": "yes"}, "do_sample must be True or False, got 'yes'"),
        ({"do_sample": True, "num_beams": 1}, "do_sample=True with num_beams=1 is plain sampling"),
        ({"temperature": 0.5}, "temperature=0.5 has no effect without do_sample=True"),
        ({"top_k": 5}, "top_k=5 has no effect without do_sample=True"),
        ({"do_sample": True, "temperature": 0}, "temperature must be a finite number above 0, got 0"),
        ({"do_sample": True, "temperature": HUGE}, "temperature must be a finite number above 0, got 10"),
        ({"do_sample": True, "top_k": -1}, "top_k must be an integer of at least 0, got -1"),
        ({"do_sample": True, "top_p": 0}, "top_p must be a finite number above 0 and at most 1, got 0"),
        ({"do_sample": True, "top_p": 1.1}, "top_p must be a finite number above 0 and at most 1, got 1.1"),
        ({"do_sample": True, "min_p": -0.1}, "min_p must be a finite number at least 0 and at most 1, got -0.1"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an integer of at least 0, got '</s>'"),
        ({"eos_token_id": -1}, "eos_token_id must be an integer of at least 0, got -1"),
        ({"eos_token_id": 1.5}, "eos_token_id must be token ids, got 1.5"),
        ({"eos_token_id": [1, None]}, "eos_token_id must be an integer of at least 0, got None"),
        ({"eos_token_id": 2**70}, f"eos_token_id must be token ids, got {2**70}"),
        ({"seed": -1}, r"seed must be an integer from 0 to 2\*\*64 - 1, got -1"),
        ({"seed": 2**64}, r"seed must be an integer from 0 to 2\*\*64 - 1, got 18446744073709551616"),
        ({"seed": 1.0}, r"seed must be an integer from 0 to 2\*\*64 - 1, got 1.0"),
    ],
)
def test_values_that_cannot_be_used(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        BeamSearchParams(**fields)


@pytest.mark.parametrize(
    "field", [field.name for field in dataclasses.fields(BeamSearchParams) if field.name != "stop_strings"]
)
def test_hostile_text_is_quoted_in_short(field: str) -> None:
    """No field but stop_strings takes text of any kind, and none echoes control characters or all of a huge value."""
    for text in ("\x00\x1b[2J", "<script>alert(1)</script>", "9" * 1_000_000, "\u202e\ud800"):
        with pytest.raises(ValueError, match=field) as refusal:
            BeamSearchParams(**{field: text})
        message = str(refusal.value)
        assert len(message) < 200
        assert message.isprintable()


@pytest.mark.parametrize("kind", [BeamSearchParams, SamplingParams])
def test_unknown_fields_are_named(kind: Any) -> None:
    """Options dropped by a positional shift (TensorRT-LLM PR #13633): fields are keyword-only and known."""
    with pytest.raises(TypeError, match="beam_width"):
        kind(beam_width=4)
    with pytest.raises(TypeError, match="positional"):
        kind(4)


def test_samples_have_no_beams() -> None:
    with pytest.raises(TypeError, match="num_beams"):
        SamplingParams(num_beams=4)  # type: ignore[call-arg]


def test_params_are_frozen_and_compare_by_value() -> None:
    params = BeamSearchParams(eos_token_id=[3, 3, 2])
    assert params.eos_token_id == (3, 2)
    assert params == BeamSearchParams(eos_token_id=(3, 2))
    assert hash(params) == hash(BeamSearchParams(eos_token_id=(3, 2)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.num_beams = 3  # type: ignore[misc]


@pytest.mark.parametrize("kind", [SamplingParams, functools.partial(BeamSearchParams, do_sample=True)])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_whole_numbers_are_numbers(kind: Any, field: str) -> None:
    """transformers' processors refuse some: ``{"temperature": 2}`` in a line of a batch job ended the whole job."""
    whole = 1 if field in ("top_p", "min_p") else 2
    decoder = Decoder(tiny_model("llama"), num_blocks=64)
    tokens = []
    for number in (whole, float(whole)):
        result = decoder.generate([5, 9, 2], kind(**{field: number}, max_new_tokens=6, seed=3))
        tokens.append([completion.token_ids for completion in result.completions])
    assert tokens[0] == tokens[1]


def test_a_generation_config_gives_the_same_settings() -> None:
    config = GenerationConfig(
        num_beams=5,
        num_return_sequences=2,
        length_penalty=2.0,
        early_stopping="never",
        max_new_tokens=9,
        no_repeat_ngram_size=2,
        eos_token_id=[4, 5],
    )
    assert BeamSearchParams.from_generation_config(config) == BeamSearchParams(
        num_beams=5,
        num_return_sequences=2,
        length_penalty=2.0,
        early_stopping="never",
        max_new_tokens=9,
        no_repeat_ngram_size=2,
        eos_token_id=[4, 5],
    )
    changed = BeamSearchParams.from_generation_config(config, num_beams=7)
    assert changed.num_beams == 7


def test_sampling_settings_of_a_config_count_only_where_it_samples() -> None:
    config = GenerationConfig(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, num_return_sequences=3)
    assert SamplingParams.from_generation_config(config) == SamplingParams(
        temperature=0.7, top_k=5, top_p=0.9, num_return_sequences=3
    )
    greedy = GenerationConfig(do_sample=False, temperature=0.7, top_k=5, num_beams=2)
    assert BeamSearchParams.from_generation_config(greedy) == BeamSearchParams(num_beams=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("top_h", 0.4), ("typical_p", 0.5), ("forced_eos_token_id", 3), ("min_length", 5)],
)
def test_settings_that_cowbeam_lacks_are_not_dropped(field: str, value: Any) -> None:
    config = GenerationConfig()
    setattr(config, field, value)
    with pytest.raises(ValueError, match=f"^{field}="):
        BeamSearchParams.from_generation_config(config)


def test_numbers_of_numpy_are_numbers() -> None:
    given = SamplingParams(num_return_sequences=np.int64(3), temperature=np.float32(0.5), suppress_tokens=[np.int32(4)])
    assert given == SamplingParams(num_return_sequences=3, temperature=0.5, suppress_tokens=[4])
    assert [type(v) for v in (given.num_return_sequences, given.temperature)] == [int, float]
    with pytest.raises(ValueError, match=r"^num_beams must be an integer of at least 1, got 2\.0$"):
        BeamSearchParams(num_beams=np.float64(2))
