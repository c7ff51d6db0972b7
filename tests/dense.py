"""Dense copies beside block tables: what each branch must read, whatever was shared, copied or freed in between.

The K/V of a token stand as one number in an array of slots. Every branch also keeps its numbers as a plain list, which
shares nothing with anybody. ``Forest.check`` reads each branch through its block table and compares.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from cowbeam.decoder.blocks import BlockCopy, BlockPool
from cowbeam.decoder.branches import Branch, BranchTree

UNWRITTEN = -1  # stands where NaN would: reading it is always wrong


class Forest:
    """Several trees on one pool. ``tree_class`` and ``pool_class`` take the mutants of the tests."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        tree_class: type[BranchTree] = BranchTree,
        pool_class: type[BlockPool] = BlockPool,
    ) -> None:
        self.pool = pool_class(num_blocks, block_size)
        self.trees: list[BranchTree] = []
        self.dense: dict[Branch, list[int]] = {}
        self._tree_class = tree_class
        self._tree_of: dict[Branch, BranchTree] = {}
        self._slots = np.full(num_blocks * block_size, UNWRITTEN)
        self._next_value = 0

    @property
    def branches(self) -> list[Branch]:
        return list(self.dense)

    def branches_of(self, tree: BranchTree) -> list[Branch]:
        return [branch for branch in self.dense if self._tree_of[branch] is tree]

    def plant(self, num_tokens: int) -> Branch:
        tree = self._tree_class(self.pool)
        branch = tree.plant(num_tokens)
        self.trees.append(tree)
        self._tree_of[branch] = tree
        self.dense[branch] = [self._fresh_value() for _ in range(num_tokens)]
        self._slots[self.slots_of(branch)] = self.dense[branch]
        return branch

    def fork(self, parent: Branch) -> Branch:
        tree = self._tree_of[parent]
        child = tree.fork(parent)
        self._tree_of[child] = tree
        self.dense[child] = list(self.dense[parent])
        return child

    def free(self, branch: Branch) -> None:
        self._tree_of.pop(branch).free(branch)
        del self.dense[branch]
        live = {block for each in self.branches for block in each.block_table}
        for block in set(range(self.pool.num_blocks)) - live:
            self._slots[block * self.pool.block_size : (block + 1) * self.pool.block_size] = UNWRITTEN

    def free_all(self) -> None:
        for branch in self.branches:
            self.free(branch)

    def advance(self, tree: BranchTree, parents: Sequence[Branch]) -> None:
        """A search's step: the first child keeps its parent's branch, others fork, then the childless are freed."""
        taken: list[Branch] = []
        for parent in parents:
            taken.append(self.fork(parent) if parent in taken else parent)
        for branch in self.branches_of(tree):
            if branch not in taken:
                self.free(branch)
        self.step(taken)

    def blocks_needed(self, branches: Iterable[Branch]) -> int:
        chosen = list(branches)
        return sum(
            tree.blocks_needed([branch for branch in chosen if self._tree_of[branch] is tree]) for tree in self.trees
        )

    def step(self, branches: Sequence[Branch]) -> None:
        """One token for each of ``branches``, whose slots are reserved in this order."""
        needed, free = self.blocks_needed(branches), self.pool.num_free
        copies: list[BlockCopy] = []
        for branch in branches:
            tree = self._tree_of[branch]
            tree.append_token(branch, token_id=0, logprob=0.0, beam=0)
            copy = tree.append_slot(branch)
            copies += [copy] if copy else []
        taken = free - self.pool.num_free
        assert taken == needed, f"blocks_needed said {needed}, {taken} were taken"
        values = [self._fresh_value() for _ in branches]
        for branch, value in zip(branches, values, strict=True):
            self.dense[branch].append(value)
        self.run(copies, [self._tree_of[branch].slot(branch) for branch in branches], values)

    def run(self, copies: Sequence[BlockCopy], slots: Sequence[int], values: Sequence[int]) -> None:
        """The device's part: all copies of whole blocks, then all writes."""
        self.copy(copies)
        self.write(slots, values)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        destinations = [copy.destination for copy in copies]
        assert len(set(destinations)) == len(destinations), f"two copies into one block: {copies}"
        assert not {copy.source for copy in copies} & set(destinations), f"a copy's source is written: {copies}"
        blocks = self._slots.reshape(self.pool.num_blocks, self.pool.block_size)
        for source, destination in copies:
            blocks[destination] = blocks[source]

    def write(self, slots: Sequence[int], values: Sequence[int]) -> None:
        assert len(set(slots)) == len(slots), f"two tokens in one slot: {slots}"
        self._slots[list(slots)] = values

    def slots_of(self, branch: Branch) -> list[int]:
        """The branch's slots in token order, through its block table."""
        size, table = self.pool.block_size, branch.block_table
        assert len(table) == -(-branch.num_slots // size), f"{len(table)} blocks for {branch.num_slots} tokens"
        return [table[position // size] * size + position % size for position in range(branch.num_slots)]

    def check(self) -> None:
        """Every branch reads its own tokens; every count is what a recount finds."""
        for branch, values in self.dense.items():
            read = self._slots[self.slots_of(branch)].tolist()
            assert read == values, f"branch {branch.branch_id} reads {read} instead of {values}"
        self.pool.check_integrity([branch.last_block for branch in self.dense])
        for tree in self.trees:
            branches = self.branches_of(tree)
            assert list(tree.branches.values()) == branches
            blocks = {block for branch in branches for block in branch.block_table}
            assert tree.num_blocks == len(blocks), f"num_blocks is {tree.num_blocks}, the tables hold {len(blocks)}"
            distinct = {value for branch in branches for value in self.dense[branch]}
            assert tree.num_tokens == len(distinct), f"num_tokens is {tree.num_tokens}, {len(distinct)} are distinct"

    def _fresh_value(self) -> int:
        self._next_value += 1
        return self._next_value
