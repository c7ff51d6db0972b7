"""A group: the branches of one request, from prompt to completions."""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cowbeam.decoder.backlog import Backlog, Piece
from cowbeam.decoder.beam_search import BeamSearch
from cowbeam.decoder.blocks import Block, BlockId, BlockPool
from cowbeam.decoder.branches import Branch, BranchTree, Event
from cowbeam.decoder.chain import links
from cowbeam.decoder.diverse_beams import DiverseBeamSearch
from cowbeam.decoder.endings import Endings
from cowbeam.decoder.grammar_states import GrammarStates
from cowbeam.decoder.outputs import Completion, DecodeResult, DecodeStats, MemoryUse, TokenLogprob
from cowbeam.decoder.params import BeamSearchParams, Params, SamplingParams
from cowbeam.decoder.sampling import Sampling
from cowbeam.decoder.scored_sampling import ScoredSampling
from cowbeam.decoder.stop_strings import StopStrings
from cowbeam.decoder.strategy import Candidate, Continuation, Hypothesis


@dataclass(frozen=True)
class Request:
    """One prompt and what is asked of it.

    ``seed`` is set where draws are made, ``stops`` where texts end it, ``write`` (token ids to text) where a user's
    function looks at texts, ``start_grammar`` where a grammar decides.
    """

    prompt_token_ids: tuple[int, ...]
    params: Params
    eos_ids: frozenset[int]
    seed: int | None
    stops: StopStrings | None = None
    write: Callable[[Sequence[int]], str] | None = None
    start_grammar: Callable[[], GrammarStates] | None = None

    @property
    def is_greedy(self) -> bool:
        """One branch that takes the likeliest token."""
        return isinstance(self.params, BeamSearchParams) and self.params.num_beams == 1


@dataclass(frozen=True)
class KVBytes:
    """What KV costs: bytes of one token in all layers, and the layers that transformers would crop to a window."""

    per_token: int
    windows: tuple[tuple[int, int], ...]  # (bytes of a token, tokens kept at most) of each group of sliding layers

    def copied(self, num_tokens: int) -> int:
        """What transformers keeps for one branch of ``num_tokens`` tokens."""
        cropped = sum(per_token * max(0, num_tokens - kept) for per_token, kept in self.windows)
        return num_tokens * self.per_token - cropped


def make_strategy(request: Request) -> BeamSearch | DiverseBeamSearch | Sampling:
    """The strategy that ``request`` asks for."""
    params = request.params
    if isinstance(params, BeamSearchParams) and params.num_beam_groups > 1:
        return DiverseBeamSearch(params, request.eos_ids)
    if isinstance(params, BeamSearchParams) and not request.is_greedy:
        return BeamSearch(params, request.eos_ids, make_endings(request))
    if isinstance(params, SamplingParams) and params.branch_scorer is not None:
        assert request.seed is not None, "samples are drawn"
        assert request.write is not None, "a scorer sees texts"
        return ScoredSampling(params, make_endings(request), params.branch_scorer, request.seed, request.write)
    length_penalty = params.length_penalty if isinstance(params, BeamSearchParams) else 1.0
    return Sampling(params, request.eos_ids, make_endings(request), length_penalty=length_penalty)


def make_endings(request: Request) -> Endings:
    """What ends a branch of ``request``."""
    return Endings(request.eos_ids, request.params.max_new_tokens, request.stops, request.prompt_token_ids)


class SwapRoom(Protocol):
    """Where what blocks hold can wait: see `swap`."""

    def save(self, block_ids: Sequence[BlockId]) -> Any:
        """Copy them out; None if there is no room."""

    def bring_back(self, saved: Any, block_ids: Sequence[BlockId]) -> None:
        """Copy what was saved, or the last of it, into these blocks."""

    def drop(self, saved: Any) -> None:
        """Nobody will ask for it any more."""


