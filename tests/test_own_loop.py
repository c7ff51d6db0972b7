"""Requests added, turned and aborted by a loop of the user's own, and what the counters say of it."""

import gc
import random
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import FunctionType, ModuleType, NoneType
from unittest import mock

import pytest
import torch

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams, scheduler
from cowbeam.decoder.lookahead import Landing, Lookahead
from cowbeam.decoder.model_adapter import ModelAdapter
from cowbeam.decoder.run import TurnError
from cowbeam.decoder.scheduler import Scheduler
from fakes import VOCABULARY, assert_unused, random_beam_settings, random_prompt, tiny_model, token_ids

PROMPT = [5, 6, 7, 8, 9, 10, 11]
BEAMS = BeamSearchParams(num_beams=3, max_new_tokens=6, eos_token_id=[])


def make_decoder(block_size=4, num_blocks=256):
    return Decoder(tiny_model("llama"), block_size=block_size, num_blocks=num_blocks)


def test_a_loop_of_ones_own_gives_the_results_of_generate():
    decoder = make_decoder(num_blocks=64)
    prompts = [[3 + i, 1, 4, 1 + i] for i in range(9)]
    runs = [decoder.add_request(prompt, BEAMS) for prompt in prompts]
    ended = []
    while not all(run.is_over for run in runs):
        ended += decoder.step()
        decoder.check_integrity()
    assert sorted(map(id, ended)) == sorted(map(id, runs)), "each run ends once"
    assert decoder.step() == [], "nothing is in flight"
    want = decoder.generate(prompts, BEAMS)
    assert [token_ids(run.result) for run in runs] == [token_ids(result) for result in want]
    assert_unused(decoder)


def test_a_prepared_request_is_taken_as_it_is():
    decoder = make_decoder()
    request = decoder.prepare(PROMPT, SamplingParams(max_new_tokens=3))
    assert decoder.counters().waiting == 0, "nothing is queued"
    run = decoder.add_request(request)
    while not run.is_over:
        decoder.step()
    assert run.result.seed == request.seed
    with pytest.raises(ValueError, match="one prompt is taken here, got a list of 2"):
        decoder.prepare([PROMPT, PROMPT])


def test_watched_runs_collect_frames():
    decoder = make_decoder()
    run = decoder.add_request(PROMPT, BEAMS, watch="frames")
    while not run.is_over:
        decoder.step()
    want = list(decoder.stream(PROMPT, BEAMS))
    assert [frame.step for frame in run.frames] == [frame.step for frame in want]
    assert token_ids(run.frames[-1].result) == token_ids(want[-1].result)


class Texts:
    """A tokenizer's place in the engine: notes when a text is made, and is interrupted at the one asked for."""

    def __init__(self, monkeypatch, decoder, stops_at=None):
        self.happened = []
        self._stops_at = stops_at
        launch = Lookahead.launch
        monkeypatch.setattr(decoder._engine, "_decode_text", self.text_of)
        monkeypatch.setattr(Lookahead, "launch", lambda *args: self.happened.append("launch") or launch(*args))

    def text_of(self, token_ids):
        self.happened.append("text")
        if self.happened.count("text") == self._stops_at:
            raise KeyboardInterrupt
        return ""


def test_results_are_made_while_the_device_computes_the_next_step(monkeypatch):
    """64 requests of 8 samples that ended one after the other kept an H200 waiting for 15 ms at each end."""
    decoder = make_decoder()
    decoder._engine._looks_ahead = False  # one launch a step
    texts = Texts(monkeypatch, decoder)
    short, long = (SamplingParams(max_new_tokens=n, seed=1, eos_token_id=[]) for n in (3, 6))
    results = decoder.generate([PROMPT, PROMPT[:3]], [short, long])
    # Launched: the short one's second and third token; the long one's fourth before the short one's result is made.
    assert texts.happened == ["launch"] * 3 + ["text"] + ["launch"] * 2 + ["text"]
    assert [token_ids(result) for result in results] == [
        token_ids(decoder.generate(prompt, params)) for prompt, params in ((PROMPT, short), (PROMPT[:3], long))
    ]


