"""What if one entry of a block table were wrong? For teaching: asked of a real search at one of its steps.

The step is built up again beside the engine: the branches' tokens are written to blocks of its own, shared as the
search shares them. The device's copy of the table is then changed for the branches that pass through the entry, and the
next logits are computed with it and without; the host's copy (the link between two blocks) is changed too, and the
pool's integrity check is asked what it finds.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cowbeam.decoder.batch import DecodeInputs
from cowbeam.decoder.blocks import Block, BlockPool
from cowbeam.decoder.chain import links
from cowbeam.decoder.decoder import Decoder
from cowbeam.decoder.frames import Frame
from cowbeam.decoder.kv_cache import KVCache
from cowbeam.decoder.params import Params


class Position(NamedTuple):
    """An entry of a block table: the branch's rank and the logical block."""

    rank: int
    column: int


@dataclass(frozen=True)
class NextToken:
    """What a branch would choose next by itself, its likeliest token, before and after the change."""

    is_affected: bool  # its table passes through the changed entry
    token_before: str
    token_after: str
    probability_before: float
    probability_after: float  # of token_after
    logit_change: float  # the greatest over the vocabulary


@dataclass(frozen=True)
class WhatIf:
    """The answer: ``tokens`` and the ``tables`` before the change in rank order; what the integrity check says.

    The blocks are shared as in the search, but their ids are this answer's own.
    """

    block_before: int
    block_after: int
    tables: tuple[tuple[int, ...], ...]
    tokens: tuple[NextToken, ...]
    integrity: str


def corrupt_entry(
    decoder: Decoder, prompt: Sequence[int], params: Params, *, step: int, entry: Position, other: Position
) -> WhatIf:
    """Search up to step ``step`` and let ``entry`` of a block table point to the block that ``other`` points to.

    ``prompt`` is token ids, and a search that draws needs a seed. Raises ValueError if there is no such step or
    position, or if the entry points there already.
    """
    branches = _Branches.at(decoder, prompt, params, step)
    found = _Entry.find(branches.last_blocks, entry, other)
    affected = found.passing(branches.last_blocks)
    honest, corrupt = _logits(decoder, branches, affected, entry.column, found.other.block_id)
    tokens = tuple(
        _next_token(decoder, rank in affected, honest[rank], corrupt[rank]) for rank in range(len(branches.last_blocks))
    )
    sentence = _integrity_sentence(branches, found)
    return WhatIf(found.block.block_id, found.other.block_id, branches.tables, tokens, sentence)


@dataclass
class _Branches:
    """A step's branches in rank order, over a pool of their own."""

    pool: BlockPool
    last_blocks: list[Block]
    token_ids: list[tuple[int, ...]]

    @classmethod
    def at(cls, decoder: Decoder, prompt: Sequence[int], params: Params, step: int) -> "_Branches":
        paths: dict[int, tuple[int, ...]] = {}
        with closing(decoder.stream(list(prompt), params)) as frames:  # type: ignore[type-var]  # a generator
            for frame in frames:
                paths = {
                    branch.branch_id: (*paths.get(branch.parent_id, tuple(prompt)), branch.token_id)
                    for branch in frame.branches
                }
                if frame.step == step and frame.branches:
                    return cls._share_as(frame, decoder, [paths[branch.branch_id] for branch in frame.branches])
        raise ValueError(f"step {step} has no branches to look at")

    @classmethod
    def _share_as(cls, frame: Frame, decoder: Decoder, token_ids: list[tuple[int, ...]]) -> "_Branches":
        """Blocks in the order of the tables; a block that the search shares is one block here."""
        pool = BlockPool(len(frame.sharers), decoder.block_size)
        blocks: dict[int, Block] = {}
        last_blocks: list[Block] = []
        for branch in frame.branches:
            last: Block | None = None
            for block_id in branch.block_table:
                last = blocks[block_id] = blocks.get(block_id) or pool.allocate(last)
            assert last is not None, "a live branch has blocks"
            last.ref_count += 1
            last_blocks.append(last)
        for block in blocks.values():
            pool.release(block)  # the hold of whoever asked for it: its branches and followers hold it now
        return cls(pool, last_blocks, token_ids)

    @property
    def tables(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(block.block_id for block in links(last)) for last in self.last_blocks)


