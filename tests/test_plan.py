"""The plan lists each window's distinct blocks once, with the rows that hold them."""

import pytest
import torch

from cowbeam.kernels.plan import Plan, build_plan, rows_per_window
from forests import ABSURD, Rows


def entries(plan: Plan, window: int) -> list[tuple[int, int, int, int]]:
    """(block id, first row, end row, first position) of the window's entries, padding left out."""
    first = int(plan.tile_starts[window]) * plan.entries_per_tile
    span = slice(first, first + int(plan.window_entries[window]))
    fields = (plan.block_ids, plan.first_row, plan.end_row, plan.first_position)
    return list(zip(*(tensor[span].tolist() for tensor in fields), strict=True))


def plan_of(tables: list[list[int]], lengths: list[int], starts: list[bool], **kwargs) -> Plan:
    columns = max(len(table) for table in tables) + 1
    padded = [table + [ABSURD] * (columns - len(table)) for table in tables]
    options = {"block_size": 16, "rows_per_window": 8} | kwargs
    return build_plan(
        torch.tensor(padded, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32), starts, **options
    )


def test_shared_blocks_are_listed_once_trunk_first():
    plan = plan_of([[7, 3, 1], [7, 3, 4], [7, 5]], [33, 40, 20], [True, False, False])
    assert entries(plan, 0) == [(7, 0, 3, 0), (3, 0, 2, 16), (1, 0, 1, 32), (4, 1, 2, 32), (5, 2, 3, 16)]
    assert plan.trunk_entries.tolist() == [1]
    assert plan.tile_starts.tolist() == [0, 2]
    assert plan.trunk_tiles.tolist() == [0]


def test_ids_past_the_end_are_never_equal():
    """Rows of one block each, and equal garbage behind: nothing is shared (kernels.md, pitfall 4)."""
    plan = plan_of([[2], [9]], [16, 16], [True, False])
    assert entries(plan, 0) == [(2, 0, 1, 0), (9, 1, 2, 0)]


def test_a_partial_block_shared_by_rows_of_different_length_is_no_trunk():
    """A chunk of a prefill: the later rows see keys of the last block that the first must not."""
    plan = plan_of([[4, 6]] * 3, [18, 19, 20], [True, False, False])
    assert entries(plan, 0) == [(4, 0, 3, 0), (6, 0, 3, 16)]
    assert plan.trunk_entries.tolist() == [1]
    assert plan.seen_to[:2].tolist() == [16, 20]


def test_groups_do_not_share_a_window_but_single_branches_do():
    starts = [True, False, False, True, True, True, True, False]
    plan = plan_of([[row] for row in range(8)], [5] * 8, starts, rows_per_window=2)
    assert plan.window_row.tolist() == [0, 2, 3, 5, 6]
    assert plan.window_rows.tolist() == [2, 1, 2, 1, 2]
    assert plan.row_window.tolist() == [0, 0, 1, 2, 2, 3, 4, 4]


def test_a_window_border_lists_a_shared_block_on_both_sides():
    plan = plan_of([[8, row] for row in range(4)], [17] * 4, [True, False, False, False], rows_per_window=3)
    assert entries(plan, 0)[0] == (8, 0, 3, 0)
    assert entries(plan, 1)[0] == (8, 0, 1, 0)


def test_sliding_window_drops_blocks_that_nobody_sees():
    plan = plan_of([[5, 6, 7, 8]], [60], [True], sliding_window=20)
    assert entries(plan, 0) == [(7, 0, 1, 32), (8, 0, 1, 48)]
    assert plan.seen_from[:2].tolist() == [40, 48]
    assert plan.seen_to[:2].tolist() == [48, 60]


def test_blocks_larger_than_a_tile_are_listed_in_parts():
    plan = plan_of([[5, 6]], [130 + 64], [True], block_size=128)
    assert entries(plan, 0) == [(5, 0, 1, 0), (5, 0, 1, 64), (6, 0, 1, 128), (6, 0, 1, 192)]


def test_padding_rows_have_no_entries_and_do_not_break_the_trunk():
    plan = plan_of([[3, 1]] * 2 + [[ABSURD]] * 2, [32, 32, 0, 0], [True, False, False, False])
    assert entries(plan, 0) == [(3, 0, 2, 0), (1, 0, 2, 16)]
    assert plan.trunk_entries.tolist() == [2]


