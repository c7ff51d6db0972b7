"""One request in flight, as its caller holds it."""

from collections import deque
from typing import Literal

from cowbeam.decoder.branch_texts import BranchTexts
from cowbeam.decoder.frames import Frame
from cowbeam.decoder.group import Group
from cowbeam.decoder.outputs import DecodeResult

Watch = Literal["frames", "tokens"]


class TurnError(RuntimeError):
    """A turn of the engine failed, and with it every request in flight. The model's own error is the cause."""


class Run:
    """One request in flight, as its caller holds it; it ends with a ``result`` or an ``error``, never both.

    Where the caller watches, ``frames`` collects a frame a step, or ``tokens`` the tokens of the samples (sample,
    token id, log-prob), until the caller takes them (``popleft``); else both are None.
    """

    def __init__(self, group: Group, watch: Watch | None) -> None:
        self.group = group
        self.texts = BranchTexts()  # of its frames
        self.frames: deque[Frame] | None = deque() if watch == "frames" else None
        self.tokens: deque[tuple[int, int, float]] | None = deque() if watch == "tokens" else None
        self.result: DecodeResult | None = None
        self.error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """It has a result or an error."""
        return self.result is not None or self.error is not None

    @property
    def has_begun(self) -> bool:
        """It has taken its first step; before, it waits for a place."""
        return self.is_over or self.group.steps > 0
