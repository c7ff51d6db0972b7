"""A prompt computed piece by piece has the logits of one pass, whatever lies in the slots that are not written yet."""

import itertools
import random
from unittest import mock

import pytest
import torch

from cowbeam.decoder import BeamSearchParams, Decoder, Run, scheduler
from cowbeam.decoder.kv_cache import KVCache
from fakes import FAMILIES, VOCABULARY, assert_unused, tiny_model, token_ids

TOLERANCE = 1e-5  # of the greatest logit


def poisoned(decoder: Decoder) -> KVCache:
    """The decoder's cache, all of it NaN."""
    cache = decoder._engine._cache
    for layer in cache.layers:
        for tensor in layer.tensors:
            tensor.fill_(torch.nan)
    return cache


def finish(decoder: Decoder, runs: list[Run]) -> None:
    while not all(run.is_over for run in runs):
        decoder.step()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_pieces_have_the_logits_of_one_pass(family: str) -> None:
    """Two prompts cut anywhere, their pieces together in passes; a piece's past may be written by its own pass."""
    rng = random.Random(family)
    decoder = Decoder(tiny_model(family), block_size=rng.choice([1, 4, 16]), num_blocks=256)
    adapter, size = decoder._adapter, decoder.block_size
    prompts = [[rng.randrange(VOCABULARY) for _ in range(length)] for length in (47, 33)]
    ids = rng.sample(range(256), 128)
    tables = [[ids.pop() for _ in range(-(-len(prompt) // size))] for prompt in prompts]
    want = adapter.compute(poisoned(decoder), prompts, tables, [0, 0])
    cuts = [sorted({0, len(prompt), *rng.sample(range(1, len(prompt)), 5)}) for prompt in prompts]
    pieces = [(p, a, b) for p, at in enumerate(cuts) for a, b in itertools.pairwise(at)]
    pieces.sort(key=lambda piece: piece[1])
    cache, got = poisoned(decoder), {}
    while pieces:
        together, pieces = pieces[: (n := rng.randint(1, 4))], pieces[n:]
        logits = adapter.compute(
            cache,
            [prompts[p][a:b] for p, a, b in together],
            [tables[p] for p, *_ in together],
            [a for _, a, _ in together],
        )
        got |= {p: row for (p, _, b), row in zip(together, logits, strict=True) if b == len(prompts[p])}
    error = max(float((got[p] - want[p]).abs().max()) for p in (0, 1))
    assert error <= TOLERANCE * float(want.abs().max())


def test_one_long_prompt_is_computed_in_passes_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations of a prompt of any length in one pass would not fit beside the pool."""
    monkeypatch.setattr(scheduler, "MAX_PASS_TOKENS", 64)
    decoder = Decoder(tiny_model("llama"), block_size=4, num_blocks=256)
    prompt = [1 + i * i % 60 for i in range(500)]
    params = BeamSearchParams(num_beams=3, max_new_tokens=8, eos_token_id=[])
    sizes = []
    hook = decoder.model.register_forward_pre_hook(
        lambda _, __, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    got = decoder.generate(prompt, params)
    hook.remove()
    assert sizes == [64] * 7 + [52] + [3] * 7
    monkeypatch.setattr(scheduler, "MAX_PASS_TOKENS", 4096)
    want = Decoder(tiny_model("llama"), block_size=4, num_blocks=256).generate(prompt, params)
    assert token_ids(got) == token_ids(want)
    assert got.stats.prefill_tokens == want.stats.prefill_tokens == 500
    assert_unused(decoder)


def test_a_long_prompt_does_not_hold_up_who_runs_or_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_PASS_TOKENS", 32)
    monkeypatch.setattr(scheduler, "SHARE_OF_LONG", 16)
    decoder = Decoder(tiny_model("llama"), block_size=4, num_blocks=512)
    greedy = BeamSearchParams(num_beams=1, max_new_tokens=6, eos_token_id=[])
    runs = [decoder.add_request([7, 8, 9], greedy), decoder.add_request([5] * 600, greedy)]
    runs.append(decoder.add_request([4, 3], greedy))
    turns = 0
    while not (runs[0].is_over and runs[2].is_over):
        decoder.step()
        turns += 1
    assert turns <= 2 * 6 + 2
    assert not runs[1].has_begun
    decoder.abort(runs[1])
    assert_unused(decoder)


@pytest.mark.parametrize("call", [1, 3, 5])
def test_a_pass_that_fails_ends_everything_in_flight_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Out of memory in the middle of a prompt: no block stays held, and none of it is found by the next."""
    monkeypatch.setattr(scheduler, "MAX_PASS_TOKENS", 16)
    decoder = Decoder(tiny_model("llama"), block_size=4, num_blocks=64)
    params = BeamSearchParams(num_beams=2, max_new_tokens=4, eos_token_id=[])
    prompts = [[1 + i % 60 for i in range(40)], [5, 6]]
    want = [token_ids(result) for result in decoder.generate(prompts, params)]
    decoder.forget_prefixes()
    runs = [decoder.add_request(prompt, params) for prompt in prompts]
    forward, calls = decoder.model.forward, []

    def failing(*args, **kwargs):
        calls.append(None)
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **kwargs)

    with mock.patch.object(decoder.model, "forward", failing), pytest.raises(torch.OutOfMemoryError):
        finish(decoder, runs)
    assert all("the turn of the engine failed" in str(run.error) for run in runs)
    assert_unused(decoder)
    assert decoder.counters().cached_blocks == 0
    assert [token_ids(result) for result in decoder.generate(prompts, params)] == want


@pytest.mark.parametrize("turns", range(9))
def test_a_request_dropped_at_any_stage_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """Waiting, in the middle of its prompt, running, or gone for others: its blocks are free at once."""
    monkeypatch.setattr(scheduler, "MAX_PASS_TOKENS", 8)
    greedy = BeamSearchParams(num_beams=1, max_new_tokens=12, eos_token_id=[])
    prompts = [[7] * 20, [1, 2] * 9, [3] * 17]
    decoder = Decoder(tiny_model("llama"), block_size=4, num_blocks=14)
    want = [token_ids(decoder.generate(prompt, greedy)) for prompt in prompts]
    decoder.forget_prefixes()
    runs = [decoder.add_request(prompt, greedy) for prompt in prompts]
    for _ in range(turns):
        decoder.step()
    decoder.abort(runs[1])
    decoder.check_integrity()
    finish(decoder, runs)
    assert "aborted" in str(runs[1].error)
    assert [token_ids(runs[index].result) for index in (0, 2)] == [want[0], want[2]]
    assert_unused(decoder)
