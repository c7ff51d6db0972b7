"""Ctrl-C may come between any two lines: it reaches the caller as it is, every run is over, every block is free.

(Inside a forward pass: ``test_bad_input``.)
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any
from unittest import mock

import pytest

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams, engine
from cowbeam.decoder.engine import Engine
from cowbeam.decoder.group import Group
from cowbeam.decoder.run import Run, TurnError
from fakes import assert_unused, tiny_model, token_ids

SOURCES = str(Path(engine.__file__).parent)
PROMPTS = [[5, 9, 2, 33], [7, 8]]
BEAMS = BeamSearchParams(num_beams=2, max_new_tokens=2, eos_token_id=[])
SAMPLES = SamplingParams(num_return_sequences=2, max_new_tokens=2, seed=1, eos_token_id=[])


class Interrupt:
    """Raises KeyboardInterrupt at the ``number``-th line of the decoder that runs below a call of ``code``."""

    def __init__(self, code: CodeType, number: int) -> None:
        self._code = code
        self._left = number
        self._depth = 0

    @property
    def has_come(self) -> bool:
        return self._left <= 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        is_outermost = frame.f_code is self._code
        self._depth += is_outermost
        if not self._depth:
            return None

        def trace(_frame: FrameType, event: str, _: Any) -> Any:
            if event == "return":
                self._depth -= is_outermost
            elif event == "line" and not self.has_come:
                self._left -= 1
                if self.has_come:
                    raise KeyboardInterrupt
            return trace

        return trace


@contextmanager
def tracing(tracer: Callable[..., Any]) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(before)


def interrupted_everywhere(code: CodeType, act: Callable[[Decoder], Any]) -> int:
    """Let ``act`` be interrupted at each line below ``code`` in turn; returns how many there are."""
    decoder = Decoder(tiny_model("llama"), block_size=2, num_blocks=64)
    alone = token_ids(decoder.generate(PROMPTS[0], SAMPLES))
    number = 0
    while True:
        interrupt = Interrupt(code, number + 1)
        raised: list[BaseException] = []
        with tracing(interrupt):
            try:
                act(decoder)
            except BaseException as error:
                raised.append(error)
        if not interrupt.has_come:
            assert not raised
            return number
        number += 1
        assert [type(error) for error in raised] == [KeyboardInterrupt], f"line {number}: {raised}"
        raised.clear()  # its frames hold runs
        assert_unused(decoder)
        assert token_ids(decoder.generate(PROMPTS[0], SAMPLES)) == alone, f"line {number}"


def generated(decoder: Decoder) -> None:
    decoder.generate(PROMPTS, [BEAMS, SAMPLES])


def one_by_one(decoder: Decoder) -> None:
    list(decoder.generate_many(iter(PROMPTS), SAMPLES))


def streamed(decoder: Decoder) -> None:
    list(decoder.stream(PROMPTS[0], BEAMS))


@pytest.mark.parametrize("where", [Engine._finish, Engine._deliver])
@pytest.mark.parametrize("act", [generated, one_by_one, streamed])
def test_while_a_request_finishes(act: Callable[[Decoder], Any], where: FunctionType) -> None:
    """Its run was neither over nor in flight then: who aborted it got a KeyError instead of the interrupt."""
    assert interrupted_everywhere(where.__code__, act) > 20


def test_while_a_request_is_dropped() -> None:
    """Half of its blocks stayed held."""

    def drop(decoder: Decoder) -> None:
        runs = [decoder.add_request(PROMPTS[0], BEAMS), decoder.add_request(PROMPTS[1], SAMPLES)]
        decoder.step()
        for run in runs:
            decoder.abort(run)

    assert interrupted_everywhere(Engine._end_with.__code__, drop) > 50


def go_on_until_over(decoder: Decoder, runs: list[Run]) -> None:
    while not all(run.is_over for run in runs):
        decoder.step()


@pytest.mark.parametrize("where", [Engine._finish, Engine._deliver])
def test_every_run_of_an_interrupted_turn_is_over(where: FunctionType) -> None:
    """With a result or an error, never both."""
    decoder = Decoder(tiny_model("llama"), block_size=2, num_blocks=64)
    number, interrupt = 0, None
    while interrupt is None or interrupt.has_come:
        number += 1
        interrupt = Interrupt(where.__code__, number)
        runs = [decoder.add_request(prompt, SAMPLES) for prompt in PROMPTS]
        with suppress(KeyboardInterrupt), tracing(interrupt):
            go_on_until_over(decoder, runs)
        for run in runs:
            assert (run.result is None) != (run.error is None), f"line {number}: {run.result} {run.error}"
        assert_unused(decoder)
    assert number > 20


def test_a_result_that_cannot_be_made() -> None:
    """Who waited for it in another thread waited for ever."""
    decoder = Decoder(tiny_model("llama"), block_size=2, num_blocks=64)
    runs = [decoder.add_request(prompt, SAMPLES) for prompt in PROMPTS]
    with mock.patch.object(Group, "result", side_effect=MemoryError), pytest.raises(MemoryError):
        go_on_until_over(decoder, runs)
    assert all(isinstance(run.error, TurnError) for run in runs)
    assert_unused(decoder)
