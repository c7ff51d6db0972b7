"""The KV pool's slots: new tokens go to theirs, whole blocks onto others (copy-on-write), and both are read again.

On CUDA each write is one launch (`kernels/cache_ops_triton.py`), elsewhere plain torch.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    *,
    memo: dict[Hashable, Tensor] | None = None,
) -> None:
    """Put token t's key and value into slot `slots[t]`, in place.

    Args:
        key: [tokens, kv_heads, head_dim]; may be a slice of a fused projection.
        value: [tokens, kv_heads, value_dim].
        key_cache: [num_blocks, kv_heads, block_size, head_dim], a view of the pool is fine.
        value_cache: [num_blocks, kv_heads, block_size, value_dim].
        slots: [tokens] int32 or int64, slot = block_id * block_size + offset. Two tokens share a slot only in a scratch
            block, whose contents nobody reads.
        memo: a dict that lives as long as `slots`: what the torch path derives from them is then derived once a step,
            not once a layer.
    """
    if key_cache.is_cuda:
        from cowbeam.kernels.cache_ops_triton import write_kv_triton

        write_kv_triton(key, value, key_cache, value_cache, slots)
        return
    memo = {} if memo is None else memo
    dim = key_cache.shape[3]
    if lie_alike(key_cache, value_cache):  # one write for both
        distance = int(value_cache.storage_offset() - key_cache.storage_offset())
        layout: Hashable = (key_cache.shape, key_cache.stride(), distance)
        lines = memo.get(layout)
        if lines is None:
            key_lines = _lines(slots, key_cache)
            lines = memo[layout] = torch.cat([key_lines, key_lines + distance // dim])
        table = key_cache.as_strided((_last_line(key_cache) + distance // dim + 1, dim), (dim, 1))
        table.index_copy_(0, lines, torch.cat([key.reshape(-1, dim), value.reshape(-1, dim)]))
        return
    for new, cache in ((key, key_cache), (value, value_cache)):
        layout, dim = (cache.shape, cache.stride()), cache.shape[3]
        lines = memo.get(layout)
        if lines is None:
            lines = memo[layout] = _lines(slots, cache)
        cache.as_strided((_last_line(cache) + 1, dim), (dim, 1)).index_copy_(0, lines, new.reshape(-1, dim))


def read_kv(cache: Tensor, slots: Tensor, *, memo: dict[Hashable, Tensor] | None = None) -> Tensor:
    """What lies in slots, as a model attends to it.

    Args:
        cache: keys or values, [num_blocks, kv_heads, block_size, dim], a view of the pool is fine.
        slots: [rows, tokens] int32 or int64.
        memo: a dict that lives as long as `slots`: what is derived from them is then derived once for all layers.

    Returns:
        [rows, kv_heads, tokens, dim], a copy.
    """
    (rows, tokens), (_, kv_heads, _, dim) = slots.shape, cache.shape
    memo = {} if memo is None else memo
    layout: Hashable = (cache.shape, cache.stride())
    lines = memo.get(layout)
    if lines is None:
        by_token = _lines(slots.flatten(), cache).view(rows, tokens, kv_heads)
        lines = memo[layout] = by_token.transpose(1, 2).flatten()
    table = cache.as_strided((_last_line(cache) + 1, dim), (dim, 1))
    return table.index_select(0, lines).view(rows, kv_heads, tokens, dim)


def lie_alike(key_cache: Tensor, value_cache: Tensor) -> bool:
    """Values lie behind their keys at one distance, whole vectors apart, in the same memory."""
    alike = key_cache.stride() == value_cache.stride() and key_cache.shape == value_cache.shape
    same = key_cache.untyped_storage().data_ptr() == value_cache.untyped_storage().data_ptr()
    distance = int(value_cache.storage_offset() - key_cache.storage_offset())
    return alike and same and distance > 0 and distance % key_cache.shape[3] == 0


def _last_line(cache: Tensor) -> int:
    """The cache is a table of vectors of `dim` elements, in which it has every so many lines: the last one's number."""
    (blocks, heads, offsets, dim), (block, head, offset, _) = cache.shape, cache.stride()
    return ((blocks - 1) * block + (heads - 1) * head + (offsets - 1) * offset) // dim


def _lines(slots: Tensor, cache: Tensor) -> Tensor:
    """[tokens * kv_heads]: where each token's heads lie, in vectors of `dim` elements from the cache's beginning."""
    _, kv_heads, block_size, dim = cache.shape
    block, head, offset = (stride // dim for stride in cache.stride()[:3])
    assert cache.stride() == (block * dim, head * dim, offset * dim, 1), f"unexpected strides {cache.stride()}"
    slots = slots.long()
    first = slots // block_size * block + slots % block_size * offset
    return (first[:, None] + torch.arange(0, kv_heads * head, head, device=slots.device)).flatten()


def copy_blocks(
    layers: Sequence[Tensor], sources: Tensor, destinations: Tensor, *, pointers: Tensor | None = None
) -> None:
    """Copy whole blocks in every layer, in place: block `destinations[i]` becomes block `sources[i]`.

    Args:
        layers: the pool's tensors, each [num_blocks, ...], contiguous, all with blocks of the same size on CUDA.
        sources: [copies] int32 or int64.
        destinations: [copies], distinct, and none of them a source; a copy of a block onto itself does nothing, so that
            a captured step of a fixed number of copies can leave some idle.
        pointers: `layer_pointers(layers)`, made once; needed under CUDA graph capture, which admits no upload.
    """
    if not layers or not sources.numel():
        return
    if layers[0].is_cuda:
        from cowbeam.kernels.cache_ops_triton import copy_blocks_triton

        copy_blocks_triton(layers, sources, destinations, layer_pointers(layers) if pointers is None else pointers)
        return
    busy = sources != destinations
    if not busy.any():
        return
    sources, destinations = sources[busy].long(), destinations[busy].long()
    for layer in layers:
        layer.index_copy_(0, destinations, layer.index_select(0, sources))


def layer_pointers(layers: Sequence[Tensor]) -> Tensor:
    """[layers] int64 on the layers' device: where each layer's pool begins, for `copy_blocks` as one launch."""
    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64, device=layers[0].device)
