"""Why a branch ends: an EOS id, a stop string, the greatest length."""

from collections.abc import Sequence
from typing import NamedTuple

from cowbeam.decoder.outputs import FinishReason
from cowbeam.decoder.stop_strings import StopState, StopStrings
from cowbeam.decoder.strategy import Continuation


class Ending(NamedTuple):
    """``stop_reason`` is the EOS id or the stop string; ``excess`` as in `stop_strings.StopFound`."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    excess: int = 0


class Endings:
    """Of the live branches of one request, by rank. Owns how far each of them is in a stop string."""

    def __init__(
        self,
        eos_ids: frozenset[int],
        max_new_tokens: int,
        stops: StopStrings | None = None,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        self.eos_ids = eos_ids
        self._max_new_tokens = max_new_tokens
        self._stops = stops
        # Before the first choice one branch stands for all ranks.
        self._states: list[StopState] = [stops.start(prompt_token_ids)] if stops else []
        self._is_first = True

    def of(self, rank: int, token_id: int, length: int) -> Ending | None:
        """Why the branch of ``rank`` ends with ``token_id`` as its generated token number ``length``, if it does."""
        if token_id in self.eos_ids:
            return Ending("eos", token_id)
        if self._stops is not None:
            found = self._stops.found(self._state(rank), token_id)
            if found is not None:
                return Ending("stop", found.stop_string, found.excess)
        return Ending("length") if length >= self._max_new_tokens else None

    def follow(self, continuations: Sequence[Continuation]) -> None:
        """These are the live branches now."""
        if self._stops is not None:
            self._states = [self._stops.add(self._state(c.beam), c.token_id) for c in continuations]
            self._is_first = False

    def reorder(self, ranks: Sequence[int]) -> None:
        """Of the live branches these go on, some of them several times."""
        if self._stops is not None:
            self._states = [self._states[rank] for rank in ranks]

    def num_held(self, rank: int) -> int:
        """Characters at the end of the branch's text that may be the beginning of a stop string."""
        return self._stops.num_held(self._state(rank)) if self._stops else 0

    def _state(self, rank: int) -> StopState:
        return self._states[0 if self._is_first else rank]
