"""KV memory without blocks: one stretch of slots a sequence, from a first-fit allocator, beside the same in blocks.

A stretch must be reserved before anyone knows how long the sequence will get. Three ways to choose it are those of
Orca as the PagedAttention paper measured them (SOSP 2023, figure 2): the model's maximum, the next power of two, and
the true final length, which only an oracle knows. A fourth reserves little, and moves to twice the room when it is
full. All face one queue that never runs dry, so memory that nobody can use shows.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from traces import RequestLengths

from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.branches import Branch, BranchTree


class FirstFit:
    """``size`` slots; a stretch is taken from the first gap that is long enough."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._taken: list[tuple[int, int]] = []  # (first, end), ascending

    def allocate(self, length: int) -> int | None:
        """The first slot of ``length`` free ones in a row, or None if no gap is that long."""
        end_before = 0
        for index, (first, end) in enumerate([*self._taken, (self.size, self.size)]):
            if first - end_before >= length:
                self._taken.insert(index, (end_before, end_before + length))
                return end_before
            end_before = end
        return None

    def free(self, first: int) -> None:
        """Give the stretch back that begins at ``first``."""
        (index,) = (i for i, taken in enumerate(self._taken) if taken[0] == first)
        del self._taken[index]

    @property
    def num_taken(self) -> int:
        """Slots in stretches."""
        return sum(end - first for first, end in self._taken)


@dataclass(eq=False)
class InFlight:
    """A request that holds memory. ``length`` counts its tokens so far, prompt included."""

    lengths: RequestLengths
    length: int


@dataclass
class MemoryShares:
    """Where the slots of the whole memory were, summed over the time steps; ``moved`` tokens were copied to regrow.

    ``used`` hold a token; ``reserved`` are held by a sequence and hold none; ``idle`` nobody holds, and yet the next
    request in the queue could not be begun: gaps too short for it, or blocks set aside for others.
    """

    used: int = 0
    reserved: int = 0
    idle: int = 0
    moved: int = 0
    generated: int = 0
    preemptions: int = 0
    steps: int = 0

    def share(self, name: str) -> float:
        """A field as a share of the whole memory."""
        return float(getattr(self, name) / (self.used + self.reserved + self.idle))

    @property
    def filled(self) -> float:
        """Of the slots that were held, the share that held a token."""
        return self.used / (self.used + self.reserved)

    @property
    def moved_per_token(self) -> float:
        """Tokens copied for each one generated."""
        return self.moved / self.generated


class Memory(ABC):
    """A way to give sequences room in ``size`` slots. ``moved`` counts the tokens it copied."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.moved = 0

    @abstractmethod
    def admit(self, sequence: InFlight) -> bool:
        """Find room for the prompt and what comes with it; False, changing nothing, if there is none."""

    @abstractmethod
    def grow(self, sequence: InFlight) -> bool:
        """Find room for one token more; False, changing nothing, if there is none."""

    @abstractmethod
    def release(self, sequence: InFlight) -> None:
        """Take the sequence's room back."""

    @property
    @abstractmethod
    def num_held(self) -> int:
        """Slots that sequences hold."""


class Contiguous(Memory):
    """One stretch a sequence, ``reserve(lengths)`` slots long; a full one moves to a stretch of twice the length."""

    def __init__(self, size: int, reserve: Callable[[RequestLengths], int]) -> None:
        super().__init__(size)
        self._slots = FirstFit(size)
        self._reserve = reserve
        self._stretches: dict[InFlight, tuple[int, int]] = {}  # (first, length)

    def admit(self, sequence: InFlight) -> bool:
        return self._take(sequence, self._reserve(sequence.lengths))

    def grow(self, sequence: InFlight) -> bool:
        first, length = self._stretches[sequence]
        if sequence.length < length:
            return True
        if not self._take(sequence, 2 * length):
            return False
        self._slots.free(first)
        self.moved += sequence.length
        return True

    def release(self, sequence: InFlight) -> None:
        self._slots.free(self._stretches.pop(sequence)[0])

    @property
    def num_held(self) -> int:
        return self._slots.num_taken

    def _take(self, sequence: InFlight, length: int) -> bool:
        first = self._slots.allocate(length)
        if first is not None:
            self._stretches[sequence] = (first, length)
        return first is not None


