"""From logits to candidates, on the device: the processors, then the best or the drawn tokens.

Everything here sees branches in rank order, as transformers does: ties and draws fall over ``rank * vocabulary +
token``. Results stay on the device; the engine downloads those of all groups at once.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from cowbeam.decoder.beam_search import BeamSearch
from cowbeam.decoder.group import Group
from cowbeam.decoder.processors import is_beam_sampling, make_processors
from cowbeam.decoder.sampling import Sampling, uniform
from cowbeam.decoder.strategy import Candidate, Continuation


class CandidateSource:
    """Proposes candidates for one group. Owns the group's token history on the device, where processors need one."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._processors = make_processors(group.request, device)
        self._history: Tensor | None = None  # [ranks, prompt + max_new_tokens], filled up to _length
        self._log_probs: Tensor | None = None
        self._length = group.num_prompt_tokens
        if len(self._processors):
            capacity = self._length + group.request.params.max_new_tokens
            self._history = torch.zeros(1, capacity, dtype=torch.long, device=device)
            self._history[0, : self._length] = torch.tensor(group.request.prompt_token_ids, device=device)

    def propose(self, logits: Tensor) -> Tensor:
        """Candidates in float64, [3, candidates]: score, rank, token id (all exact in float64).

        Unusable logits (NaN, +inf, a row without a finite value) show as a score that is NaN.

        Args:
            logits: [ranks, vocabulary] in rank order; [1, vocabulary] at the first choice.
        """
        strategy = self._group.strategy
        logits = logits.float()
        if isinstance(strategy, BeamSearch):
            return self._beam_candidates(strategy, self._log_softmax(logits))
        return self._one_a_sample(strategy, self._process(logits))

    def _log_softmax(self, logits: Tensor) -> Tensor:
        """Into a buffer of this request: megabytes allocated anew each step would be faulted in anew."""
        if self._log_probs is None or self._log_probs.shape != logits.shape:
            self._log_probs = torch.empty(logits.shape, device=logits.device)
        return torch.log_softmax(logits, -1, out=self._log_probs)

    def _process(self, scores: Tensor) -> Tensor:
        if self._history is None:
            return scores
        seen = cast(torch.LongTensor, self._history[:, : self._length])
        processed = self._processors(seen, cast(torch.FloatTensor, scores))
        if not self._group.request.params.renormalize_logits:
            return processed
        # A row in which nothing is allowed has no distribution: normalizing gives NaN, which would rank first.
        return processed.masked_fill(processed.isnan() & ~scores.isnan(), -torch.inf)

    def _beam_candidates(self, strategy: BeamSearch, log_probs: Tensor) -> Tensor:
        # At the first choice all ranks stand on the prompt: one row processed, then seen by each of them.
        processed = self._process(log_probs)
        running = torch.tensor(strategy.scores, dtype=torch.float32, device=self._device)[:, None]
        is_first = len(processed) < strategy.width
        accumulated = (processed + running if is_first else processed.add_(running)).reshape(-1)
        count = min(strategy.num_candidates, accumulated.numel())
        if is_beam_sampling(self._group.request):
            scores, flat = self._draw(accumulated, count)
        else:
            scores, flat = torch.topk(accumulated, count)
        vocabulary = log_probs.shape[-1]
        return torch.stack([scores.double(), (flat // vocabulary).double(), (flat % vocabulary).double()])

    def _draw(self, accumulated: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """``count`` candidates without replacement, best first (sorted as since transformers 5.24)."""
        probabilities = torch.softmax(accumulated, -1)
        # NaN must not reach multinomial, where it would abort the process on CUDA, but must show in the candidates.
        drawn = torch.multinomial(probabilities.nan_to_num(nan=1.0), count, generator=self._generator())
        scores, order = accumulated[drawn].sort(descending=True)
        return scores.masked_fill_(probabilities[:1].isnan(), torch.nan), drawn[order]

    def _generator(self) -> torch.Generator:
        """A stream that depends on the seed and the position only."""
        position = self._length - self._group.num_prompt_tokens
        key = np.random.SeedSequence([self._seed, position]).generate_state(1, np.uint64)[0]
        return torch.Generator(self._device).manual_seed(int(key))

    @property
    def _seed(self) -> int:
        seed = self._group.request.seed
        assert seed is not None, "a request that draws has a seed"
        return seed

    def _one_a_sample(self, strategy: Sampling, processed: Tensor) -> Tensor:
        log_probs = torch.log_softmax(processed, -1).expand(len(strategy.indices), -1)
        # Greedy takes the greatest logit: two that differ can have equal log-probs.
        is_greedy = self._group.request.is_greedy
        tokens = processed.argmax(-1) if is_greedy else self._inverse_cdf(log_probs, strategy)
        scores = log_probs.gather(1, tokens[:, None])[:, 0]
        ranks = torch.arange(len(tokens), device=self._device)
        return torch.stack([scores.double(), ranks.double(), tokens.double()])

    def _inverse_cdf(self, log_probs: Tensor, strategy: Sampling) -> Tensor:
        """Each row's token: the first whose cumulative probability exceeds the row's uniform number."""
        numbers = [uniform(self._seed, index, strategy.length) for index in strategy.indices]
        cumulative = log_probs.double().exp().cumsum(-1)
        target = torch.tensor(numbers, dtype=torch.float64, device=self._device)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
        return tokens.clamp_(max=log_probs.shape[-1] - 1)

    def follow(self, continuations: Sequence[Continuation]) -> None:
        """Make the choice the history."""
        if self._history is not None and continuations:
            parents, tokens = zip(*((c.beam, c.token_id) for c in continuations), strict=True)
            if self._history.shape[0] == 1:
                parents = (0,) * len(parents)
            chosen = torch.tensor([parents, tokens], device=self._device)
            self._history = self._history[chosen[0]]
            self._history[:, self._length] = chosen[1]
        self._length += 1


def unpack(rows: Sequence[Sequence[float]]) -> list[Candidate]:
    """Downloaded columns of ``propose`` as candidates."""
    scores, ranks, tokens = rows
    return [Candidate(s, int(r), int(t)) for s, r, t in zip(scores, ranks, tokens, strict=True)]
