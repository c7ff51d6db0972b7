"""Text while it comes: what a new token adds to the text of those before it."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from cowbeam.decoder.group import Request
from cowbeam.decoder.outputs import StreamedToken
from cowbeam.decoder.strategy import eos_or_length

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer gives for the first bytes of a character


class TextStream:
    """The text of one sequence in pieces, whose sum is the text of the whole.

    A token's text depends on its neighbours (spaces, characters of several tokens), so the pieces are differences of
    texts of a few tokens: of those since the last cut but one. A cut is where a piece was given.
    """

    def __init__(self, decode_text: Callable[[Sequence[int]], str]) -> None:
        self._decode_text = decode_text
        self._token_ids: list[int] = []
        self._num_before = 0  # tokens from the last cut but one to the last cut

    def add(self, token_id: int, *, is_last: bool = False) -> str:
        """The text that this token adds; none while a character is unfinished, and all that is left with the last."""
        before = self._decode_text(self._token_ids[: self._num_before])
        self._token_ids.append(token_id)
        text = self._decode_text(self._token_ids)
        if text.endswith(_UNFINISHED) and not is_last:
            return ""
        del self._token_ids[: self._num_before]
        self._num_before = len(self._token_ids)
        return text[len(before) :]


class TokenTexts:
    """Of all samples of one request: turns what the engine tells into what users get."""

    def __init__(self, request: Request, decode_text: Callable[[Sequence[int]], str]) -> None:
        self._request = request
        self._streams: defaultdict[int, TextStream] = defaultdict(lambda: TextStream(decode_text))
        self._lengths: defaultdict[int, int] = defaultdict(int)

    def add(self, index: int, token_id: int, logprob: float) -> StreamedToken:
        """The next token of sample ``index``."""
        self._lengths[index] += 1
        limit = self._request.params.max_new_tokens
        reason = eos_or_length(token_id, self._lengths[index], self._request.eos_ids, limit)
        text = self._streams[index].add(token_id, is_last=reason is not None)
        return StreamedToken(index, token_id, text, logprob, reason)
