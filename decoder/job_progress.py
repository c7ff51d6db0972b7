"""How far a job of many prompts is: a bar on a terminal, now and then a line where there is none."""

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from cowbeam.decoder.counters import Counters
from cowbeam.decoder.outputs import Outcome

SECONDS_BETWEEN_LINES = 10.0


def in_time(seconds: float) -> str:
    """``3661`` as ``1:01:01``, ``61`` as ``1:01``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class JobProgress:
    """Shows done and failed prompts, generated tokens a second and the time left; a context manager.

    Args:
        total: prompts in all; None where nobody knows.
        counters: of the decoder that does the job.
        done, failed: of an earlier run that this one goes on with.
    """

    def __init__(self, total: int | None, counters: Callable[[], Counters], *, done: int = 0, failed: int = 0) -> None:
        self._total = total
        self._counters = counters
        self._before = self.done = done
        self.failed = failed
        self._started = self._shown = time.perf_counter()
        self._tokens_before = counters().decode_tokens
        self._console = Console(stderr=True)
        self._bar = Progress(
            BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), console=self._console, transient=True
        )
        self._task = self._bar.add_task("", total=total, completed=done)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def over(self, outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
        """The outcomes themselves, counted as they pass."""
        with self:
            for outcome in outcomes:
                self.note(failed=outcome.error is not None)
                yield outcome

    def note(self, *, failed: bool) -> None:
        """One prompt more is done."""
        self.done += 1
        self.failed += failed
        now = time.perf_counter()
        is_due = now - self._shown >= (0.1 if self._console.is_terminal else SECONDS_BETWEEN_LINES)
        if is_due or self.done == self._total:
            self._shown = now
            self._show(now - self._started)

    def _show(self, seconds: float) -> None:
        text = self._text(seconds)
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self.done, description=text)
        else:
            of = "" if self._total is None else f" of {self._total}"
            self._console.print(f"{self.done}{of} prompts, {text}", soft_wrap=True, highlight=False, markup=False)

    def _text(self, seconds: float) -> str:
        rate = (self._counters().decode_tokens - self._tokens_before) / seconds if seconds else 0.0
        parts = [f"{rate:,.0f} tokens a second"]
        done_now = self.done - self._before
        if self._total is not None and done_now:
            parts.append(f"{in_time((self._total - self.done) * seconds / done_now)} left")
        if self.failed:
            parts.append(f"{self.failed} failed")
        return ", ".join(parts)
