"""The rows of one ``generate`` call of transformers, kept in blocks.

transformers repeats every prompt for each of its beams or samples, and moves whole rows of its cache when beams change
places. Here equal rows are computed once and fork, and a change of places is a change of block tables.
"""

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cowbeam.decoder.batch import Batch, lay_out, to_device
from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.group import Group, KVBytes, Request
from cowbeam.decoder.kv_cache import KVCache
from cowbeam.decoder.model_adapter import ModelAdapter
from cowbeam.decoder.params import SamplingParams
from cowbeam.decoder.placement import on_device
from cowbeam.decoder.scheduler import MAX_PASS_TOKENS, Part
from cowbeam.decoder.step_graph import StepGraphs
from cowbeam.decoder.strategy import Continuation

logger = logging.getLogger("cowbeam")


def as_requests(input_ids: Tensor, lengths: Sequence[int], max_new_tokens: int) -> list[Request]:
    """The prompts without padding or repetition: neighbours that are equal are one prompt with several branches.

    Args:
        input_ids: [rows, width], of which the last ``lengths[row]`` tokens count.
        lengths: [rows].
        max_new_tokens: of each row.
    """
    runs: list[tuple[tuple[int, ...], int]] = []
    for padded, length in zip(input_ids.tolist(), lengths, strict=True):
        prompt = tuple(padded[len(padded) - length :])
        if runs and runs[-1][0] == prompt:
            runs[-1] = (prompt, runs[-1][1] + 1)
        else:
            runs.append((prompt, 1))
    return [
        Request(prompt, SamplingParams(num_return_sequences=rows, max_new_tokens=max_new_tokens), frozenset(), None)
        for prompt, rows in runs
    ]


class Memory(NamedTuple):
    """The pool's bytes and the steps captured over them, lent to one ``PagedRows`` at a time."""

    cache: KVCache
    graphs: StepGraphs
    num_blocks: int


class PagedRows:
    """Gives logits as a transformers model with a cache would, row for row; transformers decides what follows."""

    def __init__(self, adapter: ModelAdapter, memory: Memory, kv_bytes: KVBytes, requests: Sequence[Request]) -> None:
        block_size = memory.cache.block_size
        self.memory = memory
        self._adapter = adapter
        self._pool = BlockPool(memory.num_blocks, block_size)
        self._batch = Batch(block_size, adapter.device, memory.cache.scratch_block)
        self._groups = [Group(request, self._pool, kv_bytes, in_pieces=adapter.computes_pieces) for request in requests]
        widths = [group.strategy.width for group in self._groups]
        starts = itertools.accumulate(widths, initial=0)
        # Of each group the rows that still have a branch, in its branches' order.
        self._live = [list(range(start, start + width)) for start, width in zip(starts, widths, strict=False)]
        self._num_rows = sum(widths)
        self._parents: Tensor | None = None
        self._ended: Tensor | None = None
        self.peak_blocks = 0

    def prefill(self) -> Tensor:
        """Compute every prompt once; logits of the last tokens, [rows, vocabulary], equal for rows of one prompt."""
        for group in self._groups:
            group.plant()
            self._batch.add_group(group)
        self.peak_blocks = self._pool.num_live
        self._adapter.follow_owner()
        with on_device(self._adapter.device):
            passes: Iterator[list[Part]] = _passes(self._groups)
            if self._adapter.has_hooks:  # they may look for a prompt's end where transformers has it: at a row's
                passes = ([part] for parts in passes for part in parts)
            logits = [self._compute(parts) for parts in passes]
        widths = torch.tensor([group.strategy.width for group in self._groups], device=self._adapter.device)
        return torch.cat(logits).repeat_interleave(widths, dim=0)

    def _compute(self, parts: Sequence[Part]) -> Tensor:
        """Logits of the prompts that are complete by this pass."""
        pieces = [piece for _, piece in parts]
        logits = self._adapter.compute(
            self.memory.cache,
            [piece.token_ids for piece in pieces],
            [piece.block_table for piece in pieces],
            [piece.start for piece in pieces],
            [piece.owner for piece in pieces],
        )
        complete = [row for row, (group, piece) in enumerate(parts) if piece.end == group.num_prompt_tokens]
        return logits[complete]

    def reorder(self, parents: Tensor) -> None:
        """Row r of the next step continues row ``parents[r]``, of the same prompt; [rows]."""
        self._parents = parents

    def end(self, rows: Tensor) -> None:
        """Nobody asks any more what follows these rows, [rows] bool: their blocks are freed at the next step."""
        self._ended = rows

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token to each row, [rows]; logits of what follows, [rows, vocabulary].

        Rows that have ended get another's. Raises torch.OutOfMemoryError if the pool has too few blocks, which is
        possible only where memory did not hold the worst case.
        """
        self._follow(tokens.tolist())
        groups = [group for group in self._groups if group.branches]
        self._check_room(groups)
        layout = lay_out(groups)
        self.peak_blocks = max(self.peak_blocks, self._pool.num_live)
        with on_device(self._adapter.device):
            logits = self.memory.graphs.decode(self._batch.upload(layout))
        # Finite logits for rows that have ended too: no processor stumbles over them.
        row_of = [0] * self._num_rows
        for rows, of_group in zip((live for live in self._live if live), layout.rows_of_group, strict=True):
            for row, in_batch in zip(rows, of_group, strict=True):
                row_of[row] = in_batch
        return logits[to_device(row_of, torch.long, logits.device)]

    def _follow(self, tokens: Sequence[int]) -> None:
        """Fork, free and append as the loop has chosen."""
        ended: list[bool] = [False] * self._num_rows if self._ended is None else self._ended.tolist()
        parents: Sequence[int] = range(self._num_rows) if self._parents is None else self._parents.tolist()
        self._parents = None
        for number, group in enumerate(self._groups):
            rank_of = {row: rank for rank, row in enumerate(self._live[number])}
            self._live[number] = [row for row in self._live[number] if not ended[row]]
            if group.branches:
                group.follow([Continuation(rank_of[parents[row]], tokens[row], 0.0) for row in self._live[number]])

    def _check_room(self, groups: Sequence[Group]) -> None:
        needed = sum(group.tree.blocks_needed(group.branches) for group in groups)
        if needed > self._pool.num_free:
            raise torch.OutOfMemoryError(
                f"the KV pool of {self._pool.num_blocks} blocks of {self._pool.block_size} tokens is full: memory did "
                "not hold the call's worst case"
            )

    def log_use(self) -> None:
        """What the call took, for who turns the logger ``cowbeam`` up."""
        message = "generate: %d prompts, %d rows, at most %d blocks of %d tokens"
        logger.info(message, len(self._groups), self._num_rows, self.peak_blocks, self._pool.block_size)

    def close(self) -> None:
        """Give every block back."""
        for group in self._groups:
            group.free()
        assert not self._pool.num_live, f"{self._pool.num_live} blocks are held by nobody"

    def check_integrity(self) -> None:
        """Assert every invariant of the pool; for tests."""
        self._pool.check_integrity([branch.last_block for group in self._groups for branch in group.branches])


def _passes(groups: Sequence[Group]) -> Iterator[list[Part]]:
    """All prompts in passes of bounded size, so that long ones take no more memory than several short ones."""
    parts: list[Part] = []
    left = MAX_PASS_TOKENS
    for group in groups:
        while group.backlog.num_tokens:
            parts.append(Part(group, group.take(left)))
            left -= len(parts[-1].piece.token_ids)
            if left <= 0:
                yield parts
                parts, left = [], MAX_PASS_TOKENS
    if parts:
        yield parts
