"""What a group has slots for and has not computed: its prompt, or all that it held before it was preempted."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from cowbeam.decoder.blocks import BlockId
from cowbeam.decoder.branches import Branch


class Piece(NamedTuple):
    """Tokens for one forward pass. ``block_table`` leads to their slots and to all before them."""

    token_ids: Sequence[int]
    start: int  # position of the first
    block_table: Sequence[BlockId]
    owner: Branch  # in whose name it is computed: dense states that it leaves behind are the branch's

    @property
    def end(self) -> int:
        """The position behind the last."""
        return self.start + len(self.token_ids)


class Backlog:
    """Pieces in an order in which each one's past is computed before it, or in the same pass."""

    def __init__(self, *, may_cut: bool = True) -> None:
        self._may_cut = may_cut  # else a piece is a whole sequence, and computed at once
        self._pieces: deque[Piece] = deque()
        self.num_tokens = 0

    def add(self, piece: Piece) -> None:
        """Behind all others."""
        self._pieces.append(piece)
        self.num_tokens += len(piece.token_ids)

    def take(self, limit: int) -> Piece:
        """The first piece, or its first ``limit`` tokens where it may be cut."""
        piece = self._pieces.popleft()
        if self._may_cut and len(piece.token_ids) > limit:
            rest = piece._replace(token_ids=piece.token_ids[limit:], start=piece.start + limit)
            self._pieces.appendleft(rest)
            piece = piece._replace(token_ids=piece.token_ids[:limit])
        self.num_tokens -= len(piece.token_ids)
        return piece

    def clear(self) -> None:
        """Nothing is to be computed any more."""
        self._pieces.clear()
        self.num_tokens = 0
