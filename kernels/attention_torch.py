"""Paged attention in plain torch, over the same plan as the Triton kernel: the CPU path, and the fallback on CUDA.

Of each window, the entries that all rows see whole (the trunk) meet all rows in one matrix product without a mask. The
rest goes one of two ways: *together*, appended to the trunk under a mask, or *apart*, each row against its own blocks
only, where the rows share so little that the masked products would be mostly waste. One softmax covers both parts.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
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
    by_head = query.to(compute).view(rows, kv_heads, heads // kv_heads, -1).transpose(0, 1)
    sinks = None if sinks is None else sinks.to(compute).view(kv_heads, 1, -1)
    windows = _windows(plan)
    attended = [
        _attend_window(
            by_head[:, window.rows],
            key_cache,
            value_cache,
            window,
            plan.entry_keys,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
        )
        for window in windows
    ]
    if len(windows) == 1 and windows[0].rows == slice(0, rows):  # most steps: nothing to put together
        return attended[0].transpose(0, 1).reshape(rows, heads, -1).to(query.dtype)
    out = query.new_zeros(rows, kv_heads, heads // kv_heads, value_cache.shape[-1])
    for window, part in zip(windows, attended, strict=True):
        out[window.rows] = part.transpose(0, 1)
    return out.view(rows, heads, -1)


class _Gather(NamedTuple):
    """How to read a layer's entries as pieces of memory; the same for all layers of one layout."""

    size: tuple[int, int]  # of the table of pieces: [pieces, elements of a piece]
    pieces: Tensor  # [kv_heads * n] int64: which of them


class _Entries(NamedTuple):
    """Entries to gather, in the order in which their keys become columns."""

    block_ids: Tensor  # [n] int64
    parts: Tensor  # [n] int64: which part of the block; 0 unless the block is larger than a tile
    unseen: Tensor  # [m] int64: columns whose slots no row sees
    gathers: dict[tuple[int, ...], _Gather]  # by the cache's shape and strides


class _Window(NamedTuple):
    rows: slice
    together: _Entries  # columns that all rows meet, the trunk first
    hidden: Tensor  # [rows, k] bool, of the last k columns of `together`
    apart: _Entries | None  # [rows * k]: each row's own columns
    apart_hidden: Tensor | None  # [rows, keys] bool
    empty: Tensor | None  # [rows] bool: rows of length 0, where there are any
    biases: dict[int, Tensor]  # by query heads per kv head: `hidden` as SDPA takes it, [rows * group, columns]


