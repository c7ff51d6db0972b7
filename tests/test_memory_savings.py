"""What sharing saves, on real searches: beside transformers' own cache, reserves, and the published numbers."""

import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """The benchmark's own files, so that what it prints is what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        names = ("bench_memory", "contiguous", "memory_searches", "traces")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture(scope="module")
def small(scripts: Any) -> Decoder:
    return scripts.memory_searches.load_decoder(small=True)


def beams(num_beams: int, new_tokens: int) -> BeamSearchParams:
    return BeamSearchParams(num_beams=num_beams, max_new_tokens=new_tokens, eos_token_id=[])


@pytest.mark.parametrize(("num_beams", "num_prompt"), [(1, 64), (4, 64), (4, 512), (16, 512), (32, 2048)])
def test_the_named_baselines_are_what_transformers_is_measured_to_hold(
    scripts: Any, small: Decoder, num_beams: int, num_prompt: int
):
    """`copied` is a claim about somebody else's code: measured in the same run it must be the very number."""
    new_tokens = 12
    prompt = scripts.memory_searches.make_prompt(small, num_prompt, seed=num_beams)
    peer = scripts.memory_searches.run_transformers(small.model, prompt, num_beams, new_tokens)
    result = small.generate(prompt, beams(num_beams, new_tokens))
    memory, stats = result.stats.peak_memory, result.stats
    assert result.completions[0].token_ids == peer.token_ids, "memory of different searches is not comparable"
    assert memory.copied == peer.peak_bytes
    per_token = stats.bytes_per_block // stats.block_size
    assert memory.contiguous == num_beams * (num_prompt + new_tokens) * per_token
    assert (
        memory.unique
        <= memory.used
        <= stats.bytes_per_block * (num_prompt // 16 + num_beams * -(-(num_prompt % 16 + new_tokens) // 16))
    )
    # The prompt is held once: what is left of transformers' memory is one branch and each branch's own tail.
    assert memory.used <= memory.copied / num_beams + num_beams * 2 * stats.bytes_per_block


def test_a_block_costs_the_bytes_that_its_tensors_take(small: Decoder):
    engine = small._engine
    assert engine is not None
    stats = small.generate([1, 2, 3], beams(2, 2)).stats
    tensors = [tensor for layer in engine._cache.layers for tensor in layer.tensors]
    blocks = engine.pool.num_blocks + 1  # the scratch block of captured steps
    assert sum(tensor.nbytes for tensor in tensors) == blocks * stats.bytes_per_block


def test_the_peak_is_the_most_that_the_pool_ever_gave(small: Decoder):
    engine = small._engine
    assert engine is not None
    live, result = [], None
    for frame in small.stream(list(range(1, 40)), beams(8, 24)):
        live += [frame.live_blocks] if frame.branches else []
        result = frame.result
    assert result is not None
    assert max(live) == result.stats.peak_blocks
    assert result.stats.peak_memory.used == max(live) * result.stats.bytes_per_block
    assert engine.pool.num_live == 0


def test_a_real_model_shares_most_of_a_prompt(scripts: Any):
    """SmolLM2 with a prompt of 128 tokens: eight beams in less than a quarter of what transformers holds."""
    with Decoder.from_pretrained(dtype="float32", device="cpu") as decoder:
        prompt = scripts.memory_searches.make_prompt(decoder, 128, seed=3)
        peer = scripts.memory_searches.run_transformers(decoder.model, prompt, 8, 10)
        result = decoder.generate(prompt, beams(8, 10))
    memory = result.stats.peak_memory
    assert result.completions[0].token_ids == peer.token_ids
    assert memory.copied == peer.peak_bytes
    assert 4 * memory.used < peer.peak_bytes
    moved = result.stats.cow_copies * result.stats.bytes_per_block
    assert 20 * moved < peer.moved_bytes, "copy-on-write must not become the copying it replaces"


def test_samples_save_the_prompts_full_blocks_and_nothing_else(scripts: Any, small: Decoder):
    """By hand: 40 prompt tokens are two full blocks, and a third that every sample but one copies at once."""
    params = SamplingParams(num_return_sequences=4, max_new_tokens=21, eos_token_id=[], seed=1)
    watched = scripts.memory_searches.watch(small, [list(range(1, 41))], [params])
    assert len(watched.states) == 20
    assert {state.saved_blocks for state in watched.states} == {3 * 2}
    assert [state.live_blocks for state in watched.states] == [2 + 4] * 8 + [2 + 8] * 12
    assert watched.results[0].stats.cow_copies == 3
    assert {state.duplicated_slots for state in watched.states} == {3 * 8}


@pytest.mark.parametrize("block_size", [1, 8, 64])
def test_each_branch_wastes_less_than_a_block(scripts: Any, block_size: int):
    decoder = scripts.memory_searches.load_decoder(small=True, block_size=block_size)
    params = [beams(6, 30), SamplingParams(num_return_sequences=6, max_new_tokens=30, eos_token_id=[], seed=1)]
    watched = scripts.memory_searches.watch(decoder, [list(range(1, 50))] * 2, params)
    assert max(state.unused_slots for state in watched.states) <= 6 * (block_size - 1)
    copies = [result.stats.cow_copies for result in watched.results]
    assert (sum(copies) == 0) == (block_size == 1)


def test_savings_are_of_the_published_size(scripts: Any):
    """The paper saves 6.1 to 9.8 % with samples and 37.6 to 55.2 % with beams, 2 to 6 branches, on Alpaca's lengths.

    The model and the lengths are others, so the law is the order: beams save several times what samples save, and
    more branches save more.
    """
    rows = scripts.bench_memory.compare_sharing(scripts.bench_memory.QUICK)
    saved = {(row["strategy"], row["branches"]): row["saved"] for row in rows}
    assert 0.03 < saved["sampling", 2] < saved["sampling", 4] < 0.2
    assert 0.3 < saved["beams", 2] < saved["beams", 4] < 0.8


def test_drawn_lengths_have_the_published_means(scripts: Any):
    for trace, (prompt, generated) in scripts.traces.MEAN_LENGTHS.items():
        lengths = scripts.traces.draw_lengths(trace, 20_000, seed=5)
        assert sum(it.prompt for it in lengths) / len(lengths) == pytest.approx(prompt, rel=0.03)
        assert sum(it.generated for it in lengths) / len(lengths) == pytest.approx(generated, rel=0.03)
        assert max(map(sum, lengths)) <= scripts.traces.LONGEST


def test_first_fit_leaves_holes_that_are_too_small(scripts: Any):
    slots = scripts.contiguous.FirstFit(10)
    assert [slots.allocate(3), slots.allocate(4), slots.allocate(3)] == [0, 3, 7]
    slots.free(0)
    slots.free(7)
    assert slots.num_taken == 4
    assert slots.allocate(4) is None, "six slots are free, but in two gaps of three"
    assert slots.allocate(2) == 0
    assert slots.allocate(3) == 7
    assert slots.allocate(1) == 2


def test_first_fit_never_gives_a_slot_twice(scripts: Any):
    rng = random.Random(4)
    slots, taken = scripts.contiguous.FirstFit(60), {}
    for _ in range(500):
        if taken and rng.random() < 0.45:
            slots.free(first := rng.choice(list(taken)))
            del taken[first]
            continue
        length = rng.randint(1, 12)
        free = sorted(set(range(60)) - {slot for first, end in taken.items() for slot in range(first, end)})
        fits = [slot for slot in free if all(slot + i in free for i in range(length))]
        first = slots.allocate(length)
        assert first == (fits[0] if fits else None)
        if first is not None:
            taken[first] = first + length


def test_stretches_waste_most_of_the_memory_and_blocks_hardly_any(scripts: Any):
    """The paper's figure 2: 20 to 40 % of the memory holds tokens in stretches, over 96 % in blocks."""
    rows = list(scripts.bench_memory.compare_allocation(scripts.bench_memory.QUICK))
    ways = {row["way"]: row for row in rows}
    for row in rows:
        assert row["used"] + row["reserved"] + row["idle"] == pytest.approx(1)
        if row["way"].startswith("contiguous"):
            assert row["filled"] < 0.75
        else:
            assert row["filled"] > 0.96
            assert row["moved_per_token"] == 0
    assert ways["contiguous, the maximum"]["used"] < 0.3
    assert ways["contiguous, true length (oracle)"]["used"] < 0.6
    assert ways["contiguous, doubled when full"]["moved_per_token"] > 0.5
    assert ways["blocks of 16, newest preempted"]["used"] > 0.96


def test_the_benchmark_prints_draws_and_ends_with_json(
    scripts: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    picture = tmp_path / "memory.png"
    arguments = ["--quick", "--part", "a", "--part", "c", "--part", "d", "--beams", "1", "4", "--plot", str(picture)]
    assert scripts.bench_memory.main(arguments) == 0
    output = capsys.readouterr().out
    last = json.loads(output.splitlines()[-1])
    assert {row["same_tokens"] for row in last["a"]} == {True}
    assert {row["beams"] for row in last["a"]} == {1, 4}
    assert [row["block_size"] for row in last["c"]] == [8, 16, 32, 64]
    assert last["commit"]
    assert "Peak KV memory" in output
    assert picture.read_bytes().startswith(b"\x89PNG")
