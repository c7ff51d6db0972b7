"""Models that benchmarks run: shapes by name with random weights, or one that is there already."""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from cowbeam.decoder.default_model import resolve_default_model

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(  # for a look at whether a script works
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    ),
    "smollm2-135m": dict(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    ),
    "llama-1b": dict(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    ),
    "llama-8b": dict(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8,
    ),
}  # fmt: skip


def random_model(shape: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights in every run; no EOS."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=131072, rope_theta=500000.0, eos_token_id=None)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def saved_model(name_or_path: str | None, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """By hub name or path; None is the default model."""
    path = name_or_path or resolve_default_model()
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p20": ordered[len(ordered) // 5],
        "p80": ordered[len(ordered) * 4 // 5],
    }
