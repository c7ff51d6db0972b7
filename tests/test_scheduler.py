"""Admission: first come, first served, and nothing that could run out of blocks half-way."""

import pytest

from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.group import Group, KVBytes, Request
from cowbeam.decoder.params import BeamSearchParams, SamplingParams
from cowbeam.decoder.scheduler import MAX_PREFILL_TOKENS, MAX_ROWS, Scheduler, worst_case_blocks


def make_request(num_prompt_tokens: int = 20, width: int = 2, max_new_tokens: int = 16) -> Request:
    params = SamplingParams(num_return_sequences=width, max_new_tokens=max_new_tokens)
    return Request((1,) * num_prompt_tokens, params, frozenset(), seed=1)


def queue(pool: BlockPool, *requests: Request) -> tuple[Scheduler, list[Group]]:
    scheduler = Scheduler(pool)
    groups = [Group(request, pool, KVBytes(1, ())) for request in requests]
    for group in groups:
        scheduler.add(group)
    return scheduler, groups


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


def test_as_many_run_as_fit_with_their_worst_cases():
    scheduler, groups = queue(BlockPool(14, 16), *[make_request()] * 4)
    assert scheduler.admit() == groups[:2]
    assert scheduler.admit() == []
    assert list(scheduler.waiting) == groups[2:]


def test_what_runs_keeps_its_worst_case_while_its_blocks_are_still_free():
    """The pool looks empty when a group has only just begun; it is promised all the same."""
    pool = BlockPool(9, 16)
    scheduler, groups = queue(pool, make_request(), make_request())
    assert scheduler.admit() == groups[:1]
    groups[0].plant()
    assert pool.num_free == 7
    assert scheduler.admit() == []


def test_a_small_request_does_not_overtake_a_big_one():
    """Overtaking would starve the big one as long as small ones come (vLLM #546: requests that hang)."""
    small = make_request(1, 1, 1)
    scheduler, groups = queue(BlockPool(6, 16), make_request(), make_request(), small)
    assert scheduler.admit() == groups[:1]
    scheduler.remove(groups[0])
    assert scheduler.admit() == groups[1:]
    scheduler.remove(groups[1])
    scheduler.remove(groups[2])
    assert [*scheduler.waiting, *scheduler.running] == []


def test_rows_are_bounded_but_one_group_always_runs():
    wide, narrow = make_request(1, MAX_ROWS + 1, 1), make_request(1, 1, 1)
    scheduler, groups = queue(BlockPool(10_000, 16), wide, narrow)
    assert scheduler.admit() == groups[:1]
    assert scheduler.admit() == []
    scheduler.remove(groups[0])
    assert scheduler.admit() == groups[1:]


def test_rows_of_running_and_admitted_groups_count_together():
    half = make_request(1, MAX_ROWS // 2, 1)
    scheduler, groups = queue(BlockPool(10_000, 16), half, half, half)
    assert scheduler.admit() == groups[:2]
    assert scheduler.admit() == []


def test_prompts_of_one_pass_are_bounded_but_one_long_prompt_always_runs():
    long = make_request(MAX_PREFILL_TOKENS + 1, 1, 1)
    scheduler, groups = queue(BlockPool(10_000, 16), long, long)
    assert scheduler.admit() == groups[:1]
    assert scheduler.admit() == groups[1:]


def test_a_waiting_group_can_be_removed():
    """An aborted request that stays in the queue would be decoded for nobody."""
    scheduler, groups = queue(BlockPool(5, 16), make_request(), make_request())
    scheduler.admit()
    scheduler.remove(groups[1])
    scheduler.remove(groups[1])  # forgotten twice is forgotten
    scheduler.remove(groups[0])
    assert [*scheduler.waiting, *scheduler.running] == []