def test_the_others_go_on_while_a_first_choice_is_awaited(monkeypatch):
    """An H200 waited 7 ms at each pass over prompts: for its composition, and for what the host chooses around it."""
    decoder = make_decoder()
    happened = []

    def note(owner, name):
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: happened.append(name) or method(*args))

    for owner, name in ((ModelAdapter, "compute"), (Lookahead, "launch"), (Landing, "candidates")):
        note(owner, name)
    note(Scheduler, "next_pass")
    old = decoder.add_request(PROMPT, BEAMS)
    decoder.step()
    assert happened == ["next_pass", "compute", "candidates"]
    decoder.add_request(PROMPT[:2], BEAMS)
    happened.clear()
    decoder.step()
    # The pass is launched before the step in flight is awaited, the next step before the first choice is.
    assert happened == ["launch", "next_pass", "compute", "candidates", "launch", "candidates"]
    while not old.is_over:
        decoder.step()
    assert token_ids(old.result) == token_ids(decoder.generate(PROMPT, BEAMS))


@pytest.mark.parametrize("kind", ["beams", "samples", "processed"])
def test_the_device_goes_on_with_the_others_where_a_group_takes_its_last_token(kind, monkeypatch):
    """64 groups of beams that ended one after the other kept an H200 waiting at each end, 2 to 9 ms of a 9 ms step."""
    decoder = make_decoder()
    decoder._engine._looks_ahead = True
    params = {
        "beams": BEAMS,
        "samples": SamplingParams(num_return_sequences=3, eos_token_id=[], seed=5),
        "processed": SamplingParams(num_return_sequences=3, eos_token_id=[], seed=5, temperature=0.6),
    }[kind]
    of_each = [replace(params, max_new_tokens=n) for n in (9, 4, 7, 6, 9, 5)]
    prompts = [PROMPT[: i + 1] for i in range(len(of_each))]
    runs = [decoder.add_request(prompt, of_one) for prompt, of_one in zip(prompts, of_each, strict=True)]
    launched = []
    launch = Lookahead.launch
    monkeypatch.setattr(Lookahead, "launch", lambda *args: launched.append(len(args[1])) or launch(*args))
    while not all(run.is_over for run in runs):
        decoder.step()
        decoder.check_integrity()
    assert launched == [6], "the first step alone is laid out by the host"
    for run, prompt, of_one in zip(runs, prompts, of_each, strict=True):
        assert token_ids(run.result) == token_ids(decoder.generate(prompt, of_one))
    assert_unused(decoder)


def test_rows_that_move_up_are_those_of_their_groups_still():
    """Groups of other widths ended; the others' windows of attention lay across their borders from there on."""
    decoder = make_decoder()
    decoder._engine._looks_ahead = True
    of_each = [
        SamplingParams(num_return_sequences=width, max_new_tokens=length, seed=1, eos_token_id=[])
        for width, length in ((3, 4), (2, 9), (1, 6), (4, 9), (1, 7))
    ]
    runs = [decoder.add_request(PROMPT, of_one) for of_one in of_each]
    widths_seen = set()
    while not all(run.is_over for run in runs):
        decoder.step()
        if flight := decoder._engine._flight:
            inputs = decoder._engine._graphs.inputs
            widths = tuple(len(rows) for rows in flight.rows)
            starts = [number == 0 for width in widths for number in range(width)]
            assert inputs.group_starts.tolist() == starts
            assert inputs.widest_group == max(widths)
            widths_seen.add(widths)
    assert widths_seen == {(3, 2, 1, 4, 1), (2, 1, 4, 1), (2, 4, 1), (2, 4)}


