"""The block pool: which blocks of KV memory are free, which are held, and by how many.

No tensor is known here: a block is an id. The bytes behind it are ``kv_cache``'s.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple, NewType

from cowbeam.decoder.chain import Link, hold, links, release
from cowbeam.decoder.prefix_cache import PrefixCache

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

    A block that nobody holds is free. Some of the free ones are kept with what they hold while there are others:
    ``prefixes`` finds them by their content. With ``prefix_reuse`` off nothing is ever entered there.
    """

    def __init__(self, num_blocks: int, block_size: int, *, prefix_reuse: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_reuse = prefix_reuse
        self.prefixes = PrefixCache()
        self._free = deque(BlockId(block_id) for block_id in range(num_blocks))
        self._live: dict[BlockId, Block] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, kept ones included."""
        return len(self._free) + self.prefixes.num_kept

    @property
    def num_live(self) -> int:
        """Blocks with at least one holder."""
        return len(self._live)

    def allocate(self, parent: Block | None) -> Block:
        """A free block that follows ``parent``, which gains a holder. Raises OutOfBlocksError, changing nothing."""
        if not self.num_free:
            raise OutOfBlocksError(f"all {self.num_blocks} blocks are in use")
        self._empty(1)
        block = Block(self._free.popleft(), parent)
        self._live[block.block_id] = block
        return block

    def upcoming(self, count: int) -> list[BlockId]:
        """The ids that the next ``count`` calls of ``allocate`` will give, whatever is released in between."""
        assert count <= self.num_free, f"{count} ids asked for, {self.num_free} are free"
        self._empty(count)
        return list(islice(self._free, count))

    def _empty(self, count: int) -> None:
        """Let so many free blocks be without content that is kept."""
        while len(self._free) < count:
            self._free.append(self.prefixes.give_away().block_id)

    def hold(self, block: Block) -> None:
        """One holder more for a block that ``prefixes`` found; it and all before it are live afterwards."""
        for taken in hold(block):
            self.prefixes.take(taken)
            self._live[taken.block_id] = taken

    def release(self, block: Block | None) -> list[Block]:
        """Take one holder from ``block``; the blocks left without one are free, last first, and are returned."""
        unheld = release(block)
        for freed in unheld:
            del self._live[freed.block_id]
            if self.prefixes.knows(freed):
                self.prefixes.keep(freed)
            else:
                self._free.append(freed.block_id)
        return unheld

    def find_prefix(self, token_ids: Sequence[int]) -> list[Block]:
        """Full blocks that hold these tokens, as many of the first as there are; nothing is held by that."""
        found: list[Block] = []
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            tokens = token_ids[start : start + self.block_size]
            block = self.prefixes.find(found[-1] if found else None, tokens)
            if block is None:
                break
            found.append(block)
        return found

    def enter_prefix(self, token_ids: Sequence[int], block_table: Sequence[BlockId], start: int) -> None:
        """Let the blocks that tokens ``start`` and later of a sequence fill be found; ``block_table`` is its table."""
        for column in range(start // self.block_size, len(token_ids) // self.block_size):
            first = column * self.block_size
            self.prefixes.enter(self._live[block_table[column]], token_ids[first : first + self.block_size])

    def forget_prefixes(self) -> None:
        """Nothing computed so far is found from now on."""
        self._free.extend(block.block_id for block in self.prefixes.clear())

    def check_integrity(self, held: Iterable[Block | None]) -> None:
        """Recount everything; ``held`` names the last block of every branch, once a branch.

        Asserts that each ref count is the number of holders, that empty, kept and live ids are disjoint and together
        all, and that nothing is live that nobody holds.
        """
        holders: dict[BlockId, int] = {}
        for block in held:
            if block is not None:
                holders[block.block_id] = holders.get(block.block_id, 0) + 1
        for block in self._live.values():
            if block.parent is not None:
                holders[block.parent.block_id] = holders.get(block.parent.block_id, 0) + 1
        self.prefixes.check_integrity()
        free = [*self._free, *(block.block_id for block in self.prefixes.kept)]
        assert len(set(free)) == len(free), f"an id is free twice: {sorted(free)}"
        live = self._live.keys()
        assert live.isdisjoint(free), f"ids both free and live: {sorted(live & set(free))}"
        assert live | set(free) == set(range(self.num_blocks)), "an id is neither free nor live"
        for block_id, block in self._live.items():
            count = holders.get(block_id, 0)
            assert block.ref_count == count, f"block {block_id} has ref count {block.ref_count} but {count} holders"
        assert holders.keys() <= self._live.keys(), f"freed but held: {sorted(holders.keys() - self._live.keys())}"