class Group:
    """One request in flight. ``branches`` are the live ones in rank order; before the first choice it is one.

    ``backlog`` is what it has slots for and has not computed; until that is empty it takes part in no step.
    """

    def __init__(
        self,
        request: Request,
        pool: BlockPool,
        kv_bytes: KVBytes,
        *,
        in_pieces: bool = True,
        swap_space: SwapRoom | None = None,
    ) -> None:
        self.request = request
        self._in_pieces = in_pieces  # else each sequence is computed from its begin and at once
        self.strategy = make_strategy(request)
        self.tree = BranchTree(pool)
        self.branches: list[Branch] = []
        self.parents: list[int] = []  # of the last choice: each branch's parent branch id, for frames
        self.backlog = Backlog(may_cut=in_pieces)
        self.steps = self.decode_tokens = 0
        self.prefill_tokens = self.reused_tokens = self.recomputed_tokens = self.preemptions = 0
        self.swapped_blocks = 0  # brought back after a preemption
        self._swap_space = swap_space
        self._swapped: Any = None  # what its blocks held
        self._kv_bytes = kv_bytes
        self._peak_blocks = self._peak_tokens = self._peak_copied = 0
        self._num_blocks_before: int | None = None  # it was preempted
        self._found: tuple[int, list[Block]] | None = None  # as of these changes; since given away, some may be
        self._generation: int | None = None  # of the prefix cache, when it was planted, if its blocks may be found
        self._started = time.perf_counter()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Generated tokens of each live branch."""
        token = self.branches[0].last_token if self.branches else None
        return token.length if token else 0

    @property
    def is_at_last_token(self) -> bool:
        """The next token is the last one its branches may have."""
        return self.num_generated + 1 >= self.request.params.max_new_tokens

    @property
    def blocks_to_take(self) -> int:
        """Free blocks that ``plant`` would take now: blocks that others use already are shared."""
        in_all = -(-self.num_prompt_tokens // self.tree.pool.block_size)
        if self._num_blocks_before is not None:
            in_all = self._num_blocks_before
        pool = self.tree.pool
        if self._found is None or self._found[0] != pool.prefixes.changes:
            self._found = (pool.prefixes.changes, self._find_prefix())
        # A block in use follows blocks in use.
        return in_all - bisect_left(self._found[1], True, key=lambda block: block.ref_count == 0)

    def plant(self) -> None:
        """Reserve the prompt's slots, to be computed once for all branches to come; after a preemption, all slots."""
        pool = self.tree.pool
        prefix = self._find_prefix()
        self._found = None
        start = len(prefix) * pool.block_size
        if self._swapped is None:
            self._generation = pool.prefixes.generation
        if self.branches:
            owed = self.tree.replant(prefix)
            before = self._num_blocks_before
            assert self.tree.num_blocks == before, f"{self.tree.num_blocks} blocks for what had {before}"
            if self._swapped is not None:
                self._bring_back(prefix)
            else:
                for branch, first in owed:
                    self._owe(branch, first)
        else:
            self.branches = [self.tree.plant(self.num_prompt_tokens, prefix)]
            self._owe(self.branches[0], start)
        if not self.steps:
            self.reused_tokens = start
        self.measure()

    def _find_prefix(self) -> list[Block]:
        """Full blocks that hold the prompt's begin; of a prompt whose logits are wanted all but the last token."""
        pool = self.tree.pool
        if not pool.prefix_reuse:
            return []
        wanted = self.num_prompt_tokens if self.steps else self.num_prompt_tokens - 1
        return pool.find_prefix(self.request.prompt_token_ids[:wanted])

    def _owe(self, branch: Branch, start: int) -> None:
        """To be computed: what is in ``branch``'s slots from position ``start`` on, all where sequences stay whole."""
        start = start if self._in_pieces else 0
        prompt = self.request.prompt_token_ids[start:]
        generated = branch.token_ids_from(max(0, start - self.num_prompt_tokens))
        token_ids = (*prompt, *generated)[: branch.num_slots - start]
        self.backlog.add(Piece(token_ids, start, branch.block_table, branch))

    def take(self, limit: int) -> Piece:
        """Tokens of the backlog for the next pass, at most ``limit``.

        Blocks of the prompt that they fill can be found by later requests.
        """
        piece = self.backlog.take(limit)
        if self.steps:
            self.recomputed_tokens += len(piece.token_ids)
        else:
            self.prefill_tokens += len(piece.token_ids)
        if self._may_be_found:
            prompt, pool = self.request.prompt_token_ids, self.tree.pool
            pool.enter_prefix(prompt[: min(piece.end, len(prompt))], piece.block_table, piece.start)
        return piece

    def give_back(self) -> None:
        """Give every block back and be as before ``plant``, but for tokens and scores."""
        self.preemptions += 1
        self._num_blocks_before = self.tree.num_blocks
        self._swap_out()
        self.tree.uproot()
        self.backlog.clear()
        if not self.steps:  # what was computed of the prompt will be computed again
            self.recomputed_tokens += self.prefill_tokens
            self.prefill_tokens = 0

    def _swap_out(self) -> None:
        """Save what the blocks hold, unless something is yet to be computed: then nothing would be spared."""
        if self._swap_space is not None and self._in_pieces and self.steps and not self.backlog.num_tokens:
            self._swapped = self._swap_space.save([block.block_id for block in self.tree.blocks()])

    def _bring_back(self, prefix: Sequence[Block]) -> None:
        assert self._swap_space is not None, "blocks were saved somewhere"
        blocks = self.tree.blocks()[len(prefix) :]
        self._swap_space.bring_back(self._swapped, [block.block_id for block in blocks])
        self._swapped = None
        self.swapped_blocks += len(blocks)
        if self._may_be_found:
            prompt, pool = self.request.prompt_token_ids, self.tree.pool
            pool.enter_prefix(prompt, self.branches[0].block_table, len(prefix) * pool.block_size)

    def _forget_swapped(self) -> None:
        if self._swap_space is not None and self._swapped is not None:
            self._swap_space.drop(self._swapped)
            self._swapped = None

    @property
    def _may_be_found(self) -> bool:
        prefixes = self.tree.pool.prefixes
        return self.tree.pool.prefix_reuse and self._generation == prefixes.generation

    def choose(self, candidates: Sequence[Candidate]) -> list[Continuation]:
        """Let the strategy choose and make its choice the live branches; returns it. Frees everything when done."""
        continuations = self.select(candidates)
        self.follow(continuations)
        return continuations

    def select(self, candidates: Sequence[Candidate]) -> list[Continuation]:
        """Let the strategy choose. Users' functions take part: where one raises, the group can only be freed."""
        return self.strategy.select(candidates, [branch.last_token for branch in self._ranked()])

    def follow(self, continuations: Sequence[Continuation]) -> None:
        """Make these the live branches; whoever is not continued is freed."""
        self.steps += 1
        self._advance(self._ranked(), continuations)

    def _ranked(self) -> list[Branch]:
        """The branch of each rank; before the first choice one branch stands for all."""
        return self.branches * self.strategy.width if self.num_generated == 0 else self.branches

    def _advance(self, ranked: Sequence[Branch], continuations: Sequence[Continuation]) -> None:
        """Fork, free, append. A parent's first child keeps the branch; the dropped are freed after all forks."""
        taken: set[int] = set()
        successors: list[Branch] = []
        self.parents = []
        for continuation in continuations:
            parent = ranked[continuation.beam]
            self.parents.append(parent.branch_id)
            successors.append(self.tree.fork(parent) if parent.branch_id in taken else parent)
            taken.add(parent.branch_id)
        for branch in self.branches:
            if branch.branch_id not in taken:
                self._free(branch)
        for branch, continuation in zip(successors, continuations, strict=True):
            c = continuation
            self.tree.append_token(branch, c.token_id, c.logprob, c.beam, c.plain)
        self.branches = successors

    def measure(self) -> None:
        """Note the peaks; called when the step's slots are reserved and nothing of it is freed yet."""
        self._peak_blocks = max(self._peak_blocks, self.tree.num_blocks)
        self._peak_tokens = max(self._peak_tokens, self.tree.num_tokens)
        self._peak_copied = max(self._peak_copied, self.memory.copied)

    @property
    def memory(self) -> MemoryUse:
        """KV bytes now, beside the baselines."""
        length = self.num_prompt_tokens + self.num_generated
        copied = self.strategy.width * self._kv_bytes.copied(length) if self.branches else 0
        return self._memory(self.tree.num_blocks, self.tree.num_tokens, copied)

    def _memory(self, blocks: int, tokens: int, copied: int) -> MemoryUse:
        per_token, params = self._kv_bytes.per_token, self.request.params
        return MemoryUse(
            used=blocks * self.tree.pool.block_size * per_token,
            unique=tokens * per_token,
            copied=copied,
            contiguous=params.width * (self.num_prompt_tokens + params.max_new_tokens) * per_token,
        )

    def free(self) -> None:
        """Give every block back; the group is over."""
        for branch in self.branches:
            self._free(branch)
        self.branches = []
        self._forget_swapped()
        self.leave_swap_space()
        self.backlog.clear()

    def leave_swap_space(self) -> None:
        """Know nothing of it any more: who keeps the group may outlast it, and it is gigabytes of pinned memory."""
        self._swapped = self._swap_space = None

    def _free(self, branch: Branch) -> None:
        if self._may_be_found and not self.backlog.num_tokens:
            self.tree.keep_findable(branch, self.request.prompt_token_ids)
        self.tree.free(branch)

    def forget_blocks(self) -> None:
        """What its blocks hold is worth nothing: nobody shall find them."""
        self._generation = None
        for branch in self.branches:
            for block in links(branch.last_block):
                self.tree.pool.prefixes.forget(block)

    def result(
        self,
        texts: Sequence[str],
        attention: str,
        *,
        level: int = 1,
        cuda_graphs: bool = False,
        compiled: bool = False,
    ) -> DecodeResult:
        """The finished request; ``texts`` are of ``hypotheses``, in their order."""
        stats = DecodeStats(
            steps=self.steps,
            prefill_tokens=self.prefill_tokens,
            reused_tokens=self.reused_tokens,
            recomputed_tokens=self.recomputed_tokens,
            swapped_blocks=self.swapped_blocks,
            preemptions=self.preemptions,
            decode_tokens=self.decode_tokens,
            cow_copies=self.tree.num_cow_copies,
            peak_blocks=self._peak_blocks,
            bytes_per_block=self.tree.pool.block_size * self._kv_bytes.per_token,
            block_size=self.tree.pool.block_size,
            peak_memory=self._memory(self._peak_blocks, self._peak_tokens, self._peak_copied),
            level=level,
            attention=attention,
            cuda_graphs=cuda_graphs,
            compiled=compiled,
            seconds=time.perf_counter() - self._started,
        )
        pairs = zip(self.strategy.hypotheses, texts, strict=True)
        completions = tuple(completion(index, hypothesis, text) for index, (hypothesis, text) in enumerate(pairs))
        return DecodeResult(self.request.prompt_token_ids, completions, stats, self.request.seed)

    def take_events(self) -> tuple[Event, ...]:
        """What happened since the last call, where the tree records."""
        happened = tuple(self.tree.events or ())
        if self.tree.events is not None:
            self.tree.events = []
        return happened


