"""Preempted groups wait on the host: what comes back is what was there, and nothing of it is computed anew."""

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams
from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.group import Group, KVBytes, Request
from cowbeam.decoder.kv_cache import KVCache, LayerShape
from cowbeam.decoder.strategy import Candidate
from cowbeam.decoder.swap import CHUNK_BLOCKS, SwapSpace
from fakes import DEVICE, FAMILIES, assert_unused, make_model, token_ids

BLOCK_SIZE = 4
ROOM = 2**30


def make_cache(num_blocks: int = 200) -> KVCache:
    """Layers of three kinds, one with K and V of different widths."""
    kinds = [(2, 16, 16, torch.float32), (1, 24, 8, torch.float32), (3, 8, 8, torch.bfloat16)]
    device = torch.device(DEVICE)
    cache = KVCache([LayerShape(*kind, device, None) for kind in kinds], num_blocks, BLOCK_SIZE)
    for tensor in cache.tensors:
        tensor.normal_()
    return cache


def chunk_bytes(cache: KVCache) -> int:
    return CHUNK_BLOCKS * sum(tensor[0].nbytes for tensor in cache.tensors)


NUMBERS = [1, CHUNK_BLOCKS - 1, CHUNK_BLOCKS, CHUNK_BLOCKS + 1, 3 * CHUNK_BLOCKS - 5]
LEFT_OUT = [0, 1, CHUNK_BLOCKS, CHUNK_BLOCKS + 3]


@pytest.mark.parametrize(("number", "left_out"), [(n, out) for n in NUMBERS for out in LEFT_OUT if out < n])
def test_blocks_come_back_as_they_were_wherever_they_come(number: int, left_out: int) -> None:
    cache, rng = make_cache(), random.Random(number)
    ids = rng.sample(range(200), number)
    held = [tensor[ids].clone() for tensor in cache.tensors]
    space = SwapSpace(cache, ROOM)
    saved = space.save(ids)
    for tensor in cache.tensors:
        tensor.fill_(torch.nan)
    places = rng.sample(range(200), number)
    space.bring_back(saved, places[left_out:])
    elsewhere = [place for place in range(201) if place not in places[left_out:]]
    for tensor, before in zip(cache.tensors, held, strict=True):
        assert torch.equal(tensor[places[left_out:]], before[left_out:])
        assert tensor[elsewhere].isnan().all(), "other blocks were written"


def test_the_room_is_bounded_and_used_again() -> None:
    cache = make_cache()
    space = SwapSpace(cache, 3 * chunk_bytes(cache) - 1)
    made = []
    with mock.patch.object(SwapSpace, "_make", lambda self, make=SwapSpace._make: made.append(make(self)) or made[-1]):
        assert space.save(range(2 * CHUNK_BLOCKS + 1)) is None, "three pieces do not fit"
        assert not made, "memory is taken only when it is needed"
        first, second = space.save(range(CHUNK_BLOCKS)), space.save([5])
        assert space.save([6]) is None
        space.bring_back(first, range(CHUNK_BLOCKS))
        third = space.save([6])
        assert third is not None
        space.drop(second)
        space.drop(third)
        assert space.save(range(2 * CHUNK_BLOCKS)) is not None
    assert len(made) == 2


def test_a_little_room_is_used_too() -> None:
    cache = make_cache()
    space = SwapSpace(cache, 5 * sum(tensor[0].nbytes for tensor in cache.tensors))
    assert space.save(range(6)) is None
    saved, before = space.save([7, 3, 9, 1, 2]), cache.tensors[0][[7, 3, 9, 1, 2]].clone()
    space.bring_back(saved, range(20, 25))
    assert torch.equal(cache.tensors[0][20:25], before)
    assert SwapSpace(cache, 1).save([1]) is None


def test_memory_that_cannot_be_pinned_costs_nothing_but_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="cowbeam")
    space = SwapSpace(make_cache(), ROOM)
    with mock.patch.object(SwapSpace, "_make", side_effect=RuntimeError("CUDA error: out of memory")):
        assert space.save([1]) is None
    assert "computed anew: CUDA error: out of memory" in caplog.text
    assert space.save([1]) is None, "it is not tried again and again"


def test_a_cache_without_blocks_saves_nothing() -> None:
    assert SwapSpace(KVCache([], 10, BLOCK_SIZE), ROOM).save([1]) is None


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8], [1, 6, 1, 8, 0, 3, 3]]
BEAMS = BeamSearchParams(num_beams=4, num_return_sequences=4, max_new_tokens=24, eos_token_id=[])
SAMPLES = SamplingParams(num_return_sequences=4, max_new_tokens=24, eos_token_id=[], seed=7)


def make_decoder(family: str = "llama", num_blocks: int = 31, **knobs: object) -> Decoder:
    model = make_model(family, FAMILIES[family]).to(DEVICE)
    return Decoder(model, block_size=BLOCK_SIZE, num_blocks=num_blocks, **knobs)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [BEAMS, SAMPLES], ids=["beams", "samples"])
