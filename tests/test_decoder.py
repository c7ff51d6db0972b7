"""The public interface: what is computed once, what stays when a caller leaves, and who may call at the same time."""

import random
import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams
from fakes import (
    FAMILIES,
    assert_unused,
    make_model,
    random_beam_settings,
    random_prompt,
    tiny_decoder,
    tiny_model,
    token_ids,
)

PROMPT = [5, 9, 2, 33, 41, 7, 7]
BEAMS = BeamSearchParams(num_beams=4, num_return_sequences=2, max_new_tokens=12, eos_token_id=[])
SAMPLES = SamplingParams(num_return_sequences=3, max_new_tokens=12, seed=7, eos_token_id=[])


def tokens_computed(decoder: Decoder, *args: Any) -> tuple[Any, list[int]]:
    """The result and how many tokens each forward pass of the model took in."""
    taken: list[int] = []

    def note(_: torch.nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken.append(kwargs["input_ids"].numel())

    hook = decoder.model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        return decoder.generate(*args), taken
    finally:
        hook.remove()


def decoder_of(
    family: str = "llama", block_size: int = 16, num_blocks: int = 128, prefix_reuse: bool = True
) -> Decoder:
    return Decoder(tiny_model(family), block_size=block_size, num_blocks=num_blocks, prefix_reuse=prefix_reuse)


@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(num_beams=1, max_new_tokens=5, eos_token_id=[]),
        BeamSearchParams(num_beams=16, num_return_sequences=16, max_new_tokens=5, eos_token_id=[]),
        SamplingParams(num_return_sequences=16, max_new_tokens=5, eos_token_id=[]),
    ],
)
def test_a_prompt_is_computed_once(params: BeamSearchParams | SamplingParams) -> None:
    """transformers computes it num_beams times; counted at the model, not by cowbeam's own books."""
    decoder = tiny_decoder("llama")
    result, taken = tokens_computed(decoder, PROMPT, params)
    assert taken[0] == len(PROMPT)
    assert set(taken[1:]) == {params.width}
    assert len(taken) == 5 or result.stats.cuda_graphs  # a replayed step does not pass through the model's hooks
    assert result.stats.prefill_tokens == len(PROMPT)
    assert result.stats.decode_tokens == 4 * params.width
    assert result.stats.steps == 5


def test_prompts_are_packed_without_padding() -> None:
    prompts = [[1] * 3, [2] * 20, [3]]
    results, taken = tokens_computed(tiny_decoder("llama"), prompts, BEAMS)
    assert taken[0] == 24
    assert [result.stats.prefill_tokens for result in results] == [3, 20, 1]


def test_the_last_chosen_token_is_not_computed() -> None:
    result, taken = tokens_computed(
        tiny_decoder("llama"), PROMPT, BeamSearchParams(num_beams=3, max_new_tokens=1, eos_token_id=[])
    )
    assert taken == [len(PROMPT)]
    assert result.stats.decode_tokens == 0


def test_the_end_of_a_search_is_noticed() -> None:
    """All beams finished and still max_tokens steps (vLLM): early stopping must save the forward passes."""
    decoder = tiny_decoder("llama")
    free = decoder.generate(PROMPT, BeamSearchParams(num_beams=2, max_new_tokens=2, eos_token_id=[]))
    everything_but_one = [token for token in range(67) if token != free.completions[0].token_ids[0]]
    params = BeamSearchParams(num_beams=2, max_new_tokens=100, early_stopping=True, eos_token_id=everything_but_one)
    result, taken = tokens_computed(decoder, PROMPT, params)
    assert result.completions[0].finish_reason == "eos"
    assert len(taken) < 10