def test_a_request_may_be_preempted_before_its_first_choice_lands(monkeypatch):
    monkeypatch.setattr(scheduler, "GROWTH_SET_ASIDE", 0.0)
    monkeypatch.setattr(scheduler, "MAX_PASS_TOKENS", 4)
    decoder = Decoder(tiny_model("llama"), block_size=1, num_blocks=17, prefix_reuse=False)
    old = SamplingParams(num_return_sequences=2, max_new_tokens=6, seed=1, eos_token_id=[])
    new = SamplingParams(max_new_tokens=7, seed=2, eos_token_id=[])
    new_prompt = list(range(3, 11))
    runs = [decoder.add_request(PROMPT[:4], old)]
    decoder.step()
    runs.append(decoder.add_request(new_prompt, new))
    decoder.step()  # half of the new one's prompt
    assert decoder.counters().preemptions == 0
    decoder.step()  # the other half, and then there is no room for the old one's step
    assert decoder.counters().preemptions == 1
    assert runs[1].group.num_generated == 0
    while not all(run.is_over for run in runs):
        decoder.step()
        decoder.check_integrity()
    alone = Decoder(tiny_model("llama"), block_size=1, num_blocks=64)
    assert token_ids(runs[0].result) == token_ids(alone.generate(PROMPT[:4], old))
    assert token_ids(runs[1].result) == token_ids(alone.generate(new_prompt, new))
    assert_unused(decoder)


@pytest.mark.parametrize("stops_at", [1, 2, 3])
def test_a_turn_interrupted_between_results_loses_none(monkeypatch, stops_at):
    decoder = make_decoder()
    texts = Texts(monkeypatch, decoder, stops_at)
    runs = [decoder.add_request(PROMPT[:n], SamplingParams(max_new_tokens=3, seed=1)) for n in (2, 3, 4)]
    decoder.step()  # the prompts, and the first tokens
    decoder.step()
    with pytest.raises(KeyboardInterrupt):
        decoder.step()
    assert all(run.result is not None for run in runs), "they were complete"
    assert texts.happened.count("text") == 4, "one was made twice"
    assert decoder.counters().finished == 3
    assert_unused(decoder)


@pytest.mark.parametrize("seed", range(4))
def test_aborts_at_random_leave_the_others_their_tokens(seed):
    rng = random.Random(seed)
    decoder = make_decoder(num_blocks=96)
    jobs = [(random_prompt(rng), BeamSearchParams(**random_beam_settings(rng))) for _ in range(12)]
    runs = [decoder.add_request(*job) for job in jobs]
    dropped = set()
    while not all(run.is_over for run in runs):
        decoder.step()
        if rng.random() < 0.3:
            index = rng.randrange(len(runs))
            if not runs[index].is_over:
                dropped.add(index)
            decoder.abort(runs[index])
            decoder.abort(runs[index])  # twice is fine
        decoder.check_integrity()
    assert_unused(decoder)
    for index, (run, job) in enumerate(zip(runs, jobs, strict=True)):
        if index in dropped:
            assert "aborted" in str(run.error)
        else:
            assert token_ids(run.result) == token_ids(decoder.generate(*job))
    counters = decoder.counters()
    assert counters.aborted == len(dropped)
    assert counters.failed == 0


def test_counters_are_the_sums_of_the_stats():
    decoder = make_decoder(num_blocks=64)
    runs = [decoder.add_request([3 + i] * (3 + i), BEAMS) for i in range(8)]
    before = decoder.counters()
    assert (before.running, before.waiting, before.turns, before.decode_tokens_per_second) == (0, 8, 0, 0.0)
    decoder.step()
    decoder.step()
    during = decoder.counters()
    assert during.running > 0
    assert during.running + during.waiting == 8
    assert during.live_blocks + during.free_blocks == 64
    assert during.live_blocks > 0
    assert during.decode_tokens > 0
    while not all(run.is_over for run in runs):
        decoder.step()
    after = decoder.counters()
    stats = [run.result.stats for run in runs]
    assert after.prefill_tokens == sum(s.prefill_tokens for s in stats)
    assert after.decode_tokens == sum(s.decode_tokens for s in stats)
    assert after.cow_copies == sum(s.cow_copies for s in stats) > 0
    assert (after.finished, after.running, after.waiting, after.live_blocks) == (8, 0, 0, 0)
    assert 0 < after.busy_seconds <= after.seconds
    assert after.decode_tokens_per_second == pytest.approx(after.decode_tokens / after.busy_seconds)


