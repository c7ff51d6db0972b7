"""Beam search with the semantics of transformers' ``_beam_search``, and beam sampling, which only draws differently.

Score arithmetic is float32, as there, so that ties and near ties fall the same way.
"""

import math
from collections.abc import Sequence

import numpy as np

from cowbeam.decoder.branches import Token
from cowbeam.decoder.endings import Ending, Endings
from cowbeam.decoder.params import BeamSearchParams
from cowbeam.decoder.strategy import Candidate, Continuation, Hypothesis

# Added to what must rank behind everything else. Not -inf: among the masked, order survives where float32 allows it.
MASK = -1e9


def penalized(cumulative_logprob: float, length: int, length_penalty: float) -> float:
    """``cumulative_logprob / length ** length_penalty`` in float32; ``length`` counts generated tokens only."""
    return float(np.float32(cumulative_logprob) / np.float32(length**length_penalty))


def is_hopeless(cumulative_logprob: float) -> bool:
    """It descends from a rank that was masked, or no token was allowed: no model gives such a log-prob."""
    return cumulative_logprob < MASK / 2


class BeamSearch:
    """The live beams' scores and the best finished hypotheses of one request.

    A beam that completes a stop string is finished as one that ends in an EOS id is (B1, B2 of transformers #34843:
    ``_beam_search`` asks its stopping criteria of every candidate). ``endings`` of a request without stop strings may
    be left out.
    """

    def __init__(self, params: BeamSearchParams, eos_ids: frozenset[int], endings: Endings | None = None) -> None:
        self._params = params
        self._eos_ids = eos_ids
        self._endings = endings or Endings(eos_ids, params.max_new_tokens)
        self._length = 0  # generated tokens of every live beam
        self._hypotheses: list[Hypothesis] = []  # best first, at most num_beams
        self.is_done = False
        # As if all beams started on the prompt and all but one were hopeless: the first step forks one branch.
        self.scores: list[float] = [0.0] + [MASK] * (params.num_beams - 1)

    @property
    def width(self) -> int:
        """Live beams."""
        return self._params.num_beams

    @property
    def num_candidates(self) -> int:
        """Enough that ``num_beams`` live ones remain even if every other candidate ends in one of the EOS ids."""
        return max(2, 1 + len(self._eos_ids)) * self.width

    @property
    def hypotheses(self) -> Sequence[Hypothesis]:
        """The finished sequences that are returned, best first; fewer, where fewer exist."""
        found = [h for h in self._hypotheses if not is_hopeless(h.cumulative_logprob)]
        return found[: self._params.num_return_sequences]

    def select(self, candidates: Sequence[Candidate], last_tokens: Sequence[Token | None]) -> list[Continuation]:
        """The next live beams, best first. ``candidates`` come best first."""
        assert not self.is_done, "the search is over: what finishes now would not be kept"
        self._length += 1
        endings = [self._endings.of(c.beam, c.token_id, self._length) for c in candidates]
        masked = [float(np.float32(c.score + MASK)) if e else c.score for c, e in zip(candidates, endings, strict=True)]
        ranked = sorted(range(len(candidates)), key=lambda i: -masked[i])[: self.width]
        finished = [
            self._hypothesis(candidate, ending, last_tokens)
            for candidate, ending in zip(candidates[: self.width], endings, strict=False)
            if ending
        ]
        continuations = [self._continuation(candidates[i]) for i in ranked]
        self.scores = [masked[i] for i in ranked]
        self._keep_best(finished)
        self._decide_whether_to_go_on(all_hit=all(endings))
        if self.is_done:
            self.scores = []
            return []
        self._endings.follow(continuations)
        return continuations

    def _continuation(self, candidate: Candidate) -> Continuation:
        # The log-prob is the difference of float32 sums, so that a branch's log-probs add up to that sum exactly.
        is_first = self._length == 1
        before = 0.0 if is_first or math.isinf(candidate.score) else self.scores[candidate.beam]
        return Continuation(candidate.beam, candidate.token_id, candidate.score - before, candidate.plain)

    def _hypothesis(self, candidate: Candidate, ending: Ending, last_tokens: Sequence[Token | None]) -> Hypothesis:
        return Hypothesis(
            index=0,
            prefix=last_tokens[candidate.beam],
            last=self._continuation(candidate),
            cumulative_logprob=candidate.score,
            score=penalized(candidate.score, self._length, self._params.length_penalty),
            finish_reason=ending.finish_reason,
            stop_reason=ending.stop_reason,
            excess=ending.excess,
        )

    def _keep_best(self, finished: list[Hypothesis]) -> None:
        # With more beams than candidates the surplus ranks are hopeless. What ends there fills a place only if it beats
        # an empty one, which scores MASK in transformers.
        hopeful = [h for h in finished if h.score > MASK or not is_hopeless(h.cumulative_logprob)]
        self._hypotheses = sorted([*self._hypotheses, *hopeful], key=lambda h: -h.score)[: self.width]

    def _decide_whether_to_go_on(self, all_hit: bool) -> None:
        is_full = len(self._hypotheses) == self.width
        lp, early_stopping = self._params.length_penalty, self._params.early_stopping
        # The best score a live beam may still reach. With a positive penalty longer is better: "never" counts on
        # the greatest length; the heuristic of False on the present one (transformers PR #20901).
        length = self._params.max_new_tokens if early_stopping == "never" and lp > 0 else self._length
        attainable = penalized(self.scores[0], length, lp)
        worst = MASK if is_hopeless(self.scores[0]) else -math.inf
        if is_full:
            worst = self._hypotheses[-1].score
        self.is_done = attainable <= worst or (is_full and early_stopping is True) or all_hit
