"""A group between choice and blocks: who keeps a branch, who forks, what is freed, and what it says it cost."""

import random

import pytest
import torch

from cowbeam.decoder.batch import Batch, lay_out
from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.group import Group, KVBytes, Request
from cowbeam.decoder.outputs import MemoryUse
from cowbeam.decoder.params import BeamSearchParams, Params, SamplingParams
from cowbeam.decoder.sampling import Sampling
from cowbeam.decoder.scheduler import worst_case_blocks
from cowbeam.decoder.strategy import Candidate

EOS = 0
BYTES = KVBytes(per_token=100, windows=())


def make_group(params: Params, num_prompt_tokens: int = 5, num_blocks: int = 200, block_size: int = 4) -> Group:
    """A planted group with a pool of its own; its tree records events."""
    request = Request(tuple(range(1, num_prompt_tokens + 1)), params, frozenset([EOS]), seed=1)
    group = Group(request, BlockPool(num_blocks, block_size), BYTES)
    group.tree.events = []
    group.plant()
    group.measure()
    return group


def reserve(group: Group) -> None:
    """The start of a step: a slot for every branch, as the batch does it."""
    needed, free = group.tree.blocks_needed(group.branches), group.tree.pool.num_free
    for branch in group.branches:
        group.tree.append_slot(branch)
    assert free - group.tree.pool.num_free == needed
    group.measure()
    check(group)


def check(group: Group) -> None:
    pool = group.tree.pool
    pool.check_integrity([branch.last_block for branch in group.branches])
    assert group.tree.num_blocks == pool.num_live
    assert len(group.branches) == len(group.tree.branches)


def beams(*choices: tuple[int, int]) -> list[Candidate]:
    """Candidates of these (beam, token), best first, and enough worse ones behind them."""
    chosen = [Candidate(-0.1 * rank, beam, token) for rank, (beam, token) in enumerate(choices)]
    return chosen + [Candidate(-100.0 - rank, 0, 90 + rank) for rank in range(len(choices))]


def random_candidates(group: Group, rng: random.Random, eos_chance: float) -> list[Candidate]:
    def token() -> int:
        return EOS if rng.random() < eos_chance else rng.randrange(1, 10_000)

    is_first = group.num_generated == 0
    if isinstance(group.strategy, Sampling):
        live = group.strategy.width if is_first else len(group.branches)
        return [Candidate(-rng.random(), beam, token()) for beam in range(live)]
    live = 1 if is_first else len(group.branches)
    number = max(2, 1 + len(group.request.eos_ids)) * group.strategy.width
    scores = sorted((-100 * rng.random() for _ in range(number)), reverse=True)
    return [Candidate(score, rng.randrange(live), token()) for score in scores]


def test_the_first_choice_forks_the_prompt():
    group = make_group(BeamSearchParams(num_beams=3, num_return_sequences=3))
    group.choose(beams((0, 11), (0, 12), (0, 13)))
    assert [branch.branch_id for branch in group.branches] == [0, 1, 2]
    assert group.parents == [0, 0, 0]
    assert {tuple(branch.block_table) for branch in group.branches} == {(0, 1)}
    check(group)
    reserve(group)
    assert [branch.block_table for branch in group.branches] == [[0, 2], [0, 3], [0, 1]]


def test_the_first_child_keeps_the_branch_and_the_childless_are_freed_after_all_forks():
    """A parent freed before its second child forked would take the child's blocks along (vLLM V0's comment)."""
    group = make_group(BeamSearchParams(num_beams=3, num_return_sequences=3))
    group.choose(beams((0, 11), (0, 12), (0, 13)))
    reserve(group)
    group.take_events()
    group.choose(beams((2, 21), (1, 22), (2, 23)))
    assert [branch.branch_id for branch in group.branches] == [2, 1, 3]
    assert group.parents == [2, 1, 2]
    assert [(event.kind, event.branch) for event in group.take_events()] == [("fork", 3), ("prune", 0), ("free", None)]
    assert [[token.token_id for token in branch.tokens] for branch in group.branches] == [[13, 21], [12, 22], [13, 23]]
    check(group)


