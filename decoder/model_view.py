"""A view of a model: its attributes under a class whose decoding loops run over blocks.

transformers' ``generate`` and its loops run on the view as on the model, and take every decision: which tokens, which
beams, which random numbers, when to stop, what to return, by the rules of the installed version. Only the forward
passes of a loop are answered from blocks.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast

from cowbeam.decoder.attachment import Attachment
from cowbeam.decoder.model_adapter import ONE_PASS_AT_A_TIME
from cowbeam.decoder.model_levels import CACHE_NAMES
from cowbeam.decoder.paged_rows import PagedRows, as_requests
from cowbeam.decoder.refusals import given_cache, why_not

_LOOPS = ("_sample", "_beam_search", "_assisted_decoding")


def view_of(model: PreTrainedModel, attachment: Attachment, *, has_cache: bool = False) -> Any:
    """For one call of ``generate``. ``has_cache``: the caller gives a cache, which he wants filled."""
    view_class = attachment.view_class
    if view_class is None or view_class.__base__ is not type(model):
        view_class = attachment.view_class = _make_view_class(type(model))
    view: Any = object.__new__(view_class)
    object.__setattr__(view, "__dict__", model.__dict__)
    object.__setattr__(view, "_call", _Call(model, attachment, has_cache))
    return view


def _make_view_class(model_class: type) -> type:
    """A subclass whose loops run over blocks. The slot keeps the call out of the attributes shared with the model."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return self._call.forward(*args, **kwargs)

    def loop(name: str) -> Callable[..., Any]:
        @functools.wraps(getattr(model_class, name))
        def run(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
            return self._call.loop(name, self, input_ids, **kwargs)

        return run

    def get_compiled_call(self: Any, *args: Any) -> Any:
        return self._call.model.get_compiled_call(*args)  # kept by the model, which outlives the view

    loops = {name: loop(name) for name in _LOOPS}
    names = {"__slots__": ("_call",), "__module__": model_class.__module__, "__doc__": model_class.__doc__}
    return type(
        model_class.__name__,
        (model_class,),
        {**names, **loops, "__call__": __call__, "get_compiled_call": get_compiled_call},
    )


class _Call:
    """One call of ``generate``: stands between transformers' loop and the blocks."""

    def __init__(self, model: PreTrainedModel, attachment: Attachment, has_cache: bool) -> None:
        self.model = model
        self.attachment = attachment
        self._has_cache = has_cache  # the caller's, which he wants filled
        self._rows: PagedRows | None = None
        self._cache: _RowsAsCache | None = None

    def loop(self, name: str, view: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        """Run transformers' loop ``name`` over blocks, or as it is."""
        own = getattr(type(self.model), name)
        reason = self._why_not(name, input_ids, **kwargs)
        if reason is not None:
            self.attachment.warn(self.model, reason)
            return own(view, input_ids, **kwargs)
        max_new_tokens = kwargs["generation_config"].max_length - input_ids.shape[1]
        requests = as_requests(input_ids, _lengths(input_ids, kwargs.get("attention_mask")), max_new_tokens)
        fitted = self.attachment.fitted(self.model)
        try:
            self._rows, self._cache = fitted.open_rows(requests, self.attachment.knobs.block_size), None
        except MemoryError as error:
            self.attachment.warn(self.model, str(error))
            return own(view, input_ids, **kwargs)
        try:
            output = self._over_blocks(own, view, input_ids, **kwargs)
            self._rows.log_use()
        finally:
            fitted.close_rows(self._rows)
            self._rows = self._cache = None
        return output if isinstance(output, Tensor) else _without_cache(output)

    def _over_blocks(self, loop: Callable[..., Any], view: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        assert self._rows is not None, "the loop has rows"
        for name in CACHE_NAMES:  # empty; one of fixed size would have masks made and the forward pass compiled
            kwargs.pop(name, None)
        if loop.__name__ == "_sample" and _forgets_ended(**kwargs):
            kwargs["stopping_criteria"] = _Watched(kwargs["stopping_criteria"], self._rows)
        return loop(view, input_ids, **kwargs)

    def _why_not(self, name: str, input_ids: Tensor, **kwargs: Any) -> str | None:
        if name == "_assisted_decoding":
            return "assistant models and prompt lookup are not supported"
        if self._has_cache:
            return "a given cache is not supported"
        return why_not(self.attachment.fitted(self.model).adapter, input_ids, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the loop's forward pass; any other (of guidance, say, or of a call that is left to transformers) is
        the model's own, for which other threads' steps have to wait: the model attends in another way during them."""
        rows, cache = self._rows, given_cache(kwargs)
        if rows is None or (self._cache is not None and cache is not self._cache):
            with ONE_PASS_AT_A_TIME:
                return self.model(*args, **kwargs)
        if self._cache is None:
            self._cache = _RowsAsCache(rows, kwargs["input_ids"].shape[1])
            logits = rows.prefill()
        else:
            logits = rows.step(kwargs["input_ids"][:, -1])
            self._cache.length += 1
        name = next(name for name in CACHE_NAMES if name in CausalLMOutputWithPast.__dataclass_fields__)
        named: Any = {name: self._cache}
        return CausalLMOutputWithPast(logits=logits[:, None], **named)


class _RowsAsCache:
    """The rows as the loop sees them: a cache that can be reordered."""

    is_compileable = False

    def __init__(self, rows: PagedRows, length: int) -> None:
        self._rows = rows
        self.length = length

    def get_seq_length(self, *_: Any) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._rows.reorder(beam_idx)


class _Watched(StoppingCriteriaList):
    """Tells the rows which of them have ended."""

    def __init__(self, criteria: StoppingCriteriaList, rows: PagedRows) -> None:
        super().__init__(criteria)
        self._rows = rows
        self._ended: Tensor | None = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        is_done = super().__call__(input_ids, scores, **kwargs)
        self._ended = is_done if self._ended is None else is_done | self._ended
        self._rows.end(self._ended)
        return is_done


def _forgets_ended(*, stopping_criteria: Any, generation_config: Any, **_: Any) -> bool:
    """The loop does not look at a sample any more once it has ended: it appends pads and returns no scores of it."""
    appends_pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    returns = generation_config.return_dict_in_generate
    return appends_pads and not (returns and (generation_config.output_scores or generation_config.output_logits))


def _lengths(input_ids: Tensor, mask: Tensor | None) -> list[int]:
    if mask is None:
        return [input_ids.shape[1]] * len(input_ids)
    lengths: list[int] = mask.long().sum(-1).tolist()  # a mask may be of any type
    return lengths


def _without_cache(output: Any) -> Any:
    """The blocks are free for the next call: what is left would be of no use."""
    return type(output)(**{name: value for name, value in output.items() if name not in CACHE_NAMES})
