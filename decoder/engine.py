"""The engine: requests in, one turn at a time, results out.

A turn gives every live branch one token, or computes a pass of prompts, each once, or does both one after the other;
the scheduler says which. Any thread may turn the engine; each turn advances all requests, whoever asked for them.

The device is given its next work before the host waits for what it must choose from:

    the device foresees the next step    candidates sent, next step launched, chosen
    a pass over prompts is due           candidates sent, pass launched, chosen;
                                         first candidates sent, next step launched, first tokens chosen
    neither                              candidates sent, chosen, next step launched, results made

Only a step that the host lays out may preempt. By then every running group has chosen, but for those whose first
candidates are still on their way: such a group may be preempted, and its prompt is computed again.
"""

import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cowbeam.decoder.batch import Batch, Layout, lay_out, to_device
from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.branch_scorer import ScorerError
from cowbeam.decoder.branch_texts import DecodeText
from cowbeam.decoder.candidates import CandidateSource, unpack
from cowbeam.decoder.counters import Counters, Tally
from cowbeam.decoder.faults import fault_of
from cowbeam.decoder.flight import Flight, given_to
from cowbeam.decoder.frames import make_frame
from cowbeam.decoder.group import Group, KVBytes, Request, hypothesis_text
from cowbeam.decoder.kv_cache import KVCache
from cowbeam.decoder.lookahead import Landing, Lookahead, mark, wait_for
from cowbeam.decoder.model_adapter import ModelAdapter
from cowbeam.decoder.outputs import DecodeResult
from cowbeam.decoder.placement import on_device
from cowbeam.decoder.run import Run, TurnError, Watch
from cowbeam.decoder.sampling import Sampling
from cowbeam.decoder.scheduler import MAX_ROWS, Part, Scheduler
from cowbeam.decoder.step_graph import StepGraphs
from cowbeam.decoder.strategy import Candidate, Continuation
from cowbeam.decoder.swap import SwapSpace

# Seconds that a turn waits where another caller waits for the engine.
_COURTESY = 1e-4


