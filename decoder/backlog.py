"""What a group has slots for and has not computed: its prompt, or all that it held before it was preempted."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from cowbeam.decoder.blocks import BlockId


class Piece(NamedTuple):
    """Tokens for one forward pass. ``block_table`` leads to their slots and to all before them."""

    token_ids: Sequence[int]
    start: int  # position of the first
    block_table: Sequence[BlockId]

    @property
    def end(self) -> int:
        """The position behind the last."""
        return self.start + len(self.token_ids)


class Backlog:
    """Pieces in an order in which each one's past is computed before it, or in the same pass."""

    def __init__(self) -> None:
        self._pieces: deque[Piece] = deque()
        self.num_tokens = 0

    def add(self, piece: Piece) -> None:
        """Behind all others."""
        self._pieces.append(piece)
        self.num_tokens += len(piece.token_ids)

    def take(self, limit: int) -> Piece:
        """The first piece, or its first ``limit`` tokens."""
        piece = self._pieces.popleft()
        if len(piece.token_ids) > limit:
            rest = piece._replace(token_ids=piece.token_ids[limit:], start=piece.start + limit)
            self._pieces.appendleft(rest)
            piece = piece._replace(token_ids=piece.token_ids[:limit])
        self.num_tokens -= len(piece.token_ids)
        return piece

    def clear(self) -> None:
        """Nothing is to be computed any more."""
        self._pieces.clear()
        self.num_tokens = 0
