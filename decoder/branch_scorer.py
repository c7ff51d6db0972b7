"""A user's own judgement in the middle of sampling: which samples are worth going on with."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from reprlib import repr as shown  # abbreviates: a user's value may be of any length
from typing import Any

from cowbeam.decoder.field_checks import check_integer


@dataclass(frozen=True)
class BranchView:
    """One sample as its scorer sees it; ``token_ids`` and ``text`` (without a tokenizer: none) are what is generated.

    A finished one stays among the others until a better one takes its place.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    cumulative_logprob: float
    is_finished: bool


class ScorerError(Exception):
    """The user's function failed; what it raised is the cause."""


@dataclass(frozen=True, kw_only=True)
class BranchScorer:
    """Re-ranks the samples of a request every few tokens; whoever is dropped makes room for a fork of a better one.

    Forks share all their blocks, so going on twice from one sample costs its future only.

    Args:
        score: gets all samples of the request and gives a number each; greater is better, -inf means drop. If all are
            -inf, nothing is re-ranked.
        every: generated tokens between two calls.
        keep: so many of the best go on, each as often as the others (best-first search). None: each goes on about
            ``softmax(scores)`` × number of samples times (systematic resampling, as of particles in sequential Monte
            Carlo), by the request's seed.

    Raises:
        ValueError: names the field and the value.
    """

    score: Callable[[Sequence[BranchView]], Sequence[float]]
    every: int = 8
    keep: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.score):
            raise ValueError(f"score must be a function, got {shown(self.score)}")
        check_integer("every", self.every, 1)
        if self.keep is not None:
            check_integer("keep", self.keep, 1)

    def scores(self, branches: Sequence[BranchView]) -> list[float]:
        """The user's numbers, checked. Raises ScorerError."""
        try:
            given: Any = self.score(branches)
            if not isinstance(given, Iterable):
                raise ValueError(f"branch_scorer gave {shown(given)}: it must give a score for each of its branches")
            numbers = [float(number) for number in given]
            if len(numbers) != len(branches):
                raise ValueError(f"branch_scorer gave {len(numbers)} scores for {len(branches)} branches")
            if any(math.isnan(number) or number == math.inf for number in numbers):
                raise ValueError(f"branch_scorer gave {shown(numbers)}: a score is a number or -inf")
        except Exception as error:
            raise ScorerError("the branch_scorer failed") from error
        return numbers

    def parents(self, scores: Sequence[float], number: float) -> list[int]:
        """Which sample goes on in each place. Who goes on keeps its own; ``number`` in [0, 1) is the draw's."""
        if max(scores) == -math.inf:
            return list(range(len(scores)))
        copies = _resampled(scores, number) if self.keep is None else _best(scores, self.keep)
        return _placed(copies)


def _best(scores: Sequence[float], keep: int) -> list[int]:
    """How often each goes on: the best ``keep`` as often as each other, the better ones once more."""
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    kept = [place for place in order[:keep] if scores[place] > -math.inf]
    share, rest = divmod(len(scores), len(kept))
    copies = [0] * len(scores)
    for rank, place in enumerate(kept):
        copies[place] = share + (rank < rest)
    return copies


def _resampled(scores: Sequence[float], number: float) -> list[int]:
    """How often each goes on: as many of the points (number + i) / n fall into its share of the unit interval."""
    greatest = max(scores)
    weights = [math.exp(score - greatest) for score in scores]
    total, reached, taken = math.fsum(weights), 0.0, 0
    copies = []
    for weight in weights:
        reached += weight / total
        until = min(len(scores), math.ceil(reached * len(scores) - number))
        copies.append(max(0, until - taken))
        taken = max(taken, until)
    copies[max(range(len(scores)), key=lambda place: scores[place])] += len(scores) - taken  # rounding's last point
    return copies


def _placed(copies: Sequence[int]) -> list[int]:
    """Places with at least one copy keep theirs; further copies go to the places that have none, in order."""
    further = iter([place for place, count in enumerate(copies) for _ in range(count - 1)])
    return [place if count else next(further) for place, count in enumerate(copies)]
