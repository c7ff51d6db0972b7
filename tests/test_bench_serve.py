"""The throughput benchmark: its loads equal solo runs, its floor is what a hand computes, its last line is JSON."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cowbeam.decoder import Decoder

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
NAMES = ("bench_models", "bench_serve", "device_clock", "serve_floor", "serve_load", "serve_peers")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(SCRIPTS)
    return SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})


@pytest.fixture
def model(scripts: SimpleNamespace) -> Any:
    return scripts.bench_models.random_model("tiny", "cpu", torch.float32)


@pytest.mark.parametrize("name", ["9x3-samples@21+17", "7x4-beams@18+13"])
@pytest.mark.parametrize("num_blocks", [300, 40])
def test_each_request_is_as_alone(scripts: SimpleNamespace, model: Any, name: str, num_blocks: int):
    load = scripts.serve_load.Load.parse(name)
    with Decoder(model, block_size=4, num_blocks=num_blocks) as decoder:
        served = scripts.serve_load.check_equality(decoder, load, seed=3)
        assert decoder.num_free_blocks == decoder.num_blocks
    assert (served.preemptions > 0) == (num_blocks == 40), "the small pool is there to see preemption"
    assert served.peak_blocks <= num_blocks


def test_a_case_has_a_name_or_a_size(scripts: SimpleNamespace):
    parse = scripts.serve_load.Load.parse
    assert parse("64x4-beams") == scripts.serve_load.Load(64, 4, "beams", 1024, 32)
    assert parse("64x8-samples").output_tokens == 64 * 8 * 256
    for wrong in ("64x9-samples", "8x8", "2x2-beams@5"):
        with pytest.raises(ValueError, match="is none of 64x8-samples"):
            parse(wrong)


def test_runs_have_prompts_of_their_own(scripts: SimpleNamespace):
    """Else the prefix cache would answer for the warm runs."""
    small, other = (scripts.serve_load.Load.parse(name) for name in ("2x2-samples@9+3", "3x2-samples@9+3"))
    drawn = [tuple(prompt) for load in (small, other) for seed in (1, 2) for prompt in load.make_prompts(512, seed)]
    assert len(set(drawn)) == len(drawn)


def test_the_floor_of_a_small_load_by_hand(scripts: SimpleNamespace, model: Any):
    """Two prompts of 3 tokens, 2 samples each of 3 tokens: two steps after the prefill."""
    floor = scripts.serve_floor.floor_of(
        scripts.serve_load.Load.parse("2x2-samples@3+3"), model, scripts.serve_floor.Peaks(operations=1.0, bytes=1.0)
    )
    layers, head = 3 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128), 512 * 64
    pair = 4 * 64 * 3  # multiply and add, with K and with V, of 4 heads of 16 in 3 layers
    assert floor.prefill == 2 * layers * 6 + 2 * head * 2 + pair * 2 * 6
    assert floor.products == 2 * max(4 * (layers + head), 2 * (layers + head) * 4)
    kv = 2 * 3 * 2 * 16 * 4  # K and V, 3 layers, 2 heads of 16 floats
    steps = [(2 * (3 + 2 * made) * kv, 4 * (3 + made) * pair) for made in (1, 2)]
    assert floor.attention == sum(max(step) for step in steps)
    assert floor.bytes_alone == sum(kv for kv, _ in steps) + 2 * 4 * (layers + head)
    assert floor.seconds == floor.prefill + floor.products + floor.attention


def test_the_clock_counts_every_pass_and_step_once(scripts: SimpleNamespace, model: Any):
    clock = scripts.device_clock.DeviceClock(on_cuda=False)
    load = scripts.serve_load.Load.parse("3x2-samples@9+5")
    with Decoder(model, block_size=4, num_blocks=64) as decoder, clock.running():
        served = scripts.serve_load.serve(decoder, load, seed=1)
    spans = clock.seconds()
    assert (spans["prefill"]["spans"], spans["step"]["spans"], spans["choice"]["spans"]) == (1, 4, 5)
    assert 0 < sum(kind["seconds"] for kind in spans.values()) < served.seconds


def test_overlapping_kernels_count_once(scripts: SimpleNamespace):
    assert scripts.device_clock._union([(5, 9), (1, 3), (2, 4), (6, 7), (9, 10)]) == 8


def test_the_last_line_is_json(scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    cases = ["--case", "8x3-samples@40+9", "--case", "3x2-beams@12+5"]
    monkeypatch.setattr(sys, "argv", ["bench_serve.py", "--shape", "tiny", "--device", "cpu", "--repeats", "2", *cases])
    assert scripts.bench_serve.main() == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    samples, beams = last["cases"]
    assert samples["cowbeam"]["tokens_per_second"] > 0
    for peer in (samples["generate"], samples["continuous"], beams["generate"]):
        assert peer["tokens_per_second"] > 0, peer
    assert beams["continuous"]["error"] == "it has no beam search"
