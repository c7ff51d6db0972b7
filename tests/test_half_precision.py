"""Whole searches in float16 on a GPU: the other tests are in float32, which goes through other kernels.

`test_paged_logits.py` compares every step with a full recompute; here over heads as wide as real models have, so that
the forms of `kernels/attention.py` for 16 bits run inside captured steps.
"""

import random
from typing import Any
from unittest import mock

import pytest
import torch

import test_paged_logits
from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams
from cowbeam.kernels import attention
from fakes import FAMILIES, make_model, random_prompt
from test_paged_logits import Watch

SHAPES = {  # family, heads, kv heads, head dim
    "llama-64": ("llama", 8, 2, 64),
    "llama-128": ("llama", 8, 2, 128),
    "mistral-64": ("mistral", 6, 2, 64),
    "gpt_oss-64": ("gpt_oss", 16, 2, 64),
    "gemma2-128": ("gemma2", 4, 2, 128),
}


@pytest.mark.cuda
@pytest.mark.parametrize("prompt_length", [40, 700, 4300])
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_step_equals_a_full_recompute_in_half_precision(
    shape: str, prompt_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wide group over a long prompt, a narrow one, a single branch: every form of the attention kernel."""
    family, heads, kv_heads, head_dim = SHAPES[shape]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    config = FAMILIES[family] | sizes | {"max_position_embeddings": 8192}
    if "sliding_window" in config:
        config["sliding_window"] = 100
    if "num_local_experts" in config:  # a rounding error that takes another expert is no error of attention
        config["num_experts_per_tok"] = config["num_local_experts"]
    model = make_model(family, config, scale=0.1).to("cuda", torch.float16)
    monkeypatch.setattr(test_paged_logits, "TOLERANCE", 0.02)
    rng = random.Random(f"{shape} {prompt_length}")
    forms = []
    choose = attention._variant

    def noted(*args: Any, **options: Any) -> attention._Variant:
        forms.append(choose(*args, **options))
        return forms[-1]

    decoder = Decoder(model, num_blocks=2048)
    prompts = [random_prompt(rng, prompt_length, prompt_length), random_prompt(rng, 20, 50), random_prompt(rng, 20, 50)]
    params = [
        BeamSearchParams(num_beams=40, max_new_tokens=8, eos_token_id=[]),
        SamplingParams(num_return_sequences=3, max_new_tokens=10, seed=1, eos_token_id=[]),
        BeamSearchParams(num_beams=1, max_new_tokens=9, eos_token_id=[]),
    ]
    with mock.patch.object(attention, "_variant", noted), Watch(decoder) as watch:
        decoder.generate(prompts, params)
    assert watch.steps >= 8
    assert watch.copies
    assert decoder.num_free_blocks == decoder.num_blocks
    if torch.cuda.get_device_capability()[0] == 9 and family != "gemma2":
        assert any(form.for_hopper for form in forms)