@dataclass(frozen=True)
class _Entry:
    """One entry of a block table, and what holds it on the host: the block behind it, or the branch if it is last."""

    block: Block
    other: Block
    follower: Block | None
    rank: int

    @classmethod
    def find(cls, last_blocks: list[Block], entry: Position, other: Position) -> "_Entry":
        chain, column = _chain(last_blocks, entry), entry.column
        block, follower = chain[column], chain[column + 1] if column + 1 < len(chain) else None
        instead = _chain(last_blocks, other)[other.column]
        if block is instead:
            raise ValueError(f"entry {column} points to block {block.block_id} already")
        return cls(block, instead, follower, entry.rank)

    def passing(self, last_blocks: list[Block]) -> set[int]:
        """Ranks of the branches whose table is led through this entry."""
        if self.follower is None:
            return {self.rank}
        return {rank for rank, last in enumerate(last_blocks) if self.follower in links(last)}


def _chain(last_blocks: list[Block], position: Position) -> list[Block]:
    if not 0 <= position.rank < len(last_blocks):
        raise ValueError(f"there is no branch of rank {position.rank}: {len(last_blocks)} are live")
    chain = links(last_blocks[position.rank])
    if not 0 <= position.column < len(chain):
        raise ValueError(f"entry {position.column} is not in this block table, which has {len(chain)}")
    return chain


@dataclass
class _Owner:
    """Stands for a branch."""

    state: object | None = None


def _logits(
    decoder: Decoder, branches: _Branches, affected: set[int], column: int, block_id: int
) -> tuple[Tensor, Tensor]:
    """Logits ``[branches, vocabulary]`` after the newest tokens, with the right tables and with the wrong one."""
    adapter = decoder._adapter
    cache = KVCache(adapter.probe(num_tokens=2), branches.pool.num_blocks, decoder.block_size)
    for layer in cache.layers:
        for tensor in layer.tensors:
            tensor.zero_()  # a wrong entry can lead to slots that nothing wrote: the answer must not hang on chance
    tables, lengths = branches.tables, [len(ids) for ids in branches.token_ids]
    owners = [_Owner() for _ in tables]
    adapter.prefill(cache, [ids[:-1] for ids in branches.token_ids], tables, owners)
    # Rows in tree order, as the kernels want them: those that share a block are neighbours.
    rows = sorted(range(len(tables)), key=lambda rank: tables[rank])
    padded = [[*tables[rank], *[0] * (max(map(len, tables)) - len(tables[rank]))] for rank in rows]
    positions = torch.tensor([lengths[rank] - 1 for rank in rows], device=adapter.device)
    right = torch.tensor(padded, dtype=torch.int32, device=adapter.device)
    last_blocks = torch.tensor([tables[rank][-1] for rank in rows], device=adapter.device)
    idle = torch.full_like(positions, cache.scratch_block)
    inputs = DecodeInputs(
        token_ids=torch.tensor([branches.token_ids[rank][-1] for rank in rows], device=adapter.device),
        positions=positions,
        slots=last_blocks * decoder.block_size + positions % decoder.block_size,
        lengths=(positions + 1).int(),
        block_tables=right,
        group_starts=torch.arange(len(rows), device=adapter.device) == 0,
        copy_sources=idle,
        copy_destinations=idle,
        widest_group=len(rows),
        owners=[owners[rank] for rank in rows],
    )
    # The wrong step after the right one: it starts from the same states.
    again = [_Owner(owner.state) for owner in inputs.owners]
    wrong = right.clone()
    wrong[[row for row, rank in enumerate(rows) if rank in affected], column] = block_id
    honest = adapter.decode(cache, inputs)
    corrupt = adapter.decode(cache, dataclasses.replace(inputs, block_tables=wrong, owners=again))
    by_rank = [rows.index(rank) for rank in range(len(rows))]
    return honest[by_rank], corrupt[by_rank]


def _integrity_sentence(branches: _Branches, entry: _Entry) -> str:
    """What ``check_integrity`` says while the host's link leads to the wrong block."""
    branches.pool.check_integrity(branches.last_blocks)
    held = list(branches.last_blocks)
    if entry.follower is None:
        held[entry.rank] = entry.other
    else:
        entry.follower.parent = entry.other
    try:
        branches.pool.check_integrity(held)
    except AssertionError as error:
        return str(error)
    finally:
        if entry.follower is not None:
            entry.follower.parent = entry.block
    raise AssertionError("the integrity check missed a wrong entry")


def _next_token(decoder: Decoder, is_affected: bool, honest: Tensor, corrupt: Tensor) -> NextToken:
    before, after = honest.float().softmax(-1), corrupt.float().softmax(-1)
    first, second = int(before.argmax()), int(after.argmax())
    return NextToken(
        is_affected=is_affected,
        token_before=decoder.text_of([first]),
        token_after=decoder.text_of([second]),
        probability_before=float(before[first]),
        probability_after=float(after[second]),
        logit_change=float((corrupt.float() - honest.float()).abs().max()),
    )
