"""Parallel sampling and greedy search: every branch goes on by itself.

Randomness: sample i's token t is chosen by one uniform number that depends on (seed, i, t) alone, so neither its
neighbours in the batch nor preemption nor the block size can change it. (The distribution it is held against comes from
matrix products, whose last bits do depend on the number of rows: a token can change where the number falls within
rounding of an edge.)
"""

from collections.abc import Sequence

import numpy as np

from cowbeam.decoder.branches import Token
from cowbeam.decoder.endings import Ending, Endings
from cowbeam.decoder.params import Params, SamplingParams
from cowbeam.decoder.strategy import Candidate, Continuation, Hypothesis


def uniform(seed: int, index: int, position: int) -> float:
    """The number in [0, 1) of sample ``index`` at generated token ``position``: counter-based, no state to carry.

    Philox (Salmon et al., SC 2011) keyed by the seed, its counter set to (position, index).
    """
    return float(np.random.Generator(np.random.Philox(key=seed, counter=[0, position, index, 0])).random())


class Sampling:
    """The live samples of one request; with one sample and the likeliest token as its candidate, greedy search."""

    def __init__(
        self,
        params: Params,
        eos_ids: frozenset[int],
        endings: Endings | None = None,
        *,
        length_penalty: float = 1.0,
    ) -> None:
        self._params = params
        self._endings = endings or Endings(eos_ids, params.max_new_tokens)
        self._length_penalty = length_penalty
        self._length = 0
        self._finished: list[Hypothesis] = []
        self.indices = list(range(params.width))  # which sample each rank is
        self.scores = [0.0] * params.width

    @property
    def width(self) -> int:
        """Samples."""
        return self._params.width

    @property
    def length(self) -> int:
        """Generated tokens of every live sample."""
        return self._length

    @property
    def is_done(self) -> bool:
        """Every sample is finished."""
        return not self.indices

    @property
    def hypotheses(self) -> Sequence[Hypothesis]:
        """The finished samples by index; of ``best_of`` those with the greatest mean log-prob, best first."""
        by_index = sorted(self._finished, key=lambda hypothesis: hypothesis.index)
        if isinstance(self._params, SamplingParams) and self._params.best_of is not None:
            return sorted(by_index, key=lambda h: -h.score)[: self._params.num_return_sequences]
        return by_index

    def select(self, candidates: Sequence[Candidate], last_tokens: Sequence[Token | None]) -> list[Continuation]:
        """One candidate a live sample, in rank order; ``score`` is the log-prob of its token."""
        assert len(candidates) == len(self.indices), "one candidate a sample"
        self._length += 1
        continuations, indices, scores = [], [], []
        for rank, candidate in enumerate(candidates):
            cumulative = self.scores[rank] + candidate.score
            continuation = Continuation(candidate.beam, candidate.token_id, candidate.score, candidate.plain)
            ending = self._endings.of(candidate.beam, candidate.token_id, self._length)
            if ending:
                self._finish(self.indices[rank], last_tokens[candidate.beam], continuation, cumulative, ending)
            else:
                continuations.append(continuation)
                indices.append(self.indices[rank])
                scores.append(cumulative)
        self.indices, self.scores = indices, scores
        self._endings.follow(continuations)
        return continuations

    def _finish(self, index: int, prefix: Token | None, last: Continuation, cumulative: float, ending: Ending) -> None:
        score = cumulative / self._length**self._length_penalty
        self._finished.append(Hypothesis(index, prefix, last, cumulative, score, *ending))
