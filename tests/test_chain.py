"""Persistent lists: what a holder is, and that long chains need no deep stack."""

import pytest

from cowbeam.decoder.chain import Link, links, release


def chain(length: int) -> list[Link]:
    """Links that one branch holds, first one first."""
    made: list[Link] = []
    for _ in range(length):
        link = Link(made[-1] if made else None)
        if made:
            release(made[-1])  # the follower holds it from here on
        made.append(link)
    return made


def test_links_come_oldest_first():
    made = chain(4)
    assert links(made[-1]) == made
    assert links(made[1]) == made[:2]
    assert links(None) == []


def test_a_link_counts_branches_and_followers():
    trunk = chain(2)
    first, second = Link(trunk[1]), Link(trunk[1])
    assert [link.ref_count for link in (*trunk, first, second)] == [1, 3, 1, 1]


def test_release_returns_the_unheld_last_first_and_stops_at_the_first_one_held():
    trunk = chain(3)
    first, second = Link(trunk[2]), Link(trunk[2])
    release(trunk[2])
    assert release(first) == [first]
    assert trunk[2].ref_count == 1
    assert release(second) == [second, *reversed(trunk)]
    assert release(None) == []


def test_one_release_too_many_is_noticed():
    """A double free must not hand the same block out twice (sglang fork.py: nested groups freed one twice)."""
    (link,) = chain(1)
    release(link)
    with pytest.raises(AssertionError, match="released more often than held"):
        release(link)


def test_a_chain_of_100_000_links_is_freed_without_recursion():
    """A context of 100,000 tokens is a chain as long; Python's stack holds a hundredth of it."""
    made = chain(100_000)
    last = made[-1]
    del made
    assert len(links(last)) == 100_000
    freed = release(last)
    assert len(freed) == 100_000
    assert all(link.ref_count == 0 for link in freed)
    del freed, last  # the interpreter's own clean-up of the chain must not recurse either
