"""The next step's rows, made on the device from what was just chosen, so that it need not wait for the host.

The host does the same with its block tables (`decoder/branches.py`, which decides when a block is copied) and takes the
same block ids in the same order: the two are compared at every step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepRows:
    """What a decode step knows of each of its rows, on the device.

    Tensors may hold more rows than are advanced: those only fill a captured step, and stay as they are.
    """

    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    slots: Tensor  # [rows] int64, slot = block_id * block_size + offset
    lengths: Tensor  # [rows] int32, this step's token included
    block_tables: Tensor  # [rows, columns] int32; what lies past a row's length is garbage
    copy_sources: Tensor  # [rows] int64: the block that is copied before the row writes its slot,
    copy_destinations: Tensor  # [rows] int64: and to which; both the same where nothing is


def advance_rows(
    parents: Tensor,
    tokens: Tensor,
    step: StepRows,
    *,
    tables_before: Tensor,
    upcoming: Tensor,
    block_size: int,
    scratch_block: int,
) -> Tensor:
    """Give every chosen token its row and its slot, in place: ``step`` is the next one afterwards.

    Rows are laid out in tree order: by their parents' rows, siblings in the order given. Where the parent's last block
    is full each child takes a new block; else the last sibling goes on in it and those before it take a copy.

    Args:
        parents: [rows] int64, the row that each chosen token continues; a group's rows continue rows of the group.
        tokens: [rows] int64.
        step: the step just computed, with a column of its block tables to spare for every row.
        tables_before: [rows, columns] int32, a copy of its block tables.
        upcoming: [rows] int64: the ids of the next free blocks.
        block_size: tokens of a block.
        scratch_block: source and destination of copies where nothing is copied.

    Returns:
        [rows] int64: the row of each chosen token.
    """
    if tables_before.is_cuda:
        from cowbeam.kernels.advance_triton import advance_rows_triton as advance
    else:
        advance = _advance_rows_torch
    return advance(parents, tokens, step, tables_before, upcoming, block_size, scratch_block)


def _advance_rows_torch(
    parents: Tensor,
    tokens: Tensor,
    step: StepRows,
    tables_before: Tensor,
    upcoming: Tensor,
    block_size: int,
    scratch_block: int,
) -> Tensor:
    rows = parents.shape[0]
    order = parents.argsort(stable=True)
    source = parents[order]
    row_of = torch.empty_like(order).scatter_(0, order, torch.arange(rows, device=order.device))
    length = step.lengths[source].long()
    last_block = tables_before[source, (length - 1) // block_size].long()
    has_younger = torch.zeros_like(source, dtype=torch.bool)
    has_younger[:-1] = source[1:] == source[:-1]
    is_full = length % block_size == 0
    takes = is_full | has_younger
    block = torch.where(takes, upcoming[(takes.cumsum(0) - 1).clamp_(min=0)], last_block)
    copies = takes & ~is_full
    step.token_ids[:rows] = tokens[order]
    step.positions[:rows] = length
    step.slots[:rows] = block * block_size + length % block_size
    step.lengths[:rows] = length.int() + 1
    step.copy_sources[:rows] = torch.where(copies, last_block, scratch_block)
    step.copy_destinations[:rows] = torch.where(copies, block, scratch_block)
    step.block_tables[:rows] = tables_before[source]
    step.block_tables[:rows].scatter_(1, (length // block_size)[:, None], block[:, None].int())
    return row_of
