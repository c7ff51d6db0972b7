"""Counters: how busy an engine is and what it has done so far."""

import time
from dataclasses import dataclass

from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.group import Group


@dataclass(frozen=True)
class Counters:
    """A snapshot of an engine; what is counted, is counted since the decoder was made.

    ``running``, ``waiting``: requests now. ``free_blocks``, ``live_blocks``: of the pool now. ``finished``: requests
    with a result. ``failed``: with an error. ``aborted``: dropped by their callers. ``prefill_tokens``: prompt tokens
    computed. ``decode_tokens``: generated tokens computed, those of every branch. ``cow_copies``: blocks copied on
    write. ``turns``: of the engine. ``busy_seconds``: spent in turns; ``seconds``: since the decoder was made.
    """

    running: int
    waiting: int
    free_blocks: int
    live_blocks: int
    finished: int
    failed: int
    aborted: int
    prefill_tokens: int
    decode_tokens: int
    cow_copies: int
    turns: int
    busy_seconds: float
    seconds: float

    @property
    def decode_tokens_per_second(self) -> float:
        """Generated tokens a second of busy time; 0 before the first turn."""
        return self.decode_tokens / self.busy_seconds if self.busy_seconds else 0.0


class Tally:
    """What an engine adds up, for its counters. Guarded by the engine's lock."""

    def __init__(self) -> None:
        self.finished = self.failed = self.aborted = self.turns = 0
        self.prefill_tokens = 0
        self.busy_seconds = 0.0
        self._decode_tokens = self._cow_copies = 0  # of groups that have left
        self._started = time.perf_counter()

    def leave(self, group: Group) -> None:
        """The group is over: what it did, it did."""
        self._decode_tokens += group.decode_tokens
        self._cow_copies += group.tree.num_cow_copies

    def counters(self, pool: BlockPool, running: list[Group], num_waiting: int) -> Counters:
        """The snapshot."""
        return Counters(
            running=len(running),
            waiting=num_waiting,
            free_blocks=pool.num_free,
            live_blocks=pool.num_live,
            finished=self.finished,
            failed=self.failed,
            aborted=self.aborted,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self._decode_tokens + sum(group.decode_tokens for group in running),
            cow_copies=self._cow_copies + sum(group.tree.num_cow_copies for group in running),
            turns=self.turns,
            busy_seconds=self.busy_seconds,
            seconds=time.perf_counter() - self._started,
        )