@pytest.mark.parametrize("prefix_reuse", [False, True])
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_who_was_preempted_goes_on_without_computing_anything_again(
    params: BeamSearchParams | SamplingParams, prefix_reuse: bool, looks_ahead: bool
) -> None:
    alone = make_decoder(num_blocks=300, prefix_reuse=False)
    wanted = [alone.generate(prompt, params) for prompt in PROMPTS]
    decoder = make_decoder(prefix_reuse=prefix_reuse, swap_memory=ROOM)
    decoder._engine._looks_ahead = looks_ahead  # type: ignore[union-attr]
    got = decoder.generate(PROMPTS, params)
    assert [token_ids(result) for result in got] == [token_ids(result) for result in wanted]
    counters = decoder.counters()
    assert counters.preemptions > 0
    assert counters.swapped_blocks > 0
    assert counters.swapped_blocks == sum(result.stats.swapped_blocks for result in got)
    assert counters.recomputed_tokens == 0
    assert_unused(decoder)


def test_who_finds_no_room_is_computed_anew() -> None:
    decoder = make_decoder(swap_memory=1)
    got = decoder.generate(PROMPTS, BEAMS)
    assert [token_ids(result) for result in got] == [
        token_ids(result) for result in make_decoder(num_blocks=300, prefix_reuse=False).generate(PROMPTS, BEAMS)
    ]
    counters = decoder.counters()
    assert counters.swapped_blocks == 0
    assert counters.recomputed_tokens > 0


class Noting:
    """A room that is always full, and knows when it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def save(self, block_ids: object) -> None:
        self.asked += 1


def test_only_what_is_computed_is_saved() -> None:
    """A prompt without its first choice needs logits, too; and blocks that are yet to be computed hold nothing."""
    room, pool = Noting(), BlockPool(64, BLOCK_SIZE)
    group = Group(Request(tuple(PROMPTS[0]), SAMPLES, frozenset(), 7), pool, KVBytes(1, ()), swap_space=room)  # type: ignore[arg-type]

    def compute() -> None:
        group.plant()
        while group.backlog.num_tokens:
            group.take(3)

    compute()
    group.give_back()
    assert room.asked == 0, "nothing was chosen yet"
    compute()
    group.choose([Candidate(0.0, rank, 7) for rank in range(4)])
    for branch in group.branches:
        group.tree.append_slot(branch)
    group.choose([Candidate(0.0, rank, 8 + rank) for rank in range(4)])
    group.give_back()
    assert room.asked == 1
    group.plant()
    group.take(3)
    group.give_back()
    assert room.asked == 1, "only a part was computed anew"
    compute()
    group.give_back()
    assert room.asked == 2


def test_room_comes_back_from_who_is_dropped_while_it_waits() -> None:
    decoder = make_decoder(swap_memory=ROOM)
    space = decoder._engine._swap_space  # type: ignore[union-attr]
    runs = [decoder.add_request(prompt, BEAMS) for prompt in PROMPTS]
    while not (waiting := [run for run in runs if run.group._swapped is not None]):
        decoder.step()
    decoder.abort(waiting[0])
    assert waiting[0].group._swapped is None
    assert space._free, "its pieces can be used again"
    while not all(run.is_over for run in runs):
        decoder.step()
    others = [run for run in runs if run is not waiting[0]]
    alone = make_decoder(num_blocks=300, prefix_reuse=False)
    for run in others:
        prompt = list(run.group.request.prompt_token_ids)
        assert token_ids(run.result) == token_ids(alone.generate(prompt, BEAMS))
    assert_unused(decoder)


def test_blocks_of_older_weights_are_not_found_once_they_are_back() -> None:
    """They hold K/V of the weights that were; a later prompt that begins alike is computed by those that are."""
    decoder = make_decoder(swap_memory=ROOM)
    runs = [decoder.add_request(prompt, replace(BEAMS, num_return_sequences=1)) for prompt in PROMPTS]
    while not (waiting := [run for run in runs if run.group._swapped is not None]):
        decoder.step()
    with torch.no_grad():
        decoder.model.get_input_embeddings().weight.mul_(1.5)
    while not all(run.is_over for run in runs):
        decoder.step()
    assert waiting[0].group.swapped_blocks > 0
    prompt = [*waiting[0].group.request.prompt_token_ids, 8, 8]
    model = decoder.model
    fresh = Decoder(model, block_size=BLOCK_SIZE, num_blocks=300, prefix_reuse=False)
    assert token_ids(decoder.generate(prompt, BEAMS)) == token_ids(fresh.generate(prompt, BEAMS))


@pytest.mark.parametrize("value", [-1, 1.5, "4G", True])
def test_swap_memory_is_a_number_of_bytes(value: object) -> None:
    with pytest.raises(ValueError, match="swap_memory must be a non-negative integer"):
        make_decoder(swap_memory=value)
