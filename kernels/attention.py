"""Paged attention in Triton: shared blocks are read once for all rows that hold them.

A window's tiles of 64 keys (`kernels/plan.py`) meet a query tile that stacks the window's rows times the query heads of
one kv head. The programs of a persistent grid share the (window, kv head, tile) space: where windows are alike every
(window, kv head) is cut into as many parts, else the whole space is cut into equal pieces (stream-K, as FlashMLA and
LeanAttention cut it). A program that holds a whole (window, kv head) writes its result; others leave a partial result
and the merge joins them by the online-softmax recurrence. The kernels are in `kernels/attention_kernel.py`; on Hopper
16-bit heads of 64 and 128 go through `kernels/attention_hopper.py`, which does the same with its warps divided by task.

A *head slot* is a kv head, or a share of its query heads where they are more than the tile's lines (MQA).
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from cowbeam.kernels.attention_hopper import hopper_attention_kernel
from cowbeam.kernels.attention_kernel import LOG2_E, attention_kernel, merge_kernel, schedule_kernel
from cowbeam.kernels.plan import MAX_TRITON_BLOCK, Plan, rows_per_window

__all__ = ["most_lines", "paged_attention", "rows_per_window"]

# A piece of fewer tiles costs more in merging than it gains in balance.
MIN_TILES = 2
# A tile costs so many halves of one in the trunk if it needs a mask: by that segments are cut.
MASKED_COST = 3
# From so many keys a row on, 128 lines that meet a tile together gain more than the tiles of few rows then cost.
TWO_TEAMS_FROM = 8192
# The schedule looks at all windows, in each of its programs, up to so many.
MOST_WINDOWS = 512
# From so many keys a row on, two programs that take turns on an SM gain more than their partial results cost.
LONG = 16384
# Elements of partial results that a program of the merge holds in registers at once.
MERGED_AT_ONCE = 8192


class _Variant(NamedTuple):
    lines: int  # of the query tile
    warps: int
    stages: int
    programs_per_sm: int
    for_hopper: bool = False


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: Plan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one query per row over the keys that the plan lists; two launches a layer, no host sync.

    Float32 inputs are multiplied in float32 (never TF32); 16-bit inputs accumulate in float32. Slots that no row sees
    may hold anything, NaN included.

    Args:
        query: [rows, heads, head_dim]; query head h reads kv head h // (heads // kv_heads).
        key_cache: [num_blocks, kv_heads, block_size, head_dim], inner two dimensions contiguous.
        value_cache: [num_blocks, kv_heads, block_size, value_dim].
        plan: of this step, for this layer's sliding window.
        scale: factor on the scores, positive.
        softcap: scores become tanh(score / softcap) * softcap, after the scale (Gemma 2).
        sinks: [heads] logits that join the softmax's denominator only (GPT-OSS).

    Returns:
        [rows, heads, value_dim]; zeros for rows of length 0.
    """
    _check(query, key_cache, value_cache, plan)
    assert scale > 0, f"the scale must be positive, not {scale}: the kernel looks for the maximum before it scales"
    rows, heads, head_dim = query.shape
    kv_heads, value_dim = key_cache.shape[1], value_cache.shape[-1]
    group = heads // kv_heads
    slot_heads, splits = _head_slots(group)
    sinks = None if sinks is None else sinks.contiguous()
    waits = _may_wait_on_device(query.device)
    same_layout = key_cache.stride() == value_cache.stride()
    variant = _variant(plan, slot_heads, query, value_dim, is_simple=softcap is None and same_layout)
    programs = _num_programs(query.device, variant)
    out = query.new_empty(rows, heads, value_dim)
    value_pad = max(16, triton.next_power_of_2(value_dim))
    partial_out = query.new_empty(2 * programs, variant.lines, value_pad, dtype=torch.float32)
    partial_lse = query.new_empty(2 * programs, variant.lines, dtype=torch.float32)
    heads_shape = {"GROUP": group, "HEADS": slot_heads, "SPLITS": splits, "SLOTS": kv_heads * splits}
    tile_shape = {"ENTRY_KEYS": plan.entry_keys, "TILE_KEYS": plan.tile_keys, "STAGES": variant.stages}
    flags = {"HAS_WINDOW": plan.sliding_window is not None, "HAS_SINKS": sinks is not None}
    is_scheduled = _schedule_key(programs, kv_heads * splits) in plan.memo
    schedule, segments = _schedule(plan, programs, kv_heads * splits)
    reads = (query, key_cache, value_cache, out, partial_out, partial_lse, sinks, schedule, *_lists(plan))
    query_strides, cache_strides = query.stride()[:2], key_cache.stride()[:2]
    if variant.for_hopper:
        hopper_attention_kernel[(programs,)](
            *reads,
            scale * LOG2_E.value,
            *query_strides,
            *cache_strides,
            DIM=head_dim,
            TEAMS=variant.lines // 64,
            **heads_shape | tile_shape | flags,
            num_warps=variant.warps,
            # It reads the schedule before it waits: not where that is what the kernel in front of it makes.
            launch_pdl=is_scheduled,
        )
    else:
        attention_kernel[(programs,)](
            *reads,
            scale * LOG2_E.value if softcap is None else scale / softcap,
            LOG2_E.value if softcap is None else softcap * LOG2_E.value,
            *query_strides,
            *cache_strides,
            *value_cache.stride()[:2],
            HEAD_DIM=head_dim,
            HEAD_PAD=max(16, triton.next_power_of_2(head_dim)),
            VALUE_DIM=value_dim,
            VALUE_PAD=value_pad,
            LINES=variant.lines,
            SAME_OFFSETS=same_layout,
            HAS_SOFTCAP=softcap is not None,
            UPCAST=INTERPRETED and query.dtype == torch.bfloat16,
            MERGE_WAITS=waits,
            **heads_shape | tile_shape | flags,
            num_warps=variant.warps,
        )
    merge_kernel[(rows, heads)](
        out,
        partial_out,
        partial_lse,
        sinks,
        segments,
        VALUE_DIM=value_dim,
        VALUE_PAD=value_pad,
        LINES=variant.lines,
        HAS_SINKS=sinks is not None,
        PARTIALS=_partials(plan, programs, kv_heads * splits, value_pad),
        WAITS=waits,
        **heads_shape,
        num_warps=1,
        **({"launch_pdl": True} if waits else {}),
    )
    return out


