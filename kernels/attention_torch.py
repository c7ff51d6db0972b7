"""Paged attention in plain torch, over the same plan as the Triton kernel: the CPU path, and the fallback on CUDA.

Keys are gathered from their blocks, then met in one of three ways (`kernels/torch_windows.py` chooses). *Alone*: each
row against a copy of all its keys, where that is little. *Together*: every key of a window once, against all its rows
in one product, under a mask. *Apart*: the entries that all rows of a window see whole (the trunk) against all of them,
the rest row by row, under one softmax, where a common product of the rest would be mostly masked.
"""

import torch
from torch import Tensor

from cowbeam.kernels.cache_ops import lie_alike
from cowbeam.kernels.plan import Plan
from cowbeam.kernels.torch_windows import Alone, Entries, Gather, Window, alone_of, windows_of


def paged_attention_torch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: Plan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one query per row over the keys that the plan lists.

    16-bit inputs are computed in float32. Slots that no row sees may hold anything, NaN included. On CUDA the first
    call with a plan copies it to the host.

    Args:
        query: [rows, heads, head_dim]; query head h reads kv head h // (heads // kv_heads).
        key_cache: [num_blocks, kv_heads, block_size, head_dim], inner dimensions contiguous.
        value_cache: [num_blocks, kv_heads, block_size, value_dim].
        plan: of this step, for this layer's sliding window.
        scale: factor on the scores.
        softcap: scores become tanh(score / softcap) * softcap, after the scale (Gemma 2).
        sinks: [heads] logits that join the softmax's denominator only (GPT-OSS).

    Returns:
        [rows, heads, value_dim]; zeros for rows of length 0.
    """
    rows, heads, _ = query.shape
    assert rows == plan.num_rows, f"{rows} queries for a plan of {plan.num_rows} rows"
    alone = alone_of(plan) if softcap is None and sinks is None else None
    if alone is not None:
        return _attend_alone(query, key_cache, value_cache, alone, scale)
    kv_heads = key_cache.shape[1]
    compute = torch.promote_types(query.dtype, torch.float32)
    by_head = query.to(compute).view(rows, kv_heads, heads // kv_heads, -1).transpose(0, 1)
    sinks = None if sinks is None else sinks.to(compute).view(kv_heads, 1, -1)
    windows = windows_of(plan)
    attended = [
        _attend(by_head[:, window.rows], key_cache, value_cache, window, scale=scale, softcap=softcap, sinks=sinks)
        for window in windows
    ]
    if len(windows) == 1 and windows[0].rows == slice(0, rows):  # most steps: nothing to put together
        return attended[0].transpose(0, 1).reshape(rows, heads, -1).to(query.dtype)
    out = query.new_zeros(rows, kv_heads, heads // kv_heads, value_cache.shape[-1])
    for window, part in zip(windows, attended, strict=True):
        out[window.rows] = part.transpose(0, 1)
    return out.view(rows, heads, -1)


def _attend_alone(query: Tensor, key_cache: Tensor, value_cache: Tensor, alone: Alone, scale: float) -> Tensor:
    """Each row and kv head by itself: few tensor operations, because with little to compute they are what costs."""
    rows, heads, _ = query.shape
    kv_heads = key_cache.shape[1]
    compute = torch.promote_types(query.dtype, torch.float32)
    keys, values = _gather(key_cache, value_cache, alone.entries, compute)  # [rows * kv_heads, keys, dim]
    bias = alone.biases.get(kv_heads)
    if bias is None:
        bias = torch.zeros(alone.hidden.shape, dtype=compute, device=query.device)
        bias = bias.masked_fill_(alone.hidden, float("-inf")).repeat_interleave(kv_heads, 0)
        alone.biases[kv_heads] = bias
    lines = query.to(compute).reshape(rows * kv_heads, heads // kv_heads, -1)
    weights = torch.baddbmm(bias, lines, keys.transpose(1, 2), alpha=scale)
    torch.softmax(weights, -1, out=weights)
    out = torch.bmm(weights, values).view(rows, heads, -1).to(query.dtype)
    return out if alone.empty is None else out.masked_fill_(alone.empty, 0)


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    window: Window,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [kv_heads, rows, group, head_dim] → [kv_heads, rows, group, value_dim]."""
    kv_heads, rows, group, _ = query.shape
    common, own = window.common.num_keys, 0 if window.own is None else window.own.num_keys // rows
    scores = query.new_empty(kv_heads, rows, group, common + own + (sinks is not None))
    by_kv_head, by_row = scores.view(kv_heads, rows * group, -1)[..., :common], scores[..., common : common + own]
    query = query * scale
    keys, values = _gather(key_cache, value_cache, window.common, query.dtype)
    torch.bmm(query.reshape(kv_heads, rows * group, -1), keys.transpose(1, 2), out=by_kv_head)
    if window.own is not None:
        own_keys, own_values = (
            gathered.view(kv_heads, rows, own, -1)
            for gathered in _gather(key_cache, value_cache, window.own, query.dtype)
        )
        by_row.copy_(torch.matmul(query, own_keys.transpose(2, 3)))
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if window.hidden.shape[2]:
        end = common + own
        scores[..., end - window.hidden.shape[2] : end].masked_fill_(window.hidden, float("-inf"))
    if sinks is not None:
        scores[..., -1] = sinks
    torch.softmax(scores, -1, out=scores)  # `by_kv_head` and `by_row` hold the weights from here on
    out = torch.bmm(by_kv_head, values).view(kv_heads, rows, group, -1)
    if window.own is not None:
        out += torch.matmul(by_row, own_values)
    return out if window.empty is None else out.masked_fill_(window.empty, 0)


