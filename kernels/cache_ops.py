"""Writes into the KV pool: new tokens to their slots, whole blocks onto others (copy-on-write).

On CUDA each is one launch (`kernels/cache_ops_triton.py`), elsewhere plain torch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Put token t's key and value into slot `slots[t]`, in place.

    Args:
        key: [tokens, kv_heads, head_dim]; may be a slice of a fused projection.
        value: [tokens, kv_heads, value_dim].
        key_cache: [num_blocks, kv_heads, block_size, head_dim], a view of the pool is fine.
        value_cache: [num_blocks, kv_heads, block_size, value_dim].
        slots: [tokens] int32 or int64, slot = block_id * block_size + offset. Two tokens share a slot only in a scratch
            block, whose contents nobody reads.
    """
    if key_cache.is_cuda:
        from cowbeam.kernels.cache_ops_triton import write_kv_triton

        write_kv_triton(key, value, key_cache, value_cache, slots)
        return
    block_size = key_cache.shape[2]
    slots = slots.long()
    block_ids, offsets = slots // block_size, slots % block_size
    key_cache[block_ids, :, offsets] = key
    value_cache[block_ids, :, offsets] = value


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
    sources, destinations = sources.long(), destinations.long()
    for layer in layers:
        layer.index_copy_(0, destinations, layer.index_select(0, sources))


def layer_pointers(layers: Sequence[Tensor]) -> Tensor:
    """[layers] int64 on the layers' device: where each layer's pool begins, for `copy_blocks` as one launch."""
    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64, device=layers[0].device)
