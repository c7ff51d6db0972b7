"""What generated text must look like: a JSON schema, a regular expression or a grammar, by the library xgrammar."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shown  # abbreviates: a user's value may be of any length
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from cowbeam.decoder.grammar_states import GrammarStates

Kind = Literal["json_schema", "regex", "ebnf"]
KINDS: tuple[Kind, ...] = ("json_schema", "regex", "ebnf")


@dataclass(frozen=True)
class Grammar:
    """Text that is allowed, from the first generated token to the EOS; made by one of its class methods."""

    kind: Kind
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | bool = True) -> Self:
        """JSON that fits ``schema``, in one line; ``True`` is any JSON at all.

        Blanks stand behind ``,`` and ``:`` only: where any are allowed, small models write nothing else.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise ValueError(f"json_schema is no JSON: {error}") from None
        if not isinstance(schema, Mapping | bool):
            raise ValueError(f"json_schema must be a schema, got {shown(schema)}")
        try:
            return cls("json_schema", json.dumps(schema, sort_keys=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"json_schema is no JSON: {error}") from None

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Text that ``pattern`` matches as a whole."""
        return cls("regex", _text("regex", pattern))

    @classmethod
    def ebnf(cls, rules: str) -> Self:
        """Text of the rule ``root`` of a grammar in GBNF, the notation of llama.cpp: ``root ::= "yes" | "no"``."""
        return cls("ebnf", _text("ebnf", rules))

    @classmethod
    def of(cls, given: object) -> "Grammar | None":
        """A Grammar as it is; ``{"json_schema": …}`` and the like, as in a file of prompts."""
        if given is None or isinstance(given, Grammar):
            return given
        if not isinstance(given, Mapping) or len(given) != 1 or next(iter(given)) not in KINDS:
            raise ValueError(
                f"grammar must be a Grammar, or a mapping of one of {', '.join(KINDS)}, got {shown(given)}"
            )
        ((kind, value),) = given.items()
        made: Grammar = getattr(cls, kind)(value)
        return made


def _text(name: str, given: object) -> str:
    if not isinstance(given, str) or not given:
        raise ValueError(f"{name} must be text, got {shown(given)}")
    return given


class GrammarCompiler:
    """Compiles grammars for one tokenizer; the library keeps what it has compiled, so that a grammar is compiled once.

    Raises ValueError where xgrammar is not installed or does not know the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError(f"grammar needs the library xgrammar (pip install 'cowbeam[grammar]'): {error}") from None
        self._library: Any = xgrammar
        self.vocabulary_size = vocabulary_size
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary_size)
        except Exception as error:  # tokenizers come in as many kinds as there are libraries
            raise ValueError(f"grammar: xgrammar does not know this tokenizer: {error}") from error
        self._compiler: Any = xgrammar.GrammarCompiler(info)
        self._not_in_json = [i for i, token in enumerate(info.decoded_vocab) if any(byte < 0x20 for byte in token)]

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """Raises ValueError for what is no grammar."""
        # Strings of a limited length may hold raw control characters in xgrammar 0.2.9, which JSON does not have.
        permitted = self._all_but(self._not_in_json) if grammar.kind == "json_schema" else None
        return CompiledGrammar(self._compiled(grammar), permitted)

    def _all_but(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        bits = np.ones(-(-self.vocabulary_size // 32) * 32, np.uint8)
        bits[token_ids] = 0
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)

    def _compiled(self, grammar: Grammar) -> Any:
        compiler = self._compiler
        try:
            if grammar.kind == "json_schema":
                if grammar.text == "true":
                    return compiler.compile_json_schema("{}", any_whitespace=False)
                return compiler.compile_json_schema(grammar.text, any_whitespace=False)
            return (compiler.compile_regex if grammar.kind == "regex" else compiler.compile_grammar)(grammar.text)
        except Exception as error:  # of the library's own, by no class of their own
            # Without the clock and the C++ line that the library puts in front.
            text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error).strip()).splitlines()
            raise ValueError(
                f"grammar: this {grammar.kind} cannot be used: {text[0][:200] if text else error!r}"
            ) from error

    def states(self, compiled: "CompiledGrammar", eos_ids: Sequence[int]) -> "GrammarStates":
        """Of a new request, whose text ends by one of ``eos_ids``."""
        matcher = self._library.GrammarMatcher(compiled.grammar, override_stop_tokens=list(eos_ids))
        return GrammarStates(matcher, self.vocabulary_size, compiled.permitted)


class CompiledGrammar(NamedTuple):
    """The library's own; and a bit for each token, 0 for those that no text of this kind has: int32 [words]."""

    grammar: Any
    permitted: NDArray[np.int32] | None
