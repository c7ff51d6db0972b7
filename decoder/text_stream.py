"""Text while it comes: what a new token adds to the text of those before it."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from cowbeam.decoder.endings import Ending
from cowbeam.decoder.group import Request, make_endings
from cowbeam.decoder.outputs import StreamedToken
from cowbeam.decoder.strategy import Continuation

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer gives for the first bytes of a character


class TextStream:
    """The text of one sequence in pieces, whose sum is the text of the whole.

    A token's text depends on its neighbours (spaces, characters of several tokens), so the pieces are differences of
    texts of a few tokens: of those since the last cut but one. A cut is where a piece was given.
    """

    def __init__(self, decode_text: Callable[[Sequence[int]], str]) -> None:
        self._decode_text = decode_text
        self.token_ids: list[int] = []  # since the last cut but one
        self._num_before = 0  # tokens from the last cut but one to the last cut

    def add(self, token_id: int, *, is_last: bool = False) -> str:
        """The text that this token adds; none while a character is unfinished, and all that is left with the last."""
        before = self._decode_text(self.token_ids[: self._num_before])
        self.token_ids.append(token_id)
        text = self._decode_text(self.token_ids)
        # A token without text of its own (a special one) is no context either: the next one would lose its space.
        if (text.endswith(_UNFINISHED) or len(text) == len(before)) and not is_last:
            return ""
        del self.token_ids[: self._num_before]
        self._num_before = len(self.token_ids)
        return text[len(before) :]

    def rest(self) -> str:
        """The text that was kept back, a character that nothing finishes."""
        before = self._decode_text(self.token_ids[: self._num_before])
        text = self._decode_text(self.token_ids)
        self._num_before = len(self.token_ids)
        return text[len(before) :]


class _SampleText:
    """The text of one sample, of which nothing is shown that a stop string may yet cut off."""

    def __init__(self, request: Request, decode_text: Callable[[Sequence[int]], str]) -> None:
        self._stops = request.stops
        self._endings = make_endings(request)
        self._shown = TextStream(decode_text)
        self._held: list[int] = []  # the newest tokens, of which no text was given yet
        self._length = 0

    def add(self, token_id: int, logprob: float) -> tuple[str, Ending | None]:
        """The text that can be shown now, and why the sample ends, if it does."""
        self._length += 1
        self._held.append(token_id)
        ending = self._endings.of(0, token_id, self._length)
        if ending is not None and ending.finish_reason == "stop":
            return self._last_before_the_stop(ending.excess), ending
        self._endings.follow([Continuation(0, token_id, logprob)])
        if ending is not None:
            return self._show(len(self._held)) + self._shown.rest(), ending
        num_held = self._endings.num_held(0)
        return self._show(self._num_before(num_held)[0] if num_held else len(self._held)), None

    def _last_before_the_stop(self, excess: int) -> str:
        whole, surplus = self._num_before(excess)
        text = self._show(whole + (1 if surplus else 0)) + self._shown.rest()
        return text[: len(text) - surplus]

    def _num_before(self, excess: int) -> tuple[int, int]:
        """See `StopStrings.num_before`; of the held tokens."""
        assert self._stops is not None, "only stop strings hold text back"
        context = self._shown.token_ids  # on which the first one's text may depend
        whole, surplus = self._stops.num_before([*context, *self._held], excess)
        num_context = len(context)
        return (whole - num_context, surplus) if whole >= num_context else (0, 0)

    def _show(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        return "".join(map(self._shown.add, shown))


class TokenTexts:
    """Of all samples of one request: turns what the engine tells into what users get."""

    def __init__(self, request: Request, decode_text: Callable[[Sequence[int]], str]) -> None:
        self._samples: defaultdict[int, _SampleText] = defaultdict(lambda: _SampleText(request, decode_text))

    def add(self, index: int, token_id: int, logprob: float) -> StreamedToken:
        """The next token of sample ``index``."""
        text, ending = self._samples[index].add(token_id, logprob)
        return StreamedToken(index, token_id, text, logprob, ending.finish_reason if ending else None)