class Paged(Memory):
    """cowbeam's own pool and block tables; the subclasses differ in whom they admit."""

    def __init__(self, size: int, block_size: int) -> None:
        super().__init__(size)
        self._pool = BlockPool(size // block_size, block_size)
        self._branches: dict[InFlight, tuple[BranchTree, Branch]] = {}

    def admit(self, sequence: InFlight) -> bool:
        if not self._may_enter(sequence.lengths):
            return False
        tree = BranchTree(self._pool)
        self._branches[sequence] = (tree, tree.plant(sequence.lengths.prompt))
        return True

    def grow(self, sequence: InFlight) -> bool:
        tree, branch = self._branches[sequence]
        if tree.blocks_needed([branch]) > self._pool.num_free:
            return False
        tree.append_slot(branch)
        return True

    def release(self, sequence: InFlight) -> None:
        tree, branch = self._branches.pop(sequence)
        tree.free(branch)

    @property
    def num_held(self) -> int:
        return self._pool.num_live * self._pool.block_size

    @abstractmethod
    def _may_enter(self, lengths: RequestLengths) -> bool:
        """Whether a request is begun now."""

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)


class PagedByWorstCase(Paged):
    """As cowbeam admits: what the request may need at most is set aside, though nobody holds it yet.

    At most means here its true length, as if every user asked for exactly the tokens that came.
    """

    def _may_enter(self, lengths: RequestLengths) -> bool:
        everyone = [*(sequence.lengths for sequence in self._branches), lengths]
        return sum(self._blocks(sum(each)) for each in everyone) <= self._pool.num_blocks


class PagedByPrompt(Paged):
    """As vLLM admits: the prompt must fit and a hundredth of the blocks stay free."""

    def _may_enter(self, lengths: RequestLengths) -> bool:
        return self._blocks(lengths.prompt) + self._pool.num_blocks // 100 <= self._pool.num_free


class Server:
    """First come, first served, as many as fit; where there is no room to grow, the newest starts over later."""

    def __init__(self, memory: Memory, requests: Iterable[RequestLengths]) -> None:
        self._memory = memory
        self._waiting = deque(requests)
        self._running: list[InFlight] = []
        self._shares = MemoryShares()

    def run(self) -> MemoryShares:
        """Serve until the queue is empty; what is then still running is not counted, since nobody waits for room."""
        while True:
            self._admit()
            if not self._waiting:
                self._shares.moved = self._memory.moved
                return self._shares
            assert self._running, f"{self._waiting[0]} never fits {self._memory.size} slots"
            self._step()

    def _admit(self) -> None:
        while self._waiting:
            sequence = InFlight(self._waiting[0], self._waiting[0].prompt)
            if not self._memory.admit(sequence):
                return
            self._running.append(sequence)
            self._waiting.popleft()

    def _step(self) -> None:
        for sequence in list(self._running):
            while sequence in self._running and not self._memory.grow(sequence):
                self._preempt_newest()
            if sequence in self._running:
                sequence.length += 1
                self._shares.generated += 1
        self._measure()
        for sequence in list(self._running):
            if sequence.length == sum(sequence.lengths):
                self._end(sequence)

    def _measure(self) -> None:
        used, held = sum(sequence.length for sequence in self._running), self._memory.num_held
        self._shares.used += used
        self._shares.reserved += held - used
        self._shares.idle += self._memory.size - held
        self._shares.steps += 1

    def _preempt_newest(self) -> None:
        newest = self._running[-1]
        self._end(newest)
        self._waiting.appendleft(newest.lengths)
        self._shares.preemptions += 1

    def _end(self, sequence: InFlight) -> None:
        self._running.remove(sequence)
        self._memory.release(sequence)


def power_of_two(at_least: int) -> int:
    """The least power of two that is no less."""
    return 1 << (at_least - 1).bit_length()


def serve_all_ways(requests: Iterable[RequestLengths], size: int, longest: int) -> dict[str, MemoryShares]:
    """The same queue served from ``size`` slots in every way; no request is longer than ``longest`` tokens."""
    queue = list(requests)
    ways: dict[str, Memory] = {
        "contiguous, the maximum": Contiguous(size, lambda _lengths: longest),
        "contiguous, output to 2^n": Contiguous(size, lambda it: it.prompt + power_of_two(it.generated)),
        "contiguous, true length (oracle)": Contiguous(size, sum),
        "contiguous, doubled when full": Contiguous(size, lambda it: power_of_two(it.prompt + 1)),
        "blocks of 16, worst case set aside": PagedByWorstCase(size, 16),
        "blocks of 16, newest preempted": PagedByPrompt(size, 16),
    }
    return {name: Server(memory, queue).run() for name, memory in ways.items()}
