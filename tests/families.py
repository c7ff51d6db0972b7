"""Tiny models of every family that cowbeam is tried with, the level each is decoded on, and how its logits compare.

``fakes.FAMILIES`` are those that most tests run with; here are the others. Used by tests and by
``scripts/check_families.py``, which makes the README's table of them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cowbeam.decoder import Decoder
from cowbeam.decoder.batch import Batch, lay_out
from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.group import Group, KVBytes, Request
from cowbeam.decoder.model_levels import cache_parameter
from cowbeam.decoder.params import SamplingParams
from cowbeam.decoder.strategy import Candidate
from fakes import FAMILIES, make_model

_LLAMA = FAMILIES["llama"]
_GPT2 = FAMILIES["gpt2"]
_ALTERNATING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_SHARED_KV = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 67,
}
_MAMBA_2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_n_groups": 1}
_DELTA_NET = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_WINDOWS_BY_NUMBER = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}

# Variants of a family are named "family: what is other".
LEVEL_1: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "biogpt": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    "codegen": {**_GPT2, "rotary_dim": 4},
    "cohere2": {**_LLAMA, **_ALTERNATING},
    "deepseek_v3": {
        **_LLAMA,
        **_ROUTED_EXPERTS,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "dots1": {**_LLAMA, **_ROUTED_EXPERTS, "n_group": 1, "head_dim": 8},
    "exaone4": {**_LLAMA, "sliding_window": 6, "sliding_window_pattern": 2},
    "gemma": {**_LLAMA, "head_dim": 8},
    "gemma3n_text": {
        **_LLAMA,
        **_SHARED_KV,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [48] * 4,
    },
    "gemma4_text": {**_LLAMA, **_SHARED_KV, "global_head_dim": 8},
    "glm4": {**_LLAMA, "head_dim": 8},
    "gpt2: scaled by layer": {**_GPT2, "scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": _GPT2,
    "gptj": {**_GPT2, "rotary_dim": 4},
    "granite": _LLAMA,
    "hunyuan_v1_dense": {**_LLAMA, "head_dim": 8},
    "minimax_m2": {**_LLAMA, **_LOCAL_EXPERTS, "head_dim": 8},
    "ministral": {**_LLAMA, **_ALTERNATING, "head_dim": 8},
    "ministral3": {**_LLAMA, "head_dim": 8},
    "mistral: no window": {**_LLAMA, "sliding_window": None},
    "nemotron": _LLAMA,
    "olmo3": {**_LLAMA, **_ALTERNATING},
    "olmoe": {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2},
    "persimmon": _LLAMA,
    "phi": _LLAMA,
    "phimoe": {**_LLAMA, **_LOCAL_EXPERTS, "sliding_window": 6},
    "qwen2: windows": {**_LLAMA, **_WINDOWS_BY_NUMBER},
    "qwen2_moe": {**_LLAMA, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen2_moe: windows": {**_LLAMA, **_EXPERTS, **_WINDOWS_BY_NUMBER, "shared_expert_intermediate_size": 16},
    "stablelm": _LLAMA,
    "starcoder2": {**_LLAMA, "sliding_window": None},
    "starcoder2: window": {**_LLAMA, "sliding_window": 6},
}

# Attention of their own: ALiBi, chunks, local layers, or modules that do not ask the attention interface.
LEVEL_2: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "falcon: ALiBi": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 6,
        "intermediate_size": 48,
    },
    "llama4_text": {
        **_LLAMA,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 6,
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 1, 1, 0],
    },
    "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
}

# Recurrent or convolutional layers beside attention, inside the same layer (falcon_h1, zamba2), or alone (the Mambas).
LEVEL_3: dict[str, dict[str, Any]] = {
    "bamba": {**_LLAMA, **_MAMBA_2, "attn_layer_indices": [1]},
    "falcon_h1": {**_LLAMA, **_MAMBA_2, "mamba_d_ssm": 64},
    "falcon_mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "granitemoehybrid": {
        **_LLAMA,
        **_MAMBA_2,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 16,
    },
    "jamba": {
        **_LLAMA,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "lfm2": {**_LLAMA, "layer_types": ["conv", "full_attention"]},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "mamba2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 4,
        "num_heads": 4,
        "head_dim": 16,
        "n_groups": 1,
    },
    "nemotron_h": {
        **_LLAMA,
        "head_dim": 8,
        "hybrid_override_pattern": "M*",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 4,
        "n_groups": 1,
    },
    "olmo_hybrid": {**_LLAMA, **_DELTA_NET},
    "qwen3_5_text": {**_LLAMA, **_DELTA_NET},
    "qwen3_next": {**_LLAMA, **_EXPERTS, **_DELTA_NET, "shared_expert_intermediate_size": 16},
    "zamba2": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "mamba_d_state": 4,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 1,
    },
}

# Their own code gives other logits step by step than all at once (Mamba-2's time steps are bounded from below in one of
# the two only): transformers' own cached steps are what cowbeam is compared with.
UNLIKE_THEMSELVES = ("nemotron_h", "zamba2")

LEVELS = {name: level for level, names in ((1, LEVEL_1), (2, LEVEL_2), (3, LEVEL_3)) for name in names}
ALL_FAMILIES = {**LEVEL_1, **LEVEL_2, **LEVEL_3}


def family_model(name: str, *, scale: float = 0.15) -> PreTrainedModel:
    """The model of that name; the same weights at each call."""
    return make_model(name.partition(":")[0], ALL_FAMILIES[name], scale=scale)


class Forks(NamedTuple):
    """Prompts, and for each of them the tokens of branches that part after it."""

    prompts: list[list[int]]
    branches: list[list[list[int]]]

    @classmethod
    def make(cls, lengths: Sequence[int] = (11, 1, 8), width: int = 2, new_tokens: int = 9) -> "Forks":
        """Unequal prompts: rows of one step differ in length, and where K/V are gathered shorter ones are padded."""
        generator = torch.Generator().manual_seed(0)

        def tokens(count: int) -> list[int]:
            drawn: list[int] = torch.randint(1, 67, (count,), generator=generator).tolist()
            return drawn

        return cls([tokens(n) for n in lengths], [[tokens(new_tokens) for _ in range(width)] for _ in lengths])


@torch.inference_mode()
def eager_logits(model: PreTrainedModel, forks: Forks) -> list[Tensor]:
    """Each branch by itself and at once, by the model's eager attention: from its prompt's last token on."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")
    return [
        model(input_ids=torch.tensor([[*prompt, *tokens]], device=model.device), use_cache=False)
        .logits[0, len(prompt) - 1 :]
        .cpu()
        for prompt, branches in zip(forks.prompts, forks.branches, strict=True)
        for tokens in branches
    ]