def hypothesis_token_ids(hypothesis: Hypothesis) -> tuple[int, ...]:
    """The generated ids, the last one included."""
    return (*(token.token_id for token in links(hypothesis.prefix)), hypothesis.last.token_id)


def hypothesis_text(request: Request, hypothesis: Hypothesis, decode_text: Callable[[Sequence[int]], str]) -> str:
    """Its text; less the stop string that ended it, and what came behind."""
    token_ids = hypothesis_token_ids(hypothesis)
    if hypothesis.finish_reason != "stop":
        return decode_text(token_ids)
    assert request.stops is not None, "only a request with stop strings ends by one"
    return request.stops.text_before(token_ids, hypothesis.excess)


def completion(index: int, hypothesis: Hypothesis, text: str) -> Completion:
    """The hypothesis as users get it."""
    prefix = links(hypothesis.prefix)
    return Completion(
        index=index,
        text=text,
        token_ids=hypothesis_token_ids(hypothesis),
        logprobs=(*(token.logprob for token in prefix), hypothesis.last.logprob),
        cumulative_logprob=hypothesis.cumulative_logprob,
        score=hypothesis.score,
        finish_reason=hypothesis.finish_reason,
        stop_reason=hypothesis.stop_reason,
        beams=(*(token.beam for token in prefix), hypothesis.last.beam),
        token_logprobs=_plain_logprobs(hypothesis),
    )


def _plain_logprobs(hypothesis: Hypothesis) -> tuple[TokenLogprob, ...] | None:
    plain = [*(token.plain for token in links(hypothesis.prefix)), hypothesis.last.plain]
    asked = tuple(logprob for logprob in plain if logprob is not None)
    assert len(asked) in (0, len(plain)), "all tokens have them or none"
    return asked or None