def test_a_turn_that_fails_ends_everything_in_flight_and_nothing_else():
    decoder = make_decoder()
    runs = [decoder.add_request(PROMPT, BEAMS), decoder.add_request([1, 2], BEAMS)]
    decoder.step()
    with mock.patch.object(decoder.model, "forward", side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
        decoder.step()
    assert all("the turn of the engine failed" in str(run.error) for run in runs)
    assert decoder.counters().failed == 2
    assert_unused(decoder)
    assert decoder.generate(PROMPT, BEAMS).completions


def test_a_run_that_is_over_keeps_no_tensors():
    """Who keeps thousands of runs, or decodes thousands of prompts, kept rows as wide as the vocabulary for each."""
    decoder = Decoder(tiny_model("llama"), block_size=4, num_blocks=24, swap_memory=2**20)
    each = [
        replace(BEAMS, max_new_tokens=20),
        replace(BEAMS, repetition_penalty=1.2, logprobs=2),
        SamplingParams(num_return_sequences=2, max_new_tokens=4, logprobs=2, top_k=5, seed=1),
    ]
    runs = [decoder.add_request(PROMPT, params) for params in each * 2]
    decoder.abort(runs[-1])
    while not all(run.is_over for run in runs):
        decoder.step()
        if decoder.counters().finished and any(run.group._swapped for run in runs):
            runs += [decoder.add_request(PROMPT, BEAMS)]
            with mock.patch.object(Lookahead, "land", side_effect=MemoryError), suppress(MemoryError):
                decoder.step()
    assert {type(run.error) for run in runs} == {NoneType, RuntimeError, TurnError}
    for run in runs:
        if run.error is not None:
            run.error.__cause__ = run.error.__traceback__ = None  # whose frames are Python's to keep
    seen, left = set(), [vars(run) for run in runs]
    while left:
        if id(one := left.pop()) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        assert not isinstance(one, torch.Tensor)
        left += gc.get_referents(one)
    assert id(runs[0].result) in seen


def test_a_turn_lets_waiting_callers_go_first():
    """A lock is not fair: on a busy machine a thread that turned in a loop kept others out for a second and more."""
    decoder = make_decoder()
    decoder.add_request(PROMPT, BEAMS)
    with mock.patch("time.sleep") as slept:
        decoder.step()
        slept.assert_not_called()
        with decoder._engine._called():  # as a caller that waits for the lock, or just got it
            decoder.step()
        slept.assert_called_once()
        decoder.step()
        slept.assert_called_once()


def test_callers_get_in_while_another_thread_turns():
    decoder = make_decoder(num_blocks=512)
    run = decoder.add_request(PROMPT, SamplingParams(max_new_tokens=600, eos_token_id=[], seed=1))

    def turn():
        while not run.is_over:
            decoder.step()

    thread = threading.Thread(target=turn)
    thread.start()
    for _ in range(10):
        time.sleep(0.002)  # into the middle of a turn
        decoder.abort(decoder.add_request([VOCABULARY - 1], BEAMS))
    assert not run.is_over, "the calls go through while one long request is turned"
    decoder.abort(run)
    thread.join(30)
    assert not thread.is_alive()
    assert_unused(decoder)


def test_a_closed_decoder_says_so():
    decoder = make_decoder()
    run = decoder.add_request(PROMPT, BEAMS)
    decoder.close()
    for use in (decoder.step, decoder.counters, lambda: decoder.add_request(PROMPT, BEAMS)):
        with pytest.raises(ValueError, match="the decoder is closed"):
            use()
    decoder.abort(run)  # an `except` or `finally` of the loop may come to this; nothing is left to free


@pytest.mark.parametrize("call", ["counters", "check_integrity", "forget_prefixes", "add_request"])
def test_who_aborts_while_another_caller_is_at_the_lock_is_not_forgotten(call):
    """The one who held the lock left, and nobody dropped the request until somebody turned the engine again."""
    decoder = make_decoder()
    run = decoder.add_request(PROMPT, BEAMS)
    decoder.step()
    is_held, may_go = threading.Event(), threading.Event()
    lock = decoder._engine._lock

    class Slow:
        def __enter__(self):
            lock.acquire()
            if threading.current_thread() is other:
                is_held.set()
                assert may_go.wait(20)

        def __exit__(self, *_):
            lock.release()

        acquire, release = lock.acquire, lock.release

    arguments = {"add_request": (PROMPT, BEAMS)}.get(call, ())
    other = threading.Thread(target=getattr(decoder, call), args=arguments)
    decoder._engine._lock = Slow()
    other.start()
    assert is_held.wait(20)
    decoder.abort(run)
    assert not run.is_over, "the lock is held"
    may_go.set()
    other.join()
    assert "aborted" in str(run.error)
    while decoder.step() or decoder.counters().running:
        pass
    assert_unused(decoder)


@pytest.mark.parametrize("kind", ["another decoder's", "none", "a result"])
def test_who_aborts_what_is_no_run_of_the_decoder_is_told_and_the_others_go_on(kind):
    decoder, other = make_decoder(), make_decoder()
    theirs, mine = other.add_request(PROMPT, BEAMS), decoder.add_request(PROMPT, BEAMS)
    decoder.step(), other.step()
    wrong = {"another decoder's": theirs, "none": None, "a result": decoder.prepare(PROMPT, BEAMS)}[kind]
    with pytest.raises(ValueError, match=r"in flight in another|abort takes what add_request"):
        decoder.abort(wrong)
    for each, run in ((decoder, mine), (other, theirs)):
        while not run.is_over:
            each.step()
        assert run.result is not None, run.error
        each.abort(run)  # is over
        assert_unused(each)
    decoder.abort(theirs)  # is over, wherever it ran
    assert_unused(decoder)


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("call", ["generate", "generate_many", "stream"])
def test_who_had_finished_before_the_turn_failed_has_its_result(call, looks_ahead, monkeypatch):
    """The next step, of another caller's request, was launched in that turn and failed: both got its error.

    Where the device goes on before the host chooses, who is at its last token has not even finished by then.
    """
    decoder = make_decoder()
    alone = token_ids(decoder.generate(PROMPT, BEAMS))
    engine = decoder._engine
    engine._looks_ahead = looks_ahead
    decode = engine._graphs.decode
    failed = []

    def failing(inputs):
        if len(inputs.block_tables) < 2 * BEAMS.num_beams:
            failed.append(bool(engine._finished))
            raise MemoryError("no room for a step")
        return decode(inputs)

    monkeypatch.setattr(engine._graphs, "decode", failing)
    theirs = decoder.add_request(PROMPT, replace(BEAMS, max_new_tokens=20))
    if call == "generate":
        result = decoder.generate(PROMPT, BEAMS)
    elif call == "generate_many":
        (outcome,) = decoder.generate_many([PROMPT], BEAMS)
        result = outcome.result
    else:
        result = list(decoder.stream(PROMPT, BEAMS))[-1].result
    assert token_ids(result) == alone
    assert isinstance(theirs.error.__cause__, MemoryError)
    assert failed == [not looks_ahead], "the step failed in another place than was meant"
    assert_unused(decoder)
