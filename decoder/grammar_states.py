"""How far each branch of a request is in its grammar, at a price that does not grow with the length."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

REACH = 64  # a matcher reads at most so many tokens again
COPIED_AS_ONE_IS_READ = 100  # tokens: what a fork copies in the time in which a matcher reads one (30 to 300)


class Place:
    """A point in the tree of all that was chosen: a token and the place before it; the root has neither."""

    __slots__ = ("before", "depth", "token_id")

    def __init__(self, before: "Place | None" = None, token_id: int | None = None) -> None:
        self.before = before
        self.token_id = token_id
        self.depth: int = 0 if before is None else before.depth + 1

    def upwards(self, reach: int) -> "Iterator[Place]":
        """This place and the ``reach`` ones before it."""
        place: Place | None = self
        for _ in range(reach + 1):
            if place is None:
                return
            yield place
            place = place.before


class Reader:
    """A matcher of the library's, and the place up to which it has read."""

    def __init__(self, matcher: Any, place: Place) -> None:
        self.matcher = matcher
        self.place = place

    def fork(self) -> "Reader":
        """Copies what the library keeps of every token, to be able to go back."""
        return type(self)(self.matcher.fork(), self.place)

    def goes_on(self, token_id: int) -> bool:
        """It takes the token, and more may follow; else it stays where it is."""
        if not self.matcher.accept_token(token_id):
            return False
        if self.matcher.is_terminated():  # by an EOS: a beam that only fills a place may go on behind one
            self.matcher.rollback(1)
            return False
        self.place = Place(self.place, token_id)
        return True

    def move(self, place: Place, common: Place) -> None:
        """Back to ``common``, which lies before both, and from there on to ``place``."""
        if back := self.place.depth - common.depth:
            self.matcher.rollback(back)
        for step in reversed([*place.upwards(place.depth - common.depth - 1)]):
            taken = self.matcher.accept_token(step.token_id)
            assert taken, "another matcher of this grammar has read the same"
        self.place = place


class GrammarStates:
    """How far each live branch of one request is in the grammar, by rank. Before the first choice there is one branch.

    A branch's state is a matcher of its own, with which its first child goes on. A further child takes the matcher of a
    branch that was dropped nearby: it goes back to where the two parted and reads the rest, a few tokens in beams,
    whatever the length. Only where none is near, or the text is so short that it costs less, a matcher is copied. The
    state of a branch that the grammar has no token for is None: a beam that only fills a place.
    """

    def __init__(self, matcher: Any, vocabulary_size: int, permitted: NDArray[np.int32] | None = None) -> None:
        self._readers: list[Reader | None] = [Reader(matcher, Place())]
        self._spare: list[Reader] = []  # of dropped branches, oldest first; at most as many as there are branches
        self.depth = 0  # tokens of each branch
        self.permitted = permitted  # anywhere
        self._vocabulary_size = vocabulary_size

    @property
    def num_words(self) -> int:
        """32-bit words of a row of ``masks``."""
        return -(-self._vocabulary_size // 32)

    def fill_masks(self, masks: Any, start: int = 0) -> None:
        """Which tokens may follow in the ranks from ``start`` on, a bit each: int32 [ranks, num_words] on the host."""
        for row in range(len(masks)):
            reader = self._readers[start + row]
            if reader is None:
                masks[row] = 0
            else:
                reader.matcher.fill_next_token_bitmask(masks, row)

    def follow(self, parents: Sequence[int], token_ids: Sequence[int]) -> None:
        """The live branches are those of ranks ``parents`` with a token more each."""
        if len(self._readers) == 1:
            parents = [0] * len(parents)
        readers = self._hand_on(parents)
        self._readers = []
        for reader, token_id in zip(readers, token_ids, strict=True):
            goes_on = reader is not None and reader.goes_on(token_id)
            self._readers.append(reader if goes_on else None)
            if reader is not None and not goes_on:
                self._spare.append(reader)
        self.depth += 1
        self._spare = [one for one in self._spare if self.depth - one.place.depth <= self._reach][-len(parents) :]

    def _hand_on(self, parents: Sequence[int]) -> list[Reader | None]:
        """A reader for each child, where its parent is. All of them first: taking a token moves a reader."""
        kept = set(parents)
        self._spare += [one for rank, one in enumerate(self._readers) if one is not None and rank not in kept]
        near = self._spares_by_place() if len(kept) < len(parents) else {}
        taken: set[int] = set()
        readers: list[Reader | None] = []
        for parent in parents:
            reader = self._readers[parent]
            if reader is not None and parent in taken:
                reader = self._moved(reader.place, near) or reader.fork()
            taken.add(parent)
            readers.append(reader)
        return readers

    @property
    def _reach(self) -> int:
        return min(REACH, self.depth // COPIED_AS_ONE_IS_READ)

    def _spares_by_place(self) -> dict[Place, list[Reader]]:
        """Those that have been at a place a while ago and can go back there."""
        near: dict[Place, list[Reader]] = {}
        if self._reach:
            for spare in self._spare:
                for place in spare.place.upwards(self._reach):
                    near.setdefault(place, []).append(spare)
        return near

    def _moved(self, place: Place, near: dict[Place, list[Reader]]) -> Reader | None:
        """The spare one that has the least to read, moved to ``place``."""
        for common in place.upwards(self._reach):
            for spare in near.get(common, ()):
                if spare in self._spare:
                    self._spare.remove(spare)
                    spare.move(place, common)
                    return spare
        return None
