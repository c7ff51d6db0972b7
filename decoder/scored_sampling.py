"""Samples that a user's function re-ranks on the way: dropped ones make room for forks of better ones."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from cowbeam.decoder.branch_scorer import BranchScorer, BranchView
from cowbeam.decoder.branches import Token
from cowbeam.decoder.chain import links
from cowbeam.decoder.endings import Endings
from cowbeam.decoder.params import SamplingParams
from cowbeam.decoder.sampling import Sampling, uniforms
from cowbeam.decoder.strategy import Candidate, Continuation, Hypothesis


class ScoredSampling(Sampling):
    """Sampling whose places are filled anew every ``scorer.every`` tokens.

    A place keeps its index, and so its random numbers, whoever goes on in it: copies of one sample part at their next
    token. Copies of a finished one stay equal.
    """

    def __init__(
        self,
        params: SamplingParams,
        endings: Endings,
        scorer: BranchScorer,
        seed: int,
        write: Callable[[Sequence[int]], str],
    ) -> None:
        super().__init__(params, endings.eos_ids, endings)
        self._best_of, self._num_returned = params.best_of, params.num_return_sequences
        self._scorer = scorer
        self._seed = seed
        self._write = write
        self._final_scores: list[float] = []

    @property
    def hypotheses(self) -> Sequence[Hypothesis]:
        """The finished samples by index; of ``best_of`` the best by the scorer's last word, best first."""
        by_index = sorted(self._finished, key=lambda hypothesis: hypothesis.index)
        if self._best_of is None or not self._final_scores:
            return by_index[: self._num_returned]
        ranked = sorted(by_index, key=lambda hypothesis: -self._final_scores[hypothesis.index])
        return ranked[: self._num_returned]

    def select(self, candidates: Sequence[Candidate], last_tokens: Sequence[Token | None]) -> list[Continuation]:
        """As Sampling; then the scorer's choice. Raises ScorerError if the scorer fails."""
        continuations = super().select(candidates, last_tokens)
        views = self._views(continuations, last_tokens) if self._is_asked else []
        if self.is_done and views:
            self._final_scores = self._scorer.scores(views)
        elif views:
            # The first number behind those of the samples: an index that no sample has.
            (number,) = uniforms([self._seed], [self.width], [self._length])
            continuations = self._rerank(continuations, self._scorer.parents(self._scorer.scores(views), number))
        return continuations

    @property
    def _is_asked(self) -> bool:
        if self.is_done:
            return self._best_of is not None
        return self._length % self._scorer.every == 0

    def _views(
        self, continuations: Sequence[Continuation], last_tokens: Sequence[Token | None]
    ) -> Sequence[BranchView]:
        live = [
            (index, last_tokens[c.beam], c, score, False)
            for index, c, score in zip(self.indices, continuations, self.scores, strict=True)
        ]
        ended = [(h.index, h.prefix, h.last, h.cumulative_logprob, True) for h in self._finished]
        views = []
        for index, prefix, last, score, is_finished in sorted(live + ended, key=lambda one: one[0]):
            token_ids = (*(token.token_id for token in links(prefix)), last.token_id)
            views.append(BranchView(index, token_ids, self._write(token_ids), score, is_finished))
        return views

    def _rerank(self, continuations: Sequence[Continuation], parents: Sequence[int]) -> list[Continuation]:
        """``parents[place]`` goes on in each place."""
        rank_of = {index: rank for rank, index in enumerate(self.indices)}
        finished = {hypothesis.index: hypothesis for hypothesis in self._finished}
        live = [place for place, parent in enumerate(parents) if parent in rank_of]
        self._finished = [
            replace(finished[parent], index=place) for place, parent in enumerate(parents) if parent in finished
        ]
        ranks = [rank_of[parents[place]] for place in live]
        self.indices, self.scores = live, [self.scores[rank] for rank in ranks]
        self._endings.reorder(ranks)
        return [continuations[rank] for rank in ranks]
