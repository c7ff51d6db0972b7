"""Many tasks on one decoder: results, cancelling at every stage, faults, loops that end, threads that do not stay."""

import asyncio
import gc
import random
import threading
import time
from unittest import mock

import pytest

from cowbeam.decoder import AsyncDecoder, BeamSearchParams, Decoder, SamplingParams
from cowbeam.decoder.async_decoder import _Waiter
from cowbeam.decoder.text_stream import TextStream
from fakes import assert_unused, random_beam_settings, random_prompt, tiny_model, token_ids

PROMPT = [5, 6, 7, 8, 9, 10, 11]
BEAMS = BeamSearchParams(num_beams=3, max_new_tokens=6, eos_token_id=[])
LONG = SamplingParams(num_return_sequences=2, max_new_tokens=500, eos_token_id=[], seed=1)


def make_decoder(num_blocks=512, **knobs):
    return Decoder(tiny_model("llama"), block_size=4, num_blocks=num_blocks, **knobs)


def turning_threads():
    return [thread for thread in threading.enumerate() if thread.name == "cowbeam-turns"]


def assert_no_thread_stays():
    deadline = time.monotonic() + 20
    while turning_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not turning_threads()


async def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.002)


def test_200_tasks_have_the_results_of_solo_runs():
    decoder = make_decoder(num_blocks=256)
    rng = random.Random(0)
    jobs = []
    for seed in range(200):
        sampling = SamplingParams(num_return_sequences=1 + seed % 4, max_new_tokens=1 + seed % 11, seed=seed)
        beams = BeamSearchParams(**random_beam_settings(rng))
        jobs.append((random_prompt(rng), sampling if seed % 2 else beams))

    async def main():
        async with AsyncDecoder(decoder) as decoding:
            return await asyncio.gather(*(decoding.generate(*job) for job in jobs))

    results = asyncio.run(main())
    for job, result in zip(jobs[::5], results[::5], strict=True):
        assert token_ids(decoder.generate(*job)) == token_ids(result)
    assert [result.prompt_token_ids for result in results] == [tuple(prompt) for prompt, _ in jobs]
    assert_unused(decoder)
    assert_no_thread_stays()


def test_frames_are_those_of_stream():
    decoder = make_decoder()

    async def main():
        async with AsyncDecoder(decoder) as decoding:
            return [frame async for frame in decoding.stream(PROMPT, BEAMS)]

    frames, want = asyncio.run(main()), list(make_decoder().stream(PROMPT, BEAMS))
    assert frames[:-1] == want[:-1]
    assert token_ids(frames[-1].result) == token_ids(want[-1].result)
    assert_unused(decoder)


def test_tokens_come_as_they_are_chosen():
    decoder = make_decoder()
    params = SamplingParams(num_return_sequences=3, max_new_tokens=9, eos_token_id=[3, 9, 27], seed=2)

    async def main():
        async with AsyncDecoder(decoder) as decoding:
            with pytest.raises(ValueError, match="tokens of beams may be given up again"):
                await anext(decoding.tokens(PROMPT, BEAMS))
            return [token async for token in decoding.tokens(PROMPT, params)]

    streamed = asyncio.run(main())
    for completion in decoder.generate(PROMPT, params).completions:
        mine = [token for token in streamed if token.index == completion.index]
        assert tuple(token.token_id for token in mine) == completion.token_ids
        assert [token.logprob for token in mine] == pytest.approx(completion.logprobs)
        assert [token.finish_reason for token in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]
    assert_unused(decoder)


@pytest.mark.parametrize("seed", range(20))
def test_texts_of_tokens_are_the_text_of_all(seed):
    """A token may be a part of a character, or lose its space at the beginning of a text."""
    pieces = [" a", "b", " ", "é", "日", "🙂", "\n"]
    rng = random.Random(seed)
    text = "".join(rng.choice(pieces) for _ in range(30))
    token_ids = list(text.encode())

    def decode_text(ids):
        return bytes(ids).decode(errors="replace").removeprefix(" ")

    stream = TextStream(decode_text)
    parts = [stream.add(token, is_last=number == len(token_ids)) for number, token in enumerate(token_ids, 1)]
    assert "".join(parts) == decode_text(token_ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@pytest.mark.parametrize("seed", range(3))
def test_cancelling_at_random_moments_leaves_all_blocks_free(seed):
    decoder = make_decoder(num_blocks=160)
    rng = random.Random(seed)
    jobs = [(random_prompt(rng), BeamSearchParams(**random_beam_settings(rng))) for _ in range(30)]

    async def watch(decoding, job):
        result = None
        async for frame in decoding.stream(*job):
            result = frame.result
        return result

    async def cancel_later(task):
        await asyncio.sleep(rng.random() * 0.2)
        task.cancel()

    async def main():
        async with AsyncDecoder(decoder) as decoding:
            use = [decoding.generate(*job) if n % 2 else watch(decoding, job) for n, job in enumerate(jobs)]
            tasks = [asyncio.create_task(each) for each in use]
            cancels = [asyncio.create_task(cancel_later(task)) for task in tasks if rng.random() < 0.6]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*cancels)
            await until(lambda: not turning_threads())
            assert_unused(decoder)
            return results

    for job, result in zip(jobs, asyncio.run(main()), strict=True):
        if not isinstance(result, asyncio.CancelledError):
            assert token_ids(result) == token_ids(decoder.generate(*job))


