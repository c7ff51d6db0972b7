"""Blocks found by their content: which are found, which are given away first, and that none is found wrongly."""

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cowbeam.decoder.blocks import Block, BlockPool
from cowbeam.decoder.group import Group, KVBytes, Request
from cowbeam.decoder.params import SamplingParams
from cowbeam.decoder.prefix_cache import PrefixCache
from cowbeam.decoder.strategy import Candidate

PROMPT = tuple(range(100, 112))


def make_pool(num_blocks: int = 16) -> BlockPool:
    return BlockPool(num_blocks, 4, prefix_reuse=True)


def make_group(pool: BlockPool, prompt: tuple[int, ...] = PROMPT, width: int = 1, max_new_tokens: int = 20) -> Group:
    params = SamplingParams(num_return_sequences=width, max_new_tokens=max_new_tokens)
    return Group(Request(prompt, params, frozenset(), 1), pool, KVBytes(1, ()))


def compute(group: Group) -> Group:
    """Plant it and take all of its backlog, as a pass does."""
    group.plant()
    while group.backlog.num_tokens:
        group.take(5)
    return group


def choose(group: Group, *tokens: int) -> None:
    group.choose([Candidate(0.0, rank, token) for rank, token in enumerate(tokens)])


def step(group: Group) -> None:
    for branch in group.branches:
        group.tree.append_slot(branch)


def found(pool: BlockPool, token_ids: tuple[int, ...]) -> int:
    return len(pool.find_prefix(token_ids))


