"""Prompts from an iterable: as they finish, bounded in memory, each with its own error."""

import gc
import itertools
import time
import weakref
from unittest import mock

import pytest
from transformers import BatchEncoding

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams
from cowbeam.decoder.job_progress import JobProgress, in_time
from cowbeam.decoder.many_prompts import MAX_WAITING
from cowbeam.decoder.scheduler import MAX_ROWS
from fakes import assert_unused, tiny_model, token_ids

BEAMS = BeamSearchParams(num_beams=3, max_new_tokens=6, eos_token_id=[])
GREEDY = BeamSearchParams(num_beams=1, max_new_tokens=2, eos_token_id=[])


def make_decoder(num_blocks=256):
    return Decoder(tiny_model("llama"), block_size=4, num_blocks=num_blocks)


def take_fewer_than(limit, outcomes):
    for number, _ in enumerate(outcomes, 1):
        assert number < limit


def failing_on(model, is_bad):
    """The model's forward, which raises where ``is_bad`` says so of the tokens it gets."""
    forward = model.forward

    def maybe(*args, **kwargs):
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None and is_bad(ids.flatten().tolist()):
            raise ZeroDivisionError("no such forward pass")
        return forward(*args, **kwargs)

    return mock.patch.object(model, "forward", maybe)


def test_every_prompt_has_the_result_of_a_list():
    decoder = make_decoder(num_blocks=64)
    prompts = [[1 + i % 60] * (1 + i % 7) for i in range(40)]
    params = [BEAMS if i % 2 else SamplingParams(max_new_tokens=1 + i % 9, seed=i) for i in range(40)]
    outcomes = list(decoder.generate_many(iter(prompts), iter(params)))
    assert sorted(outcome.index for outcome in outcomes) == list(range(40))
    assert [o.index for o in outcomes] != list(range(40)), "as they finish: a short one does not wait for a long one"
    want = decoder.generate(prompts, params)
    assert all(token_ids(outcome.result) == token_ids(want[outcome.index]) for outcome in outcomes)
    assert_unused(decoder)


def test_generate_takes_an_iterator():
    decoder = make_decoder()
    outcomes = list(decoder.generate(([i, 2] for i in range(1, 4)), GREEDY))
    assert sorted(outcome.index for outcome in outcomes) == [0, 1, 2]
    assert list(decoder.generate(iter(()))) == []
    assert decoder.generate([], GREEDY) == [], "a list stays a list"


def test_prompts_are_taken_as_there_is_room():
    """A million prompts in a generator must not all be tokenized first, nor their results be kept."""
    decoder = make_decoder(num_blocks=64)
    taken = itertools.count()
    last = 0
    alive = weakref.WeakSet()

    def endless():
        nonlocal last
        while True:
            last = next(taken)
            yield [1 + last % 60, 2, 3]

    outcomes = decoder.generate_many(endless(), GREEDY)
    for done, outcome in enumerate(itertools.islice(outcomes, 700), 1):
        alive.add(outcome.result)
        assert last < done + MAX_WAITING + MAX_ROWS
    gc.collect()
    assert len(alive) <= 65, "results that were given are forgotten"
    outcomes.close()
    assert_unused(decoder)
    assert decoder.counters().aborted > 0


def test_a_bad_prompt_is_its_own_outcome():
    decoder = make_decoder()
    prompts = [[1, 2], [999], [], "text without a tokenizer", None, [3] * 1000, 7, [3, 4]]
    outcomes = {outcome.index: outcome for outcome in decoder.generate_many(prompts, GREEDY)}
    assert len(outcomes) == len(prompts)
    assert [index for index, outcome in outcomes.items() if outcome.error is None] == [0, 7]
    assert "prompt token 0 is 999" in str(outcomes[1].error)
    assert "the prompt is empty" in str(outcomes[2].error)
    assert "needs a tokenizer" in str(outcomes[3].error)
    assert "exceed the model's 640 positions" in str(outcomes[5].error)
    assert_unused(decoder)


@pytest.mark.parametrize("prompts", ["text", b"bytes", [1, 2, 3]])
def test_one_prompt_is_not_many(prompts):
    """Else a text would be decoded letter by letter."""
    with pytest.raises(ValueError, match="takes an iterable of prompts, got one prompt"):
        make_decoder().generate_many(prompts)


@pytest.mark.parametrize("prompts", [{"input_ids": [[1], [2]]}, BatchEncoding({"input_ids": [[1], [2]]}), 5])
def test_what_a_tokenizer_returns_is_not_many_prompts(prompts):
    """Else its keys would be decoded, as text."""
    with pytest.raises(ValueError, match="generate_many takes an iterable of prompts, got "):
        make_decoder().generate_many(prompts)


@pytest.mark.parametrize("params", [{"num_beams": 1}, "greedy", 5])
def test_params_are_of_the_two_kinds(params):
    with pytest.raises(
        ValueError, match="params must be BeamSearchParams, SamplingParams or one of them a prompt, got"
    ):
        make_decoder().generate_many([[1], [2]], params)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_params_must_be_as_many_as_prompts(number):
    decoder = make_decoder()
    prompts, params = [[1], [2], [3]], [GREEDY] * number
    with pytest.raises(ValueError, match=f"3 prompts but {number} params"):
        decoder.generate_many(prompts, params)
    with pytest.raises(
        ValueError, match=f"the {'params' if number < 3 else 'prompts'} end after {min(number, 3)}, and"
    ):
        list(decoder.generate_many(iter(prompts), params))
    assert_unused(decoder)


