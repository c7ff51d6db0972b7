"""Levels 2 and 3: the model attends as it always does, over K/V gathered from blocks.

It is given a cache of transformers' kind. What a layer writes to it goes into blocks; what it reads from it is gathered
from there, left-padded as in a batch of transformers' own. One layer's gathered K/V are alive at a time.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from cowbeam.decoder.batch import DecodeInputs
from cowbeam.decoder.branch_states import StateOwner, StateRows, give, take
from cowbeam.decoder.kv_cache import KVCache, LayerShape
from cowbeam.decoder.model_levels import cache_layers, cache_parameter, has_kv, has_states
from cowbeam.decoder.placement import on_device
from cowbeam.kernels.cache_ops import read_kv


class _Call(Protocol):
    """What the layers of one forward pass hand their K/V to, ``[rows, kv_heads, tokens, dim]``."""

    past: int  # tokens that a row has before this pass, the longest row's; others are padded on their left

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Take a layer's K/V; give back all that it may attend to."""


@dataclass
class _Probe:
    """Notes what each layer stores."""

    windows: dict[int, int | None]
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    past: int = 0

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        widths = (key.shape[1], key.shape[-1], value.shape[-1])
        self.shapes[layer] = LayerShape(*widths, key.dtype, key.device, self.windows.get(layer))
        return key, value


class _Blocks:
    """Writes the pass's K/V into ``slots``, [tokens], and gathers the slots ``read``, [rows, tokens].

    ``read`` is None where nothing lies before the pass's own tokens.
    """

    def __init__(self, cache: KVCache, numbers: dict[int, int], slots: Tensor, read: Tensor | None, past: int) -> None:
        self.past = past
        self._cache = cache
        self._numbers = numbers
        self._slots = slots
        self._read = read
        self._there: dict[torch.device, _BlocksThere] = {}

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        kv = self._cache.layers[self._numbers[layer]]
        there = self._on(key.device)
        with on_device(key.device):
            kv.write(_by_token(key), _by_token(value), there.slots, there.writes)
        if there.read is None:
            return key, value
        return read_kv(kv.key, there.read, memo=there.reads), read_kv(kv.value, there.read, memo=there.reads)

    def _on(self, device: torch.device) -> "_BlocksThere":
        """Where the layer lies: a model may lie on several devices."""
        if device not in self._there:
            read = None if self._read is None else self._read.to(device)
            self._there[device] = _BlocksThere(self._slots.to(device), read)
        return self._there[device]


@dataclass
class _BlocksThere:
    """Slots on one device, and what is derived from them once for all layers there."""

    slots: Tensor
    read: Tensor | None
    writes: dict[Hashable, Tensor] = field(default_factory=dict)
    reads: dict[Hashable, Tensor] = field(default_factory=dict)


def _by_token(kv: Tensor) -> Tensor:
    """``[rows, kv_heads, tokens, dim]`` → ``[rows · tokens, kv_heads, dim]``."""
    return kv.transpose(1, 2).reshape(-1, kv.shape[1], kv.shape[-1])


