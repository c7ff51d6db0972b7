"""The seam between searching and decoding.

Beam search and parallel sampling differ only in which parent each new token continues. A strategy sees one step's
candidates and answers with continuations; ``group`` forks, frees and appends accordingly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cowbeam.decoder.branches import Token
from cowbeam.decoder.outputs import FinishReason, TokenLogprob


class Candidate(NamedTuple):
    """A token that may continue branch ``beam`` (its rank). ``score`` is what candidates are compared by.

    ``plain``: what the model alone says of the token, where the request asks for it.
    """

    score: float
    beam: int
    token_id: int
    plain: TokenLogprob | None = None


class Continuation(NamedTuple):
    """A live branch of the next step: ``token_id`` appended to the branch of rank ``beam``."""

    beam: int
    token_id: int
    logprob: float
    plain: TokenLogprob | None = None


@dataclass(frozen=True)
class Hypothesis:
    """A finished sequence: ``last`` appended to the branch whose newest token was ``prefix``. It holds no KV."""

    index: int
    prefix: Token | None
    last: Continuation
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason
    stop_reason: int | str | None
    excess: int = 0  # characters of its text, specials written out, from the stop string's first one on


class Strategy(Protocol):
    """Selects; knows neither blocks nor tensors."""

    @property
    def width(self) -> int:
        """Branches at most."""

    @property
    def is_done(self) -> bool:
        """Nothing is left to decode."""

    @property
    def hypotheses(self) -> Sequence[Hypothesis]:
        """The finished sequences so far, in the order they are returned."""

    @property
    def scores(self) -> Sequence[float]:
        """Cumulative log-prob of each live branch, in rank order."""

    def select(self, candidates: Sequence[Candidate], last_tokens: Sequence[Token | None]) -> list[Continuation]:
        """The branches of the next step in rank order; empty when done. ``last_tokens`` are by rank."""
