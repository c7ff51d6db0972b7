"""The Triton kernels against the reference, in Triton's interpreter, which must be chosen before Triton is imported.

The tests of this file therefore run as a subprocess of one test (`test_in_the_interpreter`), named after what they do.
"""

import dataclasses
import math
import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED:

    def test_in_the_interpreter():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
        environment = os.environ | {"TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

else:
    import torch
    import triton
    import triton.language as tl

    from cowbeam.kernels import (
        advance_triton,
        attention,
        attention_kernel,
        cache_ops,
        cache_ops_triton,
        draw_tokens_triton,
        plan,
        plan_triton,
        top_candidates_triton,
    )
    from cowbeam.kernels.plan import Plan, build_plan
    from cowbeam.kernels.reference import copy_blocks_reference, paged_attention_reference, write_kv_reference
    from forests import Rows, relative_error
    from test_advance import Walk
    from test_attention import check
    from test_draw_tokens import Draw
    from test_draw_tokens import disagreement as draw_disagreement
    from test_draw_tokens import strange_rows as strange_draws
    from test_top_candidates import Step, all_at_once, disagreement, of_one_group, strange_rows, tied, together

    pytestmark = pytest.mark.filterwarnings(
        "ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
    )

    def forest(block_size=16, seed=0):
        """Groups, single branches, odd lengths, a prefill chunk, padding; small, for the interpreter is slow."""
        rows = Rows(block_size, 2048 // block_size + 64, seed).beams(70, 4, 12).beams(33, 2, 3)
        for length in (1, 15, 16, 17, 63):
            rows.beams(length, 1, 0)
        return rows.chunk(21, 9).padding(2)

    def check_triton(rows, **kwargs):
        check(rows, attention=attention.paged_attention, **{"dim": 16} | kwargs)

    @pytest.fixture(params=[1, 7, 40])
    def programs(request, monkeypatch):
        """Pieces that hold everything, end mid-window, or are fewer than the programs."""
        monkeypatch.setattr(attention, "_num_programs", lambda *_: request.param)
        monkeypatch.setattr(attention, "MIN_TILES", 1)

    @pytest.mark.parametrize("block_size", [1, 8, 16, 64, 128])
    def test_every_block_size(block_size):
        check_triton(forest(block_size))

    def test_the_largest_block_and_one_that_is_larger():
        """Where its upper half begins became a negative number: keys were read from before the block."""
        check_triton(Rows(32768, 2, 0).beams(32760, 1, 0), sliding_window=100)
        with pytest.raises(ValueError, match="block_size 65536 is too large for the kernel: it takes up to 32768"):
            check_triton(Rows(65536, 2, 0).beams(32768 + 70, 1, 0), sliding_window=100)

    @pytest.mark.parametrize("group", [1, 3, 7, 8])
    def test_every_group_of_query_heads(group):
        check_triton(forest(), group=group)

    def test_more_query_heads_than_lines_are_split():
        check_triton(Rows(16, 64, 1).beams(40, 3, 5), group=71, kv_heads=1)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("dim", [16, 20, 64])
    def test_dtypes_and_widths(dtype, dim):
        check_triton(forest(), dtype=dtype, dim=dim)

    @pytest.mark.parametrize("window_rows", [1, 3, 16])
    def test_windows_cut_groups_anywhere(window_rows, programs):
        check_triton(forest(), window_rows=window_rows)

    @pytest.mark.parametrize("kv_heads", [1, 3, 50])
    @pytest.mark.parametrize("length", [1, 65, 330])
    @pytest.mark.parametrize("window_rows", [None, 2])
    def test_segments_are_cut_evenly(kv_heads, length, window_rows, programs):
        """One window or two over the same blocks: fewer programs than heads, as many, more than there are tiles."""
        rows = Rows(16, 64, length).samples(length, [3, 0, 2]).padding(2)
        check_triton(rows, kv_heads=kv_heads, group=1, window_rows=window_rows)

    @triton.jit
    def cut_kernel(tiles, trunk_tiles, most_parts, bounds, min_tiles: tl.constexpr, masked_cost: tl.constexpr):
        parts = attention_kernel._parts(tiles, most_parts, min_tiles, masked_cost)
        at = tl.minimum(tl.arange(0, 16), parts)
        cut = attention_kernel._cut(tiles, trunk_tiles, at, parts, masked_cost)
        tl.store(bounds + tl.arange(0, 16), cut)

    @pytest.mark.parametrize(("min_tiles", "masked_cost"), [(1, 2), (1, 3), (2, 3), (2, 4)])
    @pytest.mark.parametrize(("tiles", "trunk_tiles"), [(1, 0), (2, 1), (5, 0), (5, 5), (20, 10), (160, 128)])
    def test_no_part_of_a_segment_is_empty(tiles, trunk_tiles, min_tiles, masked_cost):
        """The merge would read what no program wrote: half the tiles, at the cost of a mask, fell behind one bound."""
        bounds = torch.empty(16, dtype=torch.int32)
        cut_kernel[(1,)](tiles, trunk_tiles, 15, bounds, min_tiles=min_tiles, masked_cost=masked_cost)
        used = bounds[: bounds.tolist().index(tiles) + 1]
        assert used[0] == 0
        assert (used.diff() > 0).all()
        cost = 2 * used.clamp(max=trunk_tiles) + masked_cost * (used - trunk_tiles).clamp(min=0)
        assert cost.diff().max() - cost.diff().min() <= 2 * masked_cost

    @pytest.mark.parametrize("most_windows", [0, 512])
    def test_windows_of_very_different_lengths(most_windows, programs, monkeypatch):
        monkeypatch.setattr(attention, "MOST_WINDOWS", most_windows)
        rows = Rows(16, 64, 5).samples(150, [0, 9]).beams(3, 1, 0).samples(300, [1, 2, 3])
        check_triton(rows, window_rows=2)

    @pytest.mark.parametrize("sliding_window", [1, 40, 1000])
    @pytest.mark.parametrize("block_size", [8, 128])
    def test_sliding_window(block_size, sliding_window):
        check_triton(forest(block_size), sliding_window=sliding_window)

    def test_softcap():
        check_triton(forest(), softcap=2.0)
        check_triton(forest(), softcap=50.0)

    def test_sinks_join_once_whether_a_segment_is_cut_or_not(programs):
        check_triton(forest(), with_sinks=True)
        check_triton(forest(), with_sinks=True, softcap=5.0, sliding_window=30)

    def test_value_width_of_its_own():
        check_triton(forest(), value_dim=24)

    def test_long_context_goes_through_the_trunk_loop():
        check_triton(Rows(16, 400, 3).beams(1000, 5, 20), kv_heads=1)

    def test_all_rows_are_padding():
        rows = Rows(16, 4, 0).padding(4)
        tables, lengths, starts = rows.tensors()
        key_cache, value_cache = rows.pool(2, 16, torch.float32)
        plan = build_plan(tables, lengths, starts, block_size=16, rows_per_window=8)
        out = attention.paged_attention(torch.randn(4, 4, 16), key_cache, value_cache, plan, scale=1.0)
        assert not out.any()

    def test_worst_case_plan_of_a_captured_step(monkeypatch):
        """On CUDA no count is read: more windows and tiles than needed, whose fields must be harmless."""
        monkeypatch.setattr("cowbeam.kernels.plan._may_read", lambda _: False)
        check_triton(forest())
        check_triton(forest(128), sliding_window=20)

    @pytest.mark.parametrize("tensor", ["intervals", "spans"])
    def test_a_wrong_plan_is_caught(tensor, monkeypatch):
        """The comparison would notice a kernel that forgets the interval mask, or reads slots that no row sees."""
        everything = {"intervals": 8 << 8, "spans": 16 << 8}[tensor]

        def build_wrong_plan(*args, **kwargs):
            wrong = build_plan(*args, **kwargs)
            packed = getattr(wrong, tensor)
            keep = 0xFFFF << 16
            packed.copy_((packed & keep) | everything)
            return wrong

        monkeypatch.setattr("test_attention.build_plan", build_wrong_plan)
        with pytest.raises(AssertionError):
            check_triton(Rows(16, 64, 7).samples(40, [9, 9, 9]), window_rows=8)

    def triton_plan(tables, lengths, starts, *, block_size, rows_per_window, sliding_window=None):
        return plan._build_plan_triton(
            tables, lengths, torch.tensor(starts), block_size, rows_per_window, sliding_window
        )

    @pytest.mark.parametrize(
        ("block_size", "window_rows", "sliding_window"),
        [(16, 4, None), (16, 16, 40), (16, 1, None), (1, 4, 1), (128, 16, None), (128, 4, 40), (8, 16, 1)],
    )
    def test_plan_kernels_list_what_the_torch_plan_lists(block_size, window_rows, sliding_window, monkeypatch):
        """Entry for entry, in the same order; what lies behind the last tile may differ, nothing reads it."""
        rows = Rows(block_size, 2048 // block_size + 64, 11).beams(70, 6, 20).beams(1, 1, 0).beams(33, 1, 0)
        rows.beams(40, 3, 9).chunk(21, 9).samples(30, [3, 9, 0]).padding(3)
        tables, lengths, starts = rows.tensors()
        options = {"block_size": block_size, "rows_per_window": window_rows, "sliding_window": sliding_window}
        monkeypatch.setattr(plan, "_may_read", lambda _: False)
        expected = build_plan(tables, lengths, starts, **options)
        built = triton_plan(tables, lengths, starts, **options)
        tiles = int(expected.tile_starts[-1])
        used = {"tile_window": tiles} | dict.fromkeys(plan_triton.ENTRY_FIELDS, tiles * expected.entries_per_tile)
        for field in dataclasses.fields(Plan):
            old, new = getattr(expected, field.name), getattr(built, field.name)
            if isinstance(old, torch.Tensor):
                assert old.dtype == new.dtype
                assert old.shape == new.shape
                end = used.get(field.name)
                assert torch.equal(old[:end], new[:end]), field.name
            else:
                assert old == new

    def test_attention_over_a_plan_built_by_kernels(monkeypatch):
        monkeypatch.setattr("test_attention.build_plan", triton_plan)
        check_triton(forest())
        check_triton(forest(128), sliding_window=20)
        check_triton(Rows(8, 8, 1).beams(9, 1, 0))

    def test_write_kv_kernel():
        for block_size, slot_dtype in ((1, torch.int32), (16, torch.int64)):
            kv = torch.full((12, 2, 3, block_size, 20), float("nan"))
            truth = kv.clone()
            slots = torch.randperm(12 * block_size)[:9].to(slot_dtype)
            qkv = torch.randn(9, 6, 20)
            cache_ops_triton.write_kv_triton(qkv[:, :3], qkv[:, 3:], kv[:, 0], kv[:, 1], slots)
            write_kv_reference(qkv[:, :3], qkv[:, 3:], truth[:, 0], truth[:, 1], slots)
            torch.testing.assert_close(kv, truth, rtol=0, atol=0, equal_nan=True)

    def test_write_kv_kernel_with_widths_of_their_own():
        key_cache, value_cache = torch.zeros(4, 1, 8, 6), torch.zeros(4, 1, 8, 10)
        key, value = torch.randn(2, 1, 6), torch.randn(2, 1, 10)
        cache_ops_triton.write_kv_triton(key, value, key_cache, value_cache, torch.tensor([9, 31]))
        assert torch.equal(key_cache[1, :, 1], key[0])
        assert torch.equal(value_cache[3, :, 7], value[1])

    @pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_a_value_that_is_no_number_stays_with_its_request(fault, dtype):
        """Requests of one branch share a window: 0 times one's NaN was in the others' sums, and they failed with it."""
        rows = Rows(16, 64, 3)
        for length in (21, 40, 33):
            rows.beams(length, 1, 0)
        tables, lengths, starts = rows.tensors()
        key_cache, value_cache = rows.pool(2, 16, dtype)
        plan = build_plan(tables, lengths, starts, block_size=16, rows_per_window=8)
        assert int((plan.window_rows > 0).sum()) == 1
        query = torch.randn(3, 4, 16).to(dtype)
        good = attention.paged_attention(query, key_cache, value_cache, plan, scale=0.3)
        last = tables[1, 39 // 16] * 16 + 39 % 16
        key, value = torch.randn(2, 1, 2, 16).to(dtype)
        value[0, 1, 5] = fault
        cache_ops_triton.write_kv_triton(key, value, key_cache, value_cache, last[None])
        out = attention.paged_attention(query, key_cache, value_cache, plan, scale=0.3)
        assert torch.equal(out[[0, 2]], good[[0, 2]])
        assert out[1, 2:].isnan().all(), "the query heads of the kv head that has it"
        assert out[1, :2].isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_copy_blocks_kernel(dtype):
        layers = [torch.randn(12, 2, 3, 4, 20).to(dtype) for _ in range(3)]
        truth = [layer.clone() for layer in layers]
        sources, destinations = torch.tensor([3, 3, 7, 9]), torch.tensor([0, 11, 5, 9])
        cache_ops_triton.copy_blocks_triton(layers, sources, destinations, cache_ops.layer_pointers(layers))
        copy_blocks_reference(truth, sources, destinations)
        for layer, expected in zip(layers, truth, strict=True):
            assert torch.equal(layer, expected)

    @pytest.mark.parametrize("seed", range(3))
    def test_advance_kernel(seed, monkeypatch):
        monkeypatch.setattr("test_advance.advance_rows", advance_triton.advance_rows_triton)
        Walk(seed, block_size=(1, 4, 16)[seed]).go(10)

    @pytest.fixture
    def small_chunks(monkeypatch):
        """Many chunks, and several levels of merging, from few tokens: the interpreter sorts a key a millisecond."""
        monkeypatch.setattr(top_candidates_triton, "CHUNK", 32)
        monkeypatch.setattr(top_candidates_triton, "KEYS_AT_ONCE", 128)

    def check_candidates(step):
        found = of_one_group(top_candidates_triton.top_candidates_triton(*step.arguments))
        assert disagreement(found, step, lower_first=True) < 1e-6
        return found

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(
        ("width", "vocabulary", "count"),
        [(1, 2, 1), (1, 2, 2), (2, 2, 4), (16, 2, 32), (1, 37, 37), (2, 1000, 4), (5, 300, 3), (2, 37, 50)],
    )
    def test_candidates_of_every_shape(width, vocabulary, count, dtype, small_chunks):
        check_candidates(Step.random(width * count, width, vocabulary, count, dtype))

    @pytest.mark.parametrize(
        ("width", "vocabulary", "count"), [(16, 1000, 32), (40, 37, 20), (40, 1000, 8), (16, 5003, 6)]
    )
    def test_candidates_of_many_chunks_are_merged_level_by_level(width, vocabulary, count, small_chunks):
        check_candidates(Step.random(count, width, vocabulary, count, torch.bfloat16))

    @pytest.mark.parametrize(("width", "vocabulary", "count"), [(1, 37, 3), (5, 100, 10), (40, 37, 20), (40, 1000, 8)])
    def test_candidates_of_many_groups(width, vocabulary, count, small_chunks):
        steps = together(7, 3, width, vocabulary, count)
        for found, step in zip(all_at_once(top_candidates_triton.top_candidates_triton, steps), steps, strict=True):
            assert disagreement(found, step, lower_first=True) < 1e-6
            for ours, alone in zip(found, check_candidates(step), strict=True):
                assert torch.equal(ours, alone)

    def test_candidates_of_chunks_as_large_as_on_a_gpu():
        check_candidates(Step.random(3, 2, 5003, 2, torch.float32))

    def test_equal_candidates_come_in_the_order_of_their_indices(small_chunks):
        """Inside a chunk, between chunks and between ranks, where a step stands on one prompt."""
        step = tied(3, 150, 30)
        _, indices, _ = check_candidates(step)
        assert torch.equal(indices, step.accumulated.view(-1).sort(descending=True, stable=True).indices[:30])

    @pytest.mark.parametrize("count", [5, 64])
    @pytest.mark.parametrize("strange", strange_rows)
    def test_candidates_of_strange_rows(strange, count, small_chunks):
        step = strange_rows[strange](count)
        _, indices, _ = check_candidates(step)
        unusable = step.accumulated.view(-1).isnan().nonzero()[:count, 0]
        assert torch.equal(indices[: len(unusable)], unusable)

    def check_draw(draw):
        found = draw_tokens_triton.draw_tokens_triton(*draw)
        assert draw_disagreement(found, draw) < 1e-6
        return found

    @pytest.fixture
    def small_draw_chunks(monkeypatch):
        monkeypatch.setattr(draw_tokens_triton, "CHUNK", 32)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(("width", "vocabulary"), [(1, 1), (5, 31), (3, 33), (4, 1000)])
    def test_draws_of_every_shape(width, vocabulary, dtype, small_draw_chunks):
        check_draw(Draw.random(vocabulary, width, vocabulary, dtype))

    def test_draws_from_chunks_as_large_as_on_a_gpu():
        check_draw(Draw.random(3, 4, 5003, torch.float32))

    @pytest.mark.parametrize("allowed", [[0], [79], [3, 4, 5], [0, 40, 79], [31, 32]])
    def test_draws_of_what_is_allowed_only(allowed, small_draw_chunks):
        """Whole chunks may have no probability."""
        tokens, _, _ = check_draw(Draw.masked(len(allowed), 80, allowed))
        assert set(tokens.tolist()) <= set(allowed)

    @pytest.mark.parametrize("strange", strange_draws)
    def test_draws_from_strange_rows(strange, small_draw_chunks):
        check_draw(strange_draws[strange]())

    @triton.jit
    def place_kernel(masses, cumulative, targets, found):
        at = tl.arange(0, 8)
        place = draw_tokens_triton._place(
            tl.load(masses + at), tl.load(cumulative + at), tl.load(targets + tl.program_id(0)), 8
        )
        tl.store(found + tl.program_id(0), place)

    def test_sums_of_a_parallel_scan_may_rise_where_there_is_no_mass():
        """A GPU adds in another order at every place: the sum crept up behind the vocabulary, and a token there won."""
        masses = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0, 0.0, 0.0], dtype=torch.float64)
        cumulative = masses.cumsum(0) + torch.tensor([0, 0, 1, 0, 0, -1, 1, 0], dtype=torch.float64) * 2**-50
        targets = torch.tensor([0.0, 0.5, 0.75 - 2**-53, 1 - 2**-53, 1.0, math.nan], dtype=torch.float64)
        places = torch.empty(len(targets), dtype=torch.int32)
        place_kernel[(len(targets),)](masses, cumulative, targets, places)
        assert places.tolist() == [1, 3, 3, 4, 4, 4]

    def test_reference_agrees_with_dense_softmax():
        """The oracle itself, against one line of torch on contiguous keys."""
        rows = Rows(16, 8, 9).beams(40, 1, 0)
        tables, lengths, _ = rows.tensors()
        key_cache, value_cache = rows.pool(1, 16, torch.float64)
        query = torch.randn(1, 2, 16, dtype=torch.float64)
        keys = torch.cat([key_cache[block, 0] for block in rows.tables[0]])[:40]
        values = torch.cat([value_cache[block, 0] for block in rows.tables[0]])[:40]
        expected = ((query[0] @ keys.T) * 0.3).softmax(-1) @ values
        out = paged_attention_reference(query, key_cache, value_cache, tables, lengths, scale=0.3)
        assert relative_error(out[0], expected) < 1e-12