def most_lines(query: Tensor, value_dim: int, softcap: float | None, context: int) -> int:
    """Query lines that one tile may have (rows of a window times query heads of a kv head), for `rows_per_window`.

    Args:
        query: [rows, heads, head_dim] of the call.
        value_dim: of the value cache.
        softcap: of the call.
        context: most keys a row may see.
    """
    is_hopper = softcap is None and _has_hopper_form(query, value_dim)
    return 128 if is_hopper and context >= TWO_TEAMS_FROM else 64


def _lists(plan: Plan) -> tuple[Tensor, ...]:
    """The plan as both kernels take it."""
    return (
        plan.block_ids, plan.intervals, plan.spans, plan.lengths, plan.first_visible, plan.tile_starts,
        plan.tile_window, plan.window_row, plan.window_rows, plan.trunk_tiles,
    )  # fmt: skip


def _partials(plan: Plan, programs: int, slots: int, value_pad: int) -> int:
    """How many partial results the merge reads at once: about as many as a segment has, if registers hold them."""
    windows = triton.cdiv(plan.num_rows, plan.rows_per_window)
    expected = triton.cdiv(programs, windows * slots) + 1
    return int(min(triton.next_power_of_2(expected), max(2, MERGED_AT_ONCE // value_pad)))


def _schedule_key(programs: int, slots: int) -> tuple[str, int, int]:
    return ("schedule", programs, slots)


def _schedule(plan: Plan, programs: int, slots: int) -> tuple[Tensor, Tensor]:
    """See `schedule_kernel`; made by the first layer of a kind, for all."""
    key = _schedule_key(programs, slots)
    if key not in plan.memo:
        schedule = plan.lengths.new_empty(programs, 8)
        segments = plan.lengths.new_empty(plan.num_rows, slots, 4)
        schedule_kernel[(plan.num_rows + triton.cdiv(programs, 128),)](
            schedule,
            segments,
            plan.lengths,
            plan.row_window,
            plan.tile_starts,
            plan.tile_window,
            plan.window_row,
            plan.window_rows,
            plan.trunk_tiles,
            plan.num_windows,
            plan.num_rows,
            programs,
            SLOTS=slots,
            SLOTS_PAD=triton.next_power_of_2(slots),
            MIN_TILES=MIN_TILES,
            MASKED_COST=MASKED_COST,
            CHUNK=128,
            WINDOWS_PAD=triton.next_power_of_2(plan.num_windows) if plan.num_windows <= MOST_WINDOWS else 0,
            num_warps=1,
        )
        plan.memo[key] = schedule, segments
    made: tuple[Tensor, Tensor] = plan.memo[key]
    return made


# Triton's interpreter multiplies bfloat16 wrongly without a word; there the kernel casts up first.
INTERPRETED = bool(triton.knobs.runtime.interpret)


def _check(query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: Plan) -> None:
    assert query.shape[0] == plan.num_rows, f"{query.shape[0]} queries for a plan of {plan.num_rows} rows"
    assert query.shape[1] % key_cache.shape[1] == 0, f"{query.shape[1]} heads over {key_cache.shape[1]} kv heads"
    assert query.dtype == key_cache.dtype == value_cache.dtype, f"query {query.dtype}, cache {key_cache.dtype}"
    assert query.stride(2) == 1, "a query head must be contiguous"
    for cache in (key_cache, value_cache):
        assert cache.stride()[2:] == (cache.shape[3], 1), f"a block's keys must be contiguous, not {cache.stride()}"
    if plan.block_size > MAX_TRITON_BLOCK:
        raise ValueError(f"block_size {plan.block_size} is too large for the kernel: it takes up to {MAX_TRITON_BLOCK}")
    if plan.columns > 65536:
        raise ValueError(f"block_size {plan.block_size} is too small for this context: {plan.columns} columns > 65536")


def _head_slots(group: int) -> tuple[int, int]:
    """(query heads of one slot, slots of one kv head): a tile has no more lines than 64."""
    splits = triton.cdiv(group, 64)
    return triton.cdiv(group, splits), splits


def _variant(plan: Plan, slot_heads: int, query: Tensor, value_dim: int, is_simple: bool) -> _Variant:
    """The compiled form for a window's lines and a head's width; ``is_simple``: no soft-capping, one cache layout.

    Timed on an H200: the Hopper form, and where it cannot be narrow tiles while they hold the lines; one program per SM
    while there is one window that is not `LONG`, else two. Narrow tiles also where windows are many: those of single
    rows share nothing, and each key would meet 64 lines for the sake of four.
    Warps and stages keep each form free of register spills and within 227 KB of shared memory (compiled for sm_90):
    float32 has no tensor cores to go to, so its products need more threads.
    """
    lines, head_dim, dtype = plan.rows_per_window * slot_heads, query.shape[2], query.dtype
    is_one_window = plan.num_rows <= plan.rows_per_window
    if is_simple and lines <= 128 and (lines > 16 or is_one_window) and _has_hopper_form(query, value_dim):
        return _Variant(64 if lines <= 64 else 128, 4, (6 if lines <= 64 else 5) * 128 // head_dim, 1, for_hopper=True)
    width = triton.next_power_of_2(head_dim)
    wide_head = width > 128
    if lines <= 16:
        if dtype == torch.float32:
            return _Variant(16, 8 if wide_head else 4, 2 if wide_head else 3, 1)
        return _Variant(16, 4, 2 if wide_head else 3, 2)
    if lines <= 64:
        if dtype == torch.float32:
            return _Variant(64, 8 if width <= 64 else 16, 1 if wide_head else 2, 1)
        is_little = is_one_window and plan.columns * plan.entry_keys <= LONG
        programs_per_sm = 1 if wide_head or is_little else 2
        return _Variant(64, 8 if wide_head else 4, 2 if wide_head else 3, programs_per_sm)
    if lines <= 128 and dtype != torch.float32 and not wide_head:
        return _Variant(128, 8, 3, 1)
    raise ValueError(f"rows_per_window {plan.rows_per_window} is too much for {slot_heads} query heads in {dtype}")


def _has_hopper_form(query: Tensor, value_dim: int) -> bool:
    """`hopper_attention_kernel` is written for the tensor cores of compute capability 9."""
    is_hopper = query.is_cuda and torch.cuda.get_device_capability(query.device)[0] == 9
    return is_hopper and query.dtype != torch.float32 and query.shape[2] == value_dim in (64, 128)


def _may_wait_on_device(device: torch.device) -> bool:
    """A kernel can be launched before the one in front of it ends, and wait for it there: since Hopper.

    It saves what a launch takes, 0.5 µs a layer of 12 to 70 (programmatic dependent launch; graphs keep it).
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _num_programs(device: torch.device, variant: _Variant) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count * variant.programs_per_sm
    return 7  # the interpreter: odd and small, so that pieces end mid-window
