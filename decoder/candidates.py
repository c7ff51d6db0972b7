"""From logits to candidates, on the device: the processors, then the best or the drawn tokens.

The strategy on the host decides by the candidates; ``foresee`` tells on the device which of them it will take, so that
the next step can begin before the host has seen them.

Everything here sees branches in rank order, as transformers does: ties and draws fall over ``rank * vocabulary +
token``. Results stay on the device; the engine downloads those of all groups at once.
"""

from collections.abc import Hashable, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from cowbeam.decoder.batch import to_device
from cowbeam.decoder.beam_search import MASK, BeamSearch
from cowbeam.decoder.diverse_beams import DiverseBeamSearch
from cowbeam.decoder.grammar_states import GrammarStates
from cowbeam.decoder.group import Group
from cowbeam.decoder.outputs import TokenLogprob
from cowbeam.decoder.processors import HammingDiversity, check_scores, is_beam_sampling, make_processors
from cowbeam.decoder.scored_sampling import ScoredSampling
from cowbeam.decoder.strategy import Candidate, Continuation
from cowbeam.kernels.draw_tokens import draw_tokens


class CandidateSource:
    """Proposes candidates for one group. Owns the group's token history on the device, where processors need one."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._processors = make_processors(group.request, device)
        self._history: Tensor | None = None  # [ranks, prompt + max_new_tokens], filled up to _length
        self._history_before: Tensor | None = None  # as it was at the last choice but one
        self._log_probs: Tensor | None = None
        self._ranks: Tensor | None = None
        start = group.request.start_grammar
        self._grammar = None if start is None else start()
        self.fault: Exception | None = None  # what a processor of the user's raised
        self._has_users_processors = group.request.params.logits_processors is not None
        self._plain: Tensor | None = None  # [ranks, vocabulary] the plain model's, of the last `propose`, where asked
        self._eos_ids = torch.tensor(sorted(group.request.eos_ids), dtype=torch.long, device=device)
        self._length = group.num_prompt_tokens
        if len(self._processors):
            capacity = self._length + group.request.params.max_new_tokens
            self._history = torch.zeros(1, capacity, dtype=torch.long, device=device)
            self._history[0, : self._length] = torch.tensor(group.request.prompt_token_ids, device=device)

    @property
    def is_beams(self) -> bool:
        """The strategy is a beam search."""
        return isinstance(self._group.strategy, BeamSearch)

    @property
    def is_foreseeable(self) -> bool:
        """``foresee`` tells what the host will choose, and nothing is asked of this step once the next one runs.

        Which beam completes a stop string, only the host sees; the plain model's log-probs are asked for afterwards. A
        user's processor is not called for steps that may be dropped.
        """
        request = self._group.request
        if isinstance(self._group.strategy, DiverseBeamSearch | ScoredSampling) or self._has_users_processors:
            return False
        if self._grammar is not None:
            return False
        return request.params.logprobs is None and not (self.is_beams and request.stops is not None)

    @property
    def draws(self) -> list[tuple[int, int, int]]:
        """Of each sample whose next token one number decides: seed, index and position (see ``uniforms``)."""
        strategy = self._group.strategy
        if isinstance(strategy, BeamSearch | DiverseBeamSearch) or self._group.request.is_greedy:
            return []
        position = self._length - self._group.num_prompt_tokens
        return [(self._seed, index, position) for index in strategy.indices]

    @property
    def beam_scores(self) -> Sequence[float]:
        """Of the running beams; empty if these are none."""
        strategy = self._group.strategy
        return strategy.scores if isinstance(strategy, BeamSearch | DiverseBeamSearch) else []

    def propose(self, logits: Tensor, rows: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates in float64, [3, candidates]: score, rank, token id (all exact in float64).

        Unusable logits (NaN, +inf, a row without a finite value) show as a score that is NaN.

        Args:
            logits: [rows, vocabulary].
            rows: [ranks], which of them are the group's; one at the first choice.
            given: beams: their scores, [width] float32; samples: the number of each, [width] float64; greedy: [0].

        Returns:
            The candidates; and the ranks' greatest logits, which tell what is wrong, if a score is NaN (else anything).
        """
        strategy = self._group.strategy
        if self._group.request.params.logprobs is not None:
            self._plain = torch.log_softmax(logits[rows].float(), -1)
        logits = logits[rows].float()
        if isinstance(strategy, BeamSearch):
            candidates = self._beam_candidates(strategy, self._log_softmax(logits), given[:, None])
        elif isinstance(strategy, DiverseBeamSearch):
            candidates = self._diverse_candidates(strategy, torch.log_softmax(logits, -1), given[:, None])
        else:
            candidates = self._one_a_sample(self._process(logits), given)
        # Where the scores are at hand they tell whether anybody will ask, which saves a pass over the logits.
        is_asked = logits.is_cuda or bool(candidates[0].isnan().any())
        return candidates, logits.amax(-1) if is_asked else logits[:, 0]

    def kind(self, num_rows: int) -> "Kind | None":
        """What this source does to ``num_rows`` rows, where others' rows can be done with them; else None."""
        request, strategy = self._group.request, self._group.strategy
        if not self._is_plain or request.params.logprobs is not None or isinstance(strategy, DiverseBeamSearch):
            return None
        if isinstance(strategy, BeamSearch):
            # At the first choice all ranks stand on one row.
            kind = Kind("beams", strategy.width, strategy.num_candidates, request.eos_ids)
            return kind if num_rows == strategy.width else None
        return Kind("greedy" if request.is_greedy else "samples", 0, 0, frozenset())

    def ranks(self, number: int) -> Tensor:
        """[number] float64: 0, 1, 2, …; kept, for a captured choice would make it anew for each group."""
        if self._ranks is None or len(self._ranks) != number:
            self._ranks = torch.arange(number, dtype=torch.float64, device=self._device)
        return self._ranks

    def with_plain(self, candidates: list[Candidate]) -> list[Candidate]:
        """These candidates of the last ``propose`` with what the plain model says of them, if that is asked for."""
        if self._plain is None:
            return candidates
        number = min(self._group.request.params.logprobs or 0, self._plain.shape[1])
        # At the first choice one row stands for all ranks.
        ranks = [min(candidate.beam, len(self._plain) - 1) for candidate in candidates]
        at = to_device([ranks, [candidate.token_id for candidate in candidates]], torch.long, self._device)
        best = self._plain.topk(number)
        tops = [
            tuple(zip(token_ids, logprobs, strict=True))
            for token_ids, logprobs in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        return [
            candidate._replace(plain=TokenLogprob(candidate.token_id, logprob, tops[rank]))
            for candidate, rank, logprob in zip(candidates, ranks, self._plain[at[0], at[1]].tolist(), strict=True)
        ]

    def _log_softmax(self, logits: Tensor) -> Tensor:
        """Into a buffer of this request: megabytes allocated anew each step would be faulted in anew."""
        if self._log_probs is None or self._log_probs.shape != logits.shape:
            self._log_probs = torch.empty(logits.shape, device=logits.device)
        return torch.log_softmax(logits, -1, out=self._log_probs)

    def _process(self, scores: Tensor, start: int = 0) -> Tensor:
        """``scores`` of the ranks from ``start`` on."""
        if self._grammar is not None:
            scores = scores.masked_fill(self._forbidden(self._grammar, start, *scores.shape), -torch.inf)
        if self._history is None:
            return scores
        seen = cast(torch.LongTensor, self._history[start : start + len(scores), : self._length])
        if self._has_users_processors:
            processed = self._process_by_users(seen, scores)
        else:
            processed = self._processors(seen, cast(torch.FloatTensor, scores))
        if not self._group.request.params.renormalize_logits:
            return processed
        # A row in which nothing is allowed has no distribution: normalizing gives NaN, which would rank first.
        return processed.masked_fill(processed.isnan() & ~scores.isnan(), -torch.inf)

    def _forbidden(self, grammar: GrammarStates, start: int, count: int, vocabulary: int) -> Tensor:
        """[count, vocabulary] bool: the grammar has no such token there."""
        masks = torch.empty(count, grammar.num_words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        masks.fill_(-1)
        grammar.fill_masks(masks, start)
        if grammar.permitted is not None:
            masks &= torch.from_numpy(grammar.permitted)
        bits = torch.arange(32, dtype=torch.int32, device=self._device)
        allowed = (masks.to(self._device, non_blocking=True)[:, :, None] >> bits) & 1
        return allowed.reshape(count, -1)[:, :vocabulary] == 0

    def _process_by_users(self, seen: Tensor, scores: Tensor) -> Tensor:
        """Users may keep and change what they are given, so it is theirs. Their error is this request's alone."""
        try:
            given: Any = (seen.clone(), scores.clone())
            return check_scores(self._processors(*given), scores).clone()
        except Exception as error:
            self.fault = error
            return torch.full_like(scores, torch.nan)

    def _beam_candidates(self, strategy: BeamSearch, log_probs: Tensor, running: Tensor) -> Tensor:
        # At the first choice all ranks stand on the prompt: one row processed, then seen by each of them.
        processed = self._process(log_probs)
        is_first = len(processed) < strategy.width
        accumulated = (processed + running if is_first else processed.add_(running)).reshape(-1)
        count = min(strategy.num_candidates, accumulated.numel())
        if is_beam_sampling(self._group.request):
            scores, flat = self._draw(accumulated, count)
        else:
            scores, flat = torch.topk(accumulated, count)
        return columns_of(scores, flat, log_probs.shape[-1])

    def _diverse_candidates(self, strategy: DiverseBeamSearch, log_probs: Tensor, running: Tensor) -> Tensor:
        (diversity,) = (p for p in self._processors if isinstance(p, HammingDiversity))
        diversity.chosen = None
        is_first = len(log_probs) < strategy.width and self._length == self._group.num_prompt_tokens
        columns = []
        for start, size in strategy.live_groups:
            first_row = 0 if is_first else start
            processed = self._process(log_probs[first_row : 1 if is_first else start + size], first_row)
            accumulated = (processed + running[start : start + size]).reshape(-1)
            scores, flat = torch.topk(accumulated, min(strategy.num_candidates, accumulated.numel()))
            found = columns_of(scores, flat + start * log_probs.shape[-1], log_probs.shape[-1])
            tokens = found[2].long()
            # As the host will take them: the first ones that do not end.
            ends = (tokens[:, None] == self._eos_ids).any(1)
            chosen = tokens[ends.sort(stable=True).indices[:size]]
            diversity.chosen = chosen if diversity.chosen is None else torch.cat([diversity.chosen, chosen])
            columns.append(found)
        return torch.cat(columns, 1)

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

    def _one_a_sample(self, processed: Tensor, numbers: Tensor) -> Tensor:
        # Greedy takes the greatest logit: two that differ can have equal log-probs.
        if self._group.request.is_greedy:
            tokens = processed.argmax(-1)
            return _one_a_rank(torch.log_softmax(processed, -1).gather(1, tokens[:, None])[:, 0], tokens)
        # At the first choice all ranks stand on the prompt.
        rows = torch.arange(len(numbers), device=self._device).clamp_(max=len(processed) - 1)
        tokens, scores, _ = draw_tokens(processed, rows, numbers)
        return _one_a_rank(scores, tokens)

    def signature(self, width: int) -> Hashable:
        """Sources of one signature do the same to ``width`` ranks, launch for launch; None if that is not so.

        (Processors look at a history that grows, and draws of beams at a generator.)
        """
        if not self._is_plain:
            return None
        return (type(self._group.strategy), self._group.request.is_greedy, width, self._group.request.eos_ids)

    @property
    def _is_plain(self) -> bool:
        """No processor looks at the scores, and no generator draws beams."""
        return self._history is None and self._grammar is None and not is_beam_sampling(self._group.request)

    @property
    def buffers(self) -> list[Tensor | None]:
        """What ``propose`` and ``foresee`` read and write of this source's own."""
        return [self._log_probs, self._eos_ids, self._ranks]

    def foresee(self, proposal: Tensor, groups: int = 1) -> "Choice":
        """What the strategy will choose if no sample ends, on the device; it must agree with ``select``.

        ``proposal`` may be that of several groups of this source's kind, one after another.
        """
        scores, ranks, tokens = proposal[0].float(), *proposal[1:].long()
        strategy = self._group.strategy
        if not isinstance(strategy, BeamSearch):
            return Choice(ranks, tokens, scores)
        ends = (tokens[:, None] == self._eos_ids).any(1)
        masked = torch.where(ends, scores + MASK, scores).view(groups, -1)
        scores, order = masked.sort(stable=True, dim=-1, descending=True)
        order = order[:, : strategy.width]
        ranks, tokens = (part.view(masked.shape).gather(1, order).flatten() for part in (ranks, tokens))
        return Choice(ranks, tokens, scores[:, : strategy.width].flatten())

    def go_on(self, continuations: Sequence[Continuation]) -> None:
        """``follow`` what the host chose."""
        parents, tokens = zip(*((c.beam, c.token_id) for c in continuations), strict=True)
        if self._grammar is not None:
            self._grammar.follow(parents, tokens)
        self.follow(*to_device((parents, tokens), torch.long, self._device))

    def follow(self, parents: Tensor, tokens: Tensor) -> None:
        """Make the choice the history: [ranks] each, a rank that is continued and a token."""
        if self._history is not None:
            self._history_before = self._history
            self._history = self._history[parents if self._history.shape[0] > 1 else torch.zeros_like(parents)]
            self._history[:, self._length] = tokens
        self._length += 1

    def unfollow(self) -> None:
        """Take the last choice back."""
        self._history = self._history_before
        self._length -= 1


def columns_of(scores: Tensor, flat: Tensor, vocabulary: int) -> Tensor:
    """[3, candidates] of scores and ``rank * vocabulary + token``."""
    return torch.stack([scores.double(), (flat // vocabulary).double(), (flat % vocabulary).double()])


def _one_a_rank(scores: Tensor, tokens: Tensor) -> Tensor:
    return torch.stack([scores.double(), torch.arange(len(tokens), device=tokens.device).double(), tokens.double()])


class Kind(NamedTuple):
    """Groups of one kind find their candidates by the same launches."""

    name: Literal["beams", "samples", "greedy"]
    width: int  # of beams, as all that follows
    num_candidates: int
    eos_ids: frozenset[int]


class Choice(NamedTuple):
    """The continuations in rank order, on the device."""

    ranks: Tensor  # [width] int64: of the branch that is continued
    tokens: Tensor  # [width] int64
    scores: Tensor  # [width] float32


def unpack(rows: Sequence[Sequence[float]]) -> list[Candidate]:
    """Downloaded columns of ``propose`` as candidates."""
    scores, ranks, tokens = rows
    return [Candidate(s, int(r), int(t)) for s, r, t in zip(scores, ranks, tokens, strict=True)]