def test_a_swap_of_two_beams_moves_nothing():
    """Each parent has one child, in the other rank: branches keep their blocks, only their order changes."""
    group = make_group(BeamSearchParams(num_beams=2, num_return_sequences=2))
    group.choose(beams((0, 11), (0, 12)))
    reserve(group)
    group.take_events()
    tables = [branch.block_table for branch in group.branches]
    group.choose(beams((1, 21), (0, 22)))
    assert [branch.block_table for branch in group.branches] == tables[::-1]
    assert group.take_events() == ()


def test_finished_hypotheses_hold_no_blocks():
    group = make_group(BeamSearchParams(num_beams=2, num_return_sequences=2, max_new_tokens=9))
    group.choose(beams((0, EOS), (0, 12)))
    assert len(group.strategy.hypotheses) == 1
    assert group.num_generated == 1
    check(group)
    reserve(group)
    group.choose(beams((0, EOS), (1, EOS)))
    assert group.strategy.is_done
    check(group)
    assert group.tree.pool.num_live == 0
    assert (group.tree.num_blocks, group.tree.num_tokens) == (0, 0)


def test_a_finished_sample_frees_its_branch_and_the_others_go_on():
    """Their ranks move up; index, log-probs and tokens must stay with their sample."""
    group = make_group(SamplingParams(num_return_sequences=3, max_new_tokens=3))
    group.choose([Candidate(-1.0, 0, 11), Candidate(-2.0, 1, 12), Candidate(-3.0, 2, 13)])
    reserve(group)
    group.choose([Candidate(-0.1, 0, 21), Candidate(-0.2, 1, EOS), Candidate(-0.3, 2, 23)])
    assert [branch.branch_id for branch in group.branches] == [0, 2]
    check(group)
    reserve(group)
    group.choose([Candidate(-0.01, 0, 31), Candidate(-0.02, 1, 33)])
    result = group.result(["a", "b", "c"], "torch")
    assert [c.token_ids for c in result.completions] == [(11, 21, 31), (12, EOS), (13, 23, 33)]
    assert [c.logprobs for c in result.completions] == [(-1.0, -0.1, -0.01), (-2.0, -0.2), (-3.0, -0.3, -0.02)]
    assert [c.finish_reason for c in result.completions] == ["length", "eos", "length"]
    assert [c.index for c in result.completions] == [0, 1, 2]
    assert [c.stop_reason for c in result.completions] == [None, EOS, None]
    assert [c.text for c in result.completions] == ["a", "b", "c"]


def test_memory_is_counted_beside_its_baselines():
    """By hand: 5 prompt tokens, blocks of 4, two beams that part after the prompt, 100 bytes a token."""
    group = make_group(BeamSearchParams(num_beams=2, num_return_sequences=2, max_new_tokens=3))
    assert group.memory == MemoryUse(used=2 * 400, unique=5 * 100, copied=2 * 500, contiguous=2 * 8 * 100)
    group.choose(beams((0, 11), (0, 12)))
    reserve(group)
    assert group.memory == MemoryUse(used=3 * 400, unique=7 * 100, copied=2 * 600, contiguous=2 * 8 * 100)
    group.choose(beams((0, 21), (1, 22)))
    reserve(group)
    group.choose(beams((0, 31), (1, 32)))
    stats = group.result(["", ""], "torch").stats
    assert stats.peak_memory == MemoryUse(used=3 * 400, unique=9 * 100, copied=2 * 700, contiguous=2 * 8 * 100)
    assert (stats.peak_blocks, stats.bytes_per_block, stats.cow_copies, stats.steps) == (3, 400, 1, 3)


