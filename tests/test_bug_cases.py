"""Public bug reports of other decoders, tried on this one.

Each test is named after its case and tells the report's story. Cases whose law is shown at length elsewhere have a
short test here all the same, so that the story is found. What cannot occur: a copy-on-write that one back end lacks
(xLLM PR #1984) — there is one ``KVCache.copy`` for all of them, and ``test_paged_logits`` proves it is needed.

Elsewhere: what only happens among many requests (C8 to C22, D2, D3, D8 to D14, D19) in ``test_bug_cases_serving``; B1,
B2 in ``test_stop_strings``; B6, B9 in ``test_processors``; B7, B8 in ``test_grammar``; log-probs that are lost or
shifted (B14, D14) also in ``test_token_logprobs``.
"""

import argparse
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams
from cowbeam.decoder.beam_search import BeamSearch
from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.branches import BranchTree
from cowbeam.decoder.group import Group, KVBytes, Request
from cowbeam.decoder.options import Parser, add_search_options, make_params
from cowbeam.decoder.scheduler import worst_case_blocks
from cowbeam.decoder.strategy import Candidate
from fakes import FAMILIES, make_model, search_table, tiny_decoder, tiny_model
from oracles import best_of_all, transformers_generate

EOS = 0


def request(params: BeamSearchParams | SamplingParams, prompt_length: int, eos_ids: frozenset[int]) -> Request:
    return Request((1,) * prompt_length, params, eos_ids, seed=0)


def forced(steps: list[list[float]]):
    """A table by position alone; behind its end every token is as likely."""
    return lambda tokens: steps[len(tokens)] if len(tokens) < len(steps) else [-1.0] * len(steps[0])


def test_a1_length_penalty_counts_generated_tokens_only() -> None:
    """transformers #16413, #26624: divided by prompt + generated, so a long prompt makes the penalty useless.

    Every token has log-prob −10.825; hypotheses of one, two and three tokens all score −10.825, whatever the prompt.
    """
    params = BeamSearchParams(num_beams=3, num_return_sequences=3, max_new_tokens=3)
    search = search_table(params, [EOS], lambda _: [-10.825, -10.825, -10.825])
    assert {len(tokens) for _, tokens in search.found} == {1, 2, 3}
    assert [score for score, _ in search.found] == pytest.approx([-10.825] * 3, rel=1e-6)
    for prompt_length in (1, 100):
        group = Group(request(params, prompt_length, frozenset([EOS])), BlockPool(200, 4), KVBytes(1, ()))
        group.plant()
        while not group.strategy.is_done:
            reached = [(score, rank) for rank, score in enumerate(group.strategy.scores)]
            candidates = [Candidate(score - 10.825, rank, token) for score, rank in reached for token in range(3)]
            group.choose(sorted(candidates, key=lambda candidate: -candidate.score)[:6])
        assert group.strategy.hypotheses[0].score == pytest.approx(-10.825, rel=1e-6)


@pytest.mark.parametrize("length_penalty", [1.0, 1.1])
def test_a2_a_long_hypothesis_beats_a_short_one_of_nearly_equal_sum(length_penalty: float) -> None:
    """vLLM #2606: the short one won though the long one, with nearly the same sum, has the better mean."""
    table = forced([[-3.0, -2.0], [-9.0, -0.1], [-9.0, -0.1], [-1.0, -9.0]])
    params = BeamSearchParams(
        num_beams=2, num_return_sequences=2, max_new_tokens=8, length_penalty=length_penalty, early_stopping="never"
    )
    run = search_table(params, [EOS], table)
    assert run.found[0][1] == (1, 1, 1, 0)
    assert run.found[0][0] == pytest.approx(-3.2 / 4**length_penalty, rel=1e-5)