def _attend_window(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    window: _Window,
    entry_keys: int,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [kv_heads, rows, group, head_dim] → [kv_heads, rows, group, value_dim]."""
    kv_heads, rows, group, _ = query.shape
    lines = query.reshape(kv_heads, rows * group, -1)
    if window.apart is None and softcap is None and sinks is None:
        return _attend_by_sdpa(lines, key_cache, value_cache, window, entry_keys, scale).view(*query.shape[:3], -1)
    lines = lines * scale
    keys = _gather(key_cache, window.together, entry_keys, query.dtype)
    together, own = keys.shape[1], 0 if window.apart is None else window.apart.block_ids.shape[0] // rows * entry_keys
    more = own + (sinks is not None)
    if more:
        scores = query.new_empty(kv_heads, rows, group, together + more)
        by_line = scores.view(kv_heads, rows * group, -1)[..., :together]
        torch.bmm(lines, keys.transpose(1, 2), out=by_line)
    else:
        by_line = torch.bmm(lines, keys.transpose(1, 2))
        scores = by_line.view(kv_heads, rows, group, together)
    columns = scores[..., together : together + own]
    if window.apart is not None:
        own_keys = _gather(key_cache, window.apart, entry_keys, query.dtype).view(kv_heads, rows, own, -1)
        columns.copy_(torch.matmul(lines.view(query.shape), own_keys.transpose(2, 3)))
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


def _attend_by_sdpa(
    lines: Tensor, key_cache: Tensor, value_cache: Tensor, window: _Window, entry_keys: int, scale: float
) -> Tensor:
    """The common case in one call; lines [kv_heads, rows * group, head_dim] → [kv_heads, rows * group, value_dim]."""
    keys = _gather(key_cache, window.together, entry_keys, lines.dtype)
    values = _gather(value_cache, window.together, entry_keys, lines.dtype)
    group = lines.shape[1] // window.hidden.shape[0]
    bias = window.biases.get(group)
    if bias is None:
        bias = lines.new_zeros(window.hidden.shape[0], group, keys.shape[1])
        if window.hidden.shape[1]:
            bias[..., -window.hidden.shape[1] :].masked_fill_(window.hidden[:, None], float("-inf"))
        window.biases[group] = bias = bias.view(lines.shape[1], -1)
    out = F.scaled_dot_product_attention(lines[None], keys[None], values[None], attn_mask=bias, scale=scale)[0]
    if window.empty is not None:
        out.view(lines.shape[0], -1, group, out.shape[2]).masked_fill_(window.empty[None, :, None, None], 0)
    return out


def _mask(scores: Tensor, window: _Window, together: int) -> None:
    """Hide, in place, what a row does not see. scores [kv_heads, rows, group, columns], the rows' own columns last."""
    if window.hidden.shape[1]:
        columns = scores[..., together - window.hidden.shape[1] : together]
        columns.masked_fill_(window.hidden[:, None], float("-inf"))
    if window.apart_hidden is not None:
        columns = scores[..., together : together + window.apart_hidden.shape[1]]
        columns.masked_fill_(window.apart_hidden[:, None], float("-inf"))


def _gather(cache: Tensor, entries: _Entries, entry_keys: int, dtype: torch.dtype) -> Tensor:
    """[kv_heads, keys, dim]: the entries' keys (or values), zeros where no row sees them.

    Masking scores would not do: NaN times a weight of 0 is NaN.
    """
    layout = (*cache.shape, *cache.stride())
    gather = entries.gathers.get(layout)
    if gather is None:
        gather = entries.gathers[layout] = _lay_out(cache, entries, entry_keys)
    pieces = cache.as_strided(gather.size, (gather.size[1], 1)).index_select(0, gather.pieces)
    gathered = pieces.view(cache.shape[1], -1, cache.shape[3])
    if gathered.dtype != dtype:
        gathered = gathered.to(dtype)
    return gathered.index_fill_(1, entries.unseen, 0) if entries.unseen.shape[0] else gathered


def _lay_out(cache: Tensor, entries: _Entries, entry_keys: int) -> _Gather:
    """One entry of one head lies in one piece of memory: a table of pieces, gathered by memcpy."""
    num_blocks, kv_heads, block_size, dim = cache.shape
    piece = entry_keys * dim
    block_stride, head_stride = cache.stride(0), cache.stride(1)
    assert cache.stride()[2:] == (dim, 1), f"a block's keys must be contiguous, not strides {cache.stride()}"
    assert block_stride % head_stride == head_stride % piece == 0, f"unexpected strides {cache.stride()}"
    block_step, head_step = block_stride // piece, head_stride // piece
    pieces = (num_blocks - 1) * block_step + (kv_heads - 1) * head_step + block_size // entry_keys
    head = torch.arange(0, kv_heads * head_step, head_step, device=cache.device)[:, None]
    return _Gather((pieces, piece), ((entries.block_ids * block_step + entries.parts) + head).flatten())


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
        return _Window(
            together=together, hidden=~visible, apart=None, apart_hidden=None, rows=rows, empty=empty_rows, biases={}
        )
    # Each row's entries of the rest, moved to the front of its line; the line's remainder repeats some entry, hidden.
    own = (~holds).to(torch.int8).argsort(dim=1, stable=True)[:, :most] + rest.start
    is_own = holds.sum(1, keepdim=True) > torch.arange(most, device=row.device)
    visible = _visible(plan, plan.first_position[own], rows) & is_own.repeat_interleave(plan.entry_keys, 1)
    apart = _entries(plan, own.flatten())._replace(unseen=(~visible).flatten().nonzero()[:, 0])
    together = _entries(plan, torch.arange(entries.start, rest.start, device=row.device))
    hidden = visible.new_zeros(lengths.shape[0], 0)
    return _Window(
        together=together, hidden=hidden, apart=apart, apart_hidden=~visible, rows=rows, empty=empty_rows, biases={}
    )


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
        gathers={},
    )