@pytest.mark.parametrize("sliding_window", [None, 1, 33])
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_every_visible_key_of_every_row_is_listed_exactly_once(block_size, sliding_window):
    rows = Rows(block_size, 2048 // block_size + 64, 2)
    rows.beams(100, 6, 30).beams(17, 1, 0).chunk(9, 14).beams(1, 1, 0).padding(2).beams(63, 3, 9)
    tables, lengths, starts = rows.tensors()
    plan = build_plan(tables, lengths, starts, block_size=block_size, rows_per_window=4, sliding_window=sliding_window)
    found: dict[int, list[tuple[int, int]]] = {row: [] for row in range(len(starts))}
    for window in range(plan.num_windows):
        for block_id, low, high, position in entries(plan, window):
            for row in range(low, high):
                for key in range(position, position + plan.entry_keys):
                    found[int(plan.window_row[window]) + row].append((key, block_id))
    for row, (table, length) in enumerate(zip(rows.tables, rows.lengths, strict=True)):
        first = 0 if sliding_window is None else max(0, length - sliding_window)
        seen = sorted(entry for entry in found[row] if first <= entry[0] < length)
        assert seen == [(key, table[key // block_size]) for key in range(first, length)]


def test_no_value_leaves_the_device():
    """A step is captured in a CUDA graph: reading a count would end the capture. Meta tensors have nothing to read."""
    rows = Rows(16, 256, 4).beams(90, 5, 20).beams(7, 1, 0)
    tables, lengths, starts = rows.tensors()
    tensors = (tables.to("meta"), lengths.to("meta"), torch.tensor(starts, device="meta"))
    plan = build_plan(*tensors, block_size=16, rows_per_window=4, sliding_window=50)
    worst = len(starts) * (tables.shape[1] + plan.entries_per_tile) + plan.entries_per_tile
    assert plan.num_windows == len(starts)
    assert plan.tile_starts[-1].device.type == "meta"
    assert plan.block_ids.shape[0] <= worst


def test_room_for_the_worst_case_changes_no_entry(monkeypatch):
    """On a device there is a window a row and room for every column; what is listed must be the same."""
    rows = Rows(16, 512, 5).beams(90, 5, 20).beams(7, 1, 0).chunk(30, 9).padding(2)
    tables, lengths, starts = rows.tensors()
    exact = build_plan(tables, lengths, starts, block_size=16, rows_per_window=4)
    monkeypatch.setattr("cowbeam.kernels.plan._may_read", lambda _: False)
    roomy = build_plan(tables, lengths, starts, block_size=16, rows_per_window=4)
    assert roomy.num_windows == len(starts) > exact.num_windows
    assert not roomy.window_rows[exact.num_windows :].any()
    assert roomy.tile_starts[exact.num_windows :].unique().tolist() == exact.tile_starts[-1:].tolist()
    for window in range(exact.num_windows):
        assert entries(roomy, window) == entries(exact, window)


def test_trunk_entries_need_no_mask():
    rows = Rows(16, 512, 3).beams(400, 7, 25).padding(1).chunk(200, 30)
    tables, lengths, starts = rows.tensors()
    plan = build_plan(tables, lengths, starts, block_size=16, rows_per_window=8, sliding_window=300)
    assert int(plan.trunk_entries[0]) > 0
    for window in range(plan.num_windows):
        first = int(plan.window_row[window])
        span = range(first, first + int(plan.window_rows[window]))
        active = [row for row in span if rows.lengths[row]]
        for _, low, high, position in entries(plan, window)[: int(plan.trunk_entries[window])]:
            assert low == 0
            assert high > active[-1] - first
            for row in active:
                assert max(0, rows.lengths[row] - 300) <= position
                assert position + plan.entry_keys <= rows.lengths[row]


def test_tiles_know_their_window_and_padding_is_empty():
    rows = Rows(16, 256, 4).beams(90, 5, 20).beams(7, 1, 0).beams(130, 4, 12)
    tables, lengths, starts = rows.tensors()
    plan = build_plan(tables, lengths, starts, block_size=16, rows_per_window=4)
    for window in range(plan.num_windows):
        tiles = slice(int(plan.tile_starts[window]), int(plan.tile_starts[window + 1]))
        assert set(plan.tile_window[tiles].tolist()) == {window}
        end = int(plan.tile_starts[window]) * plan.entries_per_tile + int(plan.window_entries[window])
        padding = slice(end, int(plan.tile_starts[window + 1]) * plan.entries_per_tile)
        assert torch.equal(plan.first_row[padding], plan.end_row[padding])
    assert plan.block_ids.shape[0] == (int(plan.tile_starts[-1]) + 1) * plan.entries_per_tile


@pytest.mark.parametrize(
    ("heads", "kv_heads", "group_rows", "expected"),
    [(32, 8, 4, 4), (32, 8, 5, 16), (7, 1, 2, 2), (7, 1, 16, 9), (9, 3, 16, 21), (128, 1, 4, 1), (8, 8, 16, 16)],
)
def test_rows_per_window_fill_a_tile(heads, kv_heads, group_rows, expected):
    assert rows_per_window(heads, kv_heads, group_rows) == expected


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"block_size": 12}, "block_size must be a power of two, not 12"),
        ({"rows_per_window": 0}, "rows_per_window must be at least 1, not 0"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, not 0"),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        plan_of([[1]], [1], [True], **kwargs)