def _gather(key_cache: Tensor, value_cache: Tensor, entries: Entries, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The entries' keys and values, [lines * kv_heads, keys, dim] each, zeros where no row sees them.

    Masking scores would not do: NaN times a weight of 0 is NaN.
    """
    if lie_alike(key_cache, value_cache):
        distance = int(value_cache.storage_offset()) - int(key_cache.storage_offset())
        both = _gather_pieces(key_cache, distance, entries, dtype)
        return both[0], both[1]
    return _gather_pieces(key_cache, None, entries, dtype)[0], _gather_pieces(value_cache, None, entries, dtype)[0]


def _gather_pieces(cache: Tensor, distance: int | None, entries: Entries, dtype: torch.dtype) -> Tensor:
    """[1, lines * kv_heads, keys, dim]; [2, ...] with what lies `distance` elements behind."""
    layout = (cache.shape, cache.stride(), distance)
    gather = entries.gathers.get(layout)
    if gather is None:
        gather = entries.gathers[layout] = _lay_out(cache, distance, entries)
    pieces = cache.as_strided(gather.size, (gather.size[1], 1)).index_select(0, gather.pieces)
    if pieces.dtype != dtype:
        pieces = pieces.to(dtype)
    if gather.unseen.shape[0]:
        pieces.view(-1, cache.shape[3]).index_fill_(0, gather.unseen, 0)
    lines = len(entries.block_ids) * cache.shape[1]
    return pieces.view(1 if distance is None else 2, lines, entries.num_keys, cache.shape[3])


def _lay_out(cache: Tensor, distance: int | None, entries: Entries) -> Gather:
    """One entry of one head lies in one piece of memory: a table of pieces, gathered by memcpy."""
    num_blocks, kv_heads, block_size, dim = cache.shape
    piece = entries.entry_keys * dim
    strides = (*cache.stride()[:2], distance or 0)
    assert cache.stride()[2:] == (dim, 1), f"a block's keys must be contiguous, not strides {cache.stride()}"
    assert all(stride % piece == 0 for stride in strides), f"unexpected strides {strides}"
    block_step, head_step, step_behind = (stride // piece for stride in strides)
    size = (num_blocks - 1) * block_step + (kv_heads - 1) * head_step + step_behind + block_size // entries.entry_keys
    head = torch.arange(0, kv_heads * head_step, head_step, device=cache.device)[:, None]
    pieces = ((entries.block_ids * block_step + entries.parts)[:, None] + head).flatten()
    unseen = entries.unseen[:, None].expand(-1, kv_heads, -1).flatten()
    if distance is not None:
        pieces, unseen = torch.cat([pieces, pieces + step_behind]), unseen.repeat(2)
    return Gather((size, piece), pieces, unseen.nonzero()[:, 0])
