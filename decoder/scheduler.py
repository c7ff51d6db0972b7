"""Who runs, who waits, and who gives its blocks back.

First come, first served. A group is admitted when there is room for its rows in a step, and in the pool for what it
holds at first (its prompt once) and for a part of what all may still grow by; not for the worst case, which most groups
never come near. When a step needs more blocks than are free, the youngest group gives all of its back and waits in
front of the others for room to go on: by what was saved of them (`swap`), or by computing them anew.
The oldest never does: its worst case fits the pool, so it always gets on, and everybody is the oldest at last.

Prompts are computed in passes of a bounded number of tokens. Passes and steps take turns, so neither long prompts nor
many of them hold up what runs, and what runs does not hold up prompts.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from cowbeam.decoder.backlog import Piece
from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.group import Group, Request

# Rows of a step, unless the user wants others: a step of more takes as much longer, since products of so many rows are
# bound by arithmetic and no longer by reading the weights; and CUDA graphs are captured up to here (`step_graph`).
MAX_ROWS = 512
# Tokens of one pass over prompts. Matrix products of so many rows are bound by arithmetic, so more in a pass gain
# nothing, and what runs would wait longer for its next token; the plan kernels take no more rows (`MAX_TRITON_ROWS`).
MAX_PASS_TOKENS = 4096
# Of a prompt that is longer than a pass, while others could use the rest: they need not wait for its end.
SHARE_OF_LONG = MAX_PASS_TOKENS // 2
# The part of what the groups may still grow by that must be free when one more is admitted. With outputs of full length
# on a pool of a tenth of the requests' sum: a quarter takes as many turns as nothing, with half as many preemptions;
# a half takes a fifth more turns, the whole three quarters more.
GROWTH_SET_ASIDE = 0.25


def worst_case_blocks(request: Request, block_size: int) -> int:
    """The most blocks the request can hold at once: the prompt's full blocks once, the rest once a branch."""
    full, rest = divmod(len(request.prompt_token_ids), block_size)
    return full + request.params.width * -(-(rest + request.params.max_new_tokens) // block_size)


class Part(NamedTuple):
    """What one group adds to a pass."""

    group: Group
    piece: Piece


class Scheduler:
    """``waiting`` hold no blocks; ``admitted`` do, oldest first; those of them in ``running`` have nothing to compute
    before their next step.
    """

    def __init__(self, pool: BlockPool, max_rows: int = MAX_ROWS) -> None:
        self._pool = pool
        self._max_rows = max_rows
        self.waiting: deque[Group] = deque()
        self.admitted: list[Group] = []
        self.running: list[Group] = []
        self._is_turn_of_running = False

    def check_fits(self, request: Request) -> None:
        """Raises ValueError, with the numbers, if the request could never be admitted."""
        needed = worst_case_blocks(request, self._pool.block_size)
        if needed > self._pool.num_blocks:
            raise ValueError(
                f"a prompt of {len(request.prompt_token_ids)} tokens with {request.params.width} branches and "
                f"max_new_tokens={request.params.max_new_tokens} may need {needed} blocks of {self._pool.block_size} "
                f"tokens, but the pool has {self._pool.num_blocks}: raise num_blocks or kv_memory, or ask for less"
            )

    def add(self, group: Group) -> None:
        """Queue a group whose request fits."""
        self.waiting.append(group)

    def remove(self, group: Group) -> None:
        """Forget a group: finished, failed or aborted. The caller frees its blocks."""
        for groups in (self.running, self.admitted, self.waiting):
            if group in groups:
                groups.remove(group)

    @property
    def has_pass(self) -> bool:
        """There is something to compute before some group can go on, and room for it."""
        return len(self.running) < len(self.admitted) or self._has_room()

    @property
    def is_pass_due(self) -> bool:
        """This turn is that of a pass."""
        return not (self._is_turn_of_running and self.running) and self.has_pass

    def next_pass(self) -> list[Part]:
        """Admit who fits, and what to compute now; whoever has nothing left to compute then, runs."""
        self._is_turn_of_running = True
        parts = self._compose()
        self.running += [group for group in dict.fromkeys(part.group for part in parts) if not group.backlog.num_tokens]
        return parts

    def next_step(self) -> list[Group]:
        """Make room for a step of ``running``: who had to give its blocks back for that, the youngest first."""
        self._is_turn_of_running = False
        preempted: list[Group] = []
        while not self._has_room_for_step():
            group = self.admitted.pop()
            assert self.admitted, "the pool is smaller than the worst case of its only group"
            if group in self.running:
                self.running.remove(group)
            group.give_back()
            self.waiting.appendleft(group)
            preempted.append(group)
        return preempted

    def _compose(self) -> list[Part]:
        parts: list[Part] = []
        left = MAX_PASS_TOKENS
        for group in self._with_backlog():
            num_tokens = group.backlog.num_tokens
            share = min(num_tokens, left, SHARE_OF_LONG if num_tokens > MAX_PASS_TOKENS else left)
            left -= share
            parts += _take(group, share)
            if not left:
                break
        for group in self.admitted:  # what nobody else could use
            share = min(left, group.backlog.num_tokens)
            left -= share
            parts += _take(group, share)
        return parts

    def _with_backlog(self) -> Iterator[Group]:
        """Those admitted, then those that are admitted as they are asked for: blocks can be found that the pass
        computes for the group before.
        """
        yield from [group for group in self.admitted if group.backlog.num_tokens]
        while self._has_room():
            group = self.waiting.popleft()
            group.plant()
            self.admitted.append(group)
            if not group.backlog.num_tokens:  # all that it held was found
                self.running.append(group)
            else:
                yield group

    def _has_room(self) -> bool:
        """The first that waits may hold its blocks, and all then grow for a while, before anybody must go."""
        if not self.waiting or not self.admitted:
            return bool(self.waiting)
        groups = [self.waiting[0], *self.admitted]
        rows = sum(group.strategy.width for group in groups)
        spare = self._pool.num_free - groups[0].blocks_to_take
        return rows <= self._max_rows and rows <= spare and sum(map(self._set_aside, groups)) <= spare

    def _set_aside(self, group: Group) -> int:
        """A block a branch at least."""
        tokens = group.request.params.max_new_tokens - group.num_generated
        blocks = -(-tokens // self._pool.block_size)
        return group.strategy.width * max(1, int(GROWTH_SET_ASIDE * blocks))

    def _has_room_for_step(self) -> bool:
        free = self._pool.num_free
        if sum(len(group.branches) for group in self.running) <= free:
            return True
        return sum(group.tree.blocks_needed(group.branches) for group in self.running) <= free


def _take(group: Group, num_tokens: int) -> Iterator[Part]:
    """Parts of ``num_tokens`` together; of more where a sequence must stay whole."""
    while num_tokens > 0:
        piece = group.take(num_tokens)
        num_tokens -= len(piece.token_ids)
        yield Part(group, piece)