def test_a_cancelled_request_is_dropped_within_a_step():
    decoder = make_decoder()

    async def main():
        async with AsyncDecoder(decoder) as decoding:
            task = asyncio.create_task(decoding.generate(PROMPT, LONG))
            await until(lambda: decoder.counters().turns > 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            turns = decoder.counters().turns
            await until(lambda: decoder.num_free_blocks == decoder.num_blocks)
            assert decoder.counters().turns - turns <= 2

    asyncio.run(main())
    assert decoder.counters().aborted == 1
    assert_no_thread_stays()


def test_leaving_a_stream_early_drops_its_request():
    decoder = make_decoder()

    async def main():
        async with AsyncDecoder(decoder) as decoding:
            async for frame in decoding.stream(PROMPT, LONG):
                if frame.step == 3:
                    break
            gc.collect()
            await until(lambda: decoder.counters().aborted == 1)
            assert_unused(decoder)

    asyncio.run(main())


def test_a_request_that_cannot_run_is_refused_alone():
    decoder = make_decoder(num_blocks=64)

    async def main():
        async with AsyncDecoder(decoder) as decoding:
            use = [decoding.generate(PROMPT, BEAMS), decoding.generate([999], BEAMS), decoding.generate([], BEAMS)]
            use += [decoding.generate(PROMPT, LONG), decoding.generate([PROMPT, PROMPT], BEAMS)]
            return await asyncio.gather(*use, return_exceptions=True)

    good, *bad = asyncio.run(main())
    assert len(good.completions) == 1
    sentences = ["knows ids 0 to 66", "the prompt is empty", "but the pool has 64", "one prompt is taken here"]
    for error, sentence in zip(bad, sentences, strict=True):
        assert isinstance(error, ValueError)
        assert sentence in str(error)
    assert_unused(decoder)


class Spelling:
    """Fails for one token."""

    def decode(self, token_ids, **_):
        if 13 in token_ids:
            raise OSError("no text for 13")
        return "".join(chr(97 + token_id) for token_id in token_ids)


def test_a_request_that_cannot_be_queued_fails_alone():
    """All tasks were told that the decoder had failed; what they had in flight ran on and held its blocks."""
    decoder = make_decoder()
    decoder.tokenizer = Spelling()
    params = BeamSearchParams(num_beams=3, max_new_tokens=6, eos_token_id=[], stop_strings=["!"], suppress_tokens=[13])

    async def main():
        async with AsyncDecoder(decoder) as decoding:
            first = asyncio.create_task(decoding.generate(PROMPT, LONG))
            await until(lambda: decoder.counters().turns > 1)
            use = [decoding.generate(prompt, params) for prompt in ([13, 2], PROMPT, [5, 13])]
            outcomes = await asyncio.gather(*use, return_exceptions=True)
            assert not first.done()
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            return outcomes

    bad, good, also_bad = asyncio.run(main())
    for error in (bad, also_bad):
        assert isinstance(error, OSError)
        assert str(error) == "no text for 13"
    assert token_ids(good) == token_ids(decoder.generate(PROMPT, params))
    assert_unused(decoder)


def test_a_thread_that_cannot_start_is_an_error_and_no_endless_wait():
    decoder = make_decoder()
    start, left = threading.Thread.start, [1]

    def refused_once(thread):
        if thread.name == "cowbeam-turns" and left and left.pop():
            raise RuntimeError("can't start new thread")
        start(thread)

    async def main():
        async with AsyncDecoder(decoder) as decoding:
            with mock.patch.object(threading.Thread, "start", refused_once):
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    await decoding.generate(PROMPT, BEAMS)
                return await asyncio.wait_for(decoding.generate(PROMPT, BEAMS), 20)

    result = asyncio.run(main())
    assert token_ids(result) == token_ids(decoder.generate(PROMPT, BEAMS))
    assert_unused(decoder)


def test_a_fault_of_the_engine_reaches_every_task_and_ends_nothing_else():
    decoder = make_decoder()

    async def main():
        async with AsyncDecoder(decoder) as decoding:
            with mock.patch.object(decoder.model, "forward", side_effect=ZeroDivisionError("no such pass")):
                use = [decoding.generate(PROMPT, BEAMS) for _ in range(5)]
                frames = [anext(decoding.stream(PROMPT, BEAMS)) for _ in range(2)]
                errors = await asyncio.gather(*use, *frames, return_exceptions=True)
            return errors, await decoding.generate(PROMPT, BEAMS)

    errors, result = asyncio.run(main())
    assert len(errors) == 7
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "no such pass" in str(error)
    assert len({id(error) for error in errors}) == 7, "tasks that raise one error mix their tracebacks"
    assert token_ids(result) == token_ids(decoder.generate(PROMPT, BEAMS))
    assert_unused(decoder)


def test_a_decoder_closed_meanwhile_is_told():
    decoder = make_decoder()

    async def main():
        decoding = AsyncDecoder(decoder)
        task = asyncio.create_task(decoding.generate(PROMPT, LONG))
        await until(lambda: decoder.counters().turns > 1)
        decoder.close()
        with pytest.raises(RuntimeError, match="the decoder is closed"):
            await task
        with pytest.raises(ValueError, match="the decoder is closed"):
            await decoding.generate(PROMPT, BEAMS)
        await decoding.close()

    asyncio.run(main())
    assert_no_thread_stays()


def test_closing_ends_what_runs():
    decoder = make_decoder()

    async def main():
        decoding = AsyncDecoder(decoder)
        tasks = [asyncio.create_task(decoding.generate(PROMPT, LONG)) for _ in range(4)]
        await until(lambda: decoder.counters().turns > 1)
        await decoding.close()
        await decoding.close()  # twice is fine
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, RuntimeError) for error in errors)
        with pytest.raises(ValueError, match="the async decoder is closed"):
            await decoding.generate(PROMPT, BEAMS)

    asyncio.run(main())
    assert_unused(decoder)
    assert decoder.generate(PROMPT, BEAMS).completions, "the decoder itself stays open"
    assert_no_thread_stays()


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_a_request_that_another_thread_ends_at_any_moment_is_told(call, monkeypatch):
    """It ended between two looks at it: after it was seen to have no news, before it was seen to be over."""
    decoder = make_decoder()
    look = _Waiter.has_news.fget

    def look_and_end(waiter):
        has_news = look(waiter)
        while not has_news and waiter.run is not None and not waiter.run.is_over:
            decoder.step()
        return has_news

    monkeypatch.setattr(_Waiter, "has_news", property(look_and_end))

    async def main():
        async with AsyncDecoder(decoder) as decoding:
            if call == "generate":
                return await decoding.generate(PROMPT, BEAMS)
            return [frame async for frame in decoding.stream(PROMPT, BEAMS)][-1].result

    result = asyncio.run(asyncio.wait_for(main(), 20))
    assert token_ids(result) == token_ids(decoder.generate(PROMPT, BEAMS))
    assert_unused(decoder)


