"""Random forests of block tables, made as beams make them (fork, copy-on-write), over a pool poisoned with NaN."""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

ABSURD = 2147480000  # an id past the end of every pool; following it would crash, comparing it must not matter


@dataclass
class Rows:
    """Rows in tree order, as lists of block ids and lengths; `starts` marks the first row of each group."""

    block_size: int
    num_blocks: int
    seed: int
    tables: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    starts: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.free = list(range(self.num_blocks))
        self.rng.shuffle(self.free)

    def beams(self, prompt: int, width: int, steps: int) -> "Rows":
        """A group of `width` branches of one prompt, which fork at random at each of `steps` steps."""
        branches = [(self._blocks(prompt), prompt)] * width
        for _ in range(steps):
            parents = sorted(self.rng.randrange(width) for _ in range(width))
            branches = [self._append(branches, parents, child) for child in range(width)]
        for index, (table, length) in enumerate(branches):
            self._add(table, length, index == 0)
        return self

    def samples(self, prompt: int, own: list[int]) -> "Rows":
        """A group of branches of one prompt that parted at once and have grown by `own` tokens each."""
        shared = self._blocks(prompt)
        whole = prompt // self.block_size
        for index, tokens in enumerate(own):
            fresh = len(self._blocks_needed(prompt + tokens)) - whole
            private = [self.free.pop() for _ in range(fresh)] if tokens else shared[whole:]
            self._add(shared[:whole] + private, prompt + tokens, index == 0)
        return self

    def chunk(self, past: int, tokens: int) -> "Rows":
        """A chunk of a prefill: one row a token, equal tables, growing lengths."""
        table = self._blocks(past + tokens)
        for index in range(tokens):
            self._add(table, past + index + 1, index == 0)
        return self

    def padding(self, count: int) -> "Rows":
        """Rows of length 0."""
        for _ in range(count):
            self._add([], 0, True)
        return self

    def tensors(self) -> tuple[Tensor, Tensor, list[bool]]:
        """block_tables (absurd ids past the ends), lengths, group_starts."""
        columns = max(map(len, self.tables)) + 2
        tables = torch.full((len(self.tables), columns), ABSURD, dtype=torch.int32)
        for row, table in enumerate(self.tables):
            tables[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        return tables, torch.tensor(self.lengths, dtype=torch.int32), self.starts

    def pool(
        self,
        kv_heads: int,
        dim: int,
        dtype: torch.dtype,
        sliding_window: int | None = None,
        value_dim: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Key and value caches, NaN but where some row sees the slot; views of one tensor where the widths agree."""
        generator = torch.Generator().manual_seed(self.seed)
        if value_dim is None:
            kv = torch.full((self.num_blocks, 2, kv_heads, self.block_size, dim), float("nan"), dtype=dtype)
            key_cache, value_cache = kv[:, 0], kv[:, 1]
        else:
            key_cache = torch.full((self.num_blocks, kv_heads, self.block_size, dim), float("nan"), dtype=dtype)
            value_cache = torch.full((self.num_blocks, kv_heads, self.block_size, value_dim), float("nan"), dtype=dtype)
        slots = torch.tensor(sorted(self._seen_slots(sliding_window)), dtype=torch.int64)
        for cache in (key_cache, value_cache):
            numbers = torch.randn(len(slots), kv_heads, cache.shape[-1], generator=generator)
            cache[slots // self.block_size, :, slots % self.block_size] = numbers.to(dtype)
        return key_cache, value_cache

    def _seen_slots(self, sliding_window: int | None) -> set[int]:
        slots: set[int] = set()
        for table, length in zip(self.tables, self.lengths, strict=True):
            first = 0 if sliding_window is None else max(0, length - sliding_window)
            slots.update(
                table[position // self.block_size] * self.block_size + position % self.block_size
                for position in range(first, length)
            )
        return slots

    def _add(self, table: list[int], length: int, starts: bool) -> None:
        self.tables.append(table)
        self.lengths.append(length)
        self.starts.append(starts)

    def _append(self, branches: list[tuple[list[int], int]], parents: list[int], child: int) -> tuple[list[int], int]:
        table, length = branches[parents[child]]
        table = list(table)
        if length % self.block_size == 0:
            table.append(self.free.pop())
        elif child and parents[child] == parents[child - 1]:
            table[-1] = self.free.pop()  # copy-on-write of the partial block
        return table, length + 1

    def _blocks_needed(self, tokens: int) -> range:
        return range(-(-tokens // self.block_size))

    def _blocks(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in self._blocks_needed(tokens)]


def relative_error(out: Tensor, truth: Tensor) -> float:
    """‖out − truth‖ / ‖truth‖; NaN in `out` gives NaN, which no bound admits."""
    return float((out.double() - truth).norm() / truth.norm())
