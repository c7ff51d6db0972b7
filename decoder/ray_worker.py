"""One decoder of a batch job that runs on Ray: bundles of lines in, outcomes out.

Ray calls ``decode`` from several threads. Their lines go through one `ManyPrompts`, so that the next bundle fills the
places that one leaves, and a failing turn is looked into once for all that were in it.
"""

import itertools
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from cowbeam.decoder.batch_job import sentence_of
from cowbeam.decoder.counters import Counters
from cowbeam.decoder.decoder import Decoder
from cowbeam.decoder.garbage import old_objects_left_alone
from cowbeam.decoder.hand_out import Numbered
from cowbeam.decoder.many_prompts import ManyPrompts
from cowbeam.decoder.outputs import Outcome
from cowbeam.decoder.params import Params
from cowbeam.decoder.request_maker import Prompt


class Decoded(NamedTuple):
    """A bundle's outcomes, as they finished; and what its decoder has done so far, in ``process``."""

    outcomes: list[Outcome]
    process: str
    counters: Counters


class _Bundle:
    """What one caller waits for. The thread that decodes adds; ``is_done`` is set last."""

    def __init__(self, size: int) -> None:
        self._missing = size
        self.outcomes: list[Outcome] = []
        self.error: BaseException | None = None
        self.is_done = threading.Event()

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._missing -= 1
        if not self._missing:
            self.is_done.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.is_done.set()


class RayWorker:
    """Owns a decoder and the thread that turns it. Errors of single lines come back as ValueErrors, which travel."""

    def __init__(self, name: str | None, knobs: dict[str, Any]) -> None:
        self._decoder = Decoder.from_pretrained(name, **knobs)
        self._process = f"{socket.gethostname()}:{os.getpid()}"
        self._waiting: SimpleQueue[tuple[_Bundle, Numbered]] = SimpleQueue()
        self._in_flight: dict[int, tuple[_Bundle, Numbered]] = {}  # by index of the pairs that `ManyPrompts` takes
        threading.Thread(target=self._decode_all, daemon=True).start()

    def wait_until_ready(self) -> None:
        """Raises nothing: who could not be made is never asked."""

    def decode(self, lines: Sequence[Numbered]) -> Decoded:
        """Wait for all of them. Raises the engine's own faults."""
        bundle = _Bundle(len(lines))
        for line in lines:
            self._waiting.put((bundle, line))
        bundle.is_done.wait()
        if bundle.error is not None:
            raise bundle.error
        return Decoded(bundle.outcomes, self._process, self._decoder.counters())

    def _decode_all(self) -> None:
        with old_objects_left_alone():
            while True:
                self._decode_some(self._waiting.get())

    def _decode_some(self, first: tuple[_Bundle, Numbered]) -> None:
        """This line, and those that come while anything is in flight."""
        try:
            for outcome in ManyPrompts(self._decoder, self._pairs(first)).outcomes():
                bundle, line = self._in_flight.pop(outcome.index)
                error = None if outcome.error is None else ValueError(sentence_of(outcome.error))
                bundle.add(Outcome(line.number, outcome.result, error))
        except Exception as error:
            for bundle, _ in self._in_flight.values():
                bundle.fail(error)
            self._in_flight.clear()

    def _pairs(self, first: tuple[_Bundle, Numbered]) -> Iterator[tuple[Prompt, Params] | None]:
        """The lines that wait; None while there are none."""
        waiting: tuple[_Bundle, Numbered] | None = first
        for index in itertools.count():
            if waiting is None:
                yield None
            else:
                self._in_flight[index] = waiting
                yield waiting[1].prompt, waiting[1].params
            try:
                waiting = self._waiting.get_nowait()
            except Empty:
                waiting = None