def test_a_loop_that_ends_leaves_nothing_behind():
    """Neither closed nor cancelled: the loop is just gone. A thread that stayed would keep decoder and process."""
    decoder = make_decoder()
    decoding = AsyncDecoder(decoder)
    loop = asyncio.new_event_loop()
    task = loop.create_task(decoding.generate(PROMPT, LONG))
    loop.run_until_complete(until(lambda: decoder.counters().turns > 1))
    loop.close()
    assert_no_thread_stays()
    assert decoder.counters().aborted == 1
    assert_unused(decoder)
    task._log_destroy_pending = False
    assert asyncio.run(decoding.generate(PROMPT, BEAMS)), "another loop may go on with it"


def test_nothing_turns_while_nothing_is_asked():
    decoder = make_decoder()

    async def main():
        async with AsyncDecoder(decoder) as decoding:
            await decoding.generate(PROMPT, BEAMS)
            await until(lambda: not turning_threads())
            used = time.process_time()
            await asyncio.sleep(0.3)
            assert time.process_time() - used < 0.1
            await decoding.generate(PROMPT, BEAMS)

    asyncio.run(main())


def test_a_decoder_is_shared_by_loops_threads_and_generate():
    decoder = make_decoder()
    want = token_ids(decoder.generate(PROMPT, BEAMS))
    failures = []

    def work():
        async def main():
            async with AsyncDecoder(decoder) as decoding:
                return await asyncio.gather(*(decoding.generate(PROMPT, BEAMS) for _ in range(10)))

        try:
            assert all(token_ids(result) == want for result in asyncio.run(main()))
            assert all(token_ids(decoder.generate(PROMPT, BEAMS)) == want for _ in range(5))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    assert_unused(decoder)
