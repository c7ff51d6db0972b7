"""Paged attention in torch against the row-by-row reference in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cowbeam.kernels.attention_torch import paged_attention_torch
from cowbeam.kernels.plan import build_plan, rows_per_window
from cowbeam.kernels.reference import paged_attention_reference
from forests import Rows, relative_error

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def check(
    rows: Rows,
    *,
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 32,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    sliding_window: int | None = None,
    softcap: float | None = None,
    with_sinks: bool = False,
    window_rows: int | None = None,
    attention: Callable[..., Tensor] = paged_attention_torch,
) -> None:
    torch.manual_seed(rows.seed)
    tables, lengths, starts = rows.tensors()
    key_cache, value_cache = rows.pool(kv_heads, dim, dtype, sliding_window, value_dim)
    query = torch.randn(len(starts), kv_heads * group, dim).to(dtype)
    sinks = torch.randn(kv_heads * group) if with_sinks else None
    scale = dim**-0.5
    plan = build_plan(
        tables,
        lengths,
        starts,
        block_size=rows.block_size,
        rows_per_window=window_rows or rows_per_window(kv_heads * group, kv_heads, 16),
        sliding_window=sliding_window,
    )
    out = attention(query, key_cache, value_cache, plan, scale=scale, softcap=softcap, sinks=sinks)
    truth = paged_attention_reference(
        query.double(),
        key_cache.double(),
        value_cache.double(),
        tables,
        lengths,
        scale=scale,
        softcap=softcap,
        sliding_window=sliding_window,
        sinks=None if sinks is None else sinks.double(),
    )
    assert out.dtype == dtype
    assert relative_error(out, truth) < TOLERANCE[dtype]
    assert not out[lengths == 0].any()


def forest(block_size: int, seed: int = 0) -> Rows:
    """Two groups, single branches, odd lengths, a prefill chunk, padding."""
    rows = Rows(block_size, 4096 // block_size + 64, seed)
    rows.beams(100, 5, 20).beams(63, 3, 9)
    for length in (1, 15, 16, 17, 63):
        rows.beams(length, 1, 0)
    return rows.chunk(37, 21).samples(50, [3, 40, 0, 17]).padding(3)


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128])
def test_every_block_size(block_size):
    check(forest(block_size))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_every_group_of_query_heads(group):
    check(forest(16), group=group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_accumulate_in_float32(dtype):
    check(forest(16), dtype=dtype, dim=64)


@pytest.mark.parametrize("window_rows", [1, 2, 3, 5, 64])
def test_windows_cut_groups_anywhere(window_rows):
    check(forest(16), window_rows=window_rows)


@pytest.mark.parametrize("sliding_window", [1, 7, 16, 40, 1000])
@pytest.mark.parametrize("block_size", [4, 16, 128])
def test_sliding_window_sees_only_the_last_keys(block_size, sliding_window):
    """Slots before every window are NaN here: a block half outside must not leak them."""
    check(forest(block_size), sliding_window=sliding_window)


def test_softcap():
    check(forest(16), softcap=2.0)


def test_sinks_join_every_path_once():
    check(forest(16), with_sinks=True)
    check(Rows(16, 64, 1).beams(5, 1, 0), with_sinks=True)
    check(Rows(16, 600, 1).samples(300, [200] * 8), with_sinks=True, softcap=5.0, sliding_window=250)


def test_value_width_of_its_own():
    check(forest(16), value_dim=48)


def test_long_context():
    check(Rows(16, 400, 3).beams(1000, 8, 40))


def test_wide_group_with_long_private_tails():
    """Rows attend to their own blocks apart here; the lengths differ, so lines of the private part are padded."""
    check(Rows(16, 1000, 4).samples(77, [100, 3, 250, 0, 180, 60, 90, 17] * 2))


def test_many_single_branches_share_a_window():
    rows = Rows(8, 800, 5)
    for length in (1, 200, 33, 64, 7, 150, 90, 16):
        rows.beams(length, 1, 2)
    check(rows, window_rows=16)


def test_all_rows_are_padding():
    check_rows = Rows(16, 4, 0).padding(4)
    tables, lengths, starts = check_rows.tensors()
    key_cache, value_cache = check_rows.pool(2, 16, torch.float32)
    plan = build_plan(tables, lengths, starts, block_size=16, rows_per_window=8)
    out = paged_attention_torch(torch.randn(4, 4, 16), key_cache, value_cache, plan, scale=1.0)
    assert not out.any()


def test_padding_inside_a_window_of_singles_and_a_group():
    """A row of length 0 must neither break its window's trunk nor read it."""
    check(Rows(16, 64, 6).beams(40, 1, 0).padding(3).beams(33, 4, 6))


def test_dropping_the_interval_mask_is_caught():
    """The check above would notice a kernel that lets rows see their neighbours' blocks."""
    rows = Rows(16, 64, 7).samples(40, [9, 9, 9])
    tables, lengths, starts = rows.tensors()
    key_cache, value_cache = rows.pool(1, 16, torch.float32)
    plan = build_plan(tables, lengths, starts, block_size=16, rows_per_window=8)
    real = plan.end_row > plan.first_row
    plan.first_row.zero_()
    plan.end_row.copy_(real * 3)
    query = torch.randn(3, 1, 16)
    out = paged_attention_torch(query, key_cache, value_cache, plan, scale=1.0)
    truth = paged_attention_reference(
        query.double(), key_cache.double(), value_cache.double(), tables, lengths, scale=1.0
    )
    assert not relative_error(out, truth) < 1e-2
