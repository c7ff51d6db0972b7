"""Counters: how busy an engine is and what it has done so far."""

import time
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields, replace

from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.group import Group


@dataclass(frozen=True)
class Counters:
    """A snapshot of an engine; what is counted, is counted since the decoder was made.

    ``running``, ``waiting``: requests now. ``free_blocks``, ``live_blocks``: of the pool now; ``cached_blocks``: free
    ones that still hold what a later prompt may begin with. ``finished``: requests with a result. ``failed``: with an
    error. ``aborted``: dropped by their callers. ``preemptions``: times that a request gave its blocks back for older
    ones. ``prefill_tokens``: prompt tokens computed; ``reused_tokens``: those taken over from earlier requests;
    ``recomputed_tokens``: computed once more after a preemption; ``swapped_blocks``: brought back instead from the
    host, where they waited. ``decode_tokens``: generated tokens computed, those of every branch. ``cow_copies``:
    blocks copied on write. ``turns``: of the engine. ``busy_seconds``: spent in turns; ``seconds``: since the decoder
    was made.
    """

    running: int
    waiting: int
    free_blocks: int
    live_blocks: int
    cached_blocks: int
    finished: int
    failed: int
    aborted: int
    preemptions: int
    prefill_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    swapped_blocks: int
    decode_tokens: int
    cow_copies: int
    turns: int
    busy_seconds: float
    seconds: float

    @property
    def decode_tokens_per_second(self) -> float:
        """Generated tokens a second of busy time; 0 before the first turn."""
        return self.decode_tokens / self.busy_seconds if self.busy_seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were taken over from earlier requests; 0 before the first."""
        prompt_tokens = self.reused_tokens + self.prefill_tokens
        return self.reused_tokens / prompt_tokens if prompt_tokens else 0.0


def total(parts: Iterable[Counters]) -> Counters:
    """Of several engines together; ``seconds`` are the longest."""
    snapshots = [asdict(part) for part in parts]
    sums = {field.name: sum(snapshot[field.name] for snapshot in snapshots) for field in fields(Counters)}
    return Counters(**{**sums, "seconds": max((snapshot["seconds"] for snapshot in snapshots), default=0.0)})


@dataclass
class _Work:
    """What groups did."""

    preemptions: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    swapped_blocks: int = 0
    decode_tokens: int = 0
    cow_copies: int = 0

    def add(self, group: Group) -> None:
        self.preemptions += group.preemptions
        self.prefill_tokens += group.prefill_tokens
        self.reused_tokens += group.reused_tokens
        self.recomputed_tokens += group.recomputed_tokens
        self.swapped_blocks += group.swapped_blocks
        self.decode_tokens += group.decode_tokens
        self.cow_copies += group.tree.num_cow_copies


class Tally:
    """What an engine adds up, for its counters. Guarded by the engine's lock."""

    def __init__(self) -> None:
        self.finished = self.failed = self.aborted = self.turns = 0
        self.busy_seconds = 0.0
        self._work = _Work()  # of groups that have left
        self._started = time.perf_counter()

    def leave(self, group: Group) -> None:
        """The group is over: what it did, it did."""
        self._work.add(group)

    def counters(self, pool: BlockPool, running: Collection[Group], waiting: Collection[Group]) -> Counters:
        """The snapshot."""
        work = replace(self._work)
        for group in (*running, *waiting):
            work.add(group)
        return Counters(
            running=len(running),
            waiting=len(waiting),
            free_blocks=pool.num_free,
            live_blocks=pool.num_live,
            cached_blocks=pool.prefixes.num_kept,
            finished=self.finished,
            failed=self.failed,
            aborted=self.aborted,
            turns=self.turns,
            busy_seconds=self.busy_seconds,
            seconds=time.perf_counter() - self._started,
            **asdict(work),
        )