class Engine:
    """Owns the pool, the KV cache and everything in flight. All methods are safe to call from any thread."""

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: KVCache,
        num_blocks: int,
        kv_bytes: KVBytes,
        decode_text: DecodeText,
        looks_ahead: bool | None = None,
        *,
        prefix_reuse: bool = False,
        max_rows: int = MAX_ROWS,
        swap_memory: int = 0,
    ) -> None:
        self._adapter = adapter
        self._cache = cache
        self._graphs = StepGraphs(adapter, cache)
        self._lookahead = Lookahead(self._graphs, cache.block_size, cache.scratch_block)
        # A host that computes the step itself has nothing to overlap.
        looks_ahead = adapter.device.type == "cuda" if looks_ahead is None else looks_ahead
        self._looks_ahead = looks_ahead and adapter.can_look_ahead
        self._num_blocks = num_blocks
        self._max_rows = max_rows
        self._swap_memory = swap_memory
        self._prefix_reuse = prefix_reuse and adapter.computes_pieces
        self._kv_bytes = kv_bytes
        self._decode_text = decode_text
        self._lock = threading.RLock()
        self._callers: deque[None] = deque()  # one entry for each caller that is at the lock or has it, turns apart
        self._in_turn = False
        self._aborted: deque[Run] = deque()
        self._ended: list[Run] = []
        self._tally = Tally()
        self._launched: torch.cuda.Event | None = None  # by the turns so far
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._runs: dict[Group, Run] = {}
        # Not the runs': these may be kept by the thousand, and a source holds rows as wide as the vocabulary.
        self._source_of: dict[Group, CandidateSource] = {}
        self.pool = BlockPool(self._num_blocks, self._cache.block_size, prefix_reuse=self._prefix_reuse)
        self._seen = self._adapter.weights_seen  # by what is in the pool
        self._scheduler = Scheduler(self.pool, self._max_rows)
        self._swap_space = SwapSpace(self._cache, self._swap_memory)
        self._batch = Batch(self._cache.block_size, self._adapter.device, self._cache.scratch_block)
        self._flight: Flight | None = None
        self._finished: deque[Run] = deque()  # out of the pool, their results not made yet

    def check_fits(self, request: Request) -> None:
        """Raises ValueError, with the numbers, if the request could never run."""
        self._scheduler.check_fits(request)

    def add_request(self, request: Request, *, watch: Watch | None = None) -> Run:
        """Queue a request; turns of the engine advance it. Raises ValueError if it could never run."""
        with self._called():
            self._scheduler.check_fits(request)
            group = Group(
                request,
                self.pool,
                self._kv_bytes,
                in_pieces=self._adapter.computes_pieces,
                swap_space=self._swap_space,
            )
            if watch == "frames":
                group.tree.events = []
            run = Run(group, watch)
            self._source_of[group] = CandidateSource(group, self._adapter.device)
            self._runs[group] = run
            self._scheduler.add(group)
            return run

    def step(self, run: Run | None = None) -> list[Run]:
        """One turn, for all requests in flight; none if ``run`` is over already, or nothing is in flight.

        Returns the runs that ended in this turn, whoever added them. Raises what the model raises, with nothing left
        half done: every run in flight has ended with an error then. Raises RuntimeError inside a turn, in a user's
        function that it calls.
        """
        if self._callers:
            # A lock is not fair: on a busy machine, who turns the engine in a loop takes it again before a waiting
            # caller wakes up. A second went by until a request was queued; with this, a turn.
            time.sleep(_COURTESY)
        try:
            with self._lock:
                if self._in_turn:  # the lock is this thread's already
                    raise RuntimeError("a request's function cannot decode with the decoder that calls it")
                if not self._runs or (run is not None and run.is_over):
                    return []
                self._ended = []
                self._turn()
                return self._ended
        finally:
            self._drop_aborted()

    def _turn(self) -> None:
        started = time.perf_counter()
        self._in_turn = True
        try:
            with on_device(self._adapter.device):
                wait_for(self._launched)
                try:
                    self._go_on()
                finally:  # not only what is in flight: steps that were dropped write into blocks, too
                    self._launched = mark(self._batch.tables)
        except BaseException as error:
            # The turn may have stopped anywhere: no state of it is worth keeping.
            self._fail_all(error)
            raise
        finally:
            self._in_turn = False
            self._tally.turns += 1
            self._tally.busy_seconds += time.perf_counter() - started

    def _go_on(self) -> None:
        # What is in flight lands first: its rows are those of the groups that run now.
        if self._flight is not None or not self._scheduler.is_pass_due:
            self._decode()
        else:
            parts = self._next_pass()
            self._begin(parts, self._compute(parts))
        self._deliver()

    def abort(self, run: Run) -> None:
        """Drop a request; its blocks are free on return, or at the end of a turn that another thread is in.

        Nothing happens to one that is over. Raises ValueError for one of another engine: in the middle of dropping it,
        it would take down what is in flight here.

        Never waits: Python may collect an abandoned stream anywhere, in the middle of a turn or of another decoder's,
        whose thread this one's may be waiting for.
        """
        # Asked in this order: where a turn has failed, runs end before there is a new pool.
        if run.group.tree.pool is not self.pool and not run.is_over:
            raise ValueError("the run is in flight in another decoder, which alone can abort it")
        self._aborted.append(run)
        self._drop_aborted()

    def _drop_aborted(self) -> None:
        """Drop what was aborted, unless a turn is on, which does it at its end."""
        # Looked at again after each release: what came in between found the lock held and left it to us.
        while self._aborted and not self._in_turn and self._lock.acquire(blocking=False):
            try:
                while self._aborted and not self._in_turn:
                    run = self._aborted.popleft()
                    if not run.is_over:
                        self._tally.aborted += 1
                        self._end_with(run.group, RuntimeError("the request was aborted"))
            except BaseException as error:
                self._fail_all(error)  # it may have stopped anywhere, as a turn
                raise
            finally:
                self._lock.release()

    @contextmanager
    def _called(self) -> Iterator[None]:
        """Hold the lock; a turn that has not begun lets the caller go first."""
        self._callers.append(None)
        try:
            with self._lock:
                yield
        finally:
            self._callers.pop()
            self._drop_aborted()  # who aborted meanwhile found the lock held

    def counters(self) -> Counters:
        """What is in flight and what was done so far."""
        with self._called():
            return self._tally.counters(self.pool, self._scheduler.admitted, self._scheduler.waiting)

    def check_integrity(self) -> None:
        """Assert every invariant of pool and branches; for tests."""
        with self._called():
            held = [branch.last_block for group in self._runs for branch in group.branches]
            self.pool.check_integrity(held)
            for group in self._runs:
                blocks = {block for branch in group.branches for block in branch.block_table}
                assert group.tree.num_blocks == len(blocks), f"{group.tree.num_blocks} blocks counted of {len(blocks)}"

    def _follow_owner(self) -> None:
        """Forget prefixes if the model's weights have changed since they were computed."""
        self._adapter.follow_owner()
        if self._seen != self._adapter.weights_seen:
            self.pool.forget_prefixes()
            self._seen = self._adapter.weights_seen

    def forget_prefixes(self) -> None:
        """Take over nothing that was computed so far."""
        with self._called():
            self.pool.forget_prefixes()

    def _next_pass(self) -> list[Part]:
        self._follow_owner()
        return self._scheduler.next_pass()

    def _compute(self, parts: Sequence[Part]) -> Tensor | None:
        """Launch a pass: the logits [parts, vocabulary] after each part; None if all that was to compute was found."""
        if not parts:
            return None
        return self._adapter.compute(
            self._cache,
            [part.piece.token_ids for part in parts],
            [part.piece.block_table for part in parts],
            [part.piece.start for part in parts],
            [part.piece.owner for part in parts],
        )

    def _begin(self, parts: Sequence[Part], logits: Tensor | None) -> None:
        """Whose prompt is complete by a pass makes its first choice, while the others' next step runs."""
        if logits is None:
            return
        last = {part.group: row for row, part in enumerate(parts)}
        # Who was preempted knows its next tokens already.
        fresh = [group for group in last if not group.steps and not group.backlog.num_tokens]
        if not fresh:
            self._flight = self._launch()
            return
        sources = self._sources(fresh)
        rows = torch.split(to_device([last[group] for group in fresh], torch.long, logits.device), 1)
        flight = Flight(fresh, sources, logits, list(rows), given_to(sources, logits.device))
        landing = self._lookahead.land(flight)
        self._flight = self._launch(but=fresh)
        self._follow(flight, self._choose(flight, landing))

    def _launch(self, but: Collection[Group] = ()) -> Flight | None:
        """Begin a step of those that run, none if nobody does."""
        if all(group in but for group in self._scheduler.running):
            return None
        self._scheduler.next_step()
        groups = [group for group in self._scheduler.running if group not in but]
        if not groups:  # the oldest has its prompt to compute, and needed what they had
            return None
        for group in groups:
            if group.branches[0].row is None:  # its prompt was computed, or all it had when it was preempted
                self._batch.add_group(group)
        sources = self._sources(groups)  # now: a frame that cannot be made ends its group
        layout = self._lay_out(groups)
        return self._lookahead.launch(groups, sources, self._batch.upload(layout), layout)

    def _decode(self) -> None:
        """Give every branch a token. The step after it begins before the host knows which, where that may be."""
        flight = self._flight or self._launch()
        self._flight = None
        if flight is None:
            return
        if self._may_look_ahead(flight):
            self._land_and_go_on(flight)
        else:
            self._land(flight)

    def _land_and_go_on(self, flight: Flight) -> None:
        """The host chooses while the device takes the next step, without the groups that are at their last token."""
        last, flight = flight.split()
        last_landing = self._lookahead.land(last) if last.groups else None
        try:
            landing, ahead = self._lookahead.land_and_go_on(flight, self.pool)
        finally:  # they need no next step, should it fail
            if last_landing is not None:
                self._choose(last, last_landing)
        num_branches = [len(group.branches) for group in flight.groups]
        chosen = self._choose(flight, landing)
        if [len(continuations) for continuations in chosen] == num_branches:
            landing.check(self._lay_out(flight.groups), self._cache.block_size)
            self._flight = ahead if self._scheduler.running else None
        else:
            self._batch.tables = self._lookahead.drop(ahead)
            self._follow(flight, chosen)
            self._launch_before_results()

    def _land(self, flight: Flight) -> None:
        """The host chooses; if a pass is due, the device computes it meanwhile, whatever is chosen."""
        landing = self._lookahead.land(flight)
        parts = self._next_pass() if self._scheduler.is_pass_due else []
        logits = self._compute(parts)
        chosen = self._choose(flight, landing)
        self._batch.tables = self._lookahead.tables(flight)
        self._follow(flight, chosen)
        if logits is not None:
            self._begin(parts, logits)
        else:
            self._launch_before_results()

    def _launch_before_results(self) -> None:
        """The device computes while the host makes the results of those that have finished."""
        if self._finished and not self._scheduler.has_pass:
            self._flight = self._launch()

    def _lay_out(self, groups: Sequence[Group]) -> Layout:
        layout = lay_out(groups)
        for group in groups:
            group.measure()
            group.decode_tokens += len(group.branches)
            self._show(self._runs[group])
        return layout

    def _may_look_ahead(self, flight: Flight) -> bool:
        """Nothing is known that would make the next step another than the device foresees."""
        return (
            self._looks_ahead
            and flight.groups == self._scheduler.running
            and not self._scheduler.has_pass
            and self._lookahead.may_follow(flight, self.pool)
        )

    def _sources(self, groups: Sequence[Group]) -> list[CandidateSource]:
        return [self._source_of[group] for group in groups]

    def _choose(self, flight: Flight, landing: Landing) -> list[list[Continuation]]:
        """Let the host choose; the continuations of each group, none where it is over."""
        chosen: list[list[Continuation]] = []
        for group, (columns, maxima) in zip(flight.groups, landing.candidates(), strict=True):
            if group not in self._runs or not group.tree.num_blocks:  # aborted or preempted while it was in flight
                chosen.append([])
            elif error := self._source_of[group].fault:
                self._fail(group, error)
                chosen.append([])
            elif fault := fault_of(group.strategy, columns[0], maxima):
                group.forget_blocks()
                self._fail(
                    group, ValueError(f"{fault}, at generated token {group.num_generated + 1} of {_named(group)}")
                )
                chosen.append([])
            else:
                candidates = self._source_of[group].with_plain(unpack(columns.tolist()))
                self._tell(self._runs[group], candidates)
                chosen.append(self._select(group, candidates))
                if group in self._runs:
                    group.follow(chosen[-1])
                    if group.strategy.is_done:
                        self._finish(group)
        return chosen

    def _select(self, group: Group, candidates: Sequence[Candidate]) -> list[Continuation]:
        """The strategy's choice. Scorers and the tokenizer, for stop strings, fail their own request alone: none."""
        try:
            return group.select(candidates)
        except ScorerError as error:
            self._fail(group, error.__cause__ or error)
        except AssertionError:  # a broken invariant
            raise
        except Exception as error:
            self._fail(group, error)
        return []

    def _follow(self, flight: Flight, chosen: Sequence[Sequence[Continuation]]) -> None:
        """Tell the sources what the host chose."""
        for source, continuations in zip(flight.sources, chosen, strict=True):
            if continuations:
                source.go_on(continuations)

    def _finish(self, group: Group) -> None:
        self._finished.append(self._runs[group])
        self._remove(group)

    def _deliver(self) -> None:
        """Make the results of those that have finished."""
        while self._finished:
            self._make_result(self._finished[0])
            self._ended.append(self._finished.popleft())  # now: an interrupted turn delivers it again

    def _make_result(self, run: Run) -> None:
        group = run.group
        try:
            texts = [hypothesis_text(group.request, h, self._decode_text) for h in group.strategy.hypotheses]
        except Exception as error:  # the tokenizer's fault is this request's alone
            self._tally.failed += 1
            run.error = error
            return
        result = group.result(
            texts,
            self._adapter.path,
            level=self._adapter.level,
            cuda_graphs=self._graphs.is_capturing,
            compiled=self._adapter.is_compiled,
        )
        self._show(run, result)
        self._tally.finished += 1
        if run.error is None:
            run.result = result  # last: who sees that the run is over, in whatever thread, finds its last frame

    def _show(self, run: Run, result: DecodeResult | None = None) -> None:
        if run.frames is None:
            return
        try:
            run.frames.append(make_frame(run.group, run.texts, self._decode_text, result))
        except Exception as error:  # the tokenizer's fault is this request's alone
            if run.group in self._runs:
                self._fail(run.group, error)
            else:
                run.error = error

    def _tell(self, run: Run, candidates: Sequence[Candidate]) -> None:
        if run.tokens is not None and isinstance(run.group.strategy, Sampling):
            indices = run.group.strategy.indices  # one candidate a live sample
            run.tokens.extend((i, c.token_id, c.score) for i, c in zip(indices, candidates, strict=True))

    def _fail(self, group: Group, error: BaseException) -> None:
        self._tally.failed += 1
        self._end_with(group, error)

    def _end_with(self, group: Group, error: BaseException) -> None:
        run = self._runs[group]
        run.error = error
        self._ended.append(run)
        self._remove(group)

    def _remove(self, group: Group) -> None:
        group.free()
        self._scheduler.remove(group)
        self._tally.leave(group)
        del self._source_of[group], self._runs[group]
        if self._flight is not None and self._runs.keys().isdisjoint(self._flight.groups):
            self._flight = None  # nobody waits for it any more

    def _fail_all(self, error: BaseException) -> None:
        try:
            self._deliver()
        finally:
            for group in self._runs:
                self._tally.leave(group)
                group.leave_swap_space()
            # Who had just finished may have a result already, or has none because it could not be made.
            for run in (*self._runs.values(), *self._finished):
                if run.is_over:
                    continue
                # Whoever turned the engine raises the error itself; for the others it was not their request.
                run.error = TurnError(f"the turn of the engine failed: {error!r}")
                run.error.__cause__ = error
                self._tally.failed += 1
            self._start_afresh()


def _named(group: Group) -> str:
    """The request in an error."""
    ids = group.request.prompt_token_ids
    return f"the prompt of {len(ids)} tokens [{', '.join(map(str, ids[:8]))}{', …' if len(ids) > 8 else ''}]"
