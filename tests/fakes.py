"""Tiny random-weight models of many families, random settings to run them with, and tables that stand for a model.

The weights are wide enough that next-token distributions depend on the history, so beams diverge, overtake each other
and die, as they do in a real search. With the default initialization they would hardly move.
"""

import functools
import os
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from cowbeam.decoder import BeamSearchParams, Decoder, DecodeResult
from cowbeam.decoder.beam_search import BeamSearch
from cowbeam.decoder.branches import Token
from cowbeam.decoder.group import hypothesis_token_ids
from cowbeam.decoder.strategy import Candidate

VOCABULARY = 67
MAX_POSITIONS = 640
BLOCK_SIZES = (1, 4, 16, 64)
DEVICE = os.environ.get("COWBEAM_TEST_DEVICE", "cpu")  # "cuda" runs the tests that use `tiny_model` on a GPU

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
        # Eager where scores are capped: up to 5.23 transformers' SDPA drops the cap without a word.
        capped = getattr(full, "attn_logit_softcapping", None) is not None
        chosen = {"attn_implementation": "eager"} if capped else {}
        model = AutoModelForCausalLM.from_config(full, dtype=torch.float32, **chosen).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, scale)
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The family's model, made once a process; the same weights in every dtype."""
    model = make_model(family, FAMILIES[family]).to(DEVICE, dtype)
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
    num_eos = rng.choice([0, 1, 2, 6, 6, 15])  # many: else few sequences end before max_new_tokens
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


class TableRun(NamedTuple):
    """A search over a table: the returned sequences as (score, token ids), and the live sequences of each step."""

    found: list[tuple[float, tuple[int, ...]]]
    reasons: list[str]
    live: list[list[tuple[int, ...]]]


def search_table(
    params: BeamSearchParams, eos_ids: Iterable[int], next_logprobs: Callable[[tuple[int, ...]], Sequence[float]]
) -> TableRun:
    """Beam search whose model is a function of the generated tokens: no tensors, no blocks, milliseconds."""
    search = BeamSearch(params, frozenset(eos_ids))
    live: list[tuple[int, ...]] = [()] * params.num_beams
    chains: list[Token | None] = [None] * params.num_beams
    steps = []
    while not search.is_done:
        assert len(steps) < params.max_new_tokens, "the search goes on past max_new_tokens"
        accumulated = [
            Candidate(float(np.float32(score) + np.float32(logprob)), rank, token)
            for rank, (tokens, score) in enumerate(zip(live, search.scores, strict=True))
            for token, logprob in enumerate(next_logprobs(tokens))
        ]
        candidates = sorted(accumulated, key=lambda candidate: -candidate.score)[: search.num_candidates]
        continuations = search.select(candidates, chains)
        assert all(0 <= continuation.beam < len(live) for continuation in continuations), "no such parent"
        assert len(continuations) in (0, params.num_beams)
        chains = [Token(chains[c.beam], c.token_id, c.logprob, c.beam) for c in continuations]
        live = [(*live[c.beam], c.token_id) for c in continuations]
        steps.append(live)
    found = [(h.score, hypothesis_token_ids(h)) for h in search.hypotheses]
    return TableRun(found, [h.finish_reason for h in search.hypotheses], steps)


def token_ids(result: DecodeResult) -> list[tuple[int, ...]]:
    """Of every completion."""
    return [completion.token_ids for completion in result.completions]


def assert_unused(decoder: Decoder) -> None:
    """Nothing is in flight, and no block was lost."""
    decoder.check_integrity()
    assert decoder.num_free_blocks == decoder.num_blocks
