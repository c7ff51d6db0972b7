"""``attach(model)``: transformers' own ``generate``, decoded over copy-on-write blocks.

The model is not changed but for two attributes of the instance, so that whatever holds the model (a pipeline, a
trainer) decodes by cowbeam.
"""

import functools
import types
from reprlib import repr as shown  # abbreviates: a user's value may be of any length
from typing import Any, Literal, TypeVar

from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from cowbeam.decoder.adapters import inside_wrapper
from cowbeam.decoder.attached_groups import DiverseBeams, asks_for_groups
from cowbeam.decoder.attachment import Attachment, Knobs
from cowbeam.decoder.model_view import view_of
from cowbeam.decoder.refusals import given_cache
from cowbeam.decoder.trial import check_choices

_ATTACHMENT = "_cowbeam_attachment"
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")  # that transformers has a loop for

AnyModel = TypeVar("AnyModel", bound=PreTrainedModel)


def attach(
    model: AnyModel,
    *,
    block_size: int = 16,
    attention: Literal["auto", "triton", "torch"] = "auto",
    compile: bool | None = None,
) -> AnyModel:
    """Let ``model.generate`` decode over copy-on-write blocks; it takes and returns what it always did.

    Beam search, beam sampling, sampling and greedy search, with every logits processor, stopping criterion, streamer
    and output that transformers has for them, at its own random numbers. What cowbeam cannot do is left to
    transformers, with one warning that says why. An output's cache is None: its blocks are free for the next call.

    Diverse beams (``num_beam_groups``), which transformers had until 4.5x, are decoded too: sequences and their scores.

    Args:
        model: any transformers model, or one with adapters of PEFT in its layers (LoRA). It is tried out now, if it is
            in eval mode, else at the first call.
        block_size: as for ``Decoder``, as are the others.
        attention: "triton", "torch" or "auto".
        compile: None means on the Triton path on CUDA.

    Returns:
        The model. A copy of it is attached too; ``detach`` undoes it.

    Raises:
        ValueError: ``model`` is no transformers model, or has no ``generate`` or one of its own; a knob out of range.
    """
    wrapper, model = model, inside_wrapper(model)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model must be a loaded transformers model, got {type(model).__name__}")
    if not hasattr(type(model), "generate"):
        raise ValueError(f"{type(model).__name__} has no generate; load it as AutoModelForCausalLM")
    check_choices(block_size, compile)
    if attention not in ("auto", "triton", "torch"):
        raise ValueError(f'attention must be "auto", "triton" or "torch", got {attention!r:.100}')
    detach(model)
    if "generate" in model.__dict__:
        raise ValueError(f"this {type(model).__name__} has a generate of its own, which attach would replace")
    attachment = Attachment(Knobs(block_size, attention, compile))
    if not model.training:
        _is_usable(model, attachment)
    model.__dict__[_ATTACHMENT] = attachment
    model.__dict__["generate"] = types.MethodType(generate, model)
    return wrapper


def detach(model: PreTrainedModel) -> None:
    """Give ``model`` its own ``generate`` back and free the memory; nothing happens if it is not attached."""
    model = inside_wrapper(model)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"detach takes a transformers model, got {shown(model)}")
    if model.__dict__.pop(_ATTACHMENT, None) is not None:
        del model.__dict__["generate"]


@functools.wraps(GenerationMixin.generate)
def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The ``generate`` of an attached model."""
    original = type(self).generate
    attachment = self.__dict__.get(_ATTACHMENT)
    # A recipe of the user's calls the model in ways of its own; continuous batching is another engine.
    is_foreign = kwargs.get("custom_generate") is not None or kwargs.get("cache_implementation") == "paged"
    if attachment is None or is_foreign or not _is_usable(self, attachment):
        return original(self, *args, **kwargs)
    if asks_for_groups(self, args, kwargs):
        kwargs = {**kwargs, "custom_generate": DiverseBeams(self, attachment, args, kwargs)}
    return original(view_of(self, attachment, has_cache=given_cache(kwargs) is not None), *args, **kwargs)


def custom_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Any:
    """For one call: ``model.generate(…, custom_generate=cowbeam.decoder.custom_generate)``.

    transformers keeps ``streamer``, ``tokenizer`` and ``assistant_model`` from such functions, and the model is tried
    out at each call: ``attach`` has no such gaps.
    """
    mode = generation_config.get_generation_mode()
    if mode not in _MODES:
        raise ValueError(f"custom_generate=cowbeam's does no {mode.replace('_', ' ')}; attach(model) may")
    attachment = model.__dict__.get(_ATTACHMENT) or Attachment(Knobs(16, "auto", compile=False))
    decoding: Any = view_of(model, attachment) if _is_usable(model, attachment) else model
    loop = decoding._sample if generation_config.num_beams == 1 else decoding._beam_search
    return loop(
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        **model_kwargs,
    )


def _is_usable(model: PreTrainedModel, attachment: Attachment) -> bool:
    """If the model is not, the user is told why."""
    try:
        attachment.fitted(model)
    except ValueError as error:
        attachment.warn(model, str(error))
        return False
    return True
