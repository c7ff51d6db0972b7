"""The block pool: which blocks of KV memory are free, which are held, and by how many.

No tensor is known here: a block is an id. The bytes behind it are ``kv_cache``'s.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple, NewType

from cowbeam.decoder.chain import Link, links, release

BlockId = NewType("BlockId", int)


class OutOfBlocksError(RuntimeError):
    """The pool has fewer free blocks than the step needs. The scheduler never lets a user see it."""


class BlockCopy(NamedTuple):
    """Copy all of ``source``'s slots to ``destination`` before anything of this step is written."""

    source: BlockId
    destination: BlockId


class Block(Link):
    """``block_size`` consecutive token positions of KV in all layers; ``parent`` is the block before it."""

    __slots__ = ("block_id",)

    def __init__(self, block_id: BlockId, parent: "Block | None") -> None:
        super().__init__(parent)
        self.block_id = block_id

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count})"


def block_table(last_block: Block | None) -> list[BlockId]:
    """The block ids up to ``last_block`` in logical order: O(blocks), for prefill and frames only."""
    return [block.block_id for block in links(last_block)]


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` slots. A new block's one holder is whoever asked for it.

    A freed id is reused first in, first out, so the ids that come next are known before it is known what is freed:
    a device that runs a step ahead can take them by itself (`upcoming`).
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(BlockId(block_id) for block_id in range(num_blocks))
        self._live: dict[BlockId, Block] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_live(self) -> int:
        """Blocks with at least one holder."""
        return len(self._live)

    def allocate(self, parent: Block | None) -> Block:
        """A free block that follows ``parent``, which gains a holder. Raises OutOfBlocksError, changing nothing."""
        if not self._free:
            raise OutOfBlocksError(f"all {self.num_blocks} blocks are in use")
        block = Block(self._free.popleft(), parent)
        self._live[block.block_id] = block
        return block

    def upcoming(self, count: int) -> list[BlockId]:
        """The ids that the next ``count`` calls of ``allocate`` will give, whatever is released in between."""
        assert count <= len(self._free), f"{count} ids asked for, {len(self._free)} are free"
        return list(islice(self._free, count))

    def release(self, block: Block | None) -> list[Block]:
        """Take one holder from ``block``; the blocks left without one return to the pool and are returned."""
        unheld = release(block)
        for freed in unheld:
            del self._live[freed.block_id]
            self._free.append(freed.block_id)
        return unheld

    def check_integrity(self, held: Iterable[Block | None]) -> None:
        """Recount everything; ``held`` names the last block of every branch, once a branch.

        Asserts that each ref count is the number of holders, that free and live ids are disjoint and together all,
        and that nothing is live that nobody holds.
        """
        holders: dict[BlockId, int] = {}
        for block in held:
            if block is not None:
                holders[block.block_id] = holders.get(block.block_id, 0) + 1
        for block in self._live.values():
            if block.parent is not None:
                holders[block.parent.block_id] = holders.get(block.parent.block_id, 0) + 1
        free = set(self._free)
        assert len(free) == len(self._free), f"an id is free twice: {sorted(self._free)}"
        assert not free & self._live.keys(), f"ids both free and live: {sorted(free & self._live.keys())}"
        assert free | self._live.keys() == set(range(self.num_blocks)), "an id is neither free nor live"
        for block_id, block in self._live.items():
            count = holders.get(block_id, 0)
            assert block.ref_count == count, f"block {block_id} has ref count {block.ref_count} but {count} holders"
        assert holders.keys() <= self._live.keys(), f"freed but held: {sorted(holders.keys() - self._live.keys())}"