def test_a2_the_ranking_does_not_depend_on_the_prompts_length() -> None:
    """One table behind prompts of 1 and 400 tokens: the same hypotheses, scores and order."""
    lengths = {}
    for copies in (1, 400):
        params = BeamSearchParams(num_beams=3, max_new_tokens=5, length_penalty=2.0, eos_token_id=[EOS])
        group = Group(request(params, copies, frozenset([EOS])), BlockPool(600, 4), KVBytes(1, ()))
        group.plant()
        while not group.strategy.is_done:
            scores = group.strategy.scores
            logprobs = {0: -1.0, 1: -0.5, 2: -1.5}
            pairs = [(scores[rank] + logprobs[t], rank, t) for rank in range(3) for t in range(3)]
            group.choose([Candidate(*pair) for pair in sorted(pairs, reverse=True)[:6]])
        lengths[copies] = [(h.score, h.last.token_id) for h in group.strategy.hypotheses]
    assert lengths[1] == lengths[400]


@pytest.mark.parametrize("length_penalty", [2.0, -1.0])
def test_a5_never_stops_neither_early_nor_late(length_penalty: float) -> None:
    """transformers PR #20901: the best attainable score took the wrong length for the penalty's sign.

    The first hypotheses are short and good; with the penalty 2 a much longer one wins in the end.
    """
    table = forced([[-1.5, -0.6, -2.5], [-1.5, -0.6, -2.5], [-2.5, -0.3, -4.0], [-2.5, -0.2, -4.0], [-0.1, -4.0, -4.0]])
    ranked = best_of_all(table, max_new_tokens=5, eos_ids=frozenset([EOS]), length_penalty=length_penalty)
    params = BeamSearchParams(num_beams=3, max_new_tokens=5, length_penalty=length_penalty, early_stopping="never")
    run = search_table(params, [EOS], table)
    assert run.found[0][1] == ranked[0][1]
    assert len(ranked[0][1]) == (5 if length_penalty > 0 else 1)


def test_a7_beams_live_on_when_every_best_continuation_is_an_eos() -> None:
    """transformers #34168, why 2K candidates: K finished at once, and a better one may still come."""
    table = forced([[-9.0, -1.0, -1.1], [-0.5, -1.0, -3.0], [-0.01, -5.0, -5.0]])
    params = BeamSearchParams(
        num_beams=2, num_return_sequences=2, max_new_tokens=5, length_penalty=2.0, early_stopping="never"
    )
    run = search_table(params, [EOS], table)
    assert run.live[1] == [(1, 1), (2, 1)], "both best continuations were EOS; two others live"
    assert run.found[0][1] == (1, 1, 0), "the later one is better by length"


def test_a8_many_eos_ids() -> None:
    """transformers #25103: with 10 EOS ids all 2K candidates can be EOS; (1 + E) · K are needed."""
    eos_ids = frozenset(range(10))
    search = BeamSearch(BeamSearchParams(num_beams=3), eos_ids)
    assert search.num_candidates == 33
    run = search_table(
        BeamSearchParams(num_beams=3, num_return_sequences=3, max_new_tokens=4),
        eos_ids,
        lambda _: [-1.0] * 10 + [-2.0, -3.0, -4.0],
    )
    assert all(len(live) == 3 for live in run.live[:-1])
    settings = {
        "num_beams": 3,
        "num_return_sequences": 3,
        "max_new_tokens": 8,
        "eos_token_id": list(range(20, 30)),
        "early_stopping": False,
    }
    (want,) = transformers_generate(tiny_model("llama"), [[3, 1, 4]], settings)
    got = tiny_decoder("llama").generate([3, 1, 4], BeamSearchParams(**settings))
    assert [c.token_ids for c in got.completions] == [tuple(w.token_ids) for w in want]


