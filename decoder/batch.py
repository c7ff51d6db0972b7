"""The device batch: which branch is which row, and the flat block tables the kernels read.

The persistent lists are the host's copy of the block tables: the scheduler decides by them. The flat table here is
the device's copy. A step sends one source row and one (column, block id) a row, so the host's work does not grow with
the context.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cowbeam.decoder.blocks import BlockCopy
from cowbeam.decoder.branch_states import StateOwner
from cowbeam.decoder.branches import Branch
from cowbeam.decoder.group import Group
from cowbeam.kernels.advance import StepRows

_COLUMNS_AT_ONCE = 32


@dataclass(frozen=True)
class DecodeInputs(StepRows):
    """One step's rows, and how they belong together. All tensors lie on the device."""

    group_starts: Tensor  # [rows] bool: a group begins with this row
    widest_group: int  # rows of the largest group
    owners: Sequence[StateOwner] = ()  # each row's branch, which holds its dense states where the model has such

    def first(self, sizes: Sequence[int]) -> "DecodeInputs":
        """The first rows alone, now those of groups of these sizes: where groups begin does not move with the rows."""
        rows = sum(sizes)
        kept: dict[str, Any] = {name: value[:rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        begins = [number == 0 for size in sizes for number in range(size)]
        kept["group_starts"] = to_device(begins, torch.bool, self.group_starts.device)
        return replace(self, **kept, widest_group=max(sizes), owners=())  # no step is taken ahead over dense states

    def to(self, device: torch.device) -> "DecodeInputs":
        """The same there, for layers that lie there."""
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class Layout:
    """One step's rows on the host: groups one after the other, each in tree order, a slot reserved for every branch."""

    branches: list[Branch]  # in row order
    sources: list[int]  # the row of the step before that each row continues
    copies: list[BlockCopy | None]
    group_starts: list[bool]
    rows_of_group: list[list[int]]  # group g's rows in rank order

    def slots(self, block_size: int) -> list[int]:
        """Where each row's new token goes."""
        return [
            branch.last_block.block_id * block_size + (branch.num_slots - 1) % block_size
            for branch in self.branches
            if branch.last_block is not None
        ]


def lay_out(groups: Sequence[Group]) -> Layout:
    """Reserve a slot for every branch and give it its row.

    Children sorted by their parents' rows stay in depth-first order, so rows that share a block are neighbours.
    """
    needed = sum(group.tree.blocks_needed(group.branches) for group in groups)
    free = groups[0].tree.pool.num_free
    assert needed <= free, f"the step needs {needed} blocks, {free} are free: the scheduler admitted too much"
    branches: list[Branch] = []
    copies: list[BlockCopy | None] = []
    group_starts: list[bool] = []
    for group in groups:
        in_tree_order = sorted(group.branches, key=_row)
        copies += [group.tree.append_slot(branch) for branch in in_tree_order]
        branches += in_tree_order
        group_starts += [True] + [False] * (len(in_tree_order) - 1)
    sources = [_row(branch) for branch in branches]
    for row, branch in enumerate(branches):
        branch.row = row
    rows_of_group = [[_row(branch) for branch in group.branches] for group in groups]
    return Layout(branches, sources, copies, group_starts, rows_of_group)


class Batch:
    """Keeps the flat block tables on the device between steps."""

    def __init__(self, block_size: int, device: torch.device, scratch_block: int) -> None:
        self._block_size = block_size
        self._device = device
        self._scratch_block = scratch_block
        self.tables = torch.zeros(0, 0, dtype=torch.int32, device=device)

    def add_group(self, group: Group) -> None:
        """Give the group's branches rows, in tree order: their whole tables are sent once."""
        by_table = sorted(((branch.block_table, branch) for branch in group.branches), key=lambda pair: pair[0])
        self._set_columns(max(self.tables.shape[1], *(len(table) for table, _ in by_table)))
        columns = self.tables.shape[1]
        for number, (_, branch) in enumerate(by_table):
            branch.row = len(self.tables) + number
        rows = to_device([[*table, *[0] * (columns - len(table))] for table, _ in by_table], torch.int32, self._device)
        self.tables = torch.cat([self.tables, rows])

    def _set_columns(self, needed: int) -> None:
        """Columns for tables of ``needed`` blocks, a few to spare; what one long request took is given back."""
        columns = -(-needed // _COLUMNS_AT_ONCE) * _COLUMNS_AT_ONCE
        missing = columns - self.tables.shape[1]
        if missing > 0:
            self.tables = torch.nn.functional.pad(self.tables, (0, missing))
        elif missing < 0:
            self.tables = self.tables[:, :columns]

    def upload(self, layout: Layout) -> DecodeInputs:
        """Send what is new of the rows."""
        branches = layout.branches
        token_ids = [branch.last_token.token_id for branch in branches if branch.last_token is not None]
        last_blocks = [branch.last_block.block_id for branch in branches if branch.last_block is not None]
        positions = [branch.num_slots - 1 for branch in branches]
        columns = [position // self._block_size for position in positions]
        idle = BlockCopy(self._scratch_block, self._scratch_block)  # type: ignore[arg-type]
        sources, destinations = zip(*(copy or idle for copy in layout.copies), strict=True)
        packed = to_device(
            [token_ids, last_blocks, positions, layout.sources, columns, layout.group_starts, sources, destinations],
            torch.long,
            self._device,
        )
        token_ids_, blocks_, positions_, sources_, columns_, starts_, *copies_ = packed
        self._set_columns(max(columns) + 1)
        self.tables = self.tables[sources_]
        self.tables.scatter_(1, columns_[:, None], blocks_[:, None].int())
        return DecodeInputs(
            token_ids=token_ids_,
            positions=positions_,
            slots=blocks_ * self._block_size + positions_ % self._block_size,
            lengths=(positions_ + 1).int(),
            block_tables=self.tables,
            group_starts=starts_.bool(),
            copy_sources=copies_[0],
            copy_destinations=copies_[1],
            widest_group=max(map(len, layout.rows_of_group)),
            owners=branches,
        )


def to_device(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Send host numbers without waiting for the device."""
    return ready_to_send(numbers, dtype, device).to(device, non_blocking=True)


def ready_to_send(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the host, from where a copy to ``device`` need not be waited for, as one from unpinned memory may be."""
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _row(branch: Branch) -> int:
    assert branch.row is not None, f"branch {branch.branch_id} has no row"
    return branch.row
