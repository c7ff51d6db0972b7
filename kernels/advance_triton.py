# mypy: allow-untyped-defs, allow-incomplete-defs
"""`kernels/advance.py` in two launches: the rows' numbers by one program, then their tables."""

import triton
import triton.language as tl
from torch import Tensor

from cowbeam.kernels.advance import StepRows

CHUNK = 32


def advance_rows_triton(
    parents: Tensor,
    tokens: Tensor,
    step: StepRows,
    tables_before: Tensor,
    upcoming: Tensor,
    block_size: int,
    scratch_block: int,
) -> Tensor:
    """See `advance_rows`."""
    rows, tables = parents.shape[0], step.block_tables
    assert tables.stride(1) == tables_before.stride(1) == 1, (
        f"a row's table must be contiguous, not strides {tables.stride()}"
    )
    row_of, new_block = parents.new_empty(rows), parents.new_empty(rows)
    _rows_kernel[(1,)](
        parents, tokens, step.token_ids, step.positions, step.slots, step.lengths, tables_before, step.copy_sources,
        step.copy_destinations, upcoming, row_of, new_block, rows, tables_before.stride(0), scratch_block,
        BLOCK_SIZE=block_size, ROWS_PAD=max(CHUNK, triton.next_power_of_2(rows)), CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    columns = tables.shape[1]
    _tables_kernel[(rows, triton.cdiv(columns, 1024))](
        parents, row_of, new_block, step.positions, tables_before, tables, tables_before.stride(0), tables.stride(0),
        columns, BLOCK_SIZE=block_size, COLUMNS=1024, num_warps=4,
    )  # fmt: skip
    return row_of


@triton.jit
def _rows_kernel(
    PARENTS, TOKENS, TOKEN_IDS, POSITIONS, SLOTS, LENGTHS, TABLES, COPY_SOURCES, COPY_DESTINATIONS, UPCOMING, ROW_OF,
    NEW_BLOCK, rows, table_row, scratch_block,
    BLOCK_SIZE: tl.constexpr, ROWS_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, ROWS_PAD)
    live = at < rows
    parent = tl.load(PARENTS + at, mask=live, other=0)
    token = tl.load(TOKENS + at, mask=live, other=0)
    length = tl.load(LENGTHS + parent, mask=live, other=1).to(tl.int64)
    last_block = tl.load(TABLES + parent * table_row + (length - 1) // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    # Counting what comes before instead of sorting: by parent, siblings in the order given.
    row = tl.zeros([ROWS_PAD], tl.int64)
    younger = tl.zeros([ROWS_PAD], tl.int64)
    for first in range(0, rows, CHUNK):
        other = first + tl.arange(0, CHUNK)
        others_parent = tl.load(PARENTS + other, mask=other < rows, other=2147483647)
        is_sibling = others_parent[None, :] == parent[:, None]
        before = (others_parent[None, :] < parent[:, None]) | (is_sibling & (other[None, :] < at[:, None]))
        row += tl.sum(before.to(tl.int64), 1)
        younger += tl.sum((is_sibling & (other[None, :] > at[:, None])).to(tl.int64), 1)
    is_full = length % BLOCK_SIZE == 0
    takes = (is_full | (younger > 0)) & live
    # Blocks are taken in row order, so each needs the number taken by the rows above: through memory, in row order.
    tl.store(NEW_BLOCK + row, takes.to(tl.int64), mask=live)
    tl.debug_barrier()
    by_row = tl.load(NEW_BLOCK + at, mask=live, other=0)
    tl.debug_barrier()
    rank = tl.maximum(tl.cumsum(by_row, 0) - 1, 0)
    tl.store(NEW_BLOCK + at, tl.load(UPCOMING + rank, mask=live, other=0), mask=live)
    tl.debug_barrier()
    block = tl.where(takes, tl.load(NEW_BLOCK + row, mask=live, other=0), last_block)
    tl.debug_barrier()
    copies = takes & (is_full == 0)
    tl.store(NEW_BLOCK + row, block, mask=live)
    tl.store(ROW_OF + at, row, mask=live)
    tl.store(TOKEN_IDS + row, token, mask=live)
    tl.store(POSITIONS + row, length, mask=live)
    tl.store(SLOTS + row, block * BLOCK_SIZE + length % BLOCK_SIZE, mask=live)
    tl.store(LENGTHS + row, (length + 1).to(tl.int32), mask=live)
    tl.store(COPY_SOURCES + row, tl.where(copies, last_block, scratch_block), mask=live)
    tl.store(COPY_DESTINATIONS + row, tl.where(copies, block, scratch_block), mask=live)


@triton.jit
def _tables_kernel(
    PARENTS, ROW_OF, NEW_BLOCK, POSITIONS, BEFORE, TABLES, before_row, table_row, columns,
    BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    parent = tl.load(PARENTS + at)
    row = tl.load(ROW_OF + at)
    last_column = tl.load(POSITIONS + row) // BLOCK_SIZE
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    block = tl.load(BEFORE + parent * before_row + column, mask=column < columns, other=0)
    block = tl.where(column == last_column, tl.load(NEW_BLOCK + row).to(tl.int32), block)
    tl.store(TABLES + row * table_row + column, block, mask=column < columns)
