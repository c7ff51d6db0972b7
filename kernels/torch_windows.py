"""A plan's windows as `kernels/attention_torch.py` reads them: which keys are gathered for whom, and how they meet.

Made once a step on the host and shared by all layers.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cowbeam.kernels.plan import Plan

# Measured on CPUs. Up to so many keys of all rows together, a copy for each row costs less than what sharing takes.
ALONE_KEYS = 2048
# A key of a row's own small product costs about two of the window's common product (per row), and the second gather
# and products cost about as much as 128 keys more.
APART_KEY_COST = 2
APART_FIXED_COST = 128


class Gather(NamedTuple):
    """How to read a layer's entries as pieces of memory; the same for all layers of one layout."""

    size: tuple[int, int]  # of the table of pieces: [pieces, elements of a piece]
    pieces: Tensor  # [lines * kv_heads * n] which of them; twice as many where keys and values come in one go
    unseen: Tensor  # [m] of the gathered keys (and values), counted as they lie, those that no row sees


class Entries(NamedTuple):
    """Lines of entries to gather, in the order in which their keys become columns."""

    block_ids: Tensor  # [lines, n] int64
    parts: Tensor  # [lines, n] int64: which part of the block; 0 unless the block is larger than a tile
    entry_keys: int
    unseen: Tensor  # [lines, n * entry_keys] bool: no row sees the slot
    gathers: dict[tuple[object, ...], Gather]  # by the caches' layout; `attention_torch` fills it

    @property
    def num_keys(self) -> int:
        """Columns."""
        return self.block_ids.shape[1] * self.entry_keys

    def in_one_line(self) -> "Entries":
        """Line behind line."""
        return Entries(
            self.block_ids.view(1, -1), self.parts.view(1, -1), self.entry_keys, self.unseen.view(1, -1), gathers={}
        )


class Alone(NamedTuple):
    """All rows of the batch, each with a line of its own."""

    entries: Entries  # a line a row
    hidden: Tensor  # [rows, 1, keys] bool
    empty: Tensor | None  # [rows, 1, 1] bool: rows of length 0, where there are any
    biases: dict[int, Tensor]  # what is hidden as numbers, [rows * kv_heads, 1, keys], by kv_heads


class Window(NamedTuple):
    """Rows, the columns that all of them meet and, where there are any, the columns that each has for itself."""

    rows: slice
    common: Entries  # one line, the trunk first
    own: Entries | None  # one line, equal shares of which belong to the rows
    hidden: Tensor  # [rows, 1, k] bool, of the last k columns of a row, its own ones last
    empty: Tensor | None  # [rows, 1, 1] bool: rows of length 0, where there are any


def alone_of(plan: Plan) -> Alone | None:
    """Every row by itself, where that is little; made at the first call."""
    if "alone" not in plan.memo:
        most = int((plan.lengths - plan.first_visible).max())
        plan.memo["alone"] = _read_rows(plan) if 0 < plan.num_rows * most <= ALONE_KEYS else None
    alone: Alone | None = plan.memo["alone"]
    return alone


def _read_rows(plan: Plan) -> Alone:
    tiles = int(plan.tile_starts[-1])  # behind them anything may stand: the plan has room for the worst case
    listed = slice(0, tiles * plan.entries_per_tile)
    window_row = plan.window_row[plan.tile_window[:tiles].repeat_interleave(plan.entries_per_tile).long()]
    row = torch.arange(plan.num_rows, device=window_row.device)[:, None]
    holds = (plan.first_row[listed] + window_row <= row) & (row < plan.end_row[listed] + window_row)
    own, visible = _line_up(plan, holds, 0, slice(0, plan.num_rows))
    return Alone(own, ~visible[:, None], _empty(plan, slice(0, plan.num_rows)), {})


def windows_of(plan: Plan) -> tuple[Window, ...]:
    """The plan's windows, made at the first call."""
    windows = plan.memo.get("torch")
    if windows is None:
        plan.memo["torch"] = windows = tuple(_read_windows(plan))
    return windows


def _read_windows(plan: Plan) -> Iterator[Window]:
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


def _read_window(plan: Plan, entries: slice, trunk: int, rows: slice) -> Window:
    """Together or apart, see `attention_torch`."""
    rest = slice(entries.start + trunk, entries.stop)
    row = torch.arange(rows.stop - rows.start, device=plan.lengths.device)[:, None]
    holds = (plan.first_row[rest] <= row) & (row < plan.end_row[rest])
    spread = (rest.stop - rest.start) * plan.entry_keys
    listed = torch.arange(entries.start, entries.stop, device=row.device)
    if APART_KEY_COST * int(holds.sum(1).max()) * plan.entry_keys + APART_FIXED_COST < spread:
        common = _entries(plan, listed[None, :trunk])
        lines, visible = _line_up(plan, holds, rest.start, rows)
        own = lines.in_one_line()
    else:
        common = _entries(plan, listed[None])
        own = None
        visible = _visible(plan, plan.first_position[rest], rows) & holds.repeat_interleave(plan.entry_keys, 1)
    return Window(rows, common, own, ~visible[:, None], _empty(plan, rows))


def _line_up(plan: Plan, holds: Tensor, first: int, rows: slice) -> tuple[Entries, Tensor]:
    """Each row's entries as a line, and which of their keys it sees: [rows, keys] bool.

    holds [rows, n] bool: the row's table has the block of entry `first` + i.
    """
    count = holds.sum(1, keepdim=True)
    most = int(count.max())
    # Moved to the front of the row's line, in order; what the line has to spare repeats some entry, hidden.
    index = (~holds).to(torch.int8).argsort(dim=1, stable=True)[:, :most] + first
    is_own = count > torch.arange(most, device=holds.device)
    visible = _visible(plan, plan.first_position[index], rows) & is_own.repeat_interleave(plan.entry_keys, 1)
    return _entries(plan, index)._replace(unseen=~visible), visible


def _visible(plan: Plan, first_position: Tensor, rows: slice) -> Tensor:
    """[rows, entries * entry_keys] bool, first_position [entries] or [rows, entries]: is the key in the row's range."""
    position = (first_position[..., None] + torch.arange(plan.entry_keys, device=first_position.device)).flatten(-2)
    return (position < plan.lengths[rows, None]) & (position >= plan.first_visible[rows, None])


def _empty(plan: Plan, rows: slice) -> Tensor | None:
    empty = plan.lengths[rows, None, None] == 0
    return empty if bool(empty.any()) else None


def _entries(plan: Plan, index: Tensor) -> Entries:
    """index [lines, n]."""
    first = plan.first_position[index]
    position = first[..., None] + torch.arange(plan.entry_keys, device=index.device)
    seen = (position >= plan.seen_from[index, None]) & (position < plan.seen_to[index, None])
    return Entries(
        block_ids=plan.block_ids[index].long(),
        parts=(first % plan.block_size // plan.entry_keys).long(),
        entry_keys=plan.entry_keys,
        unseen=~seen.flatten(1),
        gathers={},
    )
