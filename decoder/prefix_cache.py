"""Full blocks by their content, so that a prompt which begins like an earlier one takes over its blocks.

A block here is in use or *kept*: held by nobody, but not given away while there are free ones. A block is found by the
block before it and its own tokens, so by all tokens up to its end. The block before it is known by identity, not by its
id, and each content has one block: an id that has been given away and taken anew finds nothing that it had been.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cowbeam.decoder.blocks import Block

_Content = tuple["Block | None", tuple[int, ...]]  # the block before it, and its tokens


class PrefixCache:
    """Knows which blocks hold what, and which of them to give away first. The pool owns it."""

    def __init__(self) -> None:
        self._by_content: dict[_Content, Block] = {}
        self._content_of: dict[Block, _Content] = {}
        # Held by nobody, least recently used first. A block is in use as long as one that follows it: so what follows a
        # block always stands before it here, and the first is followed by nothing that is kept.
        self._kept: OrderedDict[Block, None] = OrderedDict()
        # Raised by whatever may change how much of a prompt is found in blocks that are in use.
        self.changes = 0
        # Raised when everything is forgotten: blocks that were computed before must not be entered after.
        self.generation = 0

    @property
    def num_kept(self) -> int:
        """Blocks that nobody holds and that can be found."""
        return len(self._kept)

    @property
    def kept(self) -> Sequence["Block"]:
        """They, least recently used first."""
        return list(self._kept)

    def find(self, parent: "Block | None", token_ids: Sequence[int]) -> "Block | None":
        """The block that follows ``parent`` with these tokens."""
        return self._by_content.get((parent, tuple(token_ids)))

    def knows(self, block: "Block") -> bool:
        """The block can be found."""
        return block in self._content_of

    def enter(self, block: "Block", token_ids: Sequence[int]) -> None:
        """Make a full block that is in use known by its tokens, all computed or about to be by the next pass.

        Nothing happens where another block has that content, or where the block before it cannot be found.
        """
        content = (block.parent, tuple(token_ids))
        if content in self._by_content or block in self._content_of:
            return
        if block.parent is not None and block.parent not in self._content_of:
            return
        self._by_content[content] = block
        self._content_of[block] = content
        self.changes += 1

    def keep(self, block: "Block") -> None:
        """Nobody holds this block, which can be found, any more."""
        self._kept[block] = None
        self.changes += 1

    def take(self, block: "Block") -> None:
        """Somebody holds this block again."""
        del self._kept[block]
        self.changes += 1

    def give_away(self) -> "Block":
        """Forget the kept block that was used least recently."""
        block, _ = self._kept.popitem(last=False)
        self._forget(block)
        return block

    def forget(self, block: "Block") -> None:
        """What this block in use holds must not be found (any more); what follows it is not found either then."""
        if block in self._content_of:
            self._forget(block)
            self.changes += 1

    def clear(self) -> list["Block"]:
        """Forget everything; the blocks that nobody holds."""
        # At once, and only then: a stream that Python collects in between gives blocks back, known by what they hold.
        self.changes += 1
        self.generation += 1
        nothing: OrderedDict[Block, None] = OrderedDict()
        kept, self._kept, self._by_content, self._content_of = self._kept, nothing, {}, {}
        return list(kept)

    def _forget(self, block: "Block") -> None:
        del self._by_content[self._content_of.pop(block)]

    def check_integrity(self) -> None:
        """Assert that the two maps agree, and the order of what is kept."""
        assert {block: content for content, block in self._by_content.items()} == self._content_of, "maps disagree"
        place = {block: number for number, block in enumerate(self._kept)}
        for block in self._kept:
            assert block in self._content_of, f"{block!r} is kept but cannot be found"
            assert block.ref_count == 0, f"{block!r} is kept and held"
            before = block.parent
            assert before not in place or place[before] > place[block], f"{before!r} would go before what follows it"
