"""Public bug reports of decoders that serve many requests, tried on this one: as ``test_bug_cases``, for one pool.

What cannot occur here: a position-keyed map that several sequences share (C21) — a block is found by the block before
it, by identity, and its own tokens; a sequence number out of range (C22) — branches have no fixed places, their number
is bounded by blocks alone; a seed that an endpoint drops (D3) — there is no endpoint; command line and batch lines have
the parameters' own names, and an unknown one is refused.

Elsewhere: A14, D16, D17 in ``test_bug_cases`` and ``test_decoder``; B7 in ``test_grammar``.
"""

import random
from unittest import mock

import pytest
import torch

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams
from cowbeam.decoder.group import Request
from cowbeam.decoder.params import Params
from cowbeam.decoder.scheduler import worst_case_blocks
from fakes import assert_unused, random_prompt, tiny_decoder, tiny_model, token_ids
from test_mixes import passes_of

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def worst(prompt: list[int], params: Params, block_size: int = 4) -> int:
    return worst_case_blocks(Request(tuple(prompt), params, frozenset(), None), block_size)


def greedy(max_new_tokens: int) -> BeamSearchParams:
    return BeamSearchParams(num_beams=1, max_new_tokens=max_new_tokens, eos_token_id=[])


def make_decoder(num_blocks: int, *, prefix_reuse: bool = False, family: str = "llama") -> Decoder:
    return Decoder(tiny_model(family), block_size=4, num_blocks=num_blocks, prefix_reuse=prefix_reuse)


def alone(prompt: list[int], params: Params) -> list[tuple[int, ...]]:
    return token_ids(make_decoder(1024).generate(prompt, params))


