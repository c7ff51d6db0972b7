"""Persistent lists: each link knows the one before it and counts its holders.

A branch's block table is such a list, and so are its tokens. Forking a branch is one more holder of its last link,
whatever the length; freeing it is one holder less, and links that nobody holds any more fall off the end.
"""

from typing import Self, TypeVar


class Link:
    """One element of a persistent list.

    Its holders are the branches whose last link it is and the links that follow it; ``ref_count`` is their number.
    """

    __slots__ = ("parent", "ref_count")

    parent: Self | None
    ref_count: int

    def __init__(self, parent: Self | None) -> None:
        if parent is not None:
            parent.ref_count += 1
        self.parent = parent
        self.ref_count = 1


AnyLink = TypeVar("AnyLink", bound=Link)


def release(link: AnyLink | None) -> list[AnyLink]:
    """Take one holder from ``link``; return the links that have none left, last first.

    A loop, not a recursion: a chain of 100,000 links is freed without a stack of that depth.
    """
    unheld: list[AnyLink] = []
    while link is not None:
        link.ref_count -= 1
        assert link.ref_count >= 0, f"{link!r} was released more often than held"
        if link.ref_count:
            break
        unheld.append(link)
        link = link.parent
    return unheld


def hold(link: AnyLink) -> list[AnyLink]:
    """One holder more for ``link``; return the links that had none, last first. The reverse of ``release``."""
    taken: list[AnyLink] = []
    before: AnyLink | None = link
    while before is not None:
        before.ref_count += 1
        if before.ref_count > 1:  # it was held, and so holds the one before it already
            break
        taken.append(before)
        before = before.parent
    return taken


def links(last: AnyLink | None) -> list[AnyLink]:
    """All links up to ``last``, first one first: O(length), for prefill, results and frames only."""
    chain: list[AnyLink] = []
    while last is not None:
        chain.append(last)
        last = last.parent
    chain.reverse()
    return chain
