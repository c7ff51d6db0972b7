"""Texts of branches that somebody watches: a frame decodes what is new, not every branch from its beginning.

They end where those of ``text_stream`` do, but branches fork: what is known of a path never changes, so forks share it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cowbeam.decoder.branches import Token

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer gives for the first bytes of a character

DecodeText = Callable[[Sequence[int]], str]


class _Path(NamedTuple):
    """A path's text up to a cut, where a character ended, and the ids since the cut before that one.

    A token's text depends on its neighbours (spaces, characters of several tokens): those ids are its context.
    """

    whole: str = ""
    up_to_cut: str = ""
    ids: tuple[int, ...] = ()
    num_before: int = 0  # ids up to the cut

    def add(self, token_id: int, decode_text: DecodeText) -> "_Path":
        before = decode_text(self.ids[: self.num_before])
        ids = (*self.ids, token_id)
        text = decode_text(ids)
        whole = self.up_to_cut + text[len(before) :]
        # A token without text of its own (a special one) is no context: the next one would lose its space.
        if text.endswith(_UNFINISHED) or len(text) == len(before):
            return self._replace(whole=whole, ids=ids)
        rest = ids[self.num_before :]
        return _Path(whole, whole, rest, len(rest))


class BranchTexts:
    """Of the branches of one group, frame after frame: O(new tokens) each."""

    def __init__(self) -> None:
        self._paths: dict[Token, _Path] = {}  # by the newest token of each branch of the frame before

    def of(self, newest: Sequence[Token], decode_text: DecodeText) -> list[str]:
        """The generated text of each branch, by its newest token."""
        self._paths = {token: self._path(token, decode_text) for token in newest}
        return [self._paths[token].whole for token in newest]

    def _path(self, newest: Token, decode_text: DecodeText) -> _Path:
        added: list[int] = []
        token: Token | None = newest
        while token is not None and token not in self._paths:
            added.append(token.token_id)
            token = token.parent
        path = self._paths[token] if token is not None else _Path()
        for token_id in reversed(added):
            path = path.add(token_id, decode_text)
        return path
