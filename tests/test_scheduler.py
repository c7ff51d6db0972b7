"""Who is admitted, what a pass holds, and who gives its blocks back: first come, first served, and nobody starves."""

import pytest

from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.group import Group, KVBytes, Request
from cowbeam.decoder.params import BeamSearchParams, SamplingParams
from cowbeam.decoder.scheduler import MAX_PASS_TOKENS, MAX_ROWS, SHARE_OF_LONG, Scheduler, worst_case_blocks
from cowbeam.decoder.strategy import Candidate


def make_request(num_prompt_tokens: int = 20, width: int = 2, max_new_tokens: int = 16, first: int = 1) -> Request:
    params = SamplingParams(num_return_sequences=width, max_new_tokens=max_new_tokens)
    return Request((first,) * num_prompt_tokens, params, frozenset(), seed=1)


class Turns:
    """A scheduler and its groups, turned without a model: every branch is given token 7."""

    def __init__(self, pool: BlockPool, *requests: Request, max_rows: int = MAX_ROWS) -> None:
        self.pool = pool
        self.scheduler = Scheduler(pool, max_rows)
        self.groups = [Group(request, pool, KVBytes(1, ())) for request in requests]
        self.preempted: list[int] = []
        for group in self.groups:
            self.scheduler.add(group)

    def admit(self) -> list[int]:
        """Which groups a pass computes something of, and how much."""
        assert self.scheduler.is_pass_due
        parts = self.scheduler.next_pass()
        for group in {part.group for part in parts}:
            if not group.backlog.num_tokens and not group.steps:
                self.choose(group)
        sizes = dict.fromkeys((part.group for part in parts), 0)
        for group, piece in parts:
            sizes[group] += len(piece.token_ids)
        self.sizes = list(sizes.values())
        return [self.groups.index(group) for group in sizes]

    def step(self) -> None:
        self.preempted += [self.groups.index(group) for group in self.scheduler.next_step()]
        for group in self.scheduler.running:
            for branch in group.branches:
                group.tree.append_slot(branch)
        for group in list(self.scheduler.running):
            self.choose(group)
        self.pool.check_integrity([branch.last_block for group in self.groups for branch in group.branches])

    def turn(self) -> bool:
        """A pass or a step; False if nothing is left."""
        if self.scheduler.is_pass_due:
            self.admit()
        else:
            self.step()
        return bool(self.scheduler.waiting or self.scheduler.admitted)

    def choose(self, group: Group) -> None:
        group.choose([Candidate(0.0, rank, 7) for rank in range(len(group.strategy.scores))])
        if group.strategy.is_done:
            self.scheduler.remove(group)

    def running(self) -> list[int]:
        return [self.groups.index(group) for group in self.scheduler.running]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "width", "max_new_tokens", "blocks"),
    [
        (16, 1, 1, 2),
        (16, 4, 16, 1 + 4 * 1),
        (20, 2, 16, 1 + 2 * 2),
        (3, 3, 1, 3),
        # TensorRT-LLM PR #16802 took the prompt once a beam: capacity / (beams x block).
        (4096, 128, 8, 256 + 128),
    ],
)
def test_the_worst_case_counts_the_prompts_full_blocks_once(
    num_prompt_tokens: int, width: int, max_new_tokens: int, blocks: int
):
    assert worst_case_blocks(make_request(num_prompt_tokens, width, max_new_tokens), 16) == blocks


def test_beams_and_samples_of_one_width_have_the_same_worst_case():
    beams = Request((1,) * 20, BeamSearchParams(num_beams=2, max_new_tokens=16), frozenset(), None)
    assert worst_case_blocks(beams, 16) == worst_case_blocks(make_request(), 16)


def test_a_request_that_could_never_run_is_refused_with_the_numbers():
    scheduler = Scheduler(BlockPool(4, 16))
    scheduler.check_fits(make_request(width=1, max_new_tokens=44))  # 1 + 3: just fits
    with pytest.raises(ValueError, match=r"20 tokens .* 2 branches .* max_new_tokens=16 may need 5 .* pool has 4"):
        scheduler.check_fits(make_request())


def test_a_prompt_and_a_block_a_branch_are_room_enough():
    """Each holds 2 blocks and may need 5: by the worst case only one would run in 9 blocks."""
    turns = Turns(BlockPool(9, 16), *[make_request()] * 4)
    assert turns.admit() == [0, 1]  # the third: 2 + 3 × 2 blocks, 5 are free
    assert turns.pool.num_free == 5
    assert len(turns.scheduler.waiting) == 2


