"""Diverse beam search: the beams in groups, of which each avoids what those before it chose in the same step.

Vijayakumar et al., *Diverse Beam Search* (2016), in the form that transformers had until 4.5x (``_group_beam_search``,
``BeamSearchScorer`` and ``BeamHypotheses`` of 4.49), by these formulas. With N beams in G groups of n = N / G, E EOS
ids and L = max_new_tokens:

1. Running scores of a group start as [0, -1e9, …]. In each step the groups take their turns, g = 0 … G - 1.
2. x = processors(log_softmax(logits)), with ``x[token] -= diversity_penalty * count(token)`` behind the sequence bias
   and in front of the other penalties (Hamming diversity): how often the beams of groups 0 … g - 1 chose it in this
   step. accumulated = x + running score; the max(2, 1 + E) · n best of n · V are the group's candidates.
3. In their order: an EOS among the first n is a hypothesis of score sum / length ** length_penalty (length with the
   EOS, without the prompt), one behind them is dropped; any other token is the group's next beam, until there are n.
4. A group keeps its n best hypotheses; one that equals the worst does not replace it. With n of them it is done if
   ``early_stopping`` is True; else if its worst score is at least best / length ** length_penalty, with best the sum of
   the step's best candidate, ended or not, and length the present one, or L with "never" and a positive penalty.
5. After L tokens the beams of groups that are not done are hypotheses too.
6. The best of all groups together are returned; of equal ones that of the later group.

A group that is done holds no blocks. (transformers went on with pad tokens in its rows, which later groups avoided
then: that is its batch's doing, and not repeated here.)
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cowbeam.decoder.beam_search import MASK, is_hopeless
from cowbeam.decoder.branches import Token
from cowbeam.decoder.params import BeamSearchParams
from cowbeam.decoder.strategy import Candidate, Continuation, Hypothesis


class RankRange(NamedTuple):
    """The ranks of a group's beams among all live ones: ``start <= rank < start + size``."""

    start: int
    size: int


class _BeamGroup:
    """The live beams' scores and the best hypotheses of one group."""

    def __init__(self, params: BeamSearchParams, eos_ids: frozenset[int]) -> None:
        self._params = params
        self._eos_ids = eos_ids
        self.size = params.num_beams // params.num_beam_groups
        self.scores = [0.0] + [MASK] * (self.size - 1)
        self.hypotheses: list[Hypothesis] = []  # in the order in which they came
        self.is_done = False

    def select(
        self, candidates: Sequence[Candidate], start: int, last_tokens: Sequence[Token | None], length: int
    ) -> list[Continuation]:
        """The group's next beams; ``candidates`` come best first, with ranks from ``start`` on."""
        beams: list[Candidate] = []
        for place, candidate in enumerate(candidates):
            if candidate.token_id not in self._eos_ids:
                beams.append(candidate)
            elif place < self.size:
                last = self._continuation(candidate, start, length)
                self._add(last_tokens[candidate.beam], last, candidate.score, length, is_eos=True)
            if len(beams) == self.size:
                break
        continuations = [self._continuation(candidate, start, length) for candidate in beams]
        self.is_done = self._decide(candidates[0].score, length)
        self.scores = [candidate.score for candidate in beams]
        if length == self._params.max_new_tokens and not self.is_done:
            for candidate, last in zip(beams, continuations, strict=True):
                self._add(last_tokens[candidate.beam], last, candidate.score, length, is_eos=False)
            self.is_done = True
        if self.is_done:
            self.scores = []
            return []
        return continuations

    def _continuation(self, candidate: Candidate, start: int, length: int) -> Continuation:
        is_first = length == 1
        before = 0.0 if is_first or math.isinf(candidate.score) else self.scores[candidate.beam - start]
        return Continuation(candidate.beam, candidate.token_id, candidate.score - before, candidate.plain)

    def _add(self, prefix: Token | None, last: Continuation, total: float, length: int, *, is_eos: bool) -> None:
        score = total / length**self._params.length_penalty
        worst = min((hypothesis.score for hypothesis in self.hypotheses), default=-math.inf)
        if len(self.hypotheses) == self.size:
            if score <= worst:
                return
            self.hypotheses.remove(next(h for h in self.hypotheses if h.score == worst))
        reason = ("eos", last.token_id) if is_eos else ("length", None)
        self.hypotheses.append(Hypothesis(0, prefix, last, total, score, *reason))

    def _decide(self, best: float, length: int) -> bool:
        params = self._params
        if len(self.hypotheses) < self.size:
            return False
        if params.early_stopping is True:
            return True
        counts_on_more = params.early_stopping == "never" and params.length_penalty > 0
        reached = params.max_new_tokens if counts_on_more else length
        worst = min(hypothesis.score for hypothesis in self.hypotheses)
        return bool(worst >= best / reached**params.length_penalty)


class DiverseBeamSearch:
    """The groups of one request. Ranks count the live beams, group after group, without groups that are done."""

    def __init__(self, params: BeamSearchParams, eos_ids: frozenset[int]) -> None:
        self._params = params
        self._length = 0
        self._num_eos_ids = len(eos_ids)
        self._groups = [_BeamGroup(params, eos_ids) for _ in range(params.num_beam_groups)]

    @property
    def width(self) -> int:
        """Live beams at most."""
        return self._params.num_beams

    @property
    def num_candidates(self) -> int:
        """Of each group; see `BeamSearch.num_candidates`."""
        return max(2, 1 + self._num_eos_ids) * (self.width // self._params.num_beam_groups)

    @property
    def live_groups(self) -> list[RankRange]:
        """The ranks of each group that is not done, in the order of their turns."""
        sizes = [group.size for group in self._groups if not group.is_done]
        starts = np.cumsum([0, *sizes]).tolist()
        return [RankRange(start, size) for start, size in zip(starts, sizes, strict=False)]

    @property
    def is_done(self) -> bool:
        """Every group is."""
        return all(group.is_done for group in self._groups)

    @property
    def scores(self) -> Sequence[float]:
        """Cumulative log-prob of each live beam, penalties included."""
        return [score for group in self._groups for score in group.scores]

    @property
    def hypotheses(self) -> Sequence[Hypothesis]:
        """The finished sequences that are returned, best first."""
        found = [h for group in self._groups for h in group.hypotheses if not is_hopeless(h.cumulative_logprob)]
        return sorted(found, key=lambda h: h.score)[::-1][: self._params.num_return_sequences]

    def select(self, candidates: Sequence[Candidate], last_tokens: Sequence[Token | None]) -> list[Continuation]:
        """The next live beams, group after group. ``candidates`` come so too, each group's best first."""
        self._length += 1
        continuations: list[Continuation] = []
        live = [group for group in self._groups if not group.is_done]
        for group, (start, size) in zip(live, self.live_groups, strict=True):
            own = [candidate for candidate in candidates if start <= candidate.beam < start + size]
            continuations += group.select(own, start, last_tokens, self._length)
        return continuations
