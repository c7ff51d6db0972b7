"""Tiny random-weight models of many families, and random settings to run them with.

The weights are wide enough that next-token distributions depend on the history, so beams diverge, overtake each other
and die, as they do in a real search. With the default initialization they would hardly move.
"""

import functools
import random
from typing import Any

import torch
from cowbeam.decoder import Decoder
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

# Matrices this small: handing them out to threads costs far more than it gives, above all beside other processes.
torch.set_num_threads(1)

VOCABULARY = 67
MAX_POSITIONS = 640
BLOCK_SIZES = (1, 4, 16, 64)

_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": MAX_POSITIONS}
_ALTERNATING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}

# Between them: MHA, GQA; rotary and learned positions; windows everywhere, in every other layer, nowhere; soft caps;
# sinks; experts; tied and untied heads; head widths that are not hidden / heads.
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {
        **_LLAMA,
        **_ALTERNATING,
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 9.0,
    },
    "gemma3_text": {**_LLAMA, **_ALTERNATING, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gpt2": _GPT2,
    "gpt_neox": _LLAMA,
    "gpt_oss": {**_LLAMA, **_ALTERNATING, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "sliding_window": 6},
    "mixtral": {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmo2": _LLAMA,
    "opt": {
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
    },
    "phi3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, "head_dim": 16},
    "qwen3_moe": {**_LLAMA, **_EXPERTS, "head_dim": 8},
    "smollm3": _LLAMA,
}


def make_model(model_type: str, config: dict[str, Any], *, seed: int = 0, scale: float = 0.3) -> PreTrainedModel:
    """A model in eval mode whose matrices are N(0, scale²); no EOS ids of its own."""
    ids = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    size = {"vocab_size": VOCABULARY, "max_position_embeddings": MAX_POSITIONS}
    full = CONFIG_MAPPING[model_type](**{**ids, **size, **config})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)  # biases, norms and sinks keep their own initialization
        model = AutoModelForCausalLM.from_config(full, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, scale)
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The family's model, made once a process; the same weights in every dtype."""
    model = make_model(family, FAMILIES[family]).to(dtype)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product takes no float64
    return model


@functools.cache
def tiny_decoder(family: str, block_size: int = 16, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder of ``tiny_model``, made once a process, with a pool of 4096 tokens."""
    return Decoder(tiny_model(family, dtype), block_size=block_size, num_blocks=4096 // block_size)


def random_prompt(rng: random.Random, low: int = 1, high: int = 20) -> list[int]:
    """Token ids without the pad id, whose n-grams a left-padded batch would count."""
    return [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(low, high))]


def random_beam_settings(rng: random.Random) -> dict[str, Any]:
    """Keyword arguments of ``BeamSearchParams`` that are also fields of ``GenerationConfig``."""
    num_beams = rng.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 12])
    max_new_tokens = rng.randint(2, 14)
    num_eos = rng.choice([0, 1, 1, 1, 2, 2, 6])
    return {
        "num_beams": num_beams,
        "num_return_sequences": rng.randint(1, num_beams),
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": rng.choice([0, 0, 0, rng.randint(1, max_new_tokens)]),
        "length_penalty": rng.choice([1.0, 1.0, 0.0, -1.0, 0.5, 2.0, rng.uniform(-1, 2)]),
        "early_stopping": rng.choice([False, False, True, "never"]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.3, 0.8]),
        "no_repeat_ngram_size": rng.choice([0, 0, 0, 1, 2, 3]),
        "renormalize_logits": rng.random() < 0.3,
        "eos_token_id": sorted(rng.sample(range(VOCABULARY), num_eos)),
    }