def test_peak_of_a_long_prompt() -> None:
    """512 + 64 tokens, 16 beams: the prompt's blocks once, and each beam's own."""
    decoder = Decoder(tiny_model("llama"), block_size=16, num_blocks=256)
    params = BeamSearchParams(num_beams=16, num_return_sequences=16, max_new_tokens=64, eos_token_id=[])
    prompt = [1 + i * i % 60 for i in range(512)]
    result = decoder.generate(prompt, params)
    bound = -(-512 // 16) + 16 * (-(-64 // 16) + 1)
    assert 512 // 16 < result.stats.peak_blocks <= bound
    peak = result.stats.peak_memory
    assert peak.unique <= peak.used < peak.copied <= peak.contiguous
    assert peak.used == result.stats.peak_blocks * result.stats.bytes_per_block


def test_mixed_widths_equal_solo_runs() -> None:
    """A request whose width is not the engine's was refused or broke the batch (TensorRT-LLM #7368)."""
    decoder = decoder_of("qwen3", block_size=4, num_blocks=512)
    params = [
        BeamSearchParams(num_beams=1, max_new_tokens=9, eos_token_id=[]),
        BeamSearchParams(num_beams=4, num_return_sequences=4, max_new_tokens=14, length_penalty=0.0),
        BeamSearchParams(num_beams=5, num_return_sequences=2, max_new_tokens=5, repetition_penalty=1.3),
        SamplingParams(num_return_sequences=3, max_new_tokens=12, seed=3, temperature=1.5),
        BeamSearchParams(num_beams=5, max_new_tokens=9, do_sample=True, seed=3),
    ]
    prompts = [[4, 8, 15], [16], PROMPT * 3, PROMPT, [23, 42]]
    together = decoder.generate(prompts, params)
    assert_unused(decoder)
    for prompt, each, result in zip(prompts, params, together, strict=True):
        alone = decoder.generate(prompt, each)
        assert [c.token_ids for c in result.completions] == [c.token_ids for c in alone.completions]
        assert [c.beams for c in result.completions] == [c.beams for c in alone.completions]
        assert [c.score for c in result.completions] == pytest.approx([c.score for c in alone.completions], abs=1e-4)
        assert result.prompt_token_ids == tuple(prompt)
        assert result.stats.peak_blocks == alone.stats.peak_blocks
        assert result.stats.cow_copies == alone.stats.cow_copies


def test_requests_that_do_not_fit_together_wait() -> None:
    """A small pool changes nothing but the time: bounded queueing instead of an abort (vLLM #787)."""
    small, large = decoder_of(block_size=4, num_blocks=24), decoder_of(block_size=4, num_blocks=512)
    prompts = [[1 + i, 2, 3 + i, 9] for i in range(12)]
    params = BeamSearchParams(num_beams=4, max_new_tokens=10, eos_token_id=[])
    waited, at_once = (decoder.generate(prompts, params) for decoder in (small, large))
    assert [w.completions[0].token_ids for w in waited] == [a.completions[0].token_ids for a in at_once]
    assert_unused(small)


@pytest.mark.parametrize("seed", range(8))
def test_a_pool_of_exactly_the_worst_case_is_enough(seed: int) -> None:
    """The admission formula is never exceeded: one block less is refused, none more is needed."""
    rng = random.Random(seed)
    block_size, prompt = rng.choice([1, 2, 4, 16]), random_prompt(rng)
    settings = random_beam_settings(rng)
    params = BeamSearchParams(**settings)
    full, rest = divmod(len(prompt), block_size)
    worst = full + params.num_beams * -(-(rest + params.max_new_tokens) // block_size)
    tight, large = (decoder_of(block_size=block_size, num_blocks=n) for n in (worst, 1024))
    got, want = tight.generate(prompt, params), large.generate(prompt, params)
    assert got.completions == want.completions, f"seed {seed}: {prompt} {settings}"
    assert got.stats.peak_blocks <= worst
    assert_unused(tight)
    if worst > 1:
        with pytest.raises(ValueError, match=f"may need {worst} blocks of {block_size} tokens"):
            decoder_of(block_size=block_size, num_blocks=worst - 1).generate(prompt, params)


@pytest.mark.parametrize("seed", range(6))
def test_requests_that_come_go_and_are_dropped(seed: int) -> None:
    """Streams opened, advanced and closed at random on a small pool; whoever finishes has the tokens of a solo run."""
    rng = random.Random(seed)
    decoder = decoder_of(rng.choice(["llama", "mistral", "gpt2"]), block_size=rng.choice([1, 4, 16]), num_blocks=256)
    open_streams: list[tuple[Any, list[int], BeamSearchParams]] = []
    finished = []
    for _ in range(60):
        if len(open_streams) < 4 and rng.random() < 0.3:
            prompt, params = random_prompt(rng), BeamSearchParams(**random_beam_settings(rng))
            open_streams.append((decoder.stream(prompt, params), prompt, params))
        elif open_streams:
            stream, prompt, params = rng.choice(open_streams)
            frame = next(stream)
            if frame.result is not None:
                finished.append((prompt, params, frame.result))
            if frame.result is not None or rng.random() < 0.05:
                stream.close()
                open_streams = [entry for entry in open_streams if entry[0] is not stream]
        decoder.check_integrity()
    for stream, *_ in open_streams:
        stream.close()
    assert_unused(decoder)
    assert finished
    for prompt, params, result in finished:
        assert token_ids(decoder.generate(prompt, params)) == token_ids(result), f"{prompt} {params}"


def test_one_prompt_gives_a_result_and_a_list_gives_a_list() -> None:
    decoder = tiny_decoder("llama")
    single = decoder.generate(PROMPT, BEAMS)
    (listed,) = decoder.generate([PROMPT], BEAMS)
    assert single.completions == listed.completions
    assert decoder.generate([], BEAMS) == []
    assert decoder.generate(tuple(PROMPT), BEAMS).completions == single.completions
    assert decoder.generate(list(np.array(PROMPT)), BEAMS).completions == single.completions


def test_the_models_own_eos_ends_a_sequence() -> None:
    model = make_model("llama", FAMILIES["llama"])
    decoder = Decoder(model, num_blocks=64)
    free = decoder.generate(PROMPT, BeamSearchParams(num_beams=1, max_new_tokens=8)).completions[0].token_ids
    for own in (free[3], [free[3], 66]):
        model.generation_config.eos_token_id = own
        ended = decoder.generate(PROMPT, BeamSearchParams(num_beams=1, max_new_tokens=8)).completions[0]
        assert ended.token_ids == free[: free.index(free[3]) + 1]
        assert (ended.finish_reason, ended.stop_reason) == ("eos", free[3])
        unended = BeamSearchParams(num_beams=1, max_new_tokens=8, eos_token_id=[])
        assert decoder.generate(PROMPT, unended).completions[0].token_ids == free


def test_the_model_is_left_as_it_was() -> None:
    """Outside a forward pass of ours the model's own attention runs, and generates what it always did."""
    model = make_model("llama", FAMILIES["llama"])
    before = model.config._attn_implementation
    own = model.generate(torch.tensor([PROMPT]), max_new_tokens=5, do_sample=False)
    decoder = Decoder(model, num_blocks=64)
    stream = decoder.stream(PROMPT, BEAMS)
    next(stream)
    assert model.config._attn_implementation == before
    assert model.generate(torch.tensor([PROMPT]), max_new_tokens=5, do_sample=False).equal(own)
    stream.close()
    decoder.generate(PROMPT, BEAMS)
    assert model.config._attn_implementation == before
    assert model.generate(torch.tensor([PROMPT]), max_new_tokens=5, do_sample=False).equal(own)


def test_frames_tell_the_whole_state() -> None:
    """Sharers are table entries; blocks, tokens and scores of the frames agree with each other and the result."""
    decoder = decoder_of(block_size=4, prefix_reuse=False)  # the same twice, to the last digit
    result = decoder.generate(PROMPT, BEAMS)
    *frames, last = decoder.stream(PROMPT, BEAMS)
    assert last.result is not None
    assert last.result.completions == result.completions
    assert last.result.stats.cow_copies == result.stats.cow_copies
    assert not last.branches
    for frame in frames:
        assert frame.result is None
        entries = Counter(block for branch in frame.branches for block in branch.block_table)
        assert dict(frame.sharers) == dict(entries)
        assert frame.live_blocks == len(entries)
        assert len(frame.branches) == BEAMS.num_beams
        for branch in frame.branches:
            assert branch.num_tokens == len(PROMPT) + frame.step
            assert len(branch.block_table) == -(-branch.num_tokens // 4)
        scores = [branch.cumulative_logprob for branch in frame.branches]
        assert scores == sorted(scores, reverse=True)
    assert [frame.step for frame in frames] == list(range(1, BEAMS.max_new_tokens))
    copies = sum(event.kind == "cow" for frame in (*frames, last) for event in frame.events)
    assert copies == result.stats.cow_copies
    assert max(frame.live_blocks for frame in frames) == result.stats.peak_blocks
    assert_unused(decoder)


def test_frames_of_samples_follow_them() -> None:
    decoder = decoder_of(block_size=4, prefix_reuse=False)  # the same twice, to the last digit
    *_, before_last, last = decoder.stream(PROMPT, SAMPLES)
    assert last.result is not None
    assert last.result.completions == decoder.generate(PROMPT, SAMPLES).completions
    assert len(before_last.branches) == 3


@pytest.mark.parametrize("frames_seen", [0, 1, 5])
def test_closing_a_stream_early_frees_everything(frames_seen: int) -> None:
    decoder = decoder_of()
    stream = decoder.stream(PROMPT, BEAMS)
    for _ in range(frames_seen):
        next(stream)
    assert (decoder.num_free_blocks < decoder.num_blocks) == (frames_seen > 0)
    stream.close()  # type: ignore[attr-defined]  # a generator
    assert_unused(decoder)
    assert decoder.generate(PROMPT, BEAMS).completions[0].finish_reason == "length"


def test_generate_inside_an_open_stream() -> None:
    """No lock is held across a yield, and neither disturbs the other."""
    decoder = decoder_of(block_size=4)
    want = token_ids(decoder.generate(PROMPT, BEAMS))
    inner = token_ids(decoder.generate([1, 2, 3], SAMPLES))
    frames = []
    for frame in decoder.stream(PROMPT, BEAMS):
        frames.append(frame)
        # Tokens only: other rows in the batch round the last digits of log-probs differently.
        assert token_ids(decoder.generate([1, 2, 3], SAMPLES)) == inner
        decoder.check_integrity()
    assert frames[-1].result is not None
    assert token_ids(frames[-1].result) == want
    assert_unused(decoder)


def test_two_streams_take_turns() -> None:
    decoder = decoder_of(block_size=4)
    want = [decoder.generate(prompt, BEAMS).completions for prompt in (PROMPT, [1, 2, 3])]
    streams = [decoder.stream(PROMPT, BEAMS), decoder.stream([1, 2, 3], BEAMS)]
    pairs = list(zip(*streams, strict=True))
    for stream, completions in zip(pairs[-1], want, strict=True):
        assert stream.result is not None
        assert [c.token_ids for c in stream.result.completions] == [c.token_ids for c in completions]
    assert_unused(decoder)


def test_threads_share_a_decoder() -> None:
    """Words of different beams mixed in one output, with two clients at once (vLLM #344)."""
    decoder = decoder_of("qwen3", block_size=4, num_blocks=512)
    jobs = [([3 + i, 1, 4, 1, 5 + i], BEAMS if i % 2 else SAMPLES) for i in range(6)]
    want = [[c.token_ids for c in decoder.generate(prompt, params).completions] for prompt, params in jobs]
    got: list[list[tuple[int, ...]]] = [[] for _ in jobs]
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for _ in range(3):
                for index in range(first, len(jobs), 2):
                    prompt, params = jobs[index]
                    got[index] = [c.token_ids for c in decoder.generate(prompt, params).completions]
                    assert got[index] == want[index]
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures, failures
    assert got == want
    assert_unused(decoder)


def test_two_decoders_share_a_model() -> None:
    """Whoever finished its step first switched the attention back in the middle of the other's: wrong tokens."""
    decoders = [decoder_of(block_size=4), decoder_of(block_size=16)]
    params = BeamSearchParams(num_beams=4, max_new_tokens=20, eos_token_id=[])
    want = token_ids(decoders[0].generate(PROMPT, params))
    got: list[list[tuple[int, ...]]] = []

    def work(decoder: Decoder) -> None:
        got.extend(token_ids(decoder.generate(PROMPT, params)) for _ in range(8))

    threads = [threading.Thread(target=work, args=(decoder,)) for decoder in decoders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert got == [want] * 16


def test_a_closed_decoder_says_so() -> None:
    with decoder_of() as decoder:
        decoder.generate(PROMPT, BEAMS)
    for use in (lambda: decoder.generate(PROMPT, BEAMS), lambda: decoder.stream(PROMPT, BEAMS)):
        with pytest.raises(ValueError, match="the decoder is closed"):
            use()
    decoder.close()  # twice is fine


def test_host_work_of_a_step_does_not_grow_with_the_context() -> None:
    """Copying whole sequences on a fork dominated the host's time (vLLM #1646): count links walked, not seconds."""
    from cowbeam.decoder import blocks, branches, chain, group

    walked: list[int] = []

    def counting(last: Any) -> list[Any]:
        found = chain.links(last)
        walked.append(len(found))
        return found

    decoder = decoder_of(num_blocks=256)
    total = {}
    with ExitStack() as stack:
        for module in (blocks, branches, group):
            stack.enter_context(mock.patch.object(module, "links", counting))
        for steps in (10, 40):
            walked.clear()
            params = BeamSearchParams(num_beams=4, max_new_tokens=steps, eos_token_id=[])
            decoder.generate([1 + i % 60 for i in range(320)], params)
            total[steps] = sum(walked)
    # The prompt's table is walked at prefill; a returned sequence at its end, a few times each. A walk a step and
    # branch would be 4 × 30 × 20 links more.
    assert total[40] - total[10] <= 6 * 30, total


def test_only_survivors_are_built() -> None:
    """Each of 2K² candidates built as an object (vLLM #20316): tokens made are the live beams' only."""
    from cowbeam.decoder import branches

    made = 0

    class CountingToken(branches.Token):
        def __init__(self, *args: Any) -> None:
            nonlocal made
            made += 1
            super().__init__(*args)

    with mock.patch.object(branches, "Token", CountingToken):
        params = BeamSearchParams(num_beams=16, max_new_tokens=10, eos_token_id=[])
        decoder_of(num_blocks=256).generate(PROMPT, params)
    assert made <= 16 * 10


def test_autocast_outside_changes_nothing() -> None:
    """A decoder computes in its model's type. (Half of a step was computed in bfloat16, and half was not.)"""
    decoder, params = tiny_decoder("llama"), BeamSearchParams(num_beams=3, max_new_tokens=8, eos_token_id=[])
    wanted = decoder.generate([3, 1, 4], params).completions
    with torch.autocast(decoder.model.device.type, torch.bfloat16):
        assert decoder.generate([3, 1, 4], params).completions == wanted
