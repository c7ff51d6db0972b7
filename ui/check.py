"""Is this what transformers gives? Asked on demand, after a run.

A deterministic search must give transformers' tokens. A sampled one cannot (the two draw from other streams), so every
log-prob of what was drawn is computed again by transformers' own forward pass and logits processors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from cowbeam.decoder import DecodeResult
from cowbeam.ui.decoders import Decoders
from cowbeam.ui.run import Run
from cowbeam.ui.settings import Settings

# float32 on other shapes sums in another order; half precision rounds coarsely.
TOLERANCE = 1e-3
TOLERANCE_HALF = 0.3


@dataclass(frozen=True)
class Verdict:
    """``ok``, and a sentence that says what was compared and how it came out.

    ``cache_bytes`` is what transformers' own cache held at its last step, as torch counts it; None where it made none.
    """

    ok: bool
    sentence: str
    cache_bytes: int | None = None


def check_against_transformers(decoders: Decoders, run: Run) -> Verdict:
    """Hold the result of ``run`` against transformers with the same model. Raises ValueError if there is none."""
    if run.result is None:
        raise ValueError("only a finished run can be held against transformers")
    if run.settings.mode in ("beam search", "greedy"):
        return _same_tokens(decoders, run.settings, run.result)
    return _same_logprobs(decoders, run.settings, run.result)


def _same_tokens(decoders: Decoders, settings: Settings, result: DecodeResult) -> Verdict:
    model: Any = decoders.first.model
    prompt = torch.tensor([result.prompt_token_ids], device=model.device)
    params: Any = settings.params()
    config = GenerationConfig(  # type: ignore[no-untyped-call]
        num_beams=params.num_beams,
        num_return_sequences=params.num_return_sequences,
        max_new_tokens=params.max_new_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        no_repeat_ngram_size=params.no_repeat_ngram_size,
        do_sample=False,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=model.generation_config.pad_token_id,
        return_dict_in_generate=True,
    )
    with torch.inference_mode():
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)
    theirs = [row[len(result.prompt_token_ids) :].tolist() for row in out.sequences]
    ours = [list(completion.token_ids) for completion in result.completions]
    # Their rows are filled up to the longest.
    same = [row[: len(tokens)] == tokens for row, tokens in zip(theirs, ours, strict=False)]
    cache_bytes = _nbytes(getattr(out, "cache", None) or getattr(out, "past_key_values", None))
    total = sum(map(len, ours))
    if all(same) and len(theirs) == len(ours):
        sequences = f"{len(ours)} sequences, {total} tokens" if len(ours) > 1 else f"{total} tokens"
        return Verdict(True, f"same tokens as transformers.generate ({sequences})", cache_bytes)
    return Verdict(
        False, f"{same.count(False)} of {len(ours)} sequences differ from transformers.generate", cache_bytes
    )


def _nbytes(cache: Any) -> int | None:
    layers = getattr(cache, "layers", None)
    if not layers:
        return None
    tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values) if isinstance(tensor, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def _same_logprobs(decoders: Decoders, settings: Settings, result: DecodeResult) -> Verdict:
    worst, count = 0.0, 0
    for completion in result.completions:
        theirs = _logprobs(decoders, settings, result.prompt_token_ids, completion.token_ids)
        ours = torch.tensor(completion.logprobs)
        worst = max(worst, float((theirs - ours).abs().max()))
        count += len(ours)
    is_half = decoders.first.model.dtype not in (torch.float32, torch.float64)
    ok = worst <= (TOLERANCE_HALF if is_half else TOLERANCE)
    compared = f"log-probs of {count} drawn tokens"
    return Verdict(ok, f"{compared} {'equal' if ok else 'differ from'} transformers' (greatest difference {worst:.1e})")


def _logprobs(decoders: Decoders, settings: Settings, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Log-probs of ``tokens`` after ``prompt`` by transformers' forward pass, processed as its generate() does it."""
    model: Any = decoders.first.model
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    # Beam sampling warps log-probs and does not normalize again; plain sampling warps logits.
    is_beams = settings.mode == "beam sampling"
    scores = logits.log_softmax(-1) if is_beams else logits
    warpers = LogitsProcessorList()
    if settings.temperature != 1:
        warpers.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k, min_tokens_to_keep=2 if is_beams else 1))
    if settings.top_p < 1:
        warpers.append(TopPLogitsWarper(settings.top_p, min_tokens_to_keep=2 if is_beams else 1))
    warped = warpers(ids, scores)  # type: ignore[arg-type]
    processed = warped if is_beams else warped.log_softmax(-1)
    return processed.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
