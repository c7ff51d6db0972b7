"""The truth beside every kernel: plain torch, one row at a time, no tiling, no masking tricks.

Each function computes in the dtype it is given (pass float64 for an oracle) and reads only what a row may see, so that
NaN in unused slots and free blocks cannot reach a result.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one query per row over the keys its block table names.

    Args:
        query: [rows, heads, head_dim]; query head h reads kv head h // (heads // kv_heads).
        key_cache: [num_blocks, kv_heads, block_size, head_dim].
        value_cache: [num_blocks, kv_heads, block_size, value_dim].
        block_tables: [rows, columns] block ids in logical order; entries past a row's length are never read.
        lengths: [rows] keys visible to each row; a row of length 0 gives zeros.
        scale: factor on the scores.
        softcap: scores become tanh(score / softcap) * softcap, after the scale (Gemma 2).
        sliding_window: only the last so many keys are visible.
        sinks: [heads] logits that join the softmax's denominator only (GPT-OSS).

    Returns:
        [rows, heads, value_dim]
    """
    out = query.new_zeros(query.shape[0], query.shape[1], value_cache.shape[-1])
    block_size = key_cache.shape[2]
    for row, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        first = max(0, length - sliding_window) if sliding_window is not None else 0
        positions = torch.arange(first, length, device=query.device)
        block_ids = block_tables[row].long()[positions // block_size]
        keys = key_cache[block_ids, :, positions % block_size].to(query.dtype)  # [keys, kv_heads, head_dim]
        values = value_cache[block_ids, :, positions % block_size].to(query.dtype)
        out[row] = _attend(query[row], keys, values, scale=scale, softcap=softcap, sinks=sinks)
    return out


def causal_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prompt_lengths: Sequence[int],
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention inside each of several packed prompts; shapes as in `packed_causal_attention`."""
    out = query.new_zeros(query.shape[0], query.shape[1], value.shape[-1])
    start = 0
    for prompt_length in prompt_lengths:
        for token in range(start, start + prompt_length):
            first = start if sliding_window is None else max(start, token + 1 - sliding_window)
            visible = slice(first, token + 1)
            out[token] = _attend(query[token], key[visible], value[visible], scale=scale, softcap=None, sinks=None)
        start += prompt_length
    return out


def write_kv_reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Put token t's key and value, [kv_heads, dim] each, into slot `slots[t]` = block_id * block_size + offset."""
    block_size = key_cache.shape[2]
    for token, slot in enumerate(slots.tolist()):
        block_id, offset = divmod(slot, block_size)
        key_cache[block_id, :, offset] = key[token]
        value_cache[block_id, :, offset] = value[token]


def copy_blocks_reference(layers: Sequence[Tensor], sources: Tensor, destinations: Tensor) -> None:
    """Copy whole blocks in every layer, one at a time."""
    for layer in layers:
        for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
            layer[destination] = layer[source]


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """One token's attention: query [heads, d], keys [n, kv_heads, d], values [n, kv_heads, v] → [heads, v]."""
    repeat = query.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
    scores = (query[None] * keys).sum(-1).T * scale  # [heads, n]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None]], 1)
    weights = scores.softmax(-1)[:, : keys.shape[0]]
    return (weights.T[..., None] * values).sum(0)