def test_a10_nothing_follows_an_end_however_beams_change_places() -> None:
    """TensorRT-LLM PRs #12838, #13543: finished flags were overwritten when beams moved; K=128, max_tokens=8."""
    eos_ids = list(range(20, 40))
    params = BeamSearchParams(num_beams=128, num_return_sequences=128, max_new_tokens=8, eos_token_id=eos_ids)
    result = tiny_decoder("llama").generate([3, 1, 4], params)
    assert result.stats.steps <= 8
    assert len({completion.token_ids for completion in result.completions}) == 128
    for completion in result.completions:
        assert 1 <= len(completion.token_ids) <= 8
        assert not set(completion.token_ids[:-1]) & set(eos_ids), "an ended beam went on"
        assert (completion.finish_reason == "eos") == (completion.token_ids[-1] in eos_ids)


def test_a11_no_output_is_empty_where_the_search_ends_as_it_widens() -> None:
    """TensorRT-LLM #19337: widths 16, 32, 100, and 84 of 100 outputs empty. Here one branch becomes 100 at once."""
    for max_new_tokens in (1, 2, 3):
        params = BeamSearchParams(
            num_beams=100, num_return_sequences=100, max_new_tokens=max_new_tokens, eos_token_id=[]
        )
        completions = tiny_decoder("llama").generate([3, 1, 4], params).completions
        # Of one token there are only as many sequences as the vocabulary has tokens.
        assert len({completion.token_ids for completion in completions}) == (67 if max_new_tokens == 1 else 100)
        assert {len(completion.token_ids) for completion in completions} == {max_new_tokens}


def test_a12_every_setting_reaches_the_search() -> None:
    """TensorRT-LLM PR #13633: length_penalty and early_stopping were dropped on the way, floats cut to integers.

    From the outermost interface, the command's options: each of them changes what is found.
    """
    decoder, found = tiny_decoder("llama"), {}
    for number, line in enumerate(("", "--length-penalty 5", "--length-penalty 0.4", "--early-stopping true")):
        parser = Parser(argument_default=argparse.SUPPRESS)
        add_search_options(parser.add_argument_group("search"))
        common = "--num-beams 4 --num-return-sequences 4 --max-new-tokens 12 "
        common += " ".join(f"--eos-token-id {token}" for token in range(20, 32))
        options = vars(parser.parse_args([*common.split(), *line.split()]))
        params = make_params(options, sample=options.pop("sample"))
        result = decoder.generate([3, 1, 4], params)
        found[number] = ([c.token_ids for c in result.completions], [c.score for c in result.completions])
        for completion in result.completions:
            exact = completion.cumulative_logprob / len(completion.token_ids) ** params.length_penalty  # type: ignore[union-attr]
            assert completion.score == pytest.approx(exact, rel=1e-5)
    assert len({str(one) for one in found.values()}) == len(found)


def test_a14_a_batch_does_not_change_its_members() -> None:
    """OpenNMT-py #137, #994: finished items were advanced while the batch ran; n-best depended on its size."""
    decoder = tiny_decoder("qwen2")
    params = BeamSearchParams(num_beams=3, num_return_sequences=3, max_new_tokens=12, eos_token_id=list(range(20, 26)))
    prompts = [[1 + (7 * number + place) % 60 for place in range(1 + number % 9)] for number in range(30)]
    alone = [[c.token_ids for c in decoder.generate(prompt, params).completions] for prompt in prompts]
    together = [[c.token_ids for c in result.completions] for result in decoder.generate(prompts, params)]
    assert together == alone


def test_a15_the_search_ends_when_it_is_over() -> None:
    """vLLM 0.33 runs max_tokens steps, finished or not: all beams end by token 5, and 500 were allowed."""
    decoder = tiny_decoder("llama")
    free = decoder.generate([3, 1, 4], BeamSearchParams(num_beams=1, max_new_tokens=5, eos_token_id=[]))
    eos_ids = sorted({*range(67)} - {*free.completions[0].token_ids[:4]})
    params = BeamSearchParams(num_beams=4, max_new_tokens=500, early_stopping=True, eos_token_id=eos_ids)
    result = decoder.generate([3, 1, 4], params)
    assert result.stats.steps <= 6