class _KVLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' classes run code when derived from
    """One layer of the cache that a model is given."""

    # Whole contexts are handed back; where a layer has a window its model masks by it.
    is_sliding = False

    def __init__(self, call: _Call, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call = call
        self.number = number

    def lazy_initialization(self, *_args: Any, **_kwargs: Any) -> None:
        """Blocks need none."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.call.update(self.number, key_states, value_states)

    def get_seq_length(self) -> int:
        return self.call.past

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else len(query_length)  # positions, in older releases
        return self.call.past + new, 0

    def get_max_length(self) -> int:
        return -1


class _KVAndStateLayer(LinearAttentionLayer, _KVLayer):  # type: ignore[override, no-untyped-call]
    """A layer with both."""

    is_compileable = False

    def __init__(self, call: _Call, number: int, **kwargs: Any) -> None:
        _KVLayer.__init__(self, call, number)
        LinearAttentionLayer.__init__(self, **kwargs)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)


class GatheredModel:
    """A model on level 2 or 3: tokens and blocks in, logits out.

    Args:
        model: the model.
        forward: runs its forward pass, as it should be run here.
    """

    def __init__(self, model: PreTrainedModel, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._layers = cache_layers(model)
        self._keeps_kv = any(has_kv(layer) for layer in self._layers)
        self._parameters = set(inspect.signature(model.forward).parameters)
        self._cache_parameter = cache_parameter(model)
        self._numbers: dict[int, int] = {}  # of each layer that keeps K/V, where they lie in the KVCache
        self.state_bytes = 0

    def probe(self, num_tokens: int, device: torch.device) -> list[LayerShape]:
        """One forward pass that tells what each layer stores, and how much a branch's state takes."""
        windows = {number: getattr(layer, "sliding_window", None) for number, layer in enumerate(self._layers)}
        call = _Probe(windows)
        cache = self._cache(call, [])
        token_ids = torch.zeros(1, num_tokens, dtype=torch.long, device=device)
        self._run(token_ids, torch.arange(num_tokens, device=device)[None], torch.ones_like(token_ids), cache)
        layers = sorted(call.shapes)
        self._numbers = {layer: number for number, layer in enumerate(layers)}
        self.state_bytes = StateRows(_state_layers(cache)).nbytes
        return [call.shapes[layer] for layer in layers]

    def prefill(
        self, cache: KVCache, token_ids: Tensor, table: Tensor, owner: StateOwner | None, start: int = 0
    ) -> Tensor:
        """Compute a prompt, or what follows its first ``start`` tokens; logits ``[vocabulary]`` of the last token.

        Each prompt by itself: padding between prompts is nothing that every recurrent layer passes over. A model with
        such layers computes a prompt at once: some take several tokens for a new sequence, whatever their states.

        Args:
            cache: holds what lies before ``start``.
            token_ids: [tokens] from ``start`` on.
            table: [blocks] of the whole prompt.
            owner: gets the dense states that the prompt leaves behind.
            start: where the tokens begin.
        """
        assert not (start and self.state_bytes), "a prompt whose states are dense is computed at once"
        positions = torch.arange(start + len(token_ids), device=token_ids.device)
        slots = table[positions // cache.block_size] * cache.block_size + positions % cache.block_size
        call = _Blocks(cache, self._numbers, slots[start:], slots[None] if start else None, start)
        owners = [owner] if owner is not None and self.state_bytes else []
        with_cache = self._cache(call, [])
        logits = self._run(token_ids[None], positions[None, start:], torch.ones_like(positions)[None], with_cache)
        give(owners, _state_layers(with_cache))
        return logits[0]

    def decode(self, cache: KVCache, inputs: DecodeInputs) -> Tensor:
        """One token a row; logits ``[rows, vocabulary]``. Waits for the device to learn the longest row's length.

        Shorter rows are padded with their own newest token: masked scores are not enough, since a weight of 0 times
        what happens to lie in a slot may be NaN.
        """
        lengths = inputs.lengths.long()
        longest = int(lengths.max())
        positions = torch.arange(longest, device=lengths.device) - (longest - lengths[:, None])
        padding = positions < 0
        positions.clamp_(min=0)
        blocks = inputs.block_tables.long().gather(1, positions // cache.block_size)
        read = torch.where(padding, inputs.slots[:, None], blocks * cache.block_size + positions % cache.block_size)
        call = _Blocks(cache, self._numbers, inputs.slots, read, longest - 1)
        owners = inputs.owners if self.state_bytes else []
        with_cache = self._cache(call, take(owners) if owners else [])
        logits = self._run(inputs.token_ids[:, None], inputs.positions[:, None], (~padding).long(), with_cache)
        give(owners, _state_layers(with_cache))
        return logits

    def _run(self, token_ids: Tensor, positions: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        """Logits of the last tokens, ``[rows, vocabulary]``; tokens and positions are [rows, new], the mask all."""
        may_take: dict[str, Any] = {"position_ids": positions, "logits_to_keep": 1}
        if self._keeps_kv:  # else nothing is padded; Mamba would take the mask for one of the new tokens
            may_take["attention_mask"] = mask
        taken = {name: value for name, value in may_take.items() if name in self._parameters}
        assert self._cache_parameter is not None, "a model that takes no cache is on no level"
        given: dict[str, Any] = {self._cache_parameter: cache, **taken}
        out = self._forward(input_ids=token_ids, use_cache=True, **given)
        logits: Tensor = out.logits[:, -1].to(token_ids.device)
        return logits

    def _cache(self, call: _Call, states: Sequence[Any]) -> Cache:
        """A cache for one forward pass. ``states``: layers with what lies before it, none where nothing does."""
        before = iter(states)
        layers: list[Any] = []
        for number, layer in enumerate(self._layers):
            if has_states(layer):
                layers.append(next(before) if states else _empty_state_layer(layer, call, number))
                if has_kv(layer):
                    layers[-1].call = call
            else:
                layers.append(_KVLayer(call, number) if has_kv(layer) else layer)
        return Cache(layers=layers)


def _empty_state_layer(layer: Any, call: _Call, number: int) -> Any:
    kind = {"number_of_states": getattr(layer, "number_of_states", 1)}
    return _KVAndStateLayer(call, number, **kind) if has_kv(layer) else type(layer)(**kind)


def _state_layers(cache: Cache) -> list[Any]:
    return [layer for layer in cache.layers if has_states(layer)]
