# mypy: allow-untyped-defs, allow-incomplete-defs
"""The launches of `kernels/attention.py`.

Legend: line m of a tile is row m // HEADS of the window and query head m % HEADS of the head slot. GROUP query heads
belong to a kv head; its SPLITS slots take HEADS of them each. `_PAD` is the next power of two, at least 16 in a dot.
Scores and log-sum-exps are in base 2.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(x):
    # exp2 keeps the absolute error small, the series the relative one near 0, where scores mostly are.
    x2 = x * x
    series = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    return tl.where(x2 < 0.04, series, 1 - 2 / (tl.math.exp2(x * 2.8853900817779268) + 1))


@triton.jit
def _scores(q, k, scale, HAS_SOFTCAP: tl.constexpr):
    """[lines, keys], yet to be multiplied by the scale of `_accumulate`, which is the cap where there is one."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if HAS_SOFTCAP:
        s = _tanh(s * scale)
    return s


@triton.jit
def _accumulate(s, v, top, total, acc, scale):
    """One turn of the online softmax in base 2: top [lines] the running maximum, total [lines], acc [lines, value_dim].

    The scale comes in with the difference, where it costs nothing: it is positive, so the greatest stays the greatest.
    """
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    # A line may have seen no key yet: its maximum is -inf, and -inf - -inf would be NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.math.exp2(s * scale - base[:, None])
    fade = tl.math.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _load_keys(pointer, offset, dims, seen, DIM: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr):
    """[keys, PAD]; keys that no row sees load as 0, because 0 times the NaN of an unused slot would be NaN."""
    address = pointer + offset[:, None] + dims[None, :]
    if MASKED and PAD != DIM:
        return tl.load(address, mask=seen[:, None] & (dims < DIM)[None, :], other=0.0)
    elif MASKED:
        return tl.load(address, mask=seen[:, None], other=0.0)
    elif PAD != DIM:
        return tl.load(address, mask=(dims < DIM)[None, :], other=0.0)
    else:
        return tl.load(address)


