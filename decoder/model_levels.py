"""How a model's K/V get into blocks, and out again: on one of three levels, found by looking at the model.

- **Level 1**: its attention modules call transformers' attention interface, so cowbeam's own function attends over the
  blocks (``attend.py``).
- **Level 2**: it attends in a way of its own (Bloom's ALiBi, Llama 4's chunks). The cache that it is given writes K/V
  into blocks and hands them back gathered, one layer at a time (``gathered.py``).
- **Level 3**: it has recurrent or convolutional layers too. Their dense states belong to a branch and fork with it
  (``branch_states.py``); attention layers are as on level 2.

What is seen here is a guess. The self-check has the last word, and takes the next level where a guess is wrong.
"""

import inspect
from collections.abc import Sequence
from typing import Any, Literal

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

Level = Literal[1, 2, 3]

# By name, and no class derived from one: a model with another cache layer than these keeps something else in it. A
# dummy belongs to a layer that keeps nothing (it attends to another one's K/V, or does not attend).
_PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
_STATE_LAYERS = (
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)
_KERNELS_KNOW = {"full_attention", "sliding_attention"}
CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # since transformers 5.24; before; of Mamba before


class UnpageableError(ValueError):
    """A model, or its attention on one level, is none whose K/V can be kept in blocks."""


def levels_of(model: PreTrainedModel) -> tuple[Level, ...]:
    """The levels on which the model may be decoded, the best first.

    Raises UnpageableError, naming the model and the reason, where there is none.
    """
    parameters = _forward_parameters(model)
    layers = cache_layers(model)
    unknown = [layer for layer in layers if type(layer).__name__ not in (*_PLAIN_LAYERS, *_STATE_LAYERS)]
    name = type(model).__name__
    if unknown:
        raise UnpageableError(
            f"{name} cannot be decoded over KV blocks: it has layers of kind {type(unknown[0]).__name__}"
        )
    if cache_parameter(model) is None:
        raise UnpageableError(f"{name} cannot be decoded over KV blocks: it takes no cache")
    if any(has_states(layer) for layer in layers):
        return (3,)
    types = set(getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"])
    is_pageable = model._can_set_attn_implementation() and "position_ids" in parameters and types <= _KERNELS_KNOW
    return (1, 2) if is_pageable else (2,)


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raises ValueError, naming the model and the reason, for what is no causal language model ready to decode."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; cowbeam decodes causal language models")
    if model.training:
        raise ValueError(f"{name} is in training mode: call model.eval() first")
    if not model.can_generate() or "input_ids" not in _forward_parameters(model):
        raise ValueError(f"{name} has no language-model head; load it as AutoModelForCausalLM")


def cache_layers(model: PreTrainedModel) -> Sequence[Any]:
    """An empty layer of transformers' own cache for each of the model's: what it keeps is told by their classes."""
    layers: Sequence[Any] = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return layers


def cache_parameter(model: PreTrainedModel) -> str | None:
    """What the model's forward pass calls its cache."""
    parameters = _forward_parameters(model)
    return next((name for name in CACHE_NAMES if name in parameters), None)


def has_states(layer: Any) -> bool:
    """The layer keeps a dense state a row, whose size does not grow with the context."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def has_kv(layer: Any) -> bool:
    """The layer keeps K/V of each token."""
    return isinstance(layer, CacheLayerMixin)


def _forward_parameters(model: PreTrainedModel) -> Any:
    return inspect.signature(model.forward).parameters
