"""Paged attention in plain torch, over the same plan as the Triton kernel: the CPU path, and the fallback on CUDA.

Of each window, the entries that all rows see whole (the trunk) meet all rows in one matrix product without a mask. The
rest goes one of two ways: *together*, appended to the trunk under a mask, or *apart*, each row against its own blocks
only, where the rows share so little that the masked products would be mostly waste. One softmax covers both parts.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cowbeam.kernels.plan import Plan

# Measured on CPUs: a column of a row's own small product costs about two of the window's common product (per row), and
# the second gather and products cost about as much as 128 columns more.
APART_COLUMN_COST = 2
APART_FIXED_COST = 128


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
    kv_heads = key_cache.shape[1]
    compute = torch.promote_types(query.dtype, torch.float32)
    scaled = (query.to(compute) * scale).view(rows, kv_heads, heads // kv_heads, -1).transpose(0, 1)
    sinks = None if sinks is None else sinks.to(compute).view(kv_heads, 1, -1)
    out = query.new_zeros(rows, kv_heads, heads // kv_heads, value_cache.shape[-1])
    for window in _windows(plan):
        attended = _attend_window(
            scaled[:, window.rows], key_cache, value_cache, window, plan.entry_keys, softcap=softcap, sinks=sinks
        )
        out[window.rows] = attended.transpose(0, 1)
    return out.view(rows, heads, -1)


class _Entries(NamedTuple):
    """Entries to gather, in the order in which their keys become columns."""

    block_ids: Tensor  # [n] int64
    parts: Tensor  # [n] int64: which part of the block; 0 unless the block is larger than a tile
    unseen: Tensor  # [m] int64: columns whose slots no row sees


class _Window(NamedTuple):
    rows: slice
    together: _Entries  # columns that all rows meet, the trunk first
    hidden: Tensor  # [rows, k] bool, of the last k columns of `together`
    apart: _Entries | None  # [rows * k]: each row's own columns
    apart_hidden: Tensor | None  # [rows, keys] bool
    empty: Tensor | None  # [rows] bool: rows of length 0, where there are any


def _attend_window(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    window: _Window,
    entry_keys: int,
    *,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [kv_heads, rows, group, head_dim], scaled → [kv_heads, rows, group, value_dim]."""
    kv_heads, rows, group, _ = query.shape
    lines = query.reshape(kv_heads, rows * group, -1)
    keys = _gather(key_cache, window.together, entry_keys, query.dtype)
    together, own = keys.shape[1], 0 if window.apart is None else window.apart.block_ids.shape[0] // rows * entry_keys
    scores = query.new_empty(kv_heads, rows, group, together + own + (sinks is not None))
    by_line = scores.view(kv_heads, rows * group, -1)[..., :together]
    torch.bmm(lines, keys.transpose(1, 2), out=by_line)
    columns = scores[..., together : together + own]
    if window.apart is not None:
        own_keys = _gather(key_cache, window.apart, entry_keys, query.dtype).view(kv_heads, rows, own, -1)
        columns.copy_(torch.matmul(query, own_keys.transpose(2, 3)))
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    _mask(scores, window, together)
    if sinks is not None:
        scores[..., -1] = sinks
    torch.softmax(scores, -1, out=scores)  # `by_line` and `columns` hold the weights from here on
    out = torch.bmm(by_line, _gather(value_cache, window.together, entry_keys, query.dtype)).view(*query.shape[:3], -1)
    if window.apart is not None:
        own_values = _gather(value_cache, window.apart, entry_keys, query.dtype).view(kv_heads, rows, own, -1)
        out += torch.matmul(columns, own_values)
    return out if window.empty is None else out.masked_fill_(window.empty[None, :, None, None], 0)


def _mask(scores: Tensor, window: _Window, together: int) -> None:
    """Hide, in place, what a row does not see. scores [kv_heads, rows, group, columns], the rows' own columns last."""
    columns = scores[..., together - window.hidden.shape[1] : together]
    columns.masked_fill_(window.hidden[None, :, None], float("-inf"))
    if window.apart_hidden is not None:
        columns = scores[..., together : together + window.apart_hidden.shape[1]]
        columns.masked_fill_(window.apart_hidden[None, :, None], float("-inf"))