@torch.inference_mode()
def cached_logits(model: PreTrainedModel, forks: Forks) -> list[Tensor]:
    """Each branch by itself, a token a step over transformers' own cache, from its prompt's last token on."""
    model.set_attn_implementation("eager")
    name = cache_parameter(model)
    assert name is not None
    found = []
    for prompt, branches in zip(forks.prompts, forks.branches, strict=True):
        for tokens in branches:
            out: Any = model(input_ids=torch.tensor([prompt], device=model.device), use_cache=True)
            logits = [out.logits[0, -1]]
            for position, token in enumerate(tokens, len(prompt)):
                token_ids = torch.tensor([[token]], device=model.device)
                given = {name: out[name], "position_ids": torch.full_like(token_ids, position)}
                out = model(input_ids=token_ids, **given)
                logits.append(out.logits[0, -1])
            found.append(torch.stack(logits).cpu())
    return found


def own_logits(name: str, forks: Forks) -> list[Tensor]:
    """What the family's logits should be."""
    return (cached_logits if name in UNLIKE_THEMSELVES else eager_logits)(family_model(name), forks)


def block_logits(decoder: Decoder, forks: Forks) -> list[Tensor]:
    """The same over blocks: prompts once, then a step a token for all branches of all of them together."""
    engine = decoder._engine
    assert engine is not None
    cache, graphs, adapter = engine._cache, engine._graphs, engine._adapter
    pool = BlockPool(decoder.num_blocks, decoder.block_size)
    batch = Batch(decoder.block_size, adapter.device, cache.scratch_block)
    width, new_tokens = len(forks.branches[0]), len(forks.branches[0][0])
    params = SamplingParams(num_return_sequences=width, max_new_tokens=new_tokens + 1)
    groups = [Group(Request(tuple(prompt), params, frozenset(), 0), pool, KVBytes(1, ())) for prompt in forks.prompts]
    for group in groups:
        group.plant()
        batch.add_group(group)
    planted = [group.branches[0] for group in groups]
    first = adapter.prefill(cache, forks.prompts, [branch.block_table for branch in planted], planted)
    logits = [[row] for row in first for _ in range(width)]
    for step in range(new_tokens):
        for group, branches in zip(groups, forks.branches, strict=True):
            group.choose([Candidate(0.0, rank, tokens[step]) for rank, tokens in enumerate(branches)])
        layout = lay_out(groups)
        out = graphs.decode(batch.upload(layout)).clone()
        for number, row in enumerate(row for rows in layout.rows_of_group for row in rows):
            logits[number].append(out[row])
    return [torch.stack(rows).cpu() for rows in logits]


def largest_error(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Of all logits; NaN if one is NaN."""
    return max(float((one - other).abs().max()) for one, other in zip(got, want, strict=True))
