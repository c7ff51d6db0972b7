"""Diverse beams behind an attached model's ``generate``: transformers had them until 4.5x, and names a repository now.

transformers prepares the call as any other (defaults, prompts, padding); a decoder of cowbeam's answers it.
"""

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

from cowbeam.decoder.attachment import Attachment
from cowbeam.decoder.decoder import Decoder
from cowbeam.decoder.group import Request
from cowbeam.decoder.outputs import DecodeResult
from cowbeam.decoder.params import BeamSearchParams
from cowbeam.decoder.refusals import why_not
from cowbeam.decoder.scheduler import worst_case_blocks

_GENERATE = inspect.signature(GenerationMixin.generate)
# Arguments of ``generate`` that these beams have no place for.
_NO_PLACE = (
    "stopping_criteria",
    "stop_strings",
    "prefix_allowed_tokens_fn",
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
)


def asks_for_groups(model: PreTrainedModel, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """The call is one for diverse beams."""
    given = kwargs.get("num_beam_groups")
    if given is None:
        config = _bound(model, args, kwargs).get("generation_config") or model.generation_config
        given = getattr(config, "num_beam_groups", None)
    return isinstance(given, int) and given > 1


class DiverseBeams:
    """Decodes one call; given to ``generate`` as its ``custom_generate``.

    Raises ValueError for what these beams have no place for, naming it.
    """

    def __init__(self, model: PreTrainedModel, attachment: Attachment, args: Sequence[Any], kwargs: dict[str, Any]):
        self._model = model
        self._attachment = attachment
        given = {**kwargs, **_bound(model, args, kwargs)}
        for name in _NO_PLACE:
            if given.get(name):
                raise ValueError(f"{name} does not go with num_beam_groups")
        self._processors = given.get("logits_processor") or None  # the user's alone

    def __call__(
        self, _model: Any, input_ids: Tensor, generation_config: GenerationConfig, **model_kwargs: Any
    ) -> Tensor | GenerateBeamDecoderOnlyOutput:
        """``input_ids`` have each prompt once a beam, and all defaults are resolved."""
        adapter = self._attachment.fitted(self._model).adapter
        given = {name: value for name, value in model_kwargs.items() if name != "stopping_criteria"}
        reason = why_not(adapter, input_ids, generation_config=generation_config, **given)
        if reason is not None:
            raise ValueError(f"num_beam_groups={generation_config.num_beam_groups}: {reason}")
        every = generation_config.num_beams
        mask = model_kwargs.get("attention_mask")
        padded = input_ids[::every]
        lengths = [padded.shape[1]] * len(padded) if mask is None else mask[::every].long().sum(-1).tolist()
        prompts = [row[len(row) - length :] for row, length in zip(padded.tolist(), lengths, strict=True)]
        params = self._params(generation_config, padded.shape[1])
        return _as_transformers(padded, self._decode(prompts, params), params, generation_config)

    def _params(self, generation_config: GenerationConfig, width: int) -> BeamSearchParams:
        """The same settings, with lengths that count new tokens and ids in place of tensors."""
        settings: Any = copy.copy(generation_config)
        max_new_tokens = settings.max_length - width
        fewest = max(settings.min_new_tokens or 0, (settings.min_length or 0) - width)
        settings.min_length = 0
        eos_ids = settings._eos_token_tensor
        return BeamSearchParams.from_generation_config(
            settings,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min(fewest, max_new_tokens),
            eos_token_id=[] if eos_ids is None else eos_ids.tolist(),
            logits_processors=self._processors,
        )

    def _decode(self, prompts: Sequence[Sequence[int]], params: BeamSearchParams) -> list[DecodeResult]:
        knobs = self._attachment.knobs
        requests = [Request(tuple(prompt), params, frozenset(), seed=None) for prompt in prompts]
        with Decoder(
            self._model,
            block_size=knobs.block_size,
            num_blocks=sum(worst_case_blocks(request, knobs.block_size) for request in requests),
            attention=knobs.attention,  # type: ignore[arg-type]
            prefix_reuse=False,
            compile=False,
        ) as decoder:
            return decoder.generate(list(prompts), params)


def _bound(model: PreTrainedModel, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``generate`` by name; what it will refuse itself is left out."""
    known = {name: value for name, value in kwargs.items() if name in _GENERATE.parameters}
    try:
        return dict(_GENERATE.bind_partial(model, *args, **known).arguments)
    except TypeError:
        return known


def _as_transformers(
    prompts: Tensor, results: Sequence[DecodeResult], params: BeamSearchParams, generation_config: Any
) -> Tensor | GenerateBeamDecoderOnlyOutput:
    """Sequences behind their padded prompts, filled up at the end; scores where they were asked for."""
    each = params.num_return_sequences
    pad = generation_config._pad_token_tensor
    fill = int(pad) if pad is not None else next(iter(params.eos_token_id or [0]))  # type: ignore[arg-type]
    longest = max(len(completion.token_ids) for result in results for completion in result.completions)
    new = torch.full((len(prompts) * each, longest), fill, dtype=prompts.dtype)
    scores = torch.full((len(new),), -1e9)  # where fewer sequences exist than were asked for, rows of padding are left
    for number, result in enumerate(results):
        for row, completion in enumerate(result.completions, number * each):
            new[row, : len(completion.token_ids)] = torch.tensor(completion.token_ids)
            scores[row] = completion.score
    sequences: Any = torch.cat([prompts.repeat_interleave(each, 0), new.to(prompts.device)], 1)
    if not generation_config.return_dict_in_generate:
        return sequences  # type: ignore[no-any-return]
    given: Any = scores.to(prompts.device) if generation_config.output_scores else None
    return GenerateBeamDecoderOnlyOutput(sequences=sequences, sequences_scores=given)
