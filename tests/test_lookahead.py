"""What turns launch, where each of them runs on another stream: that of the thread which happens to turn the engine."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams, engine, lookahead
from cowbeam.decoder.engine import Engine
from cowbeam.decoder.flight import Proposals
from cowbeam.decoder.lookahead import mark, wait_for
from cowbeam.decoder.model_adapter import ModelAdapter
from cowbeam.decoder.step_graph import StepGraphs
from cowbeam.decoder.swap import SwapSpace
from fakes import assert_unused, tiny_model, token_ids

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3, 1, 4], [2, 7, 1, 8, 2, 8]]
SAMPLES = SamplingParams(num_return_sequences=4, max_new_tokens=20, eos_token_id=[5, 6, 7], seed=3)
BEAMS = BeamSearchParams(num_beams=3, max_new_tokens=9, eos_token_id=[])


class Streams:
    """Counts what is launched. An event stands for so many launches as there were when it was recorded."""

    def __init__(self) -> None:
        self.launches = 0
        self._of_earlier_turns = 0
        self._awaited = 0  # by this turn's stream, or by the host and so by everybody

    def begin_turn(self) -> None:
        self._of_earlier_turns = self.launches

    def launch(self, name: str) -> None:
        assert self._of_earlier_turns <= self._awaited, f"{name} may run beside what an earlier turn has launched"
        self.launches += 1

    def mark(self, tensor: Tensor) -> "Event":
        return Event(self, self.launches, mark(tensor))

    def wait_for(self, event: "Event | None") -> None:
        if event is not None:
            wait_for(event.on_device)
            self.know(event)

    def know(self, event: "Event") -> None:
        self._awaited = max(self._awaited, event.launches)


class Event:
    """Beside the device's own, where it has any."""

    def __init__(self, streams: Streams, launches: int, on_device: torch.cuda.Event | None) -> None:
        self._streams = streams
        self.launches = launches
        self.on_device = on_device

    def synchronize(self) -> None:
        if self.on_device is not None:
            self.on_device.synchronize()
        self._streams.know(self)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    streams = Streams()

    def before(owner: Any, name: str, act: Callable[[], None]) -> None:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **named: (act(), method(*args, **named))[1])

    for module in (engine, lookahead):
        monkeypatch.setattr(module, "mark", streams.mark)
    monkeypatch.setattr(engine, "wait_for", streams.wait_for)
    before(Engine, "_turn", streams.begin_turn)
    for owner, name in (
        (StepGraphs, "decode_again"),
        (ModelAdapter, "compute"),
        (Proposals, "of"),
        (SwapSpace, "save"),
        (SwapSpace, "bring_back"),
    ):
        before(owner, name, lambda name=name: streams.launch(name))
    return streams


def decoder_of(streams: Streams, num_blocks: int = 256) -> Decoder:
    decoder = Decoder(tiny_model("llama"), block_size=4, num_blocks=num_blocks, swap_memory=2**30)
    decoder._engine._looks_ahead = True  # type: ignore[union-attr]
    streams.launches = 0  # what was tried out while it was made
    return decoder


@pytest.mark.parametrize("num_blocks", [26, 256])
@pytest.mark.parametrize("params", [SAMPLES, BEAMS], ids=["samples", "beams"])
def test_a_turn_waits_for_what_earlier_turns_launched(streams: Streams, params: Any, num_blocks: int) -> None:
    """A step that was dropped, since a sample had ended in it, ran on beside the next one, in the same buffers."""
    decoder = decoder_of(streams, num_blocks)
    results = decoder.generate(PROMPTS * 2, params)
    if num_blocks == 26:
        assert decoder.counters().swapped_blocks > 0
    assert [token_ids(result) for result in results] == [token_ids(decoder.generate(p, params)) for p in PROMPTS * 2]
    assert streams.launches > 30


def test_and_for_a_step_whose_requests_were_all_aborted(streams: Streams) -> None:
    decoder = decoder_of(streams)
    runs = [decoder.add_request(prompt, BEAMS) for prompt in PROMPTS]
    for _ in range(3):
        decoder.step()
    assert decoder._engine._flight is not None  # type: ignore[union-attr]
    for run in runs:
        decoder.abort(run)
    decoder.generate(PROMPTS[0], BEAMS)
    assert_unused(decoder)


def test_and_for_a_turn_that_failed(streams: Streams) -> None:
    decoder = decoder_of(streams)
    decoder.add_request(PROMPTS[0], BEAMS)
    decoder.step()
    decoder.step()
    with mock.patch.object(Engine, "_choose", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        decoder.step()
    decoder.generate(PROMPTS[0], BEAMS)
    assert_unused(decoder)