def test_c8_what_is_kept_is_of_one_path() -> None:
    """TensorRT-LLM PR #18711: the length of the longest beam was committed with the tokens of another.

    Beams of unequal lengths; every hypothesis is then a prompt, and what it takes over must be its own.
    """
    settings = {"num_beams": 6, "num_return_sequences": 6, "max_new_tokens": 22, "early_stopping": True}
    params = BeamSearchParams(**settings, eos_token_id=list(range(20, 32)))
    decoder = make_decoder(512, prefix_reuse=True)
    completions = decoder.generate(PROMPT, params).completions
    assert len({len(completion.token_ids) for completion in completions}) > 2
    reused = []
    for completion in completions:
        prompt = [*PROMPT, *completion.token_ids, 7]
        result = decoder.generate(prompt, greedy(6))
        assert token_ids(result) == alone(prompt, greedy(6))
        reused.append(result.stats.reused_tokens - len(PROMPT) // 4 * 4)
    assert max(reused) > 0, "generated tokens are found again"
    assert_unused(decoder)


@pytest.mark.parametrize("n", [3, 5, 10])
def test_c12_samples_are_preempted_and_computed_again(n: int) -> None:
    """vLLM #8844: an assertion failed where a request of n > 1 was to be recomputed."""
    params = [SamplingParams(num_return_sequences=n, max_new_tokens=20, seed=i, eos_token_id=[]) for i in range(4)]
    prompts = [[*PROMPT, i] for i in range(4)]
    decoder = make_decoder(worst(prompts[0], params[0]) + 2)
    results = decoder.generate(prompts, params)
    assert sum(result.stats.preemptions for result in results) > 0
    assert [token_ids(result) for result in results] == [alone(*job) for job in zip(prompts, params, strict=True)]
    assert_unused(decoder)


def test_c13_wide_requests_queue_without_end_of_memory() -> None:
    """vLLM #787, #546: n = 50, random aborts for want of swap space, or a hang once swapping began."""
    params = [SamplingParams(num_return_sequences=50, max_new_tokens=12, seed=i, eos_token_id=[]) for i in range(10)]
    decoder = make_decoder(worst(PROMPT, params[0]) + 40)
    runs = [decoder.add_request(PROMPT, one) for one in params]
    turns = 0
    while not all(run.is_over for run in runs):
        decoder.step()
        turns += 1
        assert turns < 10 * 4 * 12, "it hangs"
    assert decoder.counters().preemptions > 0
    assert all(run.result is not None and len(run.result.completions) == 50 for run in runs)
    assert_unused(decoder)


@pytest.mark.parametrize("place", [0, 4, 8])
def test_c14_a_beam_group_among_others_is_never_lost(place: int) -> None:
    """SGLang (`batch_tail.py`): under memory pressure the beam request is aborted, as it cannot be retracted.

    Here the order of coming decides: as the oldest it goes on, as the youngest it is resumed.
    """
    beams = BeamSearchParams(num_beams=6, num_return_sequences=6, max_new_tokens=24, eos_token_id=[])
    jobs: list[tuple[list[int], Params]] = [([i, *PROMPT], greedy(24)) for i in range(8)]
    jobs.insert(place, (PROMPT, beams))
    decoder = make_decoder(worst(PROMPT, beams) + 2 * worst(PROMPT, greedy(24)))
    results = decoder.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
    preemptions = [result.stats.preemptions for result in results]
    assert sum(preemptions) > 0
    assert preemptions[0] == 0
    assert preemptions[place] > 0 or place < 8
    assert [token_ids(result) for result in results] == [alone(*job) for job in jobs]
    assert_unused(decoder)


def test_c16_a_block_that_was_given_away_is_found_no_more() -> None:
    """vLLM PR #4761: it stayed in the map of cached blocks and was handed out again, to two owners."""
    params = greedy(3)
    decoder = make_decoder(8, prefix_reuse=True)
    prompts = [[first, *[2] * 12] for first in range(1, 9)]
    for prompt in [*prompts, *prompts]:  # four blocks each: of each the first are gone when it comes again
        result = decoder.generate(prompt, params)
        assert token_ids(result) == alone(prompt, params)
        assert result.stats.reused_tokens == 0
        decoder.check_integrity()
    assert decoder.generate(prompts[-1], params).stats.reused_tokens == 12
    assert_unused(decoder)


def test_c17_a_block_taken_anew_has_nothing_of_its_old_content() -> None:
    """kvcached #362: it kept its old hash, so the next prompt read another's keys."""
    params = greedy(3)
    decoder = make_decoder(4, prefix_reuse=True)
    first, second = [5] * 12, [6] * 12
    for prompt in (first, second, first, second):
        result = decoder.generate(prompt, params)
        assert (result.stats.reused_tokens, token_ids(result)) == (0, alone(prompt, params))
        decoder.check_integrity()


@pytest.mark.parametrize("prefix_reuse", [False, True])
@pytest.mark.parametrize("num_blocks", [24, 200])
def test_c20_a_prompt_of_many_passes_ends(prefix_reuse: bool, num_blocks: int) -> None:
    """SGLang #36855: a prompt longer than a chunk, of a beam leader that is not cached: no end, then out of memory."""
    params = BeamSearchParams(num_beams=4, max_new_tokens=8, eos_token_id=[])
    prompts = [[*random_prompt(random.Random(i), 50, 50), i] for i in range(3)]
    decoder = make_decoder(num_blocks, prefix_reuse=prefix_reuse)
    with passes_of(8):
        runs = [decoder.add_request(prompt, params) for prompt in prompts]
        for _ in range(400):
            decoder.step()
            decoder.check_integrity()
    assert all(run.result is not None for run in runs)
    for prompt, run in zip(prompts, runs, strict=True):
        assert run.result is not None
        assert token_ids(run.result) == alone(prompt, params)
    assert_unused(decoder)


def test_c21_a_second_request_does_not_move_the_first() -> None:
    """llama.cpp #27994, #27752: blocks keyed by position alone collided for sequences of one cache.

    The same prompt, and another of the same length, come while the first decodes: same positions, other blocks.
    """
    params = SamplingParams(num_return_sequences=2, max_new_tokens=14, seed=4, eos_token_id=[])
    decoder = make_decoder(256, prefix_reuse=True)
    other = PROMPT[::-1]
    first = decoder.add_request(PROMPT, params)
    for _ in range(5):
        decoder.step()
    later = [decoder.add_request(prompt, params) for prompt in (PROMPT, other)]
    while not all(run.is_over for run in (first, *later)):
        decoder.step()
    for run, prompt in ((first, PROMPT), (later[0], PROMPT), (later[1], other)):
        assert run.result is not None
        assert token_ids(run.result) == alone(prompt, params)
    assert_unused(decoder)


def test_c22_branches_are_bounded_by_blocks_alone() -> None:
    """llama.cpp #14847: a fork to a number beyond a fixed one ended the process. Here a step may be of any width."""
    params = SamplingParams(num_return_sequences=700, max_new_tokens=2, seed=1, eos_token_id=[])
    decoder = make_decoder(800)
    assert len(decoder.generate(PROMPT, params).completions) == 700
    with pytest.raises(
        ValueError, match=r"9000 branches and max_new_tokens=2 may need 9002 blocks .* the pool has 800"
    ):
        decoder.generate(PROMPT, SamplingParams(num_return_sequences=9000, max_new_tokens=2))
    assert_unused(decoder)


@pytest.mark.parametrize("seed", [None, 7])
def test_d2_samples_differ_where_everything_is_deterministic(seed: int | None) -> None:
    """SGLang PR #28805, UniRL #208: one seed for all n made clones, and the advantage of each rollout 0."""
    params = SamplingParams(num_return_sequences=8, max_new_tokens=8, seed=seed, eos_token_id=[])
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        result = tiny_decoder("llama").generate(PROMPT, params)
        again = tiny_decoder("llama").generate(PROMPT, SamplingParams(**{**vars(params), "seed": result.seed}))
    finally:
        torch.use_deterministic_algorithms(before)
    assert len(set(token_ids(result))) == 8
    assert token_ids(again) == token_ids(result), "the seed that was drawn is told"


def test_d3_seeds_change_the_outputs_and_repeat_them() -> None:
    """SGLang #15481, #15746: the seed was ignored."""
    outputs = []
    for seed in [*range(5), *range(5)]:
        params = SamplingParams(num_return_sequences=2, max_new_tokens=8, seed=seed, eos_token_id=[])
        outputs.append(tuple(token_ids(tiny_decoder("llama").generate(PROMPT, params))))
    assert outputs[:5] == outputs[5:]
    assert len(set(outputs)) == 5


def test_d8_what_is_taken_over_is_counted_once() -> None:
    """SGLang #5525: cached tokens were wrong for n > 1, since a warm-up was counted. Here the prompt is one branch."""
    decoder = make_decoder(256, prefix_reuse=True)
    params = SamplingParams(num_return_sequences=4, max_new_tokens=1, seed=1, eos_token_id=[])
    counted = [decoder.generate(PROMPT, params).stats for _ in range(3)]
    assert [(stats.prefill_tokens, stats.reused_tokens) for stats in counted] == [(9, 0), (1, 8), (1, 8)]
    counters = decoder.counters()
    assert (counters.prefill_tokens, counters.reused_tokens) == (11, 16)


def test_d9_d10_n_completions_however_alike() -> None:
    """SGLang #11048: n = 2 at temperature 0 gave one. vLLM #10852, llama-cpp-python #1906: n ignored, or n equal."""
    decoder = tiny_decoder("llama")
    cold = SamplingParams(num_return_sequences=2, max_new_tokens=6, temperature=1e-6, seed=1, eos_token_id=[])
    first, second = decoder.generate(PROMPT, cold).completions
    assert (first.index, second.index) == (0, 1)
    assert first.token_ids == second.token_ids == decoder.generate(PROMPT, greedy(6)).completions[0].token_ids
    warm = SamplingParams(num_return_sequences=3, max_new_tokens=6, seed=1, eos_token_id=[])
    assert len(set(token_ids(decoder.generate(PROMPT, warm)))) == 3
    with pytest.raises(ValueError, match="temperature must be a finite number above 0, got 0"):
        SamplingParams(temperature=0)


def test_d13_widths_of_all_kinds_in_one_batch() -> None:
    """TensorRT-LLM #7368, #1574: a request whose width is not the engine's was refused, or broke the batch."""
    decoder = make_decoder(1024)
    jobs: list[Params] = [greedy(9)]
    jobs += [BeamSearchParams(num_beams=k, num_return_sequences=k, max_new_tokens=9, eos_token_id=[]) for k in (4, 5)]
    jobs += [SamplingParams(num_return_sequences=64, max_new_tokens=9, seed=2, eos_token_id=[])]
    runs = [decoder.add_request(PROMPT, params) for params in jobs]
    decoder.step()
    assert decoder.counters().running == 4, "together, not one after the other"
    while not all(run.is_over for run in runs):
        decoder.step()
    for run, params in zip(runs, jobs, strict=True):
        assert run.result is not None
        assert token_ids(run.result) == alone(PROMPT, params)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_d14_an_abort_says_so_and_nothing_runs_on(num_steps: int, logprobs: int | None) -> None:
    """vLLM PR #56249: an inner request's abort was an IndexError, and its siblings went on being submitted.

    Beams are no requests of their own here: one abort ends all. What was decoded until then is in the frames.
    """
    params = BeamSearchParams(num_beams=4, max_new_tokens=20, eos_token_id=[], logprobs=logprobs)
    decoder = make_decoder(256)
    run = decoder.add_request(PROMPT, params, watch="frames")
    for _ in range(num_steps):
        decoder.step()
    decoder.abort(run)
    assert run.is_over
    assert run.result is None
    assert str(run.error) == "the request was aborted"
    assert run.frames is not None
    # A frame has the tokens of the step before it; the first turn computes the prompt.
    assert [frame.branches[0].num_tokens - len(PROMPT) for frame in run.frames] == list(range(1, num_steps))
    assert_unused(decoder)
    with mock.patch.object(decoder.model, "forward", side_effect=AssertionError("it runs on")):
        assert decoder.step() == []


def test_d19_a_fork_that_does_not_fit_computes_no_prompt_again() -> None:
    """transformers PR #42921: children that did not fit were prefilled again, each.

    Sixteen samples where the pool has blocks for the prompt and a few branches are refused with the numbers; where they
    fit, the prompt is computed once, and whoever has to wait meanwhile says what was computed again.
    """
    params = SamplingParams(num_return_sequences=16, max_new_tokens=10, seed=3, eos_token_id=[])
    needed = worst(PROMPT, params)
    with pytest.raises(ValueError, match=rf"16 branches and max_new_tokens=10 may need {needed} blocks"):
        make_decoder(2 + 4 * 3).generate(PROMPT, params)
    decoder = make_decoder(needed)
    results = decoder.generate([PROMPT, PROMPT[::-1]], params)
    assert [result.stats.prefill_tokens for result in results] == [9, 9]
    assert results[0].stats.recomputed_tokens == 0
    for result, prompt in zip(results, (PROMPT, PROMPT[::-1]), strict=True):
        assert token_ids(result) == alone(prompt, params)
        assert (result.stats.recomputed_tokens > 0) == (result.stats.preemptions > 0)
    assert_unused(decoder)