@pytest.mark.parametrize("num_beams", [4, 5])
def test_a16_n_best_equal_transformers_over_64_tokens(num_beams: int) -> None:
    """vLLM #975: finished pool not capped, 2K sampling missing; the n-best lists drifted apart on the way."""
    settings = {
        "num_beams": num_beams,
        "num_return_sequences": num_beams,
        "max_new_tokens": 64,
        "eos_token_id": [7],
        "early_stopping": False,
    }
    (want,) = transformers_generate(tiny_model("qwen2"), [[3, 1, 4, 1, 5]], settings)
    got = tiny_decoder("qwen2").generate([3, 1, 4, 1, 5], BeamSearchParams(**settings))
    assert [c.token_ids for c in got.completions] == [tuple(w.token_ids) for w in want]
    assert [c.beams for c in got.completions] == [tuple(w.beams) for w in want]


def test_b5_every_given_eos_ends_a_beam_and_is_named() -> None:
    """TensorRT-LLM #7145: a stop id that is not the model's EOS id crashed."""
    decoder = tiny_decoder("llama")
    free = decoder.generate([3, 1, 4], BeamSearchParams(num_beams=3, num_return_sequences=3, eos_token_id=[]))
    ids = [free.completions[0].token_ids[2], free.completions[0].token_ids[5]]
    params = BeamSearchParams(num_beams=3, num_return_sequences=3, max_new_tokens=30, eos_token_id=ids)
    ended = [c for c in decoder.generate([3, 1, 4], params).completions if c.finish_reason == "eos"]
    assert ended
    assert all(completion.stop_reason == completion.token_ids[-1] for completion in ended)
    assert {completion.stop_reason for completion in ended} <= set(ids)


def test_b13_candidates_beyond_the_vocabulary() -> None:
    """xLLM PR #2316: top-k larger than the vocabulary raised inside the sampler (vocabulary 6, K = 4 and 9)."""
    model = make_model("llama", {**FAMILIES["llama"], "vocab_size": 6})
    decoder = Decoder(model, num_blocks=64)
    for num_beams in (4, 9):
        params = BeamSearchParams(num_beams=num_beams, num_return_sequences=4, max_new_tokens=5, eos_token_id=[])
        found = {completion.token_ids for completion in decoder.generate([1, 2], params).completions}
        assert len(found) == 4
    # Fewer sequences exist than are asked for: those that exist.
    params = BeamSearchParams(num_beams=9, num_return_sequences=9, max_new_tokens=1, eos_token_id=[])
    assert len({completion.token_ids for completion in decoder.generate([1, 2], params).completions}) == 6


@pytest.mark.parametrize("num_beams", [11, 40])
def test_b14_more_than_ten_beams(num_beams: int) -> None:
    """vLLM #10792: K > 10 failed with an unrelated error on log-probs."""
    params = BeamSearchParams(num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=5, eos_token_id=[])
    completions = tiny_decoder("llama").generate([3, 1, 4], params).completions
    assert len({completion.token_ids for completion in completions}) == num_beams


def test_b16_parents_are_live_beams() -> None:
    """xLLM #553: a top list longer than K gave source indices beyond the beams."""
    for num_beams in (2, 5, 12):
        params = BeamSearchParams(
            num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=8, eos_token_id=[4, 5]
        )
        for completion in tiny_decoder("llama").generate([3, 1, 4], params).completions:
            assert all(0 <= beam < num_beams for beam in completion.beams)


