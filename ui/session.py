"""Visitors and their runs: who watches what, what may still be fetched, what a message to the browser looks like."""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from cowbeam.decoder.trace import end_record
from cowbeam.ui.check import Verdict, check_against_transformers
from cowbeam.ui.decoders import Decoders
from cowbeam.ui.engine_thread import EngineThread, decode_again
from cowbeam.ui.run import Run, to_json
from cowbeam.ui.settings import Settings, in_form_words

# Runs whose records are kept for a browser that missed some, or came late.
MAX_KEPT_RUNS = 16
# Runs that may wait at once; more are refused in a sentence.
MAX_WAITING_RUNS = 24
# Checks and what-ifs that may wait at once.
MAX_WAITING_QUESTIONS = 8
# Seconds between two messages at least, each with every step since the last. A decoder on the CPU loses the time that a
# message takes, here and in a browser on the same machine; the page shows its steps one after the other.
MESSAGE_GAP = 1 / 30
MESSAGE_GAP_ON_CPU = 1.0
# For each record sent before: a run's first steps are there at once.
GAP_BY_RECORD = 0.05

# The run that the page opens with.
RECORDED = "example"

T = TypeVar("T")


class Sessions:
    """Shared by all visitors of one server. Methods may be called from any thread."""

    def __init__(self, engine: EngineThread) -> None:
        self.engine = engine
        self._kept: OrderedDict[str, Run] = OrderedDict()
        self._of_visitor: dict[str, list[Run]] = {}
        self._recorded: Run | None = None
        self._questions: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._message_gap = MESSAGE_GAP_ON_CPU if engine.decoders.on_cpu else MESSAGE_GAP

    def start(self, visitor: str, searches: Sequence[Settings]) -> list[Run]:
        """Queue one run for each of ``searches``; the visitor's earlier ones are stopped."""
        runs = [Run(settings) for settings in searches]
        self.stop(visitor)
        with self._lock:
            if self.engine.num_waiting + len(runs) > MAX_WAITING_RUNS:
                raise ValueError("too many runs are waiting; please try again in a minute")
            self._of_visitor[visitor] = runs
            for run in runs:
                self._kept[run.id] = run
                self.engine.start(run)
            while len(self._kept) > MAX_KEPT_RUNS:
                # The oldest that is over; one that still runs is needed by who watches it.
                over = next((run_id for run_id, run in self._kept.items() if run.is_over), None)
                if over is None:
                    break
                del self._kept[over]
        return runs

    def stop(self, visitor: str) -> None:
        """End the visitor's runs within a step; their streams end by themselves."""
        with self._lock:
            runs = self._of_visitor.get(visitor, [])
        for run in runs:
            run.stop.set()

    def forget(self, visitor: str) -> None:
        """The visitor is gone."""
        self.stop(visitor)
        with self._lock:
            self._of_visitor.pop(visitor, None)

    def find(self, run_id: Any) -> Run:
        """Raises ValueError for an id that is not known (any more)."""
        with self._lock:
            run = self._kept.get(run_id) if isinstance(run_id, str) else None
        if run_id == RECORDED:
            run = self._recorded
        if run is None:
            raise ValueError("this run is not known here any more: press Generate to run it again")
        return run

    def messages(self, runs: Sequence[Run]) -> Iterator[str]:
        """JSON messages for the browser until all ``runs`` are over; closing the iterator stops them."""
        try:
            for side, run in enumerate(runs):
                for lines in self._lines_of(run):
                    yield message([run.id for run in runs], side, lines)
        finally:
            for run in runs:
                run.stop.set()

    def _lines_of(self, run: Run) -> Iterator[list[str]]:
        sent, ahead, more = 0, None, True
        while more:
            begun = time.perf_counter()
            lines, more = run.wait(sent, timeout=0.2)
            sent += len(lines)
            if not sent and (now_ahead := self.engine.ahead_of(run)) != ahead:
                ahead = now_ahead
                lines = [to_json({"type": "queued", "ahead": ahead})]
            if lines:
                yield lines
            gap = min(self._message_gap, sent * GAP_BY_RECORD)
            run.wait_until_over(max(0.0, begun + gap - time.perf_counter()))

    def keep_recorded(self, settings: Settings) -> None:
        """The recorded run's settings: it can be run again for a check or a what-if."""
        self._recorded = Run(settings)

    def check(self, run: Run) -> "Future[Verdict]":
        """Hold a finished run against transformers, as soon as the engine thread is free."""

        def ask(decoders: Decoders) -> Verdict:
            if run is self._recorded and run.result is None:
                run.result = decode_again(decoders, run)
            return check_against_transformers(decoders, run)

        return self.ask(ask)

    def ask(self, question: Callable[[Decoders], T]) -> "Future[T]":
        """Queue a question to the model. Raises ValueError where too many wait."""
        with self._lock:
            self._questions = {asked for asked in self._questions if not asked.done()}
            if len(self._questions) >= MAX_WAITING_QUESTIONS:
                raise ValueError("too many questions are waiting; please ask again in a minute")
            future = self.engine.ask(question)
            self._questions.add(future)
        return future

    def close(self) -> None:
        """Stop everything."""
        self.engine.close()


def message(run_ids: Sequence[str], side: int, lines: Sequence[str]) -> str:
    """What one yield holds: records of the run ``run_ids[side]``, JSON already. Two runs are a comparison."""
    return f'{{"runs":{to_json(list(run_ids))},"side":{side},"frames":[{",".join(lines)}]}}'


def refusal(sentence: str) -> str:
    """A message that holds nothing but the reason why nothing runs, in the form's words."""
    record = to_json({**end_record(None, "error"), "message": in_form_words(sentence)})
    return message([f"refused-{secrets.token_hex(4)}"], 0, [record])
