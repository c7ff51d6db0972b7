"""The pool: which ids are handed out, and that every way of miscounting is noticed."""

from collections.abc import Callable

import pytest

from cowbeam.decoder.blocks import Block, BlockId, BlockPool, OutOfBlocksError, block_table


def test_ids_are_handed_out_in_order_and_reused_first_in_first_out():
    """So that what comes next is known before it is known what is freed."""
    pool = BlockPool(4, 16)
    blocks = [pool.allocate(None) for _ in range(3)]
    assert [block.block_id for block in blocks] == [0, 1, 2]
    assert pool.upcoming(1) == [3]
    pool.release(blocks[2])
    pool.release(blocks[0])
    assert pool.upcoming(2) == [3, 2]
    assert [pool.allocate(None).block_id for _ in range(3)] == [3, 2, 0]
    with pytest.raises(AssertionError, match="1 ids asked for, 0 are free"):
        pool.upcoming(1)


def test_releasing_the_last_block_releases_the_whole_table():
    pool = BlockPool(4, 16)
    first = pool.allocate(None)
    second = pool.allocate(first)
    pool.release(first)
    assert block_table(second) == [0, 1]
    assert (pool.num_free, pool.num_live) == (2, 2)
    assert pool.release(second) == [second, first]
    assert (pool.num_free, pool.num_live) == (4, 0)
    pool.check_integrity([])


def test_a_full_pool_raises_and_changes_nothing():
    """The parent must not gain a holder from a block that was never made."""
    pool = BlockPool(1, 16)
    block = pool.allocate(None)
    with pytest.raises(OutOfBlocksError, match="all 1 blocks are in use"):
        pool.allocate(block)
    assert block.ref_count == 1
    pool.check_integrity([block])


def test_a_table_of_100_000_blocks_is_freed_in_one_call():
    pool = BlockPool(100_000, 16)
    last: Block | None = None
    for _ in range(pool.num_blocks):
        follower = pool.allocate(last)
        pool.release(last)
        last = follower
    assert len(pool.release(last)) == 100_000
    assert pool.num_free == 100_000


def _holder_too_many(pool: BlockPool, last: Block) -> None:
    last.ref_count += 1


def _holder_too_few(pool: BlockPool, last: Block) -> None:
    assert last.parent is not None
    last.parent.ref_count -= 1


def _free_twice(pool: BlockPool, last: Block) -> None:
    pool._free.append(pool._free[0])


def _free_and_live(pool: BlockPool, last: Block) -> None:
    pool._free.append(last.block_id)


def _lost(pool: BlockPool, last: Block) -> None:
    pool._free.pop()


def _stranger(pool: BlockPool, last: Block) -> None:
    pool._free.append(BlockId(pool.num_blocks))


def _freed_under_its_holder(pool: BlockPool, last: Block) -> None:
    del pool._live[last.block_id]
    pool._free.append(last.block_id)
    assert last.parent is not None
    last.parent.ref_count -= 1  # so that only the holder left over is wrong


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_holder_too_many, "has ref count 2 but 1 holders"),
        (_holder_too_few, "has ref count 0 but 1 holders"),
        (_free_twice, "free twice"),
        (_free_and_live, "both free and live"),
        (_lost, "neither free nor live"),
        (_stranger, "neither free nor live"),
        (_freed_under_its_holder, "freed but held"),
    ],
)
def test_check_integrity_notices(damage: Callable[[BlockPool, Block], None], message: str):
    pool = BlockPool(5, 16)
    first = pool.allocate(None)
    last = pool.allocate(first)
    pool.release(first)
    pool.check_integrity([last])
    damage(pool, last)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity([last])


def test_check_integrity_notices_a_leak():
    """A branch that is gone but was never released: its blocks are live and nobody holds them."""
    pool = BlockPool(2, 16)
    pool.allocate(None)
    with pytest.raises(AssertionError, match="block 0 has ref count 1 but 0 holders"):
        pool.check_integrity([])
