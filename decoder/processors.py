"""The logits processors a request asks for: transformers' own classes, in transformers' order."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cowbeam.decoder.group import Request
from cowbeam.decoder.params import BeamSearchParams, SamplingParams


class HammingDiversity(LogitsProcessor):
    """Takes a penalty off each token for each time that the beams of earlier groups chose it in this step.

    transformers' ``HammingDiversityLogitsProcessor`` of 4.49, which went with its group beam search. Who processes sets
    ``chosen`` [tokens] first.
    """

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty
        self.chosen: Tensor | None = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:  # noqa: ARG002  # the signature is transformers'
        """[branches, vocabulary], as ``scores``."""
        if self.chosen is None:
            return scores
        return scores - self._penalty * torch.bincount(self.chosen, minlength=scores.shape[-1])


def make_processors(request: Request, device: torch.device) -> LogitsProcessorList:
    """All of them, in the order of ``GenerationMixin._get_logits_processor``."""
    penalties = _with_the_users(list(_penalties(request, device)), request.params.logits_processors or ())
    return LogitsProcessorList([*penalties, *_warpers(request), *_normalization(request)])


def _with_the_users(penalties: Sequence[LogitsProcessor], users: Sequence[Any]) -> list[Any]:
    """The user's go last; one of the same class as a penalty takes its place (``_merge_criteria_processor_list``)."""
    merged = [next((user for user in users if type(user) is type(penalty)), penalty) for penalty in penalties]
    taken = {id(processor) for processor in merged}
    return [*merged, *(user for user in users if id(user) not in taken)]


def _penalties(request: Request, device: torch.device) -> Iterator[LogitsProcessor]:
    params = request.params
    biases: Any = params.sequence_bias  # pairs, as they are kept
    if biases:
        yield SequenceBiasLogitsProcessor([[list(token_ids), bias] for token_ids, bias in biases])
    if isinstance(params, BeamSearchParams) and params.diversity_penalty:
        yield HammingDiversity(params.diversity_penalty)
    if params.repetition_penalty != 1.0:
        yield RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
    if params.no_repeat_ngram_size:
        yield NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size)
    bad_words = [list(word) for word in params.bad_words_ids or () if len(word) > 1 or word[0] not in request.eos_ids]
    if bad_words:
        yield NoBadWordsLogitsProcessor(bad_words)
    if params.min_new_tokens and request.eos_ids:
        eos_ids = torch.tensor(sorted(request.eos_ids), device=device)
        prompt_length = len(request.prompt_token_ids)
        yield MinNewTokensLengthLogitsProcessor(prompt_length, params.min_new_tokens, eos_ids, device=str(device))
    if params.suppress_tokens:
        yield SuppressTokensLogitsProcessor(list(params.suppress_tokens), device=str(device))
    if params.begin_suppress_tokens:
        begin = len(request.prompt_token_ids)
        yield SuppressTokensAtBeginLogitsProcessor(list(params.begin_suppress_tokens), begin, device=str(device))


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


def check_scores(processed: object, scores: Tensor) -> Tensor:
    """What the user's processors made of ``scores``. Raises ValueError if that cannot be scores."""
    if not isinstance(processed, Tensor) or processed.shape != scores.shape:
        what = list(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
        raise ValueError(f"logits_processors must return scores of shape {list(scores.shape)}, got {what}")
    return processed.to(scores)


def is_beam_sampling(request: Request) -> bool:
    """The candidates of all beams together are drawn, not taken."""
    return isinstance(request.params, BeamSearchParams) and request.params.do_sample