def test_a_small_request_does_not_overtake_a_big_one():
    """Overtaking would starve the big one as long as small ones come (vLLM #546: requests that hang)."""
    turns = Turns(BlockPool(7, 16), make_request(), make_request(64, 1), make_request(1, 1, 1))
    assert turns.admit() == [0]
    assert not turns.scheduler.has_pass
    while turns.running() == [0]:
        turns.step()
    assert turns.admit() == [1, 2]


@pytest.mark.parametrize("max_rows", [1, 7, MAX_ROWS, 2 * MAX_ROWS])
def test_rows_are_bounded_but_one_group_always_runs(max_rows: int):
    turns = Turns(BlockPool(10_000, 16), make_request(1, max_rows + 1, 2), make_request(1, 1, 2), max_rows=max_rows)
    assert turns.admit() == [0]
    assert not turns.scheduler.has_pass
    turns.step()
    assert turns.admit() == [1]


@pytest.mark.parametrize("max_rows", [6, MAX_ROWS, 2 * MAX_ROWS])
def test_rows_of_running_and_admitted_groups_count_together(max_rows: int):
    half = make_request(1, max_rows // 2, 3)
    turns = Turns(BlockPool(10_000, 16), half, half, half, max_rows=max_rows)
    assert turns.admit() == [0, 1]
    assert not turns.scheduler.has_pass


def test_passes_are_bounded_and_steps_go_between():
    """A prompt of any length must not hold up who runs for longer than a pass (SGLang #36855: nor hang itself)."""
    turns = Turns(BlockPool(10_000, 16), make_request(20, 1), make_request(3 * MAX_PASS_TOKENS, 1))
    assert turns.admit() == [0, 1]
    assert turns.sizes == [20, MAX_PASS_TOKENS - 20]
    for size in (MAX_PASS_TOKENS, MAX_PASS_TOKENS, 20):
        assert not turns.scheduler.is_pass_due
        assert turns.running() == [0]
        turns.step()
        assert turns.admit() == [1]
        assert turns.sizes == [size]
    assert turns.running() == [0, 1]
    assert not turns.scheduler.is_pass_due


def test_a_long_prompt_leaves_room_in_a_pass_for_short_ones():
    requests = [make_request(8 * MAX_PASS_TOKENS, 1, first=2), *[make_request(1000, 1, first=3 + i) for i in range(3)]]
    turns = Turns(BlockPool(10_000, 16), *requests)
    assert turns.admit() == [0, 1, 2, 3]
    assert turns.sizes == [SHARE_OF_LONG, 1000, 1000, 48]
    turns.step()
    assert turns.running() == [1, 2]
    assert turns.admit() == [0, 3]
    assert turns.sizes == [MAX_PASS_TOKENS - 952, 952], "what nobody else could use is the long one's"


def test_the_youngest_gives_its_blocks_back_and_the_oldest_gets_on():
    """Preemption of a whole group; it comes back before those that have never run (vLLM #8844, SGLang: aborted)."""
    turns = Turns(BlockPool(12, 4), *[make_request(6, 2, 12, first=1 + i) for i in range(4)])
    assert turns.admit() == [0, 1, 2]
    ended = []
    while turns.turn():
        for number in range(4):
            if turns.groups[number].strategy.is_done and number not in ended:
                ended.append(number)
    assert turns.preempted, "the pool is too small for three"
    assert 0 not in turns.preempted
    assert ended == [0, 1, 2], "in the order of their coming; the last turn ends the last"
    assert turns.groups[1].preemptions == turns.preempted.count(1) > 0
    assert turns.pool.num_live == 0


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_pool_of_the_greatest_worst_case_is_enough_for_all(block_size: int):
    requests = [make_request(3 + 2 * i, 1 + i % 4, 5 + 3 * i, first=1 + i) for i in range(9)]
    num_blocks = max(worst_case_blocks(request, block_size) for request in requests)
    turns = Turns(BlockPool(num_blocks, block_size), *requests)
    for _ in range(2000):
        if not turns.turn():
            break
    assert all(group.strategy.is_done for group in turns.groups)
    assert turns.pool.num_free == num_blocks


def test_a_group_can_be_removed_wherever_it_is():
    """An aborted request that stays in the queue would be decoded for nobody."""
    turns = Turns(BlockPool(5, 16), make_request(), make_request())
    turns.admit()
    scheduler = turns.scheduler
    assert (turns.running(), len(scheduler.waiting)) == ([0], 1)
    scheduler.remove(turns.groups[1])
    scheduler.remove(turns.groups[1])  # forgotten twice is forgotten
    scheduler.remove(turns.groups[0])
    assert [*scheduler.waiting, *scheduler.running, *scheduler.admitted] == []