def test_a_source_that_raises_ends_it_behind_what_it_gave():
    decoder = make_decoder()

    def source():
        yield [1, 2]
        yield [3, 4]
        raise OSError("the disk is gone")

    outcomes = decoder.generate_many(source(), BEAMS)
    assert sorted(outcome.index for outcome in itertools.islice(outcomes, 2) if outcome.result is not None) == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(outcomes)
    assert_unused(decoder)


def test_a_source_that_raised_is_asked_no_more():
    """An iterator of a class may well go on after an error; the iteration has ended then."""

    class Source:
        given = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.given += 1
            if self.given == 2:
                raise OSError("the disk is gone")
            return [1, self.given]

    source, decoder = Source(), make_decoder()
    outcomes = decoder.generate_many(source, BEAMS)
    assert next(outcomes).result is not None
    with pytest.raises(OSError, match="the disk is gone"):
        next(outcomes)
    assert source.given == 2
    assert_unused(decoder)


def test_a_slow_source_does_not_hold_up_what_runs():
    """Waiting for 256 prompts that come one a second, before the first turn, would take minutes."""
    decoder = make_decoder()
    taken = 0

    def slow():
        nonlocal taken
        for i in range(30):
            time.sleep(0.03)
            taken += 1
            yield [1 + i, 2]

    outcomes = decoder.generate_many(slow(), GREEDY)
    next(outcomes)
    assert taken < 10
    outcomes.close()


def test_only_the_prompt_that_makes_a_turn_fail_has_the_error():
    """Out of memory on one prompt in a thousand must not cost the others their results, nor end the job."""
    decoder = make_decoder()
    prompts = [[1 + i, 2, 3] for i in range(33)]
    want = decoder.generate(prompts, BEAMS)
    prompts[7] = prompts[30] = [66, 66, 66]
    with failing_on(decoder.model, lambda ids: ids.count(66) >= 3):
        outcomes = {outcome.index: outcome for outcome in decoder.generate_many(prompts, BEAMS)}
    assert len(outcomes) == 33
    for index, outcome in outcomes.items():
        if index in (7, 30):
            assert isinstance(outcome.error, ZeroDivisionError)
            assert outcome.error.__traceback__ is None, "its frames would keep tensors"
        else:
            assert token_ids(outcome.result) == token_ids(want[index])
    assert_unused(decoder)


def test_an_engine_that_always_fails_ends_it():
    """A million error records of a GPU that is gone help nobody."""
    decoder = make_decoder()
    with failing_on(decoder.model, bool):
        outcomes = decoder.generate_many(([1 + i % 60] for i in range(10**6)), GREEDY)
        with pytest.raises(RuntimeError, match="no such forward pass"):
            take_fewer_than(10, outcomes)
    assert_unused(decoder)


def test_a_decoder_closed_meanwhile_ends_it():
    decoder = make_decoder()
    outcomes = decoder.generate_many(([1 + i % 60] for i in range(10**6)), GREEDY)
    next(outcomes)
    decoder.close()
    with pytest.raises(ValueError, match="the decoder is closed"):
        take_fewer_than(1000, outcomes)
    with pytest.raises(ValueError, match="the decoder is closed"):
        decoder.generate_many([[1]])


def test_progress_when_piped_is_plain(capsys):
    decoder = make_decoder()
    prompts = [[1], [2], [999]]
    assert len(list(decoder.generate_many(prompts, GREEDY, progress=True))) == 3
    err = capsys.readouterr().err
    assert "3 of 3 prompts" in err
    assert "1 failed" in err
    assert "\x1b" not in err


def test_time_left_is_of_this_run_alone():
    """A run that goes on where an earlier one stopped once promised the end in no time."""
    decoder = make_decoder()
    with mock.patch("time.perf_counter", side_effect=itertools.count(0, 10)):
        progress = JobProgress(100, mock.Mock(return_value=mock.Mock(decode_tokens=0)), done=90)
        progress.done += 2
        assert "0:40 left" in progress._text(10.0)
    assert (in_time(61), in_time(3661)) == ("1:01", "1:01:01")
    assert_unused(decoder)


def test_what_goes_wrong_as_a_prompt_is_queued_is_its_own(monkeypatch):
    """Once it ended the iteration: `temperature=2` was found wanting only there."""
    decoder = Decoder(tiny_model("llama"), block_size=4, num_blocks=256)
    add_request = decoder.add_request

    def refusing(request, *args, **kwargs):
        if request.prompt_token_ids == (7, 7):
            raise ValueError("not this one")
        return add_request(request, *args, **kwargs)

    monkeypatch.setattr(decoder, "add_request", refusing)
    outcomes = {outcome.index: outcome for outcome in decoder.generate(iter([[5, 6], [7, 7], [8, 9]]))}
    assert str(outcomes[1].error) == "not this one"
    assert outcomes[0].result is not None
    assert outcomes[2].result is not None


def test_faults_in_succession_are_counted_without_those_between():
    """Where each prompt came alone, three that failed ended the iteration, with a thousand results between them."""
    decoder = make_decoder()
    is_done = True
    prompts = [[66, 2] if number % 2 else [3 + number, 2] for number in range(12)]

    def one_by_one():
        nonlocal is_done
        for prompt in prompts:
            is_done = False
            yield prompt, GREEDY
            while not is_done:
                yield None

    outcomes = []
    with failing_on(decoder.model, lambda ids: ids == [66, 2]):
        for outcome in decoder.generate_pairs(one_by_one()):
            outcomes.append(outcome)
            is_done = True
    assert [isinstance(outcome.error, ZeroDivisionError) for outcome in outcomes] == [False, True] * 6
    assert_unused(decoder)
