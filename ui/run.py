"""One run: the records of a search as JSON lines, written by the engine thread, read by whoever watches."""

import dataclasses
import json
import secrets
import threading
from typing import Any

from cowbeam.decoder import DecodeResult
from cowbeam.decoder.trace import Record, end_record
from cowbeam.ui.settings import Settings, in_form_words


class Run:
    """One search of one visitor.

    The engine thread appends and never waits for a reader; readers take what is new by its number, so any number of
    them may read, late ones too. The id cannot be guessed: whoever knows it may read.
    """

    def __init__(self, settings: Settings) -> None:
        self.id = secrets.token_urlsafe(12)
        self.settings = settings
        self.result: DecodeResult | None = None
        self.failure: str | None = None
        self.stop = threading.Event()
        self._lines: list[str] = []
        self._over = threading.Event()  # apart from what is new, so that who waits for the end sleeps through the steps
        self._changed = threading.Condition()

    def append(self, record: Record) -> None:
        """Add a record."""
        line = to_json(record)
        with self._changed:
            self._lines.append(line)
            self._changed.notify_all()

    def fail(self, sentence: str) -> None:
        """Nothing came of it; say why: to a program in its words, on the page in the form's."""
        self.failure = sentence
        self.append({**end_record(None, "error"), "message": in_form_words(sentence)})

    def finish(self) -> None:
        """No record will follow."""
        self._over.set()
        with self._changed:
            self._changed.notify_all()

    @property
    def settings_to_repeat(self) -> Settings:
        """Settings that give the same search again: with the seed that was drawn."""
        drawn = self.result.seed if self.result else None
        if drawn is None and self.settings.seed is None and self.settings.draws:
            raise ValueError("this run drew its seed and did not finish: give a seed to run it again")
        return dataclasses.replace(self.settings, seed=drawn if self.settings.seed is None else self.settings.seed)

    def wait_until_over(self, timeout: float) -> bool:
        """False if it is not over after ``timeout`` seconds."""
        return self._over.wait(timeout)

    @property
    def is_over(self) -> bool:
        """No record will follow."""
        return self._over.is_set()

    def lines_from(self, number: int) -> list[str]:
        """The records from ``number`` on."""
        with self._changed:
            return self._lines[number:]

    def wait(self, number: int, timeout: float) -> tuple[list[str], bool]:
        """The records from ``number`` on, after at most ``timeout`` seconds, and whether more may follow."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._lines) > number or self.is_over, timeout)
            is_over = self.is_over  # before what is new is read: nothing is appended after it
            return self._lines[number:], not is_over


def to_json(value: Any) -> str:
    """Compact JSON without a "<": no text of a model or a visitor can be taken for markup on its way."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