@pytest.mark.parametrize(
    ("num_tokens", "taken_over"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_at_least_the_last_token_is_computed_anew(num_tokens: int, taken_over: int):
    """Exactly at a block's end its own logits are wanted: one block less is taken over."""
    pool = make_pool()
    compute(make_group(pool, (*PROMPT, 1, 2))).free()
    group = compute(make_group(pool, (*PROMPT, 9)[:num_tokens]))
    assert group.reused_tokens == taken_over
    assert group.prefill_tokens == num_tokens - taken_over
    assert group.tree.num_blocks == len(group.branches[0].block_table) == -(-num_tokens // 4)


def test_what_is_shared_is_one_block_for_all_and_counts_for_each():
    pool = make_pool()
    groups = [compute(make_group(pool, (*PROMPT, last))) for last in (1, 2, 3)]
    assert len({tuple(group.branches[0].block_table[:3]) for group in groups}) == 1
    assert [group.tree.num_blocks for group in groups] == [4, 4, 4]
    assert pool.num_live == 3 + 3
    pool.check_integrity([group.branches[0].last_block for group in groups])
    groups[0].free()
    assert groups[0].tree.num_blocks == 0
    groups[2].free()
    assert pool.num_live == 4
    groups[1].free()
    assert (pool.num_live, pool.num_free, pool.prefixes.num_kept) == (0, 16, 3)


def test_blocks_are_not_found_before_they_are_computed():
    """A prompt that is cut: who comes with the same one meanwhile must not read what nobody has written."""
    pool = make_pool()
    first = make_group(pool)
    first.plant()
    assert found(pool, PROMPT) == 0
    first.take(7)
    assert found(pool, PROMPT) == 1
    first.take(1)
    assert found(pool, PROMPT) == 2
    first.free()  # aborted before its end
    assert found(pool, PROMPT) == 2
    pool.check_integrity([])


def test_generated_tokens_are_found_by_the_next_turn_of_a_chat():
    pool = make_pool()
    group = compute(make_group(pool, PROMPT[:6]))
    for token in range(7):
        choose(group, token)
        step(group)
    answer = tuple(range(7))
    group.free()
    assert found(pool, (*PROMPT[:6], *answer)) == 3
    assert found(pool, (*PROMPT[:6], 0, 1, 2, 9)) == 2
    assert compute(make_group(pool, (*PROMPT[:6], *answer, 50, 51))).reused_tokens == 12


def test_a_sample_that_ends_leaves_its_own_tokens_not_its_neighbours():
    """TensorRT-LLM PR #18711: length of one beam, tokens of another."""
    pool = make_pool()
    params = SamplingParams(num_return_sequences=2, max_new_tokens=20)
    group = compute(Group(Request(PROMPT[:5], params, frozenset([66]), 1), pool, KVBytes(1, ())))
    for tokens in ((1, 11), (2, 12), (3, 13), (4, 14)):
        choose(group, *tokens)
        step(group)
    choose(group, 66, 15)  # the first ends
    assert found(pool, (*PROMPT[:5], 1, 2, 3)) == 2
    assert found(pool, (*PROMPT[:5], 11, 12, 13)) == 1, "the second still has its blocks for itself"
    group.free()
    assert found(pool, (*PROMPT[:5], 11, 12, 13)) == 2
    assert found(pool, (*PROMPT[:5], 1, 2, 13)) == 1


def test_what_is_needed_is_given_away_least_recently_used_and_last_blocks_first():
    """vLLM PR #4761: a block given away stayed in the map; kvcached #362: a freed one kept its old hash."""
    pool = make_pool(9)
    old, new = PROMPT[:8], (*PROMPT[:4], *range(8))
    compute(make_group(pool, (*old, 1))).free()
    compute(make_group(pool, (*new, 1))).free()
    assert (pool.prefixes.num_kept, found(pool, old), found(pool, new)) == (4, 2, 3)
    blocks: list[Block] = [pool.allocate(None) for _ in range(6)]
    assert (found(pool, old), found(pool, new)) == (1, 3), "the begin of both was used by the new one"
    blocks += [pool.allocate(None) for _ in range(2)]
    assert (found(pool, old), found(pool, new)) == (1, 1)
    assert pool.num_free == 1
    blocks.append(pool.allocate(None))
    assert (found(pool, old), pool.num_free) == (0, 0)
    pool.check_integrity(blocks)
    for block in blocks:
        pool.release(block)
    assert found(pool, old) == 0, "who has the id now holds something else"


def test_ids_that_come_next_stay_those_when_kept_blocks_are_found_meanwhile():
    """The device takes them by itself (`upcoming`)."""
    pool = make_pool(6)
    compute(make_group(pool, (*PROMPT, 1))).free()
    upcoming = pool.upcoming(4)  # three are empty: one kept block is given away
    assert found(pool, PROMPT) == 2
    assert [pool.allocate(None).block_id for _ in range(4)] == upcoming


def test_of_two_equal_blocks_one_is_found():
    pool = make_pool()
    groups = [make_group(pool), make_group(pool)]
    for group in groups:
        group.plant()  # both before anything is computed
    for group in groups:
        group.take(100)
    assert [block.block_id for block in pool.find_prefix(PROMPT)] == groups[0].branches[0].block_table
    for group in groups:
        group.free()
    assert (pool.num_free, pool.prefixes.num_kept) == (16, 3)
    pool.check_integrity([])


def test_everything_is_forgotten_also_what_is_computed_by_now():
    """After a change of weights blocks of the old ones must not be entered by groups that run on."""
    pool = make_pool()
    running = compute(make_group(pool))
    kept = compute(make_group(pool, (7,) * 9))
    kept.free()
    pool.forget_prefixes()
    assert pool.prefixes.num_kept == 0
    choose(running, 1)
    for token in range(5):
        step(running)
        choose(running, token)
    running.free()
    assert found(pool, PROMPT) == found(pool, (7,) * 9) == 0
    assert (pool.num_free, pool.prefixes.num_kept) == (16, 0)
    pool.check_integrity([])


def test_what_is_given_back_in_the_middle_of_forgetting_is_not_lost():
    """A stream that Python collects gives its blocks back between any two lines: one was neither free nor kept then."""
    lines, number = 1, 0
    while number < lines:
        pool, number, lines = make_pool(), number + 1, 0
        compute(make_group(pool, (7, *PROMPT))).free()
        group = compute(make_group(pool))

        def trace(frame, event, _):
            nonlocal lines
            if frame.f_code is not PrefixCache.clear.__code__:
                return None
            lines += event == "line"
            if event == "line" and lines == number:  # noqa: B023  # called in this round alone
                group.free()  # noqa: B023
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            pool.forget_prefixes()
        finally:
            sys.settrace(before)
        pool.check_integrity([])
        assert pool.num_free == pool.num_blocks
        assert found(pool, PROMPT) == 0
    assert number > 3


def test_blocks_of_unusable_logits_are_not_found():
    """NaN in them would be everybody's who begins with the same tokens."""
    pool = make_pool()
    group = compute(make_group(pool, (*PROMPT, 1)))
    assert found(pool, PROMPT) == 3
    group.forget_blocks()
    group.free()
    assert (found(pool, PROMPT), pool.prefixes.num_kept, pool.num_free) == (0, 0, 16)


def test_a_group_that_gave_its_blocks_back_gets_them_back_as_a_tree():
    """The prompt once, what branches share once; then each branch's own (vLLM #8844: n > 1 could not be preempted)."""
    pool = BlockPool(40, 4)
    group = compute(make_group(pool, PROMPT[:10], width=3))
    for tokens in ((1, 2, 3), (4, 5, 6), (7, 8, 9), (1, 1, 1), (2, 2, 2)):
        choose(group, *tokens)
        step(group)
    choose(group, 3, 3, 3)
    before = [branch.block_table for branch in group.branches]
    group.give_back()
    assert pool.num_live == 0
    filler = [pool.allocate(None) for _ in range(30)]  # the blocks that come back have other ids
    assert group.blocks_to_take == 2 + 3 * 2
    group.plant()
    pieces = []
    while group.backlog.num_tokens:
        pieces.append(group.take(100))
    assert [(piece.start, len(piece.token_ids)) for piece in pieces] == [(0, 15), (8, 7), (8, 7)]
    for piece, branch in zip(pieces, group.branches, strict=True):
        sequence = [*PROMPT[:10], *(token.token_id for token in branch.tokens)]
        assert list(piece.token_ids) == sequence[piece.start : 15]
        assert piece.block_table == branch.block_table
    after = [branch.block_table for branch in group.branches]
    same = [[a == b for a, b in zip(one, other, strict=True)] for one in before for other in before]
    assert same == [[a == b for a, b in zip(one, other, strict=True)] for one in after for other in after]
    pool.check_integrity([*(branch.last_block for branch in group.branches), *filler])


@given(st.randoms(use_true_random=False), st.sampled_from([1, 2, 4]))
def test_random_groups_share_find_and_give_back(rng: random.Random, block_size: int):
    """Every find is right, by a model that knows what each block holds."""
    pool = BlockPool(24, block_size, prefix_reuse=True)
    groups: list[Group] = []
    holds: dict[Block, tuple[int, ...]] = {}  # all tokens up to the block's end
    for _ in range(40):
        action = rng.random()
        if action < 0.4:
            prompt = tuple(rng.randrange(2) for _ in range(rng.randint(1, 9)))
            group = make_group(pool, prompt, width=rng.randint(1, 3))
            if group.blocks_to_take <= pool.num_free:
                compute(group)
                groups.append(group)
                choose(group, *(rng.randrange(2) for _ in group.strategy.scores))
        elif action < 0.7 and groups:
            group = rng.choice(groups)
            if group.tree.blocks_needed(group.branches) <= pool.num_free:
                step(group)
                choose(group, *(rng.randrange(2) for _ in group.strategy.scores))
        elif groups:
            group = groups.pop(rng.randrange(len(groups)))
            if rng.random() < 0.5:
                group.give_back()
                if rng.random() < 0.8 and group.blocks_to_take <= pool.num_free:
                    compute(group)
                    groups.append(group)
                    continue
            group.free()
        for group in groups:
            assert group.tree.num_blocks == len({block for b in group.branches for block in b.block_table})
            for branch in group.branches:
                sequence = (*group.request.prompt_token_ids, *(token.token_id for token in branch.tokens))
                block, end = branch.last_block, branch.num_slots
                while block is not None:
                    if end % block_size == 0:
                        assert holds.setdefault(block, sequence[:end]) == sequence[:end]
                    end = (end - 1) // block_size * block_size
                    block = block.parent
        for block in pool.prefixes._content_of:
            tokens = holds.get(block)
            if tokens is not None:
                assert pool.find_prefix(tokens)[-1] is block
        pool.check_integrity([branch.last_block for group in groups for branch in group.branches])
    for group in groups:
        group.free()
    assert pool.num_free == 24
