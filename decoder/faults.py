"""What is wrong with a request's candidates, in words."""

import math

from torch import Tensor

from cowbeam.decoder.sampling import Sampling
from cowbeam.decoder.strategy import Strategy


def fault_of(strategy: Strategy, scores: Tensor, maxima: Tensor) -> str | None:
    """What is wrong with the candidates of these scores, if anything is. maxima: of the logits, [rows]."""
    if scores.isnan().any():
        return _fault_of_logits(maxima)
    # Each sample needs its candidate; beams need one, unless some are finished.
    is_allowed = scores > -math.inf
    if isinstance(strategy, Sampling):
        is_stuck = not is_allowed.all()
    else:
        is_stuck = not is_allowed.any() and not strategy.hypotheses
    return "the logits processors allow no token" if is_stuck else None


def _fault_of_logits(maxima: Tensor) -> str:
    """Why scores are NaN. maxima [rows]."""
    if maxima.isnan().any():
        return "the model's logits hold NaN"
    if maxima.isposinf().any():
        return "the model's logits hold +inf"
    if maxima.isneginf().any():
        return "a row of the model's logits has no finite value"
    return "the logits processors allow no token or give NaN"
