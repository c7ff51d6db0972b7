# mypy: allow-untyped-defs, allow-incomplete-defs
"""The plan of `kernels/plan.py` built by four small launches instead of some sixty.

It relies on what tree order gives: two neighbouring rows share a run of columns, from the first that both see to the
first that differs. So a row is described by two runs, the columns it sees and, inside it, those it shares with the row
above. Entries come in the same order as those of the torch plan.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 64  # per program of the last launch


class _Rows(NamedTuple):
    """[rows] int32 each: what the launches tell each other about rows, and about windows (room for one per row)."""

    first_column: Tensor  # the row sees the columns first_column ≤ c < end_column
    end_column: Tensor
    join_begin: Tensor  # it shares join_begin ≤ c < join_end with the row above
    join_end: Tensor
    offset: Tensor  # of its entries among the window's entries that need a mask
    trunk_begin: Tensor  # a window's entries without a mask are the columns from here on


def plan_tensors(
    tables: Tensor, lengths: Tensor, group_starts: Tensor, *, block_size: int, entry_keys: int, per_tile: int,
    rows_per_window: int, sliding_window: int | None,
) -> dict[str, Tensor]:  # fmt: skip
    """The tensor fields of `Plan`. tables [rows, columns] by block; lengths and group_starts contiguous."""
    rows, columns = tables.shape[0], tables.shape[1] * (block_size // entry_keys)
    tiles = (rows * columns + rows * (per_tile - 1)) // per_tile
    empty = tables.new_empty
    entry = {name: empty((tiles + 1) * per_tile) for name in ENTRY_FIELDS}
    window = {name: empty(rows) for name in ("window_row", "window_rows", "window_entries", "trunk_entries")}
    window |= {"trunk_tiles": empty(rows), "row_window": empty(rows), "first_visible": empty(rows)}
    tile_starts, tile_window = empty(rows + 1), empty(tiles)
    scratch, used_windows = _Rows(*(empty(rows) for _ in _Rows._fields)), empty(1)
    rows_pad = triton.next_power_of_2(rows)
    shape = {"ENTRY_KEYS": entry_keys, "PARTS": block_size // entry_keys}
    _rows_kernel[(rows + 1,)](
        tables, lengths, group_starts, window["first_visible"], window["row_window"], window["window_row"],
        scratch.first_column, scratch.end_column, scratch.join_begin, scratch.join_end, used_windows,
        rows, tables.stride(0), tables.stride(1), rows_per_window, 0 if sliding_window is None else sliding_window,
        HAS_WINDOW=sliding_window is not None, ROWS_PAD=rows_pad, CHUNK=256, num_warps=4, **shape,
    )  # fmt: skip
    window_pad = max(2, triton.next_power_of_2(rows_per_window))
    _windows_kernel[(rows,)](
        lengths, window["first_visible"], window["window_row"], window["window_rows"], window["window_entries"],
        window["trunk_entries"], window["trunk_tiles"], used_windows, *scratch, rows,
        ENTRY_KEYS=entry_keys, PER_TILE=per_tile, WINDOW_PAD=window_pad, num_warps=1,
    )  # fmt: skip
    _tiles_kernel[(1,)](window["window_entries"], tile_starts, rows, PER_TILE=per_tile, ROWS_PAD=rows_pad, num_warps=4)
    _entries_kernel[(rows, triton.cdiv(columns, COLUMNS))](
        tables, lengths, window["first_visible"], window["row_window"], window["window_row"], window["window_rows"],
        window["window_entries"], window["trunk_entries"], tile_starts, tile_window,
        *(entry[name] for name in ENTRY_FIELDS), *scratch, tables.stride(0), tables.stride(1),
        PER_TILE=per_tile, WINDOW_PAD=window_pad, CHUNK=COLUMNS, num_warps=4, **shape,
    )  # fmt: skip
    return entry | window | {"tile_starts": tile_starts, "tile_window": tile_window, "lengths": lengths}


ENTRY_FIELDS = (
    "block_ids", "first_row", "end_row", "first_position", "seen_from", "seen_to", "intervals", "spans",
)  # fmt: skip


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _rows_kernel(
    TABLES, LENGTHS, GROUP_STARTS, FIRST_VISIBLE, ROW_WINDOW, WINDOW_ROW,
    FIRST_COLUMN, END_COLUMN, JOIN_BEGIN, JOIN_END, USED_WINDOWS,
    rows, table_row, table_column, rows_per_window, sliding_window,
    HAS_WINDOW: tl.constexpr, ROWS_PAD: tl.constexpr, CHUNK: tl.constexpr,
    ENTRY_KEYS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Program r < rows: the columns of row r; the last program: the windows."""
    row = tl.program_id(0)
    if row == rows:
        at = tl.arange(0, ROWS_PAD)
        starts = (at == 0) | (tl.load(GROUP_STARTS + at, mask=at < rows, other=1) != 0)
        next_starts = tl.load(GROUP_STARTS + at + 1, mask=at + 1 < rows, other=1) != 0
        above = (at == 1) | (tl.load(GROUP_STARTS + at - 1, mask=(at > 0) & (at <= rows), other=0) != 0)
        # Neighbouring single rows go on in one run; a larger group begins its own, and so does the row after it.
        goes_on = starts & next_starts & above & (at > 0)
        begins = starts & (goes_on.to(tl.int32) == 0)
        first = tl.associative_scan(tl.where(begins, at, 0), 0, _larger)
        cuts = ((at - first) % rows_per_window == 0) & (at < rows)
        window = tl.cumsum(cuts.to(tl.int32), 0) - 1
        tl.store(ROW_WINDOW + at, window, mask=at < rows)
        tl.store(WINDOW_ROW + window, at, mask=cuts)
        tl.store(USED_WINDOWS, tl.sum(cuts.to(tl.int32), 0))
    else:
        length = tl.load(LENGTHS + row)
        first_visible = 0
        above_length = tl.load(LENGTHS + row - 1, mask=row > 0, other=0)
        begin = 0
        first_column = 0
        if HAS_WINDOW:
            first_visible = tl.maximum(length - sliding_window, 0)
            first_column = first_visible // ENTRY_KEYS
            begin = tl.maximum(first_column, tl.maximum(above_length - sliding_window, 0) // ENTRY_KEYS)
        end_column = tl.cdiv(length, ENTRY_KEYS)
        limit = tl.minimum(end_column, tl.cdiv(above_length, ENTRY_KEYS))
        column = begin
        same = 1
        while (column < limit) & (same == 1):
            c = column + tl.arange(0, CHUNK)
            at = TABLES + row.to(tl.int64) * table_row + c // PARTS * table_column
            mine = tl.load(at, mask=c < limit, other=0)
            theirs = tl.load(at - table_row, mask=c < limit, other=0)
            differs = tl.min(tl.where((mine != theirs) & (c < limit), c, limit), 0)
            same = (differs == limit).to(tl.int32)
            column = tl.where(same == 1, column + CHUNK, differs)
        tl.store(FIRST_VISIBLE + row, first_visible)
        tl.store(FIRST_COLUMN + row, first_column)
        tl.store(END_COLUMN + row, end_column)
        tl.store(JOIN_BEGIN + row, begin)
        tl.store(JOIN_END + row, tl.maximum(begin, tl.minimum(column, limit)))


@triton.jit
def _windows_kernel(
    LENGTHS, FIRST_VISIBLE, WINDOW_ROW, WINDOW_ROWS, WINDOW_ENTRIES, TRUNK_ENTRIES, TRUNK_TILES,
    USED_WINDOWS, FIRST_COLUMN, END_COLUMN, JOIN_BEGIN, JOIN_END, OFFSET, TRUNK_BEGIN, rows,
    ENTRY_KEYS: tl.constexpr, PER_TILE: tl.constexpr, WINDOW_PAD: tl.constexpr,
):  # fmt: skip
    """Program w: count the entries of window w; the trunk is the run of columns that all its rows share whole."""
    window = tl.program_id(0)
    count = tl.load(USED_WINDOWS)
    if window >= count:
        tl.store(WINDOW_ROW + window, rows)
        tl.store(WINDOW_ROWS + window, 0)
        tl.store(WINDOW_ENTRIES + window, 0)
        tl.store(TRUNK_ENTRIES + window, 0)
        tl.store(TRUNK_TILES + window, 0)
    else:
        row = tl.load(WINDOW_ROW + window)
        window_rows = tl.load(WINDOW_ROW + window + 1, mask=window + 1 < count, other=rows) - row
        at = tl.arange(0, WINDOW_PAD)
        live = at < window_rows
        length = tl.load(LENGTHS + row + at, mask=live, other=0)
        first_visible = tl.load(FIRST_VISIBLE + row + at, mask=live, other=0)
        first_column = tl.load(FIRST_COLUMN + row + at, mask=live, other=0)
        end_column = tl.load(END_COLUMN + row + at, mask=live, other=0)
        join_begin = tl.load(JOIN_BEGIN + row + at, mask=live & (at > 0), other=0)
        join_end = tl.load(JOIN_END + row + at, mask=live & (at > 0), other=0)
        opens = end_column - first_column - (join_end - join_begin)
        last = tl.max(tl.where(length > 0, at, 0), 0)
        joins = (at > 0) & (at <= last)
        active = length > 0
        none: tl.constexpr = 2147483647
        begin = tl.maximum(
            tl.max(tl.where(joins, join_begin, 0), 0),
            tl.max(tl.where(active, tl.cdiv(first_visible, ENTRY_KEYS), 0), 0),
        )
        end = tl.minimum(
            tl.min(tl.where(joins, join_end, none), 0), tl.min(tl.where(active, length // ENTRY_KEYS, none), 0)
        )
        end = tl.minimum(end, tl.sum(tl.where(at == 0, end_column, 0), 0))
        trunk = tl.maximum(end - begin, 0)
        begin = tl.where(trunk > 0, begin, tl.sum(tl.where(at == 0, first_column, 0), 0))
        opens -= tl.where(at == 0, trunk, 0)
        tl.store(OFFSET + row + at, tl.cumsum(opens, 0) - opens, mask=live)
        tl.store(WINDOW_ROWS + window, window_rows)
        tl.store(WINDOW_ENTRIES + window, trunk + tl.sum(opens, 0))
        tl.store(TRUNK_BEGIN + window, begin)
        tl.store(TRUNK_ENTRIES + window, trunk)
        tl.store(TRUNK_TILES + window, trunk // PER_TILE)


@triton.jit
def _tiles_kernel(WINDOW_ENTRIES, TILE_STARTS, rows, PER_TILE: tl.constexpr, ROWS_PAD: tl.constexpr):
    window = tl.arange(0, ROWS_PAD)
    tiles = tl.cdiv(tl.load(WINDOW_ENTRIES + window, mask=window < rows, other=0), PER_TILE)
    tl.store(TILE_STARTS + window + 1, tl.cumsum(tiles, 0), mask=window < rows)
    tl.store(TILE_STARTS, 0)


@triton.jit
def _entries_kernel(
    TABLES, LENGTHS, FIRST_VISIBLE, ROW_WINDOW, WINDOW_ROW, WINDOW_ROWS, WINDOW_ENTRIES, TRUNK_ENTRIES,
    TILE_STARTS, TILE_WINDOW,
    BLOCK_IDS, FIRST_ROW, END_ROW, FIRST_POSITION, SEEN_FROM, SEEN_TO, INTERVALS, SPANS,
    FIRST_COLUMN, END_COLUMN, JOIN_BEGIN, JOIN_END, OFFSET, TRUNK_BEGIN, table_row, table_column,
    ENTRY_KEYS: tl.constexpr, PARTS: tl.constexpr, PER_TILE: tl.constexpr, WINDOW_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk of columns): write the entries that open there."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    window = tl.load(ROW_WINDOW + row)
    window_row = tl.load(WINDOW_ROW + window)
    window_rows = tl.load(WINDOW_ROWS + window)
    local = row - window_row
    first_tile, end_tile = tl.load(TILE_STARTS + window), tl.load(TILE_STARTS + window + 1)
    entries, trunk = tl.load(WINDOW_ENTRIES + window), tl.load(TRUNK_ENTRIES + window)
    base = first_tile * PER_TILE
    # Together the window's programs have a column for each of its tiles.
    tile = first_tile + (local * tl.num_programs(1) + chunk) * CHUNK + tl.arange(0, CHUNK)
    tl.store(TILE_WINDOW + tile, tl.zeros_like(tile) + window, mask=tile < end_tile)
    if (local == 0) & (chunk == 0):
        padding = base + entries + tl.arange(0, PER_TILE)
        nothing = tl.zeros_like(padding)
        missing = padding < end_tile * PER_TILE
        tl.store(BLOCK_IDS + padding, nothing, mask=missing)
        tl.store(FIRST_ROW + padding, nothing, mask=missing)
        tl.store(END_ROW + padding, nothing, mask=missing)
        tl.store(FIRST_POSITION + padding, nothing, mask=missing)
        tl.store(SEEN_FROM + padding, nothing, mask=missing)
        tl.store(SEEN_TO + padding, nothing, mask=missing)
        tl.store(INTERVALS + padding, nothing, mask=missing)
        tl.store(SPANS + padding, nothing, mask=missing)
    # The hole in the row's run of columns: what the row above lists, or what the trunk lists.
    begin, end = tl.load(FIRST_COLUMN + row), tl.load(END_COLUMN + row)
    hole_begin, hole_end = tl.load(JOIN_BEGIN + row), tl.load(JOIN_END + row)
    if local == 0:
        hole_begin = tl.load(TRUNK_BEGIN + window)
        hole_end = hole_begin + trunk
    nothing_missing = hole_end <= hole_begin
    hole_begin = tl.where(nothing_missing, begin, hole_begin)
    hole_end = tl.where(nothing_missing, begin, hole_end)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    sees = (column >= begin) & (column < end)
    in_hole = (column >= hole_begin) & (column < hole_end)
    rank = column - begin - tl.where(column >= hole_end, hole_end - hole_begin, 0)
    place = base + trunk + tl.load(OFFSET + row) + rank
    place = tl.where(in_hole, base + column - hole_begin, place)
    listed_above = tl.where(local == 0, hole_begin, hole_end)  # the first row lists the trunk itself
    opens = sees & ((column < hole_begin) | (column >= listed_above))
    if tl.max(opens.to(tl.int32), 0) == 1:
        other = tl.arange(0, WINDOW_PAD)
        live = other < window_rows
        below = live & (other > local)
        join_begin = tl.load(JOIN_BEGIN + window_row + other, mask=below, other=0)
        join_end = tl.load(JOIN_END + window_row + other, mask=below, other=0)
        outside = (column[:, None] < join_begin[None, :]) | (column[:, None] >= join_end[None, :])
        breaks = below[None, :] & outside
        end_row = tl.min(tl.where(breaks, other[None, :], window_rows), 1)
        sharer = (other[None, :] >= local) & (other[None, :] < end_row[:, None])
        length = tl.load(LENGTHS + window_row + other, mask=live, other=0)
        first_visible = tl.load(FIRST_VISIBLE + window_row + other, mask=live, other=0)
        position = column * ENTRY_KEYS
        seen_to = tl.minimum(position + ENTRY_KEYS, tl.max(tl.where(sharer, length[None, :], 0), 1))
        seen_from = tl.maximum(position, tl.min(tl.where(sharer, first_visible[None, :], 2147483647), 1))
        block_id = tl.load(TABLES + row.to(tl.int64) * table_row + column // PARTS * table_column, mask=opens, other=0)
        first_row = tl.zeros_like(column) + local
        span = (seen_from - position) | (seen_to - position) << 8 | (column % PARTS * ENTRY_KEYS) << 16
        tl.store(BLOCK_IDS + place, block_id, mask=opens)
        tl.store(FIRST_ROW + place, first_row, mask=opens)
        tl.store(END_ROW + place, end_row, mask=opens)
        tl.store(FIRST_POSITION + place, position, mask=opens)
        tl.store(SEEN_FROM + place, seen_from, mask=opens)
        tl.store(SEEN_TO + place, seen_to, mask=opens)
        tl.store(INTERVALS + place, first_row | end_row << 8 | column << 16, mask=opens)
        tl.store(SPANS + place, span, mask=opens)
