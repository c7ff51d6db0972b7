"""The logits processors a request asks for: transformers' own classes, in transformers' order."""

from collections.abc import Iterator

import torch
from transformers import (
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cowbeam.decoder.group import Request
from cowbeam.decoder.params import BeamSearchParams, SamplingParams


def make_processors(request: Request, device: torch.device) -> LogitsProcessorList:
    """All of them, in the order of ``GenerationMixin._get_logits_processor``."""
    return LogitsProcessorList([*_penalties(request, device), *_warpers(request), *_normalization(request)])


def _penalties(request: Request, device: torch.device) -> Iterator[LogitsProcessor]:
    params = request.params
    if params.repetition_penalty != 1.0:
        yield RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    if params.no_repeat_ngram_size:
        yield NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size)
    if params.min_new_tokens and request.eos_ids:
        eos_ids = torch.tensor(sorted(request.eos_ids), device=device)
        prompt_length = len(request.prompt_token_ids)
        yield MinNewTokensLengthLogitsProcessor(prompt_length, params.min_new_tokens, eos_ids, device=str(device))


def _warpers(request: Request) -> Iterator[LogitsProcessor]:
    params = request.params
    if isinstance(params, SamplingParams):
        keep = 1
    elif params.do_sample:
        keep = max(2, 1 + len(request.eos_ids))  # a beam needs one token that does not end it
    else:
        return
    if params.temperature != 1.0:
        yield TemperatureLogitsWarper(params.temperature)
    if params.top_k:
        yield TopKLogitsWarper(params.top_k, min_tokens_to_keep=keep)
    if params.top_p < 1.0:
        yield TopPLogitsWarper(params.top_p, min_tokens_to_keep=keep)
    if params.min_p:
        yield MinPLogitsWarper(params.min_p, min_tokens_to_keep=keep)


def _normalization(request: Request) -> Iterator[LogitsProcessor]:
    if request.params.renormalize_logits:
        yield LogitNormalization()


def is_beam_sampling(request: Request) -> bool:
    """The candidates of all beams together are drawn, not taken."""
    return isinstance(request.params, BeamSearchParams) and request.params.do_sample