@triton.jit
def _parts(tiles, most_parts, MIN_TILES: tl.constexpr, MASKED_COST: tl.constexpr):
    """Into how many parts to cut a segment; none is empty, for the merge reads a result of each."""
    return tl.maximum(1, tl.minimum(most_parts, tl.minimum(tl.cdiv(tiles, MIN_TILES), 2 * tiles // MASKED_COST)))


@triton.jit
def _cut(tiles, trunk_tiles, part, parts, MASKED_COST: tl.constexpr):
    """The tile where a part begins, where a tile of the trunk costs 2 and one with a mask MASKED_COST."""
    at = (2 * trunk_tiles + MASKED_COST * (tiles - trunk_tiles)) * part // parts
    return tl.where(at < 2 * trunk_tiles, at // 2, trunk_tiles + (at - 2 * trunk_tiles) // MASKED_COST)


@triton.jit
def _even_parts(
    TILE_STARTS, num_windows, programs, piece,
    SLOTS: tl.constexpr, MIN_TILES: tl.constexpr, MASKED_COST: tl.constexpr, WINDOWS_PAD: tl.constexpr,
):  # fmt: skip
    """Into how many parts to cut every segment, or 0: then the units are cut into pieces, across segments.

    Even parts keep a program on one segment, where two short ones take twice as long. And programs of windows over the
    same blocks read the same ones at the same time: once from memory, then from the L2 cache, which does not hold the
    blocks of a long prompt. Pieces are for windows that differ much, and for more segments than programs.
    """
    window = tl.arange(0, WINDOWS_PAD)
    starts = tl.load(TILE_STARTS + window, mask=window < num_windows, other=0)
    tiles = tl.load(TILE_STARTS + window + 1, mask=window < num_windows, other=0) - starts
    used = tl.max(tl.where(tiles > 0, window + 1, 1), 0)
    longest = tl.max(tiles, 0)
    most_parts = programs // (used * SLOTS)
    parts = _parts(longest, most_parts, MIN_TILES, MASKED_COST)
    is_balanced = tl.cdiv(longest, parts) <= piece + piece // 16
    return tl.where((most_parts > 0) & is_balanced, parts, 0)


@triton.jit(do_not_specialize=["num_windows", "rows", "programs"])
def schedule_kernel(
    SCHEDULE, SEGMENTS, LENGTHS, ROW_WINDOW, TILE_STARTS, TILE_WINDOW, WINDOW_ROW, WINDOW_ROWS, TRUNK_TILES,
    num_windows, rows, programs,
    SLOTS: tl.constexpr, SLOTS_PAD: tl.constexpr, MIN_TILES: tl.constexpr, CHUNK: tl.constexpr,
    WINDOWS_PAD: tl.constexpr, MASKED_COST: tl.constexpr,
):  # fmt: skip
    """What programs of the two kernels below need first, made once a step for all layers.

    SCHEDULE [programs, 8]: unit, end of units, and of the first unit's window: number, first tile, tiles, first row,
    rows, trunk tiles. SEGMENTS [rows, SLOTS, 4]: first and last program that compute the row's segment, the row within
    its window, and 1 if the row has no key. WINDOWS_PAD is 0 where the windows are too many to look at all.
    """
    # Totals come from device memory, not from arguments: a captured graph must follow the plan's values.
    units = tl.load(TILE_STARTS + num_windows) * SLOTS
    piece = tl.maximum(MIN_TILES, tl.cdiv(units, programs))
    most_parts = 0 * units
    if WINDOWS_PAD > 0:
        most_parts = _even_parts(TILE_STARTS, num_windows, programs, piece, SLOTS, MIN_TILES, MASKED_COST, WINDOWS_PAD)
    is_even = most_parts > 0
    most_parts = tl.maximum(most_parts, 1)
    if tl.program_id(0) < rows:
        row = tl.program_id(0)
        slot = tl.arange(0, SLOTS_PAD)
        window = tl.load(ROW_WINDOW + row)
        first_tile = tl.load(TILE_STARTS + window)
        tiles = tl.load(TILE_STARTS + window + 1) - first_tile
        first_unit = first_tile * SLOTS + slot * tiles
        parts = _parts(tiles, most_parts, MIN_TILES, MASKED_COST)
        first_program = tl.where(is_even, (window * SLOTS + slot) * most_parts, first_unit // piece)
        last_program = tl.where(is_even, first_program + parts - 1, (first_unit + tiles - 1) // piece)
        segment = SEGMENTS + (row * SLOTS + slot) * 4
        tl.store(segment, first_program, mask=slot < SLOTS)
        tl.store(segment + 1, last_program, mask=slot < SLOTS)
        tl.store(segment + 2, tl.zeros_like(slot) + row - tl.load(WINDOW_ROW + window), mask=slot < SLOTS)
        is_empty = (tl.load(LENGTHS + row) == 0).to(tl.int32)
        tl.store(segment + 3, tl.zeros_like(slot) + is_empty, mask=slot < SLOTS)
    else:
        program = (tl.program_id(0) - rows) * CHUNK + tl.arange(0, CHUNK)
        exists = program < programs
        its_window, its_slot = program // most_parts // SLOTS, program // most_parts % SLOTS
        known = exists & (its_window < num_windows)
        start = tl.load(TILE_STARTS + its_window, mask=known, other=0)
        count = tl.load(TILE_STARTS + its_window + 1, mask=known, other=0) - start
        its_parts = _parts(count, most_parts, MIN_TILES, MASKED_COST)
        part = tl.minimum(program % most_parts, its_parts)
        next_part = tl.minimum(program % most_parts + 1, its_parts)
        its_trunk = tl.load(TRUNK_TILES + its_window, mask=known, other=0)
        its_first_unit = start * SLOTS + its_slot * count
        first = its_first_unit + _cut(count, its_trunk, part, its_parts, MASKED_COST)
        last = its_first_unit + _cut(count, its_trunk, next_part, its_parts, MASKED_COST)
        unit = tl.where(is_even, first, program * piece)
        end = tl.where(is_even, last, tl.minimum(unit + piece, units))
        works = exists & (unit < end)
        windows = tl.load(TILE_WINDOW + unit // SLOTS, mask=works, other=0)
        first_tiles = tl.load(TILE_STARTS + windows, mask=works, other=0)
        schedule = SCHEDULE + program * 8
        tl.store(schedule, unit, mask=exists)
        tl.store(schedule + 1, tl.where(works, end, unit), mask=exists)
        tl.store(schedule + 2, windows, mask=exists)
        tl.store(schedule + 3, first_tiles, mask=exists)
        tl.store(schedule + 4, tl.load(TILE_STARTS + windows + 1, mask=works, other=0) - first_tiles, mask=exists)
        tl.store(schedule + 5, tl.load(WINDOW_ROW + windows, mask=works, other=0), mask=exists)
        tl.store(schedule + 6, tl.load(WINDOW_ROWS + windows, mask=works, other=0), mask=exists)
        tl.store(schedule + 7, tl.load(TRUNK_TILES + windows, mask=works, other=0), mask=exists)


@triton.jit
def attention_kernel(
    QUERY, KEYS, VALUES, OUT, PARTIAL_OUT, PARTIAL_LSE, SINKS, SCHEDULE,
    BLOCK_IDS, INTERVALS, SPANS, LENGTHS, FIRST_VISIBLE, TILE_STARTS, TILE_WINDOW, WINDOW_ROW, WINDOW_ROWS, TRUNK_TILES,
    scale, cap,
    query_row, query_head, key_block, key_head, value_block, value_head,
    HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr,
    ENTRY_KEYS: tl.constexpr, TILE_KEYS: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr,
    SAME_OFFSETS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, UPCAST: tl.constexpr, MERGE_WAITS: tl.constexpr,
):  # fmt: skip
    """Each program computes a run of units of the (window, head slot, tile) space, as SCHEDULE says."""
    PER_TILE: tl.constexpr = TILE_KEYS // ENTRY_KEYS
    program = tl.program_id(0)
    # Where it begins is looked up in one place: each look-up that waits for another costs as much as half a tile.
    schedule = SCHEDULE + program * 8
    unit = tl.load(schedule)
    unit_end = tl.load(schedule + 1)
    window = tl.load(schedule + 2)
    first_tile = tl.load(schedule + 3)
    tiles = tl.load(schedule + 4)
    window_row = tl.load(schedule + 5)
    window_rows = tl.load(schedule + 6)
    trunk_tiles = tl.load(schedule + 7)
    line = tl.arange(0, LINES)
    key = tl.arange(0, TILE_KEYS)
    dims = tl.arange(0, HEAD_PAD)
    value_dims = tl.arange(0, VALUE_PAD)
    row = line // HEADS
    factor = cap if HAS_SOFTCAP else scale
    while unit < unit_end:
        slot = (unit - first_tile * SLOTS) // tiles
        begin = unit - first_tile * SLOTS - slot * tiles
        end = tl.minimum(tiles, begin + (unit_end - unit))
        head = slot % SPLITS * HEADS + line % HEADS  # within the kv head's group
        live = (row < window_rows) & (head < GROUP)
        head += slot // SPLITS * GROUP
        length = tl.load(LENGTHS + window_row + row, mask=live, other=0)
        query_offset = (window_row + row).to(tl.int64) * query_row + head * query_head
        q = tl.load(
            QUERY + query_offset[:, None] + dims[None, :], mask=live[:, None] & (dims < HEAD_DIM)[None, :], other=0.0
        )
        if UPCAST:
            q = q.to(tl.float32)
        top = tl.full([LINES], float("-inf"), tl.float32)
        total = tl.zeros([LINES], tl.float32)
        acc = tl.zeros([LINES, VALUE_PAD], tl.float32)
        keys = KEYS + (slot // SPLITS).to(tl.int64) * key_head
        values = VALUES + (slot // SPLITS).to(tl.int64) * value_head
        entry = first_tile * PER_TILE + key // ENTRY_KEYS
        trunk_end = tl.minimum(tl.maximum(trunk_tiles, begin), end)
        # Block ids are carried one tile ahead: looked up where they are used they would halve the pipeline's depth.
        block_id = tl.load(BLOCK_IDS + entry + begin * PER_TILE)
        span = tl.load(SPANS + entry + begin * PER_TILE)
        for tile in tl.range(begin, trunk_end, num_stages=STAGES):  # every row sees every key
            within = (span >> 16) + key % ENTRY_KEYS
            key_offset = block_id.to(tl.int64) * key_block + within * HEAD_DIM
            value_offset = key_offset
            if not SAME_OFFSETS:
                value_offset = block_id.to(tl.int64) * value_block + within * VALUE_DIM
            block_id = tl.load(BLOCK_IDS + entry + (tile + 1) * PER_TILE)
            span = tl.load(SPANS + entry + (tile + 1) * PER_TILE)
            k = _load_keys(keys, key_offset, dims, key, HEAD_DIM, HEAD_PAD, False)
            v = _load_keys(values, value_offset, value_dims, key, VALUE_DIM, VALUE_PAD, False)
            if UPCAST:
                k, v = k.to(tl.float32), v.to(tl.float32)
            s = _scores(q, k, scale, HAS_SOFTCAP)
            top, total, acc = _accumulate(s, v, top, total, acc, factor)
        if HAS_WINDOW:
            first_visible = tl.load(FIRST_VISIBLE + window_row + row, mask=live, other=0)
        for tile in tl.range(trunk_end, end, num_stages=STAGES):  # the interval mask decides
            within = (span >> 16) + key % ENTRY_KEYS
            seen = (key % ENTRY_KEYS >= (span & 0xFF)) & (key % ENTRY_KEYS < ((span >> 8) & 0xFF))
            key_offset = block_id.to(tl.int64) * key_block + within * HEAD_DIM
            value_offset = key_offset
            if not SAME_OFFSETS:
                value_offset = block_id.to(tl.int64) * value_block + within * VALUE_DIM
            interval = tl.load(INTERVALS + entry + tile * PER_TILE)
            block_id = tl.load(BLOCK_IDS + entry + (tile + 1) * PER_TILE)
            span = tl.load(SPANS + entry + (tile + 1) * PER_TILE)
            k = _load_keys(keys, key_offset, dims, seen, HEAD_DIM, HEAD_PAD, True)
            v = _load_keys(values, value_offset, value_dims, seen, VALUE_DIM, VALUE_PAD, True)
            if UPCAST:
                k, v = k.to(tl.float32), v.to(tl.float32)
            s = _scores(q, k, scale, HAS_SOFTCAP)
            position = ((interval >> 16) & 0xFFFF) * ENTRY_KEYS + key % ENTRY_KEYS
            counts = (row[:, None] >= (interval & 0xFF)[None, :]) & (row[:, None] < ((interval >> 8) & 0xFF)[None, :])
            counts &= position[None, :] < length[:, None]
            if HAS_WINDOW:
                counts &= position[None, :] >= first_visible[:, None]
            s = tl.where(counts, s, float("-inf"))
            top, total, acc = _accumulate(s, v, top, total, acc, factor)
        if MERGE_WAITS:  # noqa: SIM102  # decided when it is compiled, the other one when it runs
            if unit + (end - begin) >= unit_end:
                gdc_launch_dependents()  # once all programs are here, the merge is launched
        total = tl.where(length > 0, total, 0.0)  # a padding row beside others has met their trunk
        stores = live[:, None] & (value_dims < VALUE_DIM)[None, :]
        if (begin == 0) & (end == tiles):
            if HAS_SINKS:
                sink = tl.load(SINKS + head, mask=live, other=0.0).to(tl.float32)
                total += tl.where(length > 0, tl.math.exp2(sink * LOG2_E - top), 0.0)
            acc *= tl.where(total > 0, 1 / total, 0.0)[:, None]
            out_offset = ((window_row + row).to(tl.int64) * (GROUP * SLOTS // SPLITS) + head) * VALUE_DIM
            tl.store(OUT + out_offset[:, None] + value_dims[None, :], acc.to(OUT.dtype.element_ty), mask=stores)
        else:
            # A piece that begins mid-segment is its program's first, one that ends mid-segment its last: two suffice.
            partial = 2 * program + (begin == 0).to(tl.int32)
            acc *= tl.where(total > 0, 1 / total, 0.0)[:, None]
            lse = tl.where(total > 0, top + tl.math.log2(total), float("-inf"))
            tl.store(
                PARTIAL_OUT + (partial * LINES + line)[:, None] * VALUE_PAD + value_dims[None, :], acc, mask=stores
            )
            tl.store(PARTIAL_LSE + partial * LINES + line, lse, mask=live)
        unit += end - begin
        if (unit < unit_end) & (unit == (first_tile + tiles) * SLOTS):
            window = tl.load(TILE_WINDOW + unit // SLOTS)
            first_tile = tl.load(TILE_STARTS + window)
            tiles = tl.load(TILE_STARTS + window + 1) - first_tile
            window_row = tl.load(WINDOW_ROW + window)
            window_rows = tl.load(WINDOW_ROWS + window)
            trunk_tiles = tl.load(TRUNK_TILES + window)


@triton.jit
def merge_kernel(
    OUT, PARTIAL_OUT, PARTIAL_LSE, SINKS, SEGMENTS,
    GROUP: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, LINES: tl.constexpr, HAS_SINKS: tl.constexpr,
    PARTIALS: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Program (row, query head): join the partial results of its segment, where it was cut; zero padding rows.

    Where it ``WAITS`` it is launched while `attention_kernel` ends, and reads nothing of that kernel's before it may.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    slot = head // GROUP * SPLITS + head % GROUP // HEADS
    segment = SEGMENTS + (row * SLOTS + slot) * 4
    first_program = tl.load(segment)
    last_program = tl.load(segment + 1)
    local_row = tl.load(segment + 2)
    is_empty = tl.load(segment + 3)
    if WAITS:
        gdc_wait()  # until all of attention's results are in memory
    value_dims = tl.arange(0, VALUE_PAD)
    out_offset = (row.to(tl.int64) * tl.num_programs(1) + head) * VALUE_DIM
    if is_empty == 1:
        nothing = tl.zeros([VALUE_PAD], OUT.dtype.element_ty)
        tl.store(OUT + out_offset + value_dims, nothing, mask=value_dims < VALUE_DIM)
    elif last_program > first_program:
        line = local_row * HEADS + head % GROUP % HEADS
        top = float("-inf")
        total = 0.0
        acc = tl.zeros([VALUE_PAD], tl.float32)
        # Many at once: one after the other, each would wait for memory on its own.
        for begin in range(first_program, last_program + 1, PARTIALS):
            program = begin + tl.arange(0, PARTIALS)
            counts = program <= last_program
            at = (2 * program + (program == first_program).to(tl.int32)) * LINES + line
            lse = tl.load(PARTIAL_LSE + at, mask=counts, other=float("-inf"))
            out = tl.load(
                PARTIAL_OUT + at[:, None] * VALUE_PAD + value_dims[None, :],
                mask=counts[:, None] & (value_dims < VALUE_DIM)[None, :],
                other=0.0,
            )
            new_top = tl.maximum(top, tl.max(lse, 0))
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            fade = tl.math.exp2(top - base)
            weight = tl.math.exp2(lse - base)
            acc = acc * fade + tl.sum(out * weight[:, None], 0)
            total = total * fade + tl.sum(weight, 0)
            top = new_top
        if HAS_SINKS:
            total += tl.math.exp2(tl.load(SINKS + head).to(tl.float32) * LOG2_E - top)
        acc *= tl.where(total > 0, 1 / total, 0.0)
        tl.store(OUT + out_offset + value_dims, acc.to(OUT.dtype.element_ty), mask=value_dims < VALUE_DIM)
