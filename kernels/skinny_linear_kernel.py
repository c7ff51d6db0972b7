# mypy: allow-untyped-defs, allow-incomplete-defs
"""The launch of `kernels/skinny_linear.py`.

Legend: unit u is step u % steps of output tile u // steps; program p has units [p * per, (p + 1) * per). Its partial
results are in slot 2p, of a tile that began before, and 2p + 1, of one that begins with it.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def skinny_linear_kernel(
    x,
    weight,
    bias,
    out,
    partial,
    counters,
    rows,
    outputs,
    inputs,
    x_stride,
    per,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One program's piece; see `skinny_linear`."""
    program = tl.program_id(0)
    steps = tl.cdiv(inputs, INPUTS)
    units = tl.cdiv(outputs, OUTPUTS) * steps
    begin = program * per
    end = tl.minimum(begin + per, units)
    m = tl.arange(0, ROWS)
    if EARLY:
        for unit in range(begin, tl.minimum(begin + STAGES, end)):
            _prefetch(weight, unit, steps, outputs, inputs, OUTPUTS, INPUTS)
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    acc = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    for unit in tl.range(begin, end, num_stages=STAGES):
        tile = unit // steps
        n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        k = (unit - tile * steps) * INPUTS + tl.arange(0, INPUTS)
        w_at = weight + n.to(tl.int64)[:, None] * inputs + k[None, :]
        x_at = x + m[None, :] * x_stride + k[:, None]
        if EVEN:
            w = tl.load(w_at, eviction_policy="evict_first")
            xt = tl.load(x_at, mask=m[None, :] < rows, other=0.0)
        else:
            w = tl.load(
                w_at, mask=(n[:, None] < outputs) & (k[None, :] < inputs), other=0.0, eviction_policy="evict_first"
            )
            xt = tl.load(x_at, mask=(m[None, :] < rows) & (k[:, None] < inputs), other=0.0)
        if UPCAST:
            w, xt = w.to(tl.float32), xt.to(tl.float32)
        acc = tl.dot(w, xt, acc, input_precision="ieee")
        if (unit + 1 == end) | (unit + 1 == (tile + 1) * steps):
            # Whole if this program began the tile and ends it. No loop and no barrier here, else nothing is pipelined.
            if (begin <= tile * steps) & (unit + 1 == (tile + 1) * steps):
                _write(acc, bias, out, tile, rows, outputs, HAS_BIAS, ROWS, OUTPUTS)
            else:
                slot = 2 * program + (begin <= tile * steps).to(tl.int32)
                tl.store(partial + slot * OUTPUTS * ROWS + _inside(ROWS, OUTPUTS), acc)
            acc = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    if begin < end:
        tl.debug_barrier()  # all threads' parts are written before one thread says so
        first_tile = begin // steps
        last_tile = (end - 1) // steps
        _add_up(bias, out, partial, counters, first_tile, steps, per, rows, outputs, HAS_BIAS, ROWS, OUTPUTS)
        if last_tile != first_tile:
            _add_up(bias, out, partial, counters, last_tile, steps, per, rows, outputs, HAS_BIAS, ROWS, OUTPUTS)


@triton.jit
def _prefetch(weight, unit, steps, outputs, inputs, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    """Ask for the unit's part of the weight, in lines of 128 bytes, without waiting for it."""
    LINE: tl.constexpr = 128 * 8 // weight.dtype.element_ty.primitive_bitwidth
    tile = unit // steps
    n = tl.minimum(tile * OUTPUTS + tl.arange(0, OUTPUTS), outputs - 1)
    k = tl.minimum((unit - tile * steps) * INPUTS + tl.arange(0, INPUTS // LINE) * LINE, inputs - 1)
    at = weight + n.to(tl.int64)[:, None] * inputs + k[None, :]
    # An output that nobody uses: the language knows no instruction without one.
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _inside(ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    return tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]


@triton.jit
def _add_up(
    bias, out, partial, counters, tile, steps, per, rows, outputs,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Say that this program's part of the tile is there; whoever says so last adds the parts up."""
    first = tile * steps // per
    last = (tile * steps + steps - 1) // per
    if first != last:
        arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        tl.debug_barrier()
        if arrived == last - first:
            at = partial + _inside(ROWS, OUTPUTS)
            acc = tl.load(at + (2 * first + 1) * OUTPUTS * ROWS, cache_modifier=".cg")
            for other in range(first + 1, last + 1):
                acc += tl.load(at + 2 * other * OUTPUTS * ROWS, cache_modifier=".cg")
            tl.store(counters + tile, 0)
            _write(acc, bias, out, tile, rows, outputs, HAS_BIAS, ROWS, OUTPUTS)


@triton.jit
def _write(
    acc, bias, out, tile, rows, outputs, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr
):  # fmt: skip
    n = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    m = tl.arange(0, ROWS)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    at = out + m.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m[None, :] < rows) & (n[:, None] < outputs))
