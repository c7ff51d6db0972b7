"""The bytes behind the blocks: one tensor a layer, and what is done to it in a step."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cowbeam.decoder.group import KVBytes
from cowbeam.decoder.placement import on_device
from cowbeam.kernels.cache_ops import copy_blocks, layer_pointers, write_kv


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer stores a token: K [kv_heads, key_dim] and V [kv_heads, value_dim]."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    sliding_window: int | None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class LayerCache:
    """One layer's blocks: ``[num_blocks, 2, kv_heads, block_size, head_dim]``.

    K and V of a block lie side by side, so a copy of it is one piece. Where their widths differ (MLA) they are two
    tensors. ``key`` and ``value`` are views, ``[num_blocks, kv_heads, block_size, dim]``.
    """

    def __init__(self, shape: LayerShape, num_blocks: int, block_size: int) -> None:
        def empty(*sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=shape.dtype, device=shape.device)

        self.sliding_window = shape.sliding_window
        if shape.key_dim == shape.value_dim:
            kv = empty(num_blocks, 2, shape.kv_heads, block_size, shape.key_dim)
            self.tensors = [kv]
            self.key, self.value = kv[:, 0], kv[:, 1]
        else:
            self.key = empty(num_blocks, shape.kv_heads, block_size, shape.key_dim)
            self.value = empty(num_blocks, shape.kv_heads, block_size, shape.value_dim)
            self.tensors = [self.key, self.value]

    def write(self, key: Tensor, value: Tensor, slots: Tensor, memo: dict[Hashable, Tensor]) -> None:
        """Put token t's key and value, ``[tokens, kv_heads, dim]``, into slot ``slots[t]``; ``memo`` is the step's."""
        write_kv(key, value, self.key, self.value, slots, memo=memo)


class KVCache:
    """All layers' blocks. A block id means the same block in every layer.

    One block more than the pool has, ``scratch_block``, takes what rows write that only fill a captured step.
    """

    def __init__(self, shapes: Sequence[LayerShape], num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.scratch_block = num_blocks
        self.layers = [LayerCache(shape, num_blocks + 1, block_size) for shape in shapes]
        # One launch copies all layers of a device whose blocks have one size; most models have only one such kind.
        alike: dict[tuple[torch.device, int], list[Tensor]] = {}
        for tensor in self.tensors:
            alike.setdefault((tensor.device, tensor[0].nbytes), []).append(tensor)
        self._copied_together = [(tensors, layer_pointers(tensors)) for tensors in alike.values()]

    @property
    def tensors(self) -> list[Tensor]:
        """Of all layers; the first index is the block id."""
        return [tensor for layer in self.layers for tensor in layer.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes that torch holds for all layers, the scratch block included."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    def copy(self, sources: Tensor, destinations: Tensor) -> None:
        """Run the step's copies, before anything of the step is written; [copies] each, idle where both are the same.

        Sources are live and destinations were free, so the two are disjoint and the order does not matter.
        """
        for tensors, pointers in self._copied_together:
            device = pointers.device
            with on_device(device):
                copy_blocks(tensors, sources.to(device), destinations.to(device), pointers=pointers)


def kv_bytes(shapes: Sequence[LayerShape]) -> KVBytes:
    """What a token costs, and what transformers would crop: its sliding layers keep ``window - 1`` tokens."""
    windows: dict[int, int] = {}
    for shape in shapes:
        if shape.sliding_window is not None:
            kept = shape.sliding_window - 1
            windows[kept] = windows.get(kept, 0) + shape.bytes_per_token
    per_token = sum(shape.bytes_per_token for shape in shapes)
    return KVBytes(per_token, tuple((size, kept) for kept, size in windows.items()))


class KVLayout(NamedTuple):
    """Where a token's K/V lie: each layer's pool is ``[blocks, 2, kv_heads, block_size, head_dim]``.

    ``kv_heads``, ``head_dim`` and ``item_bytes`` are None where layers differ or K and V have different widths.
    ``pool_bytes`` is what torch holds for all layers (one scratch block included); ``per_token`` counts one token's.
    """

    layers: int
    kv_heads: int | None
    head_dim: int | None
    item_bytes: int | None
    per_token: int
    pool_bytes: int


def kv_layout(shapes: Sequence[LayerShape], pool_bytes: int) -> KVLayout:
    """The layout of these layers."""
    widths = {(shape.kv_heads, shape.key_dim, shape.value_dim, shape.dtype.itemsize) for shape in shapes}
    per_token = kv_bytes(shapes).per_token
    heads, key_dim, value_dim, item_bytes = widths.pop() if widths else (0, 0, 0, 0)
    if widths or key_dim != value_dim or not shapes:
        return KVLayout(len(shapes), None, None, None, per_token, pool_bytes)
    return KVLayout(len(shapes), heads, key_dim, item_bytes, per_token, pool_bytes)