def test_the_copy_a_branch_is_cropped_as_transformers_crops_it():
    """Of 100 bytes a token 60 are of layers that keep 7 tokens at most."""
    kv_bytes = KVBytes(per_token=100, windows=((60, 7),))
    assert kv_bytes.copied(7) == 700
    assert kv_bytes.copied(10) == 10 * 40 + 7 * 60


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("kind", ["beams", "samples"])
def test_random_searches_hold_the_invariants_and_the_worst_case(kind: str, width: int):
    """The admission formula is never exceeded; samples without an EOS reach it whenever the last token's slot,
    which nobody computes, would not have opened a block of its own."""
    rng = random.Random(7 * width + len(kind))
    reached = 0
    for _ in range(60):
        block_size, num_prompt, new = rng.choice([1, 2, 4, 8, 16]), rng.randint(1, 40), rng.randint(1, 20)
        eos_chance = rng.choice([0.0, 0.0, 0.1])
        params: Params = SamplingParams(num_return_sequences=width, max_new_tokens=new)
        if kind == "beams":
            params = BeamSearchParams(num_beams=width, num_return_sequences=width, max_new_tokens=new)
        group = make_group(params, num_prompt, 2000, block_size)
        peak = search(group, rng, eos_chance)
        worst = worst_case_blocks(group.request, block_size)
        assert peak <= worst, f"{params}, prompt of {num_prompt}, blocks of {block_size}: {peak} of {worst}"
        opens_a_block = (num_prompt + new - 1) % block_size == 0
        if kind == "samples" and eos_chance == 0 and not opens_a_block and new > 1:
            assert peak == worst
        reached += peak == worst
        assert group.tree.pool.num_live == 0
    assert reached > 0


def search(group: Group, rng: random.Random, eos_chance: float) -> int:
    """Decode to the end with random choices; the greatest number of live blocks."""
    peak = group.tree.pool.num_live
    while True:
        width = len(group.branches)
        group.choose(random_candidates(group, rng, eos_chance))
        check(group)
        if group.strategy.is_done:
            break
        assert group.num_generated > 0, f"{width} branches became none, yet the search goes on"
        reserve(group)
        peak = max(peak, group.tree.pool.num_live)
    result = group.result([""] * len(group.strategy.hypotheses), "torch")
    length_penalty = getattr(group.request.params, "length_penalty", 1.0)
    for completion in result.completions:
        assert sum(completion.logprobs) == pytest.approx(completion.cumulative_logprob, abs=1e-3)
        length = len(completion.token_ids)
        assert completion.score == pytest.approx(completion.cumulative_logprob / length**length_penalty, rel=1e-6)
        assert len(completion.logprobs) == len(completion.beams) == length
    assert result.stats.peak_blocks == peak
    return peak


def test_beam_indices_lead_back_to_the_prompt():
    group = make_group(BeamSearchParams(num_beams=2, num_return_sequences=1, max_new_tokens=3))
    group.choose(beams((0, 11), (0, 12)))
    reserve(group)
    group.choose(beams((1, 21), (1, 22)))
    reserve(group)
    group.choose(beams((1, 31), (0, 32)))
    (best,) = group.result([""], "torch").completions
    assert best.token_ids == (12, 22, 31)
    assert best.beams == (0, 1, 1)


def test_a_step_that_does_not_fit_is_noticed_before_anything_changes():
    """Three beams share a half-full block: two copies. With one free block nothing may be half done."""
    group = make_group(BeamSearchParams(num_beams=3, num_return_sequences=3), num_blocks=3)
    batch = Batch(4, torch.device("cpu"), scratch_block=99)
    batch.add_group(group)
    group.choose(beams((0, 11), (0, 12), (0, 13)))
    with pytest.raises(AssertionError, match="the step needs 2 blocks, 1 are free"):
        lay_out([group])
    assert [branch.num_slots for branch in group.branches] == [5, 5, 5]
    assert [branch.block_table for branch in group.branches] == [[0, 1]] * 3
    assert group.tree.num_cow_copies == 0
    check(group)


def test_a_step_that_fits_exactly_runs():
    group = make_group(BeamSearchParams(num_beams=3, num_return_sequences=3), num_blocks=4)
    batch = Batch(4, torch.device("cpu"), scratch_block=99)
    batch.add_group(group)
    group.choose(beams((0, 11), (0, 12), (0, 13)))
    layout = lay_out([group])
    inputs = batch.upload(layout)
    assert layout.copies == [(1, 2), (1, 3), None]
    assert inputs.copy_sources.tolist() == [1, 1, 99]
    assert inputs.copy_destinations.tolist() == [2, 3, 99]
    assert inputs.slots.tolist() == layout.slots(4)
    assert group.tree.pool.num_free == 0
    for row, branch in enumerate(group.branches):
        assert inputs.block_tables[row, :2].tolist() == branch.block_table
    check(group)
