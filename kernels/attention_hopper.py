# mypy: allow-untyped-defs, allow-incomplete-defs
"""`attention_kernel` of `kernels/attention_kernel.py` for Hopper, its warps divided by task (Gluon).

Four warps only bring keys and values (`_produce`), up to STAGES tiles ahead of one or two teams of four warps, which
compute 64 lines each (`_consume`): the division of FlashAttention-3 (arXiv 2407.08608). So memory does not wait for
arithmetic, a tile that was brought once serves 128 lines, and a team's exponentials run beside its own and the other
team's products. A stage goes round by four barriers: producers make keys and values ready, consumers free them.

Schedule, partial results and legend are those of `kernels/attention_kernel.py`, and so is the merge.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cowbeam.kernels.attention_kernel import LOG2_E

# Later versions of Triton have another name for it.
async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
PRODUCERS = gl.constexpr(4)  # warps
TEAM_LINES = gl.constexpr(64)  # what an instruction of four warps multiplies
PRODUCER_REGISTERS = gl.constexpr(56)  # a thread
TEAM_REGISTERS = gl.constexpr(224)


@gluon.jit
def hopper_attention_kernel(
    QUERY, KEYS, VALUES, OUT, PARTIAL_OUT, PARTIAL_LSE, SINKS, SCHEDULE,
    BLOCK_IDS, INTERVALS, SPANS, LENGTHS, FIRST_VISIBLE, TILE_STARTS, TILE_WINDOW, WINDOW_ROW, WINDOW_ROWS, TRUNK_TILES,
    scale,
    query_row, query_head, cache_block, cache_head,
    DIM: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, SPLITS: gl.constexpr, SLOTS: gl.constexpr,
    ENTRY_KEYS: gl.constexpr, TILE_KEYS: gl.constexpr, TEAMS: gl.constexpr, STAGES: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Each program computes a run of units of the (window, head slot, tile) space, as SCHEDULE says."""
    dtype: gl.constexpr = KEYS.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_KEYS, DIM], dtype)
    queries = gl.allocate_shared_memory(dtype, [TEAMS, TEAM_LINES, DIM], tile)
    keys = gl.allocate_shared_memory(dtype, [STAGES, TILE_KEYS, DIM], tile)
    values = gl.allocate_shared_memory(dtype, [STAGES, TILE_KEYS, DIM], tile)
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(stage), count=PRODUCERS * 32)  # each thread's own copies have arrived
        mbarrier.init(values_ready.index(stage), count=PRODUCERS * 32)
        mbarrier.init(keys_free.index(stage), count=TEAMS)
        mbarrier.init(values_free.index(stage), count=TEAMS)
    shared = (keys, values, keys_ready, values_ready, keys_free, values_free)
    first_segment = SCHEDULE + gl.program_id(0) * 8
    windows = (TILE_STARTS, TILE_WINDOW, WINDOW_ROW, WINDOW_ROWS, TRUNK_TILES)
    rows = (INTERVALS, LENGTHS, FIRST_VISIBLE)
    result = (OUT, PARTIAL_OUT, PARTIAL_LSE)
    # Constants stay constants only where the tuple is written out in the call.
    if TEAMS == 1:
        gl.warp_specialize(
            [
                (_consume, (first_segment, windows, shared, queries, QUERY, rows, result, SINKS, scale, query_row,
                            query_head, GROUP, HEADS, SPLITS, SLOTS, ENTRY_KEYS, HAS_WINDOW, HAS_SINKS, 0)),
                (_produce, (first_segment, windows, shared, KEYS, VALUES, BLOCK_IDS, SPANS, cache_block, cache_head,
                            SPLITS, SLOTS, ENTRY_KEYS)),
            ],
            worker_num_warps=[PRODUCERS],
            worker_num_regs=[PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (first_segment, windows, shared, queries, QUERY, rows, result, SINKS, scale, query_row,
                            query_head, GROUP, HEADS, SPLITS, SLOTS, ENTRY_KEYS, HAS_WINDOW, HAS_SINKS, 0)),
                (_consume, (first_segment, windows, shared, queries, QUERY, rows, result, SINKS, scale, query_row,
                            query_head, GROUP, HEADS, SPLITS, SLOTS, ENTRY_KEYS, HAS_WINDOW, HAS_SINKS, 1)),
                (_produce, (first_segment, windows, shared, KEYS, VALUES, BLOCK_IDS, SPANS, cache_block, cache_head,
                            SPLITS, SLOTS, ENTRY_KEYS)),
            ],
            worker_num_warps=[4, PRODUCERS],
            worker_num_regs=[TEAM_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@gluon.jit
def _produce(
    first_segment, windows, shared, KEYS, VALUES, BLOCK_IDS, SPANS, cache_block, cache_head,
    SPLITS: gl.constexpr, SLOTS: gl.constexpr, ENTRY_KEYS: gl.constexpr,
):  # fmt: skip
    """Bring every tile of the program's units, in order, as soon as a stage is free."""
    keys, values, keys_ready, values_ready, keys_free, values_free = shared
    TILE_STARTS, TILE_WINDOW = windows[0], windows[1]
    STAGES: gl.constexpr = keys.shape[0]
    TILE_KEYS: gl.constexpr = keys.shape[1]
    DIM: gl.constexpr = keys.shape[2]
    PER_TILE: gl.constexpr = TILE_KEYS // ENTRY_KEYS
    # A thread copies 16 bytes at a time, DIM / 8 neighbours a key.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [gl.num_warps(), 1], [1, 0])
    key = gl.arange(0, TILE_KEYS, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    unit, unit_end = gl.load(first_segment), gl.load(first_segment + 1)
    first_tile, tiles = gl.load(first_segment + 3), gl.load(first_segment + 4)
    count = 0
    while unit < unit_end:
        slot = (unit - first_tile * SLOTS) // tiles
        begin = unit - first_tile * SLOTS - slot * tiles
        end = gl.minimum(tiles, begin + (unit_end - unit))
        head_offset = (slot // SPLITS).to(gl.int64) * cache_head
        entry = first_tile * PER_TILE + key // ENTRY_KEYS
        # Block ids are carried one tile ahead, so that a look-up never stands between two copies.
        block_id = gl.load(BLOCK_IDS + entry + begin * PER_TILE)
        span = gl.load(SPANS + entry + begin * PER_TILE)
        gdc_wait()  # for the slots that the kernel in front writes; the plan was there before
        for tile in range(begin, end):
            within = (span >> 16) + key % ENTRY_KEYS
            # Keys that no row sees come as 0, because 0 times the NaN of an unused slot would be NaN.
            seen = (key % ENTRY_KEYS >= (span & 0xFF)) & (key % ENTRY_KEYS < ((span >> 8) & 0xFF))
            offset = (block_id.to(gl.int64) * cache_block + within * DIM + head_offset)[:, None] + dim[None, :]
            block_id = gl.load(BLOCK_IDS + entry + (tile + 1) * PER_TILE)
            span = gl.load(SPANS + entry + (tile + 1) * PER_TILE)
            stage = count % STAGES
            parity = count // STAGES % 2 ^ 1
            mbarrier.wait(keys_free.index(stage), parity)
            async_load(keys.index(stage), KEYS + offset, mask=seen[:, None])
            async_copy.mbarrier_arrive(keys_ready.index(stage), increment_count=False)
            mbarrier.wait(values_free.index(stage), parity)
            async_load(values.index(stage), VALUES + offset, mask=seen[:, None])
            async_copy.mbarrier_arrive(values_ready.index(stage), increment_count=False)
            count += 1
        unit += end - begin
        if (unit < unit_end) & (unit == (first_tile + tiles) * SLOTS):
            window = gl.load(TILE_WINDOW + unit // SLOTS)
            first_tile = gl.load(TILE_STARTS + window)
            tiles = gl.load(TILE_STARTS + window + 1) - first_tile


@gluon.jit
def _wait(ready, count, STAGES: gl.constexpr, exists=True):
    """Until the program's tile number ``count`` is in shared memory."""
    mbarrier.wait(ready.index(count % STAGES), count // STAGES % 2, pred=exists)
    fence_async_shared()  # copies go by another way to shared memory than the tensor cores


@gluon.jit
def _mask(
    s, interval, key, row, length, first_visible, ENTRY_KEYS: gl.constexpr, HAS_WINDOW: gl.constexpr
):  # fmt: skip
    """-inf where the row doesn't hold the key's block or doesn't see its position."""
    position = ((interval >> 16) & 0xFFFF) * ENTRY_KEYS + key % ENTRY_KEYS
    counts = (row[:, None] >= (interval & 0xFF)[None, :]) & (row[:, None] < ((interval >> 8) & 0xFF)[None, :])
    counts &= position[None, :] < length[:, None]
    if HAS_WINDOW:
        counts &= position[None, :] >= first_visible[:, None]
    return gl.where(counts, s, float("-inf"))


@gluon.jit
def _weigh(s, top, total, scale):
    """One turn of the online softmax in base 2: weights [lines, keys], and what fades the sums of earlier tiles."""
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    # A line may have seen no key yet: its maximum is -inf, and -inf - -inf would be NaN.
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(s * scale - base[:, None])
    fade = gl.exp2(top - base)
    return weights, fade, new_top, total * fade + gl.sum(weights, 1)


@gluon.jit
def _turn(
    MASKED: gl.constexpr, p, acc, top, total, count, tile, end, queries, shared, intervals, key, row, length,
    first_visible, scale, nothing, ENTRY_KEYS: gl.constexpr, HAS_WINDOW: gl.constexpr,
):  # fmt: skip
    """Add the values of tile number ``count``, whose weights p are known, and find the weights of the next.

    Both products are under way together, and the exponentials are worked out while the second one still is.
    """
    keys, values, keys_ready, values_ready, keys_free, values_free = shared
    STAGES: gl.constexpr = keys.shape[0]
    TILE_KEYS: gl.constexpr = keys.shape[1]
    weight: gl.constexpr = p.type.layout
    of_line: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    if MASKED:
        interval = gl.load(intervals + tile * (TILE_KEYS // ENTRY_KEYS))
    next_keys = keys.index((count + 1) % STAGES).permute((1, 0))
    s = warpgroup_mma(queries, next_keys, nothing, use_acc=False, is_async=True)
    _wait(values_ready, count, STAGES)
    ahead = warpgroup_mma(p, values.index(count % STAGES), acc, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s,))
    mbarrier.arrive(keys_free.index((count + 1) % STAGES))
    if MASKED:
        s = _mask(s, interval, key, row, length, first_visible, ENTRY_KEYS, HAS_WINDOW)
    weights, fade, top, total = _weigh(s, top, total, scale)
    # Here and not before the next scores: the assembler would move the exponentials behind the wait for the values.
    _wait(keys_ready, count + 2, STAGES, tile + 1 < end)
    acc, p = warpgroup_mma_wait(0, deps=(ahead, p))
    mbarrier.arrive(values_free.index(count % STAGES))
    acc = acc * gl.convert_layout(fade, of_line)[:, None]
    return gl.convert_layout(weights.to(p.dtype), weight), acc, top, total


@gluon.jit
def _consume(
    first_segment, windows, shared, queries, QUERY, rows, result, SINKS, scale, query_row, query_head,
    GROUP: gl.constexpr, HEADS: gl.constexpr, SPLITS: gl.constexpr, SLOTS: gl.constexpr, ENTRY_KEYS: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SINKS: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    """Compute the team's 64 lines of the program's units, tile by tile as they come."""
    keys, values, keys_ready, values_ready, keys_free, values_free = shared
    TILE_STARTS, TILE_WINDOW, WINDOW_ROW, WINDOW_ROWS, TRUNK_TILES = windows
    INTERVALS, LENGTHS, FIRST_VISIBLE = rows
    LINES: gl.constexpr = queries.shape[0] * TEAM_LINES
    STAGES: gl.constexpr = keys.shape[0]
    TILE_KEYS: gl.constexpr = keys.shape[1]
    DIM: gl.constexpr = keys.shape[2]
    PER_TILE: gl.constexpr = TILE_KEYS // ENTRY_KEYS
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KEYS, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    weight: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    reading: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    queries = queries.index(TEAM)
    key = gl.arange(0, TILE_KEYS, layout=gl.SliceLayout(0, scores))
    row = (TEAM * TEAM_LINES + gl.arange(0, TEAM_LINES, layout=gl.SliceLayout(1, scores))) // HEADS
    query_line = TEAM * TEAM_LINES + gl.arange(0, TEAM_LINES, layout=gl.SliceLayout(1, reading))
    query_dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, reading))
    unit, unit_end = gl.load(first_segment), gl.load(first_segment + 1)
    first_tile, tiles = gl.load(first_segment + 3), gl.load(first_segment + 4)
    window_row, window_rows = gl.load(first_segment + 5), gl.load(first_segment + 6)
    trunk_tiles = gl.load(first_segment + 7)
    count = 0  # of tiles, over all segments: it tells the stage, and how often the stages went round
    while unit < unit_end:
        slot = (unit - first_tile * SLOTS) // tiles
        begin = unit - first_tile * SLOTS - slot * tiles
        end = gl.minimum(tiles, begin + (unit_end - unit))
        first_head = slot % SPLITS * HEADS  # within the kv head's group
        its_row, its_head = query_line // HEADS, first_head + query_line % HEADS
        live = (its_row < window_rows) & (its_head < GROUP)
        place = (window_row + its_row).to(gl.int64) * query_row + (slot // SPLITS * GROUP + its_head) * query_head
        length = gl.load(LENGTHS + window_row + row, mask=row < window_rows, other=0)
        first_visible = length
        if HAS_WINDOW:
            first_visible = gl.load(FIRST_VISIBLE + window_row + row, mask=row < window_rows, other=0)
        gdc_wait()
        queries.store(gl.load(QUERY + place[:, None] + query_dim[None, :], mask=live[:, None], other=0.0))
        fence_async_shared()
        intervals = INTERVALS + first_tile * PER_TILE + key // ENTRY_KEYS
        top = gl.full([TEAM_LINES], float("-inf"), gl.float32, gl.SliceLayout(1, scores))
        total = gl.zeros([TEAM_LINES], gl.float32, gl.SliceLayout(1, scores))
        acc = gl.zeros([TEAM_LINES, DIM], gl.float32, sums)
        nothing = gl.zeros([TEAM_LINES, TILE_KEYS], gl.float32, scores)
        _wait(keys_ready, count, STAGES)
        s = warpgroup_mma(queries, keys.index(count % STAGES).permute((1, 0)), nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(keys_free.index(count % STAGES))
        if begin >= trunk_tiles:
            interval = gl.load(intervals + begin * PER_TILE)
            s = _mask(s, interval, key, row, length, first_visible, ENTRY_KEYS, HAS_WINDOW)
        weights, _, top, total = _weigh(s, top, total, scale)
        p = gl.convert_layout(weights.to(queries.dtype), weight)
        _wait(keys_ready, count + 1, STAGES, begin + 1 < end)
        trunk_end = gl.minimum(gl.maximum(trunk_tiles, begin + 1), end)
        for tile in range(begin + 1, trunk_end):  # every row sees every key
            p, acc, top, total = _turn(
                False, p, acc, top, total, count, tile, end, queries, shared, intervals, key, row, length,
                first_visible, scale, nothing, ENTRY_KEYS, HAS_WINDOW,
            )  # fmt: skip
            count += 1
        for tile in range(trunk_end, end):  # the interval mask decides
            p, acc, top, total = _turn(
                True, p, acc, top, total, count, tile, end, queries, shared, intervals, key, row, length,
                first_visible, scale, nothing, ENTRY_KEYS, HAS_WINDOW,
            )  # fmt: skip
            count += 1
        _wait(values_ready, count, STAGES)
        ahead = warpgroup_mma(p, values.index(count % STAGES), acc, is_async=True)
        if unit + (end - begin) >= unit_end:
            gdc_launch_dependents()  # once all programs are here, the merge is launched
        acc = warpgroup_mma_wait(0, deps=(ahead,))
        mbarrier.arrive(values_free.index(count % STAGES))
        count += 1
        _finish(
            acc, top, total, length, begin, end, tiles, slot, first_head, window_row, window_rows, result, SINKS,
            GROUP, HEADS, SPLITS, SLOTS, LINES, HAS_SINKS, TEAM,
        )  # fmt: skip
        unit += end - begin
        if (unit < unit_end) & (unit == (first_tile + tiles) * SLOTS):
            window = gl.load(TILE_WINDOW + unit // SLOTS)
            first_tile = gl.load(TILE_STARTS + window)
            tiles = gl.load(TILE_STARTS + window + 1) - first_tile
            window_row = gl.load(WINDOW_ROW + window)
            window_rows = gl.load(WINDOW_ROWS + window)
            trunk_tiles = gl.load(TRUNK_TILES + window)
    # A kernel is over for the next one only after those in front of it: here too where there was nothing to compute.
    gdc_wait()


@gluon.jit
def _finish(
    acc, top, total, length, begin, end, tiles, slot, first_head, window_row, window_rows, result, SINKS,
    GROUP: gl.constexpr, HEADS: gl.constexpr, SPLITS: gl.constexpr, SLOTS: gl.constexpr, LINES: gl.constexpr,
    HAS_SINKS: gl.constexpr, TEAM: gl.constexpr,
):  # fmt: skip
    """Store a whole segment's result, or a partial one for the merge."""
    OUT, PARTIAL_OUT, PARTIAL_LSE = result
    DIM: gl.constexpr = acc.shape[1]
    of_line: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    top, total = gl.convert_layout(top, of_line), gl.convert_layout(total, of_line)
    total = gl.where(gl.convert_layout(length, of_line) > 0, total, 0.0)  # a padding row has met the others' trunk
    line = TEAM * TEAM_LINES + gl.arange(0, TEAM_LINES, layout=of_line)
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, acc.type.layout))
    row, head = line // HEADS, first_head + line % HEADS
    live = (row < window_rows) & (head < GROUP)
    head += slot // SPLITS * GROUP
    if (begin == 0) & (end == tiles):
        if HAS_SINKS:
            sink = gl.load(SINKS + head, mask=live, other=0.0).to(gl.float32)
            total += gl.where(total > 0, gl.exp2(sink * LOG2_E - top), 0.0)
        acc *= gl.where(total > 0, 1 / total, 0.0)[:, None]
        place = ((window_row + row).to(gl.int64) * (GROUP * SLOTS // SPLITS) + head) * DIM
        gl.store(OUT + place[:, None] + dim[None, :], acc.to(OUT.dtype.element_ty), mask=live[:, None])
    else:
        # A piece that begins mid-segment is its program's first, one that ends mid-segment its last: two suffice.
        partial = 2 * gl.program_id(0) + (begin == 0).to(gl.int32)
        acc *= gl.where(total > 0, 1 / total, 0.0)[:, None]
        lse = gl.where(total > 0, top + gl.log2(total), float("-inf"))
        gl.store(PARTIAL_OUT + (partial * LINES + line)[:, None] * DIM + dim[None, :], acc, mask=live[:, None])
        gl.store(PARTIAL_LSE + partial * LINES + line, lse, mask=live)
