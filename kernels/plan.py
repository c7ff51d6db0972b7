"""What tells the attention kernels which blocks to read for which rows.

Rows come in tree (depth-first) order, so the rows that share a block are an interval. A *window* is a run of at most
`rows_per_window` rows. Its blocks are listed once each, whoever shares them, as *entries*: a block id, the half-open
interval of rows that hold the block, and the position of its first key. A tile of `tile_keys` keys of this list meets
all rows of the window at once; a key counts for a row iff the row is in the interval and sees the key's position.

The same rule serves beams, samples, single branches and the chunks of a prefill (one row a token, equal tables, growing
lengths). Merging work into lists with interval masks follows DeFT-Flatten (ICLR 2025).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

TILE_KEYS = 64
# The Triton plan scans all rows in one program.
MAX_TRITON_ROWS = 4096
# Where an entry begins in its block has 15 bits in `Plan.spans`, and a sign.
MAX_TRITON_BLOCK = 32768


@dataclass(frozen=True, eq=False)
class Plan:
    """The reading list of one step, shared by all layers with the same sliding window.

    Tensors are int32 on the tables' device. `capacity` is a whole number of tiles plus one (the kernel looks one tile
    ahead); on CUDA it is the worst case known from shapes, so a graph captured over a plan stays valid when only the
    values change. Entries of window w fill `tile_starts[w] * entries_per_tile` onwards: first those that every row of
    the window sees whole, then the others; the rest of its last tile is padding (empty intervals).
    """

    block_size: int
    rows_per_window: int
    tile_keys: int
    sliding_window: int | None
    columns: int  # of the block tables, in entries
    block_ids: Tensor  # [capacity] an entry covers min(block_size, tile_keys) keys of one block
    first_row: Tensor  # [capacity] relative to the window
    end_row: Tensor  # [capacity] exclusive; first_row == end_row marks padding
    first_position: Tensor  # [capacity] position of the entry's first key in its rows' contexts
    seen_from: Tensor  # [capacity] positions seen_from ≤ p < seen_to are seen by at least one row (a hull:
    seen_to: Tensor  # [capacity] slots between two rows' windows hold real numbers); others may hold NaN
    intervals: Tensor  # [capacity] packed for the kernel: first_row | end_row << 8 | first_position / entry_keys << 16
    spans: (
        Tensor  # [capacity] packed, in keys: seen_from | seen_to << 8, from the entry's begin, | begin in block << 16
    )
    tile_starts: Tensor  # [num_windows + 1]
    tile_window: Tensor  # [tiles] the window that owns the tile
    window_row: Tensor  # [num_windows] first row
    window_rows: Tensor  # [num_windows] count of rows; 0 where num_windows is more than needed
    window_entries: Tensor  # [num_windows]
    trunk_entries: Tensor  # [num_windows] leading entries that need no mask
    trunk_tiles: Tensor  # [num_windows] leading tiles that need no mask
    row_window: Tensor  # [rows]
    lengths: Tensor  # [rows] a row sees the keys first_visible ≤ position < length
    first_visible: Tensor  # [rows]
    # What `attention_torch` derives from this plan for a cache layout; it fills this on the first layer of the step.
    memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def entry_keys(self) -> int:
        """Keys of one entry."""
        return min(self.block_size, self.tile_keys)

    @property
    def entries_per_tile(self) -> int:
        """Entries of one tile."""
        return self.tile_keys // self.entry_keys

    @property
    def num_windows(self) -> int:
        """Windows the plan has room for."""
        return self.window_row.shape[0]

    @property
    def num_rows(self) -> int:
        """Rows of the batch, padding rows (length 0) included."""
        return self.lengths.shape[0]


def build_plan(
    block_tables: Tensor,
    lengths: Tensor,
    group_starts: Sequence[bool] | Sequence[int] | Tensor,
    *,
    block_size: int,
    rows_per_window: int,
    sliding_window: int | None = None,
) -> Plan:
    """List each window's distinct blocks once.

    No value leaves the device, so that the call can be captured in a CUDA graph (pass `group_starts` on the device
    then: the windows are computed there, with room for one per row).

    Args:
        block_tables: [rows, columns] int32, rows in tree order; entries past a row's length are never looked at.
        lengths: [rows] int32, keys visible to the row; 0 for a padding row.
        group_starts: [rows] true where a new group begins. Groups of one row may share a window, a larger group never
            shares one; a group larger than rows_per_window is cut.
        block_size: a power of two.
        rows_per_window: most rows of one window, see `rows_per_window`.
        sliding_window: a row sees only its last so many keys; blocks that no row sees are left out.
    """
    _check(block_tables, lengths, group_starts, block_size, rows_per_window, sliding_window)
    entry_keys = min(block_size, TILE_KEYS)
    if block_tables.is_cuda and block_tables.shape[0] <= MAX_TRITON_ROWS:
        return _build_plan_triton(
            block_tables, lengths, _as_flags(group_starts), block_size, rows_per_window, sliding_window
        )
    windows = _windows(_as_flags(group_starts), rows_per_window, block_tables.device)
    tables = block_tables.repeat_interleave(block_size // entry_keys, 1) if block_size > entry_keys else block_tables
    lengths = lengths.to(torch.int32).contiguous()
    first_visible = torch.zeros_like(lengths) if sliding_window is None else (lengths - sliding_window).clamp_(min=0)
    shared = _find_sharers(tables, lengths, first_visible, windows, entry_keys)
    order = _order(shared, windows, TILE_KEYS // entry_keys)
    return Plan(
        block_size=block_size,
        rows_per_window=rows_per_window,
        tile_keys=TILE_KEYS,
        sliding_window=sliding_window,
        columns=tables.shape[1],
        **_packed(_gather_entries(tables, shared, windows, order, entry_keys), block_size, entry_keys),
        tile_starts=order.tile_starts.int(),
        tile_window=order.tile_window.int(),
        window_row=windows.bounds[:-1].int(),
        window_rows=windows.bounds.diff().int(),
        window_entries=order.entries.int(),
        trunk_entries=order.trunk_entries.int(),
        trunk_tiles=(order.trunk_entries // (TILE_KEYS // entry_keys)).int(),
        row_window=windows.of_row.int(),
        lengths=lengths,
        first_visible=first_visible,
    )


def _build_plan_triton(
    block_tables: Tensor,
    lengths: Tensor,
    group_starts: Tensor,
    block_size: int,
    rows_per_window: int,
    sliding_window: int | None,
) -> Plan:
    """The same plan, entry for entry, by four launches."""
    from cowbeam.kernels.plan_triton import plan_tensors  # here: the torch plan works where triton is missing

    entry_keys = min(block_size, TILE_KEYS)
    return Plan(
        block_size=block_size,
        rows_per_window=rows_per_window,
        tile_keys=TILE_KEYS,
        sliding_window=sliding_window,
        columns=block_tables.shape[1] * (block_size // entry_keys),
        **plan_tensors(
            block_tables.to(torch.int32),
            lengths.to(torch.int32).contiguous(),
            group_starts.to(block_tables.device, non_blocking=True).contiguous().view(torch.uint8),
            block_size=block_size,
            entry_keys=entry_keys,
            per_tile=TILE_KEYS // entry_keys,
            rows_per_window=rows_per_window,
            sliding_window=sliding_window,
        ),
    )


def rows_per_window(num_heads: int, num_kv_heads: int, max_group_rows: int, most_lines: int = 64) -> int:
    """Rows that fill one tile of the kernel variant which will run.

    A row brings `num_heads // num_kv_heads` query heads to each kv head's tile. It has 16 or 64 lines where all rows of
    the largest group fit so many, else `most_lines` (`kernels/attention.py` has the variants).
    """
    heads_per_kv_head = num_heads // num_kv_heads
    lines = next((lines for lines in (16, 64) if max_group_rows * heads_per_kv_head <= lines), most_lines)
    return max(1, lines // heads_per_kv_head)


class _Windows(NamedTuple):
    starts: Tensor  # [rows] bool
    of_row: Tensor  # [rows] int64
    bounds: Tensor  # [num_windows + 1] int64: window w holds the rows bounds[w] ≤ r < bounds[w + 1]


class _Sharers(NamedTuple):
    """Of each (row, column): does an entry begin here, and whom does it serve. All [rows, columns]."""

    opens: Tensor  # bool: the row sees this block and the row above does not share it
    whole: Tensor  # bool: opens, and every row of the window that has keys sees the whole of it
    end: Tensor  # int64: first row after the interval that begins here
    seen_from: Tensor  # int64: hull of the positions the interval's rows see
    seen_to: Tensor


class _Order(NamedTuple):
    place: Tensor  # [rows, columns] int64: where in the list the entry that opens here goes; elsewhere: anything
    entries: Tensor  # [num_windows] int64
    trunk_entries: Tensor  # [num_windows] int64
    tile_starts: Tensor  # [num_windows + 1] int64
    tile_window: Tensor  # [tiles] int64
    capacity: int


def _check(
    block_tables: Tensor,
    lengths: Tensor,
    group_starts: Sequence[bool] | Sequence[int] | Tensor,
    block_size: int,
    rows_per_window: int,
    sliding_window: int | None,
) -> None:
    rows = block_tables.shape[0]
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two, not {block_size}")
    if rows_per_window < 1:
        raise ValueError(f"rows_per_window must be at least 1, not {rows_per_window}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, not {sliding_window}")
    if not rows == lengths.shape[0] == len(group_starts):
        raise ValueError(f"{rows} rows of block_tables, {lengths.shape[0]} lengths, {len(group_starts)} group_starts")
    if block_tables.numel() == 0:
        raise ValueError(f"block_tables must have a row and a column, not shape {list(block_tables.shape)}")


def _as_flags(group_starts: Sequence[bool] | Sequence[int] | Tensor) -> Tensor:
    if isinstance(group_starts, Tensor):
        return group_starts.bool()
    return torch.tensor([bool(start) for start in group_starts])


def _windows(group_starts: Tensor, rows_per_window: int, device: torch.device) -> _Windows:
    """Cut the rows: neighbouring single rows together, larger groups apart, both every rows_per_window rows."""
    rows = group_starts.shape[0]
    index = torch.arange(rows, device=group_starts.device)
    group_starts = group_starts | (index == 0)
    single = group_starts & torch.cat([group_starts[1:], group_starts.new_ones(1)])
    follows_single = torch.cat([group_starts.new_zeros(1), single[:-1]])
    begins = group_starts & ~(single & follows_single)
    first = torch.where(begins, index, 0).cummax(0).values
    starts = (index - first) % rows_per_window == 0
    of_row = starts.cumsum(0) - 1
    # The worst case: every row is a window of its own.
    count = int(of_row[-1]) + 1 if _may_read(of_row) else rows
    bounds = torch.searchsorted(of_row, torch.arange(count + 1, device=of_row.device))
    return _Windows(*(tensor.to(device, non_blocking=True) for tensor in (starts, of_row, bounds)))


def _find_sharers(
    tables: Tensor, lengths: Tensor, first_visible: Tensor, windows: _Windows, entry_keys: int
) -> _Sharers:
    rows, columns = tables.shape
    row = torch.arange(rows, device=tables.device)[:, None]
    position = torch.arange(0, columns * entry_keys, entry_keys, device=tables.device)[None]
    length, first = lengths.long()[:, None], first_visible.long()[:, None]
    sees = (position < length) & (position + entry_keys > first)
    joins = torch.zeros_like(sees)  # the row shares this block with the row above
    joins[1:] = (tables[1:] == tables[:-1]) & sees[1:] & sees[:-1] & ~windows.starts[1:, None]
    # The interval ends at the next row below that does not join: a minimum scanned upwards.
    breaks = torch.where(joins, rows, row)
    end = torch.full_like(breaks, rows)
    end[:-1] = breaks[1:].flip(0).cummin(0).values.flip(0)
    # Hull of what the interval's rows see: a maximum scanned downwards that starts anew in each interval, because the
    # interval's number is its leading digit. The wanted value stands in the interval's last row.
    interval = (~joins).cumsum(0) << 32
    longest = (interval + length).cummax(0).values.gather(0, end - 1) & _LOW_DIGIT
    earliest = _LOW_DIGIT - ((interval + (_LOW_DIGIT - first)).cummax(0).values.gather(0, end - 1) & _LOW_DIGIT)
    opens = sees & ~joins
    whole = opens & _whole_window(lengths, first_visible, windows, position, entry_keys, end)
    return _Sharers(opens, whole, end, torch.maximum(position, earliest), torch.minimum(position + entry_keys, longest))


def _whole_window(
    lengths: Tensor, first_visible: Tensor, windows: _Windows, position: Tensor, entry_keys: int, end: Tensor
) -> Tensor:
    """[rows, columns]: an entry that opens here is seen whole by every row of the window that has keys."""
    num_windows, rows = windows.bounds.shape[0] - 1, lengths.shape[0]
    has_keys = lengths > 0
    last_row = torch.arange(1, rows + 1, device=lengths.device) * has_keys
    of_row, lengths, first = windows.of_row, lengths.long(), first_visible.long()
    zeros = lengths.new_zeros(num_windows)
    end_needed = zeros.scatter_reduce(0, of_row, last_row, "amax")[of_row]
    shortest = (zeros + _LOW_DIGIT).scatter_reduce(0, of_row, lengths + ~has_keys * _LOW_DIGIT, "amin")[of_row]
    latest = zeros.scatter_reduce(0, of_row, first, "amax")[of_row]
    fits = (position + entry_keys <= shortest[:, None]) & (position >= latest[:, None])
    return fits & windows.starts[:, None] & (end >= end_needed[:, None])


def _order(sharers: _Sharers, windows: _Windows, entries_per_tile: int) -> _Order:
    """Give every entry its place: windows in order, each with its whole entries first, then by row and column."""
    rows, columns = sharers.opens.shape
    whole_before = _exclusive_cumsum(sharers.whole)
    opens_before = _exclusive_cumsum(sharers.opens)
    bounds = windows.bounds * columns
    trunk_entries, entries = whole_before[bounds].diff(), opens_before[bounds].diff()
    tile_starts = _exclusive_cumsum((entries + entries_per_tile - 1) // entries_per_tile)
    num_windows = entries.shape[0]
    if _may_read(tile_starts):
        tiles = int(tile_starts[-1])
    else:  # the worst case: nothing is shared
        tiles = (rows * columns + num_windows * (entries_per_tile - 1)) // entries_per_tile
    tile = torch.arange(max(1, tiles), device=tile_starts.device)
    tile_window = torch.searchsorted(tile_starts[1:], tile, right=True).clamp_(max=num_windows - 1)
    # Where the window's whole and other entries begin, less what the running counts hold at its first row.
    first = tile_starts[:-1] * entries_per_tile
    whole_base = (first - whole_before[bounds[:-1]])[windows.of_row, None]
    other_base = (first + trunk_entries - (opens_before - whole_before)[bounds[:-1]])[windows.of_row, None]
    whole_rank = whole_before[:-1].view(rows, columns)
    other_rank = opens_before[:-1].view(rows, columns) - whole_rank
    place = torch.where(sharers.whole, whole_base + whole_rank, other_base + other_rank)
    return _Order(place, entries, trunk_entries, tile_starts, tile_window, (tiles + 1) * entries_per_tile)


def _gather_entries(
    tables: Tensor, sharers: _Sharers, windows: _Windows, order: _Order, entry_keys: int
) -> dict[str, Tensor]:
    """The entries' fields in list order, [capacity] each; padding gets zeros, hence an empty interval."""
    rows, columns = tables.shape
    nowhere, capacity = rows * columns, order.capacity
    cell = torch.arange(nowhere, device=tables.device)
    source = torch.full((capacity + 1,), nowhere, device=tables.device)
    source.scatter_(0, torch.where(sharers.opens, order.place, capacity).flatten(), cell)
    source = source[:capacity]
    real = source < nowhere
    source = source.clamp_(max=nowhere - 1)
    row = source // columns
    window_row = windows.bounds[windows.of_row[row]]
    fields = {
        "block_ids": tables.flatten()[source],
        "first_row": row - window_row,
        "end_row": sharers.end.flatten()[source] - window_row,
        "first_position": source % columns * entry_keys,
        "seen_from": sharers.seen_from.flatten()[source],
        "seen_to": sharers.seen_to.flatten()[source],
    }
    return {name: (field * real).int() for name, field in fields.items()}


def _packed(fields: dict[str, Tensor], block_size: int, entry_keys: int) -> dict[str, Tensor]:
    """The fields and their packed twins: one register a key instead of three in the kernel's inner loop."""
    position = fields["first_position"]
    intervals = fields["first_row"] | fields["end_row"] << 8 | position // entry_keys << 16
    spans = (fields["seen_from"] - position) | (fields["seen_to"] - position) << 8 | position % block_size << 16
    return fields | {"intervals": intervals, "spans": spans}


def _may_read(tensor: Tensor) -> bool:
    """On the host a count is at hand; on a device reading it would wait for the device, so shapes must do."""
    return tensor.device.type == "cpu"


def _exclusive_cumsum(counts: Tensor) -> Tensor:
    """[n] (flattened) → [n + 1]: what stands before each element, and the total."""
    total = counts.new_zeros(counts.numel() + 1, dtype=torch.int64)
    torch.cumsum(counts.flatten(), 0, out=total[1:])
    return total


_LOW_DIGIT = (1 << 31) - 1
