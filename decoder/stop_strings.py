"""Stop strings: which token completes one, and the text that is left in front of it.

Matching is by text, not by tokens: a stop string may begin in the middle of a token, span several, and end in the
middle of the last. What is compared is the text with special tokens written out, over the prompt and what was
generated, and a match must end in the newest token: these are the rules of transformers' ``StopStringCriteria``
(generation/stopping_criteria.py, 5.24). Unlike there, the stop string is then cut off the text.

A branch's state is the end of its text, a few tokens in an immutable tuple: forks share it, however long the branch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer gives for the first bytes of a character

DecodeIds = Callable[[Sequence[int]], str]


class StopState(NamedTuple):
    """The newest tokens of a branch, as many as may matter, and their text."""

    token_ids: tuple[int, ...]
    text: str


class StopFound(NamedTuple):
    """``stop_string`` is complete. ``excess``: characters from its first one to the end of the text, specials too."""

    stop_string: str
    excess: int


@dataclass(frozen=True)
class StopStrings:
    """The stop strings of one request.

    Args:
        strings: none of them empty.
        write_all: the text of token ids with special tokens written out.
        write: the text that users get, without special tokens.
    """

    strings: tuple[str, ...]
    write_all: DecodeIds
    write: DecodeIds

    @property
    def _longest(self) -> int:
        return max(map(len, self.strings))

    def start(self, prompt_token_ids: Sequence[int]) -> StopState:
        """The state behind a prompt. Only its end matters: a character takes four tokens at most."""
        enough = self._enough
        for more in range(4):  # begin with a whole character
            end = tuple(prompt_token_ids[-(enough + more) :])
            if not self.write_all(end).startswith(_UNFINISHED):
                break
        return self._trimmed(end)

    def add(self, state: StopState, token_id: int) -> StopState:
        """The state with one more token, which completes no stop string."""
        return self._trimmed((*state.token_ids, token_id))

    def found(self, state: StopState, token_id: int) -> StopFound | None:
        """The stop string that ``token_id`` completes; of several the one that begins first, then the longest."""
        text = self.write_all((*state.token_ids, token_id))
        num_settled = len(state.text.rstrip(_UNFINISHED))  # the new token may finish a character of those before it
        matches = []
        for stop in self.strings:
            begin = text.find(stop, max(0, num_settled - len(stop) + 1))
            if begin >= 0:
                matches.append((begin, -len(stop), stop))
        if not matches:
            return None
        begin, _, stop = min(matches)
        return StopFound(stop, len(text) - begin)

    @property
    def _enough(self) -> int:
        """Tokens that certainly show what may matter."""
        return 8 * self._longest + 16

    def _trimmed(self, token_ids: tuple[int, ...]) -> StopState:
        while cut := self._num_to_spare(token_ids):
            token_ids = token_ids[cut:]
        return StopState(token_ids, self.write_all(token_ids))

    def _num_to_spare(self, token_ids: tuple[int, ...]) -> int:
        """Tokens at the beginning that can be dropped, so that the rest begins with a whole character.

        One token more than is compared stays: the first one's own text may depend on what stood before it.
        """
        for cut in range(1, min(5, len(token_ids))):
            if len(self.write_all(token_ids[cut + 1 :])) < self._longest:
                break
            if _UNFINISHED not in self.write_all(token_ids[cut:]):
                return cut
        return max(0, len(token_ids) - self._enough)

    def num_held(self, state: StopState) -> int:
        """Characters at the end of the text that may yet turn out to be the beginning of a stop string."""
        if state.text.endswith(_UNFINISHED):
            return len(state.text)  # some decoders take back whole characters until one behind them is finished
        held = (
            length
            for stop in self.strings
            for length in range(min(len(stop) - 1, len(state.text)), 0, -1)
            if state.text.endswith(stop[:length])
        )
        return max(held, default=0)

    def num_before(self, token_ids: Sequence[int], excess: int) -> tuple[int, int]:
        """Where the last ``excess`` characters of the text begin.

        Returns:
            How many tokens stand wholly before them, and how many characters of the next token do not (0: none of it
            stands before them).
        """
        begin = len(self.write_all(token_ids)) - excess
        if begin <= 0:
            return 0, 0
        count = len(token_ids)
        while len(self.write_all(token_ids[: count - 1])) > begin:
            count -= 1
        surplus = len(self.write_all(token_ids[:count])) - begin
        if surplus == 0:
            return count, 0
        starts_inside = len(self.write_all(token_ids[: count - 1])) < begin
        return count - 1, surplus if starts_inside and self.write(token_ids[count - 1 : count]) else 0

    def text_before(self, token_ids: Sequence[int], excess: int) -> str:
        """What users get of ``token_ids``: the text without its last ``excess`` characters."""
        whole, surplus = self.num_before(token_ids, excess)
        if not surplus:
            return self.write(token_ids[:whole])
        text = self.write(token_ids[: whole + 1])
        return text[: len(text) - surplus]
