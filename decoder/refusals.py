"""Which calls of transformers' ``generate`` are none of cowbeam's, and why."""

from typing import Any

import torch
from torch import Tensor

from cowbeam.decoder.adapters import has_adapters_by_row
from cowbeam.decoder.model_adapter import ModelAdapter
from cowbeam.decoder.model_levels import CACHE_NAMES

# What `generate` hands to its loops, with no meaning that blocks could miss.
_HARMLESS = (
    "attention_mask",
    "logits_processor",
    "logits_to_keep",
    "position_ids",
    "stopping_criteria",
    "streamer",
    "synced_gpus",
    "tokenizer",
    "use_cache",
    *CACHE_NAMES,
)
# Fields of a GenerationConfig with the values that they may have.
_SETTINGS = (
    ("output_attentions", (None, False)),
    ("output_hidden_states", (None, False)),
    ("use_cache", (None, True)),
    ("prefill_chunk_size", (None,)),
    # Caches of another layout give the same answer; a quantized one does not, an offloaded one spares the GPU's memory.
    ("cache_implementation", (None, "dynamic", "static", "sliding_window", "hybrid", "hybrid_chunked")),
    ("is_assistant", (None, False)),
)


def why_not(adapter: ModelAdapter, input_ids: Tensor, *, generation_config: Any, **kwargs: Any) -> str | None:
    """Why this call cannot be answered from blocks, if so.

    Args:
        adapter: of the model.
        input_ids: [rows, width], every prompt once a row.
        generation_config: with all its defaults resolved.
        kwargs: what else the loop is given.
    """
    for name, allowed in _SETTINGS:
        if (value := getattr(generation_config, name, None)) not in allowed:
            return f"{name}={value!r} is not supported"
    if kwargs.get("synced_gpus"):
        return "synced_gpus is not supported"
    if torch.is_autocast_enabled(adapter.device.type):
        return "autocast is not supported: blocks and captured steps keep the types that the model has"
    if "prepare_inputs_for_generation" in vars(adapter.model):
        return "the model's inputs are prepared in a way of its owner's (prompt learning, say)"
    if has_adapters_by_row(adapter.model):
        return "an adapter of its own for each row is not supported"
    for name, value in kwargs.items():
        if value is not None and name not in _HARMLESS:
            return f"the argument {name} is not supported"
    cache = given_cache(kwargs)
    if cache is not None and (getattr(cache, "_is_user_defined", False) or _is_filled(cache)):
        return "a given cache is not supported"
    if input_ids.ndim != 2 or not input_ids.shape[1]:
        return "a prompt without token ids is not supported"
    limit = adapter.max_length
    if limit is not None and generation_config.max_length > limit and _turns_by_length(adapter.model.config):
        return f"past {limit} positions this model's rotary embedding depends on the whole batch"
    return _odd_mask(input_ids, kwargs.get("attention_mask"), kwargs.get("position_ids"))


def given_cache(kwargs: dict[str, Any]) -> Any:
    """The cache among these arguments, whatever this version calls it."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def _is_filled(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length() > 0)
    except ValueError:  # no layer of it keeps K/V, and so none knows a length
        return bool(cache.has_previous_state())


def _turns_by_length(config: Any) -> bool:
    """Its rotary embedding changes for all positions once one of them is past the limit."""
    text: Any = config.get_text_config()
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    each = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return any(part.get(key) in ("longrope", "dynamic") for part in each for key in ("rope_type", "type"))


def _odd_mask(input_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> str | None:
    """Blocks hold the tokens of a prompt without gaps, from position 0 on."""
    if mask is None:
        mask = torch.ones_like(input_ids)
    if mask.shape != input_ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        return "the attention_mask must have one 0 or 1 a token"
    if not bool((mask[:, -1:] == 1).all()) or bool((mask[:, 1:] < mask[:, :-1]).any()):
        return "the attention_mask has a 0 behind a token"
    if positions is not None:
        expected = (mask.cumsum(-1) - 1).clamp(min=0)
        if positions.shape != mask.shape or bool(((positions != expected) & (mask == 1)).any()):
            return "position_ids of the caller's are not supported"
    return None
