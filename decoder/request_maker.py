"""From a prompt and its parameters to a request: tokens, ends, a seed, stop strings, a grammar.

What cannot be decoded is refused here, before any work starts.
"""

from collections.abc import Callable, Iterable, Sequence
from reprlib import repr as shown  # abbreviates: a user's value may be of any length
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from cowbeam.decoder.grammar import Grammar, GrammarCompiler
from cowbeam.decoder.grammar_states import GrammarStates
from cowbeam.decoder.group import Request
from cowbeam.decoder.model_adapter import ModelAdapter
from cowbeam.decoder.params import BeamSearchParams, Params, SamplingParams
from cowbeam.decoder.stop_strings import StopStrings

Prompt = str | Sequence[int]


class RequestMaker:
    """Knows what the model knows, and its tokenizer, without which there is no text."""

    def __init__(self, adapter: ModelAdapter, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self._adapter = adapter
        self._grammars: GrammarCompiler | None = None  # made by the first request that needs it

    def make(self, prompt: Prompt, params: Params) -> Request:
        """The request. Raises ValueError for what cannot be decoded, naming it."""
        if not isinstance(params, BeamSearchParams | SamplingParams):
            raise ValueError(f"params must be BeamSearchParams or SamplingParams, got {type(params).__name__}")
        token_ids = self._token_ids(prompt)
        _check_known(params, self._adapter.vocabulary_size)
        limit = self._adapter.max_length
        if limit is not None and len(token_ids) + params.max_new_tokens > limit:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens and max_new_tokens={params.max_new_tokens} exceed the model's "
                f"{limit} positions"
            )
        draws = isinstance(params, SamplingParams) or params.do_sample
        if isinstance(params, BeamSearchParams) and draws and params.num_beams * self._adapter.vocabulary_size > 2**24:
            raise ValueError(
                f"do_sample with num_beams={params.num_beams} draws from {params.num_beams} × "
                f"{self._adapter.vocabulary_size} candidates, more than torch.multinomial's 2**24"
            )
        seed = params.seed
        if draws and seed is None:
            seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
        is_scored = isinstance(params, SamplingParams) and params.branch_scorer is not None
        return Request(
            token_ids,
            params,
            self._eos_ids(params),
            seed if draws else None,
            self._stops(params),
            self.text_of if is_scored else None,
            self._start_grammar(params),
        )

    def _start_grammar(self, params: Params) -> Callable[[], GrammarStates] | None:
        grammar = Grammar.of(params.grammar)
        if grammar is None:
            return None
        if self.tokenizer is None:
            raise ValueError("grammar needs a tokenizer: Decoder(model, tokenizer)")
        eos_ids = sorted(self._eos_ids(params))
        if not eos_ids:
            raise ValueError("grammar needs an EOS id: where the text is complete, nothing else may follow")
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer, self._adapter.vocabulary_size)
        compiler, compiled = self._grammars, self._grammars.compile(grammar)
        return lambda: compiler.states(compiled, eos_ids)

    def _stops(self, params: Params) -> StopStrings | None:
        if params.stop_strings is None:
            return None
        if self.tokenizer is None:
            raise ValueError("stop_strings need a tokenizer: Decoder(model, tokenizer)")
        return StopStrings(tuple(params.stop_strings), self._whole_text_of, self.text_of)

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a prompt as text needs a tokenizer: Decoder(model, tokenizer)")
            if not prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt):
                raise ValueError(f"the prompt {shown(prompt)} holds bytes that are no text in UTF-8")
            prompt = self.tokenizer(prompt).input_ids
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise ValueError(f"a prompt must be text or a list of token ids, got {shown(prompt)}")
        token_ids: tuple[Any, ...] = tuple(prompt)
        if not token_ids:
            raise ValueError("the prompt is empty: it has no tokens")
        size = self._adapter.vocabulary_size
        if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < size:
            return token_ids  # in a tenth of the time: a prompt of 8,192 tokens would keep the device waiting for 4 ms
        token_ids = tuple(int(t) if isinstance(t, np.integer) else t for t in token_ids)
        for position, token_id in enumerate(token_ids):
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ValueError(
                    f"a prompt must be text or a list of token ids, its item {position} is {shown(token_id)}"
                )
            if not 0 <= token_id < size:
                raise ValueError(f"prompt token {position} is {shown(token_id)}; the model knows ids 0 to {size - 1}")
        return token_ids

    def _eos_ids(self, params: Params) -> frozenset[int]:
        given: Any = params.eos_token_id
        if given is None and self._adapter.model.generation_config is not None:
            given = self._adapter.model.generation_config.eos_token_id
        if given is None:
            given = getattr(self._adapter.model.config.get_text_config(), "eos_token_id", None)
        return frozenset([given] if isinstance(given, int) else given or ())

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of generated tokens, less special ones; nothing without a tokenizer."""
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return str(text)

    def _whole_text_of(self, token_ids: Sequence[int]) -> str:
        assert self.tokenizer is not None, "only text has stop strings"
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))


def _check_known(params: Params, vocabulary_size: int) -> None:
    """Raises ValueError for token ids in ``params`` that the model does not have."""
    sequences: dict[str, Iterable[Any]] = {
        "sequence_bias": (token_ids for token_ids, _ in params.sequence_bias or ()),
        "bad_words_ids": params.bad_words_ids or (),
        "suppress_tokens": [params.suppress_tokens or ()],
        "begin_suppress_tokens": [params.begin_suppress_tokens or ()],
    }
    for name, each in sequences.items():
        largest = max((token_id for token_ids in each for token_id in token_ids), default=0)
        if largest >= vocabulary_size:
            raise ValueError(f"{name} holds {shown(largest)}; the model knows ids 0 to {vocabulary_size - 1}")