def _gather(cache: Tensor, entries: _Entries, entry_keys: int, dtype: torch.dtype) -> Tensor:
    """[kv_heads, keys, dim]: the entries' keys (or values), zeros where no row sees them.

    Masking scores would not do: NaN times a weight of 0 is NaN.
    """
    num_blocks, kv_heads, block_size, dim = cache.shape
    piece = entry_keys * dim  # one entry of one head lies in one piece: a table of pieces, gathered by memcpy
    block_stride, head_stride = cache.stride(0), cache.stride(1)
    assert cache.stride()[2:] == (dim, 1), f"a block's keys must be contiguous, not strides {cache.stride()}"
    assert block_stride % head_stride == head_stride % piece == 0, f"unexpected strides {cache.stride()}"
    block_step, head_step = block_stride // piece, head_stride // piece
    pieces = (num_blocks - 1) * block_step + (kv_heads - 1) * head_step + block_size // entry_keys
    table = cache.as_strided((pieces, piece), (piece, 1))
    head = torch.arange(0, kv_heads * head_step, head_step, device=cache.device)[:, None]
    index = (entries.block_ids * block_step + entries.parts) + head
    gathered = table.index_select(0, index.flatten()).view(kv_heads, -1, dim).to(dtype)
    return gathered.index_fill_(1, entries.unseen, 0)


def _windows(plan: Plan) -> tuple[_Window, ...]:
    """The plan's windows as this file reads them, made once per plan."""
    windows = plan.memo.get("torch")
    if windows is None:
        plan.memo["torch"] = windows = tuple(_read_windows(plan))
    return windows


def _read_windows(plan: Plan) -> Iterator[_Window]:
    columns = zip(
        plan.tile_starts[:-1].tolist(),
        plan.window_entries.tolist(),
        plan.trunk_entries.tolist(),
        plan.window_row.tolist(),
        plan.window_rows.tolist(),
        strict=True,
    )
    for first_tile, entries, trunk, row, rows in columns:
        if entries:
            first = first_tile * plan.entries_per_tile
            yield _read_window(plan, slice(first, first + entries), trunk, slice(row, row + rows))


def _read_window(plan: Plan, entries: slice, trunk: int, rows: slice) -> _Window:
    rest = slice(entries.start + trunk, entries.stop)
    lengths = plan.lengths[rows, None]
    row = torch.arange(lengths.shape[0], device=lengths.device)[:, None]
    holds = (plan.first_row[rest] <= row) & (row < plan.end_row[rest])  # [rows, rest entries]
    most = int(holds.sum(1).max())
    empty = lengths[:, 0] == 0
    empty_rows = empty if bool(empty.any()) else None
    spread = (rest.stop - rest.start) * plan.entry_keys
    if APART_COLUMN_COST * most * plan.entry_keys + APART_FIXED_COST >= spread:
        visible = _visible(plan, plan.first_position[rest], rows) & holds.repeat_interleave(plan.entry_keys, 1)
        together = _entries(plan, torch.arange(entries.start, entries.stop, device=row.device))
        return _Window(together=together, hidden=~visible, apart=None, apart_hidden=None, rows=rows, empty=empty_rows)
    # Each row's entries of the rest, moved to the front of its line; the line's remainder repeats some entry, hidden.
    own = (~holds).to(torch.int8).argsort(dim=1, stable=True)[:, :most] + rest.start
    is_own = holds.sum(1, keepdim=True) > torch.arange(most, device=row.device)
    visible = _visible(plan, plan.first_position[own], rows) & is_own.repeat_interleave(plan.entry_keys, 1)
    apart = _entries(plan, own.flatten())._replace(unseen=(~visible).flatten().nonzero()[:, 0])
    together = _entries(plan, torch.arange(entries.start, rest.start, device=row.device))
    hidden = visible.new_zeros(lengths.shape[0], 0)
    return _Window(together=together, hidden=hidden, apart=apart, apart_hidden=~visible, rows=rows, empty=empty_rows)


def _visible(plan: Plan, first_position: Tensor, rows: slice) -> Tensor:
    """[rows, entries * entry_keys] bool, first_position [entries] or [rows, entries]: is the key in the row's range."""
    position = (first_position[..., None] + torch.arange(plan.entry_keys, device=first_position.device)).flatten(-2)
    return (position < plan.lengths[rows, None]) & (position >= plan.first_visible[rows, None])


def _entries(plan: Plan, index: Tensor) -> _Entries:
    first = plan.first_position[index]
    position = first[:, None] + torch.arange(plan.entry_keys, device=index.device)
    seen = (position >= plan.seen_from[index, None]) & (position < plan.seen_to[index, None])
    return _Entries(
        block_ids=plan.block_ids[index].long(),
        parts=(first % plan.block_size // plan.entry_keys).long(),
        unseen=(~seen).flatten().nonzero()[:, 0],
    )