def test_c1_a_beam_that_continues_another_takes_its_history() -> None:
    """transformers #46612: the cache's reorder was silently skipped. A step where beam 1 is a child of beam 0."""
    pool = BlockPool(20, 4)
    params = BeamSearchParams(num_beams=2, max_new_tokens=9)
    group = Group(request(params, 6, frozenset()), pool, KVBytes(1, ()))
    group.plant()
    group.choose([Candidate(-1.0, 0, 5), Candidate(-2.0, 0, 6), Candidate(-3.0, 0, 7), Candidate(-4.0, 0, 8)])
    for branch in group.branches:
        group.tree.append_slot(branch)
    parent = group.branches[0].block_table
    group.choose([Candidate(-2.0, 0, 1), Candidate(-2.5, 0, 2), Candidate(-3.0, 1, 1), Candidate(-4.0, 1, 2)])
    assert [[token.token_id for token in branch.tokens] for branch in group.branches] == [[5, 1], [5, 2]]
    assert [branch.block_table for branch in group.branches] == [parent, parent]
    pool.check_integrity([branch.last_block for branch in group.branches])


def test_c4_beams_of_two_clients_do_not_mix() -> None:
    """vLLM #344, #644: words of different beams in one output, IndexError with two clients."""
    decoder = Decoder(tiny_model("gpt2"), block_size=4, num_blocks=256)
    params = BeamSearchParams(num_beams=4, num_return_sequences=4, max_new_tokens=16, eos_token_id=[])
    prompts = [[3, 1, 4, 1, 5], [2, 7, 1, 8]]
    want = [[c.token_ids for c in decoder.generate(prompt, params).completions] for prompt in prompts]
    got: dict[int, list[tuple[int, ...]]] = {}

    def client(number: int) -> None:
        got[number] = [c.token_ids for c in decoder.generate(prompts[number], params).completions]

    threads = [threading.Thread(target=client, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [got[0], got[1]] == want
    decoder.check_integrity()


def test_c5_an_aborted_request_leaves_no_copies_behind() -> None:
    """xLLM PR #1984: stale copy sources leaked into the next use after a reset."""
    decoder = Decoder(tiny_model("llama"), block_size=4, num_blocks=64, prefix_reuse=False)
    params = BeamSearchParams(num_beams=4, max_new_tokens=10, eos_token_id=[])
    want = decoder.generate([3, 1, 4, 1, 5], params).completions
    for frames in range(1, 8):
        stream = decoder.stream([9, 9, 9], params)
        for _ in range(frames):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        decoder.check_integrity()
        assert decoder.generate([3, 1, 4, 1, 5], params).completions == want


def test_c6_all_beams_hold_the_prompts_blocks() -> None:
    """TensorRT-LLM PR #15444: beams 1… got blocks of their own for data that only beam 0 had computed."""
    decoder = Decoder(tiny_model("llama"), block_size=4, num_blocks=64)
    params = BeamSearchParams(num_beams=5, max_new_tokens=6, eos_token_id=[])
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    for frame in decoder.stream(prompt, params):
        full = {branch.block_table[:2] for branch in frame.branches}
        assert len(full) <= 1, "the prompt's full blocks are the same for all"
        assert all(frame.sharers[block] == 5 for table in full for block in table)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_c7_a_step_that_raises_leaves_everything_as_it_was(looks_ahead: bool) -> None:
    """TensorRT-LLM PR #15444: after an exception ids in flight stayed, and the next change of width aborted.

    Blocks, tables and random numbers: the next request is answered as if nothing had been.
    """
    model = make_model("llama", FAMILIES["llama"])
    decoder = Decoder(model, block_size=4, num_blocks=256)
    decoder._engine._looks_ahead = looks_ahead  # type: ignore[union-attr]
    params = [
        BeamSearchParams(num_beams=5, num_return_sequences=5, max_new_tokens=9, eos_token_id=[]),
        SamplingParams(num_return_sequences=4, max_new_tokens=9, seed=3, eos_token_id=[]),
    ]

    def run() -> list[list[tuple[int, ...]]]:
        return [[c.token_ids for c in result.completions] for result in decoder.generate([[3, 1, 4], [9, 2]], params)]

    wanted = run()
    for fails_at in (0, 1, 2, 5):
        calls = iter(range(100))

        def fail(*_: object, fails_at: int = fails_at, calls: Iterator[int] = calls) -> None:
            if next(calls) == fails_at:
                raise MemoryError("in the middle of a step")

        hook = model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(MemoryError, match="in the middle of a step"):
            run()
        hook.remove()
        decoder.check_integrity()
        assert decoder.num_free_blocks == decoder.num_blocks
        assert run() == wanted


def test_c10_admission_counts_the_shared_prompt_once() -> None:
    """TensorRT-LLM PR #16802: capacity was divided by K as if the prompt were not shared."""
    params = BeamSearchParams(num_beams=128, max_new_tokens=8)
    assert worst_case_blocks(request(params, 4096, frozenset()), 16) == 256 + 128
    assert worst_case_blocks(request(params, 4097, frozenset()), 16) == 256 + 128
    assert worst_case_blocks(request(params, 4111, frozenset()), 16) == 256 + 2 * 128


def test_c25_a_shared_block_is_freed_once() -> None:
    """SGLang: nested free groups freed twice. Two beams of one parent, both dropped."""
    pool = BlockPool(8, 4)
    tree = BranchTree(pool)
    first = tree.plant(6)
    second = tree.fork(first)
    tree.free(first)
    pool.check_integrity([second.last_block])
    assert pool.num_free == 6
    tree.free(second)
    pool.check_integrity([])
    with pytest.raises(AssertionError, match="released more often than held"):
        pool.release(second.last_block)


def test_d1_a_seed_does_not_make_samples_equal() -> None:
    """vLLM PR #11898: with a seed all n completions were equal."""
    params = SamplingParams(num_return_sequences=4, max_new_tokens=8, seed=1, eos_token_id=[])
    first, again = (tiny_decoder("llama").generate([3, 1, 4], params).completions for _ in range(2))
    assert first == again
    assert len({completion.token_ids for completion in first}) == 4


def test_d4_equal_prompts_are_not_equal_rows() -> None:
    """TensorRT-LLM #212, #117, #2411: of a batch of eight equal prompts rows 2 to 8 were identical."""
    results = tiny_decoder("llama").generate([[3, 1, 4]] * 8, SamplingParams(max_new_tokens=10, eos_token_id=[]))
    assert len({result.completions[0].token_ids for result in results}) == 8


def test_d6_n_outputs_each_index_once() -> None:
    """vLLM #14280, #12584: n=10 gave one output, or outputs overwrote each other."""
    params = [SamplingParams(num_return_sequences=n, max_new_tokens=6, eos_token_id=[3, 5, 7]) for n in (10, 2)]
    for result, n in zip(tiny_decoder("llama").generate([[3, 1, 4]] * 2, params), (10, 2), strict=True):
        assert [completion.index for completion in result.completions] == list(range(n))


def test_d16_a_fork_touches_no_sequence() -> None:
    """vLLM #1646: host time went into copying sequence objects. A fork of 100,000 tokens touches three links."""
    pool = BlockPool(8000, 16)
    tree = BranchTree(pool)
    branch = tree.plant(100_000)
    links_before = pool.num_live
    with mock.patch("cowbeam.decoder.blocks.links", side_effect=AssertionError("the table was walked")):
        children = [tree.fork(branch) for _ in range(16)]
    assert pool.num_live == links_before
    assert {child.last_block for child in children} == {branch.last_block}


def test_d17_selection_is_near_linear_in_the_width() -> None:
    """vLLM #20316, #45815: each of 2K² candidates was built as a list. What selecting reads grows as the width."""
    seen = {}
    for width in (16, 64, 256):
        search = BeamSearch(BeamSearchParams(num_beams=width, max_new_tokens=64), frozenset([EOS]))
        candidates = [Candidate(-float(n), n % width, 1 + n % 7) for n in range(search.num_candidates)]
        started = time.thread_time()
        for _ in range(5):
            search.select(candidates, [None] * width)
        seen[width] = time.thread_time() - started
        assert len(candidates) == 2 * width
    assert seen[256] < 16 * 8 * max(seen[16], 1e-4), seen  # quadratic would be 256 times
