"""The next step's rows, made on the device from what was just chosen, so that it need not wait for the host.

The host does the same with its block tables (`decoder/branches.py`, which decides when a block is copied) and takes the
same block ids in the same order: the two are compared at every step.
"""

import torch
from torch import Tensor


def advance_rows(
    parents: Tensor,
    tokens: Tensor,
    *,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    lengths: Tensor,
    block_tables: Tensor,
    tables_before: Tensor,
    copy_sources: Tensor,
    copy_destinations: Tensor,
    upcoming: Tensor,
    block_size: int,
    scratch_block: int,
) -> Tensor:
    """Give every chosen token its row and its slot, in place: all named tensors hold the next step's afterwards.

    Rows are laid out in tree order: by their parents' rows, siblings in the order given. Where the parent's last block
    is full each child takes a new block; else the last sibling goes on in it and those before it take a copy.

    Args:
        parents: [rows] int64, the row that each chosen token continues; a group's rows continue rows of the group.
        tokens: [rows] int64.
        token_ids: [≥ rows] int64; rows behind `rows` only fill a captured step and stay as they are, here and below.
        positions: [≥ rows] int64.
        slots: [≥ rows] int64, slot = block_id * block_size + offset.
        lengths: [≥ rows] int32.
        block_tables: [≥ rows, columns] int32, with a column to spare for every row.
        tables_before: [rows, columns] int32, a copy of `block_tables`.
        copy_sources: [≥ rows] int64.
        copy_destinations: [≥ rows] int64; the scratch block, in both, where nothing is copied.
        upcoming: [rows] int64: the ids of the next free blocks.
        block_size: tokens of a block.
        scratch_block: see `copy_destinations`.

    Returns:
        [rows] int64: the row of each chosen token.
    """
    if block_tables.is_cuda:
        from cowbeam.kernels.advance_triton import advance_rows_triton as advance
    else:
        advance = _advance_rows_torch
    return advance(
        parents, tokens, token_ids, positions, slots, lengths, block_tables, tables_before, copy_sources,
        copy_destinations, upcoming, block_size, scratch_block,
    )  # fmt: skip


def _advance_rows_torch(
    parents: Tensor,
    tokens: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    lengths: Tensor,
    block_tables: Tensor,
    tables_before: Tensor,
    copy_sources: Tensor,
    copy_destinations: Tensor,
    upcoming: Tensor,
    block_size: int,
    scratch_block: int,
) -> Tensor:
    rows = parents.shape[0]
    order = parents.argsort(stable=True)
    source = parents[order]
    row_of = torch.empty_like(order).scatter_(0, order, torch.arange(rows, device=order.device))
    length = lengths[source].long()
    last_block = tables_before[source, (length - 1) // block_size].long()
    has_younger = torch.zeros_like(source, dtype=torch.bool)
    has_younger[:-1] = source[1:] == source[:-1]
    is_full = length % block_size == 0
    takes = is_full | has_younger
    block = torch.where(takes, upcoming[(takes.cumsum(0) - 1).clamp_(min=0)], last_block)
    copies = takes & ~is_full
    token_ids[:rows] = tokens[order]
    positions[:rows] = length
    slots[:rows] = block * block_size + length % block_size
    lengths[:rows] = length.int() + 1
    copy_sources[:rows] = torch.where(copies, last_block, scratch_block)
    copy_destinations[:rows] = torch.where(copies, block, scratch_block)
    block_tables[:rows] = tables_before[source]
    block_tables[:rows].scatter_(1, (length // block_size)[:, None], block[:, None].int())
    return row_of
