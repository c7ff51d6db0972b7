"""Parallel sampling and greedy search: every branch goes on by itself.

Randomness: sample i's token t is chosen by one uniform number that depends on (seed, i, t) alone, so neither its
neighbours in the batch nor preemption nor the block size can change it. (The distribution it is held against comes from
matrix products, whose last bits do depend on the number of rows: a token can change where the number falls within
rounding of an edge.)
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cowbeam.decoder.branches import Token
from cowbeam.decoder.endings import Ending, Endings
from cowbeam.decoder.params import Params, SamplingParams
from cowbeam.decoder.strategy import Candidate, Continuation, Hypothesis

Words = NDArray[np.uint64]

_HALF = 2**32 - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)  # of Philox 4x64
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def uniforms(seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]) -> list[float]:
    """The numbers in [0, 1) of samples ``indices`` at generated tokens ``positions``; all below 2**64.

    Counter-based, so there is no state to carry: Philox 4x64-10 (Salmon et al., SC 2011) keyed by the seed, its counter
    set to (position, index). What numpy's ``Generator(Philox(key=seed, counter=[0, position, index, 0])).random()``
    gives, for all samples of a step at once: one such generator takes longer to make than a small model's step.
    """
    nothing = np.zeros(len(seeds), np.uint64)
    keys = [np.array(seeds, dtype=np.uint64), nothing]
    a, b, c, d = nothing + np.uint64(1), np.array(positions, np.uint64), np.array(indices, np.uint64), nothing
    for _ in range(10):
        a, b, c, d = (
            _high_product(c, _MULTIPLIERS[1]) ^ b ^ keys[0],
            c * np.uint64(_MULTIPLIERS[1]),
            _high_product(a, _MULTIPLIERS[0]) ^ d ^ keys[1],
            a * np.uint64(_MULTIPLIERS[0]),
        )
        keys = [key + np.uint64(weyl) for key, weyl in zip(keys, _WEYL, strict=True)]
    numbers: list[float] = ((a >> np.uint64(11)) * 2.0**-53).tolist()  # the 53 bits that a float64 holds
    return numbers


def _high_product(words: Words, factor: int) -> Words:
    """The upper 64 bits of the products, by halves: numpy has no wider integers."""
    half, low = np.uint64(32), np.uint64(_HALF)
    factor_high, factor_low = np.uint64(factor >> 32), np.uint64(factor & _HALF)
    high, rest = words >> half, words & low
    middle = high * factor_low + (rest * factor_low >> half)
    product: Words = high * factor_high + (middle >> half) + (rest * factor_high + (middle & low) >> half)
    return product


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
