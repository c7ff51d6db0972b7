"""What if one entry of a block table were wrong? For teaching: a real search is led up to a step and asked there.

The device's copy of the table is changed for the branches that pass through the entry, and the step's logits are
computed with it and without; the host's copy (the link between two blocks) is changed too, and the integrity check is
asked what it finds. Then the search is dropped.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cowbeam.decoder.blocks import Block
from cowbeam.decoder.branches import Branch
from cowbeam.decoder.chain import links
from cowbeam.decoder.decoder import Decoder, Prompt
from cowbeam.decoder.params import Params


class Position(NamedTuple):
    """An entry of a block table: the branch's rank and the logical block."""

    rank: int
    column: int


@dataclass(frozen=True)
class NextToken:
    """What a branch would choose next by itself, its likeliest token, before and after the change."""

    branch_id: int
    is_affected: bool  # its table passes through the changed entry
    token_before: str
    token_after: str
    probability_before: float
    probability_after: float  # of token_after
    logit_change: float  # the greatest over the vocabulary


@dataclass(frozen=True)
class WhatIf:
    """The answer: ``tokens`` and the ``tables`` before the change in rank order; what the integrity check says.

    Block ids are those of this search: a pool hands them out in the order they fell free, so another run of the same
    search has the same sharing under other ids.
    """

    block_before: int
    block_after: int
    tables: tuple[tuple[int, ...], ...]
    tokens: tuple[NextToken, ...]
    integrity: str


def corrupt_entry(
    decoder: Decoder, prompt: Prompt, params: Params, *, step: int, entry: Position, other: Position
) -> WhatIf:
    """Search up to step ``step`` and let ``entry`` of a block table point to the block that ``other`` points to.

    Nothing else may run on ``decoder`` meanwhile. Raises ValueError if there is no such step or position, or if the
    entry points there already.
    """
    (request,) = decoder._requests([prompt], params)
    engine = decoder._running_engine()
    run = engine.add(request, watched=True)
    try:
        for _ in range(step):
            engine.step(run)
        if run.is_over or not run.group.branches or not step:
            raise ValueError(f"step {step} has no branches to look at")
        inputs = engine._batch.arrange([run.group])
        engine._cache.copy(inputs.copies)
        branches = run.group.branches
        before = tuple(tuple(branch.block_table) for branch in branches)
        found = _Entry.find(branches, entry, other)
        honest = engine._adapter.decode(engine._cache, inputs)
        tables = inputs.block_tables.clone()
        for branch in found.affected:
            tables[branch.row, entry.column] = found.other.block_id
        corrupt = engine._adapter.decode(engine._cache, dataclasses.replace(inputs, block_tables=tables))
        tokens = tuple(
            _next_token(decoder, branch, branch in found.affected, honest[branch.row], corrupt[branch.row])
            for branch in branches
        )
        sentence = _integrity_sentence(decoder, found)
        return WhatIf(found.block.block_id, found.other.block_id, before, tokens, sentence)
    finally:
        engine.abort(run)


@dataclass(frozen=True)
class _Entry:
    """One entry of a block table, and what holds it on the host: the block behind it, or the branch if it is last."""

    block: Block
    other: Block
    follower: Block | None
    branch: Branch
    affected: list[Branch]

    @classmethod
    def find(cls, branches: list[Branch], entry: Position, other: Position) -> "_Entry":
        chain, column = _chain(branches, entry), entry.column
        block, follower = chain[column], chain[column + 1] if column + 1 < len(chain) else None
        instead = _chain(branches, other)[other.column]
        if block is instead:
            raise ValueError(f"entry {column} points to block {block.block_id} already")
        passes = [b for b in branches if follower in links(b.last_block)] if follower else [branches[entry.rank]]
        return cls(block, instead, follower, branches[entry.rank], passes)


def _chain(branches: list[Branch], position: Position) -> list[Block]:
    if not 0 <= position.rank < len(branches):
        raise ValueError(f"there is no branch of rank {position.rank}: {len(branches)} are live")
    chain = links(branches[position.rank].last_block)
    if not 0 <= position.column < len(chain):
        raise ValueError(f"entry {position.column} is not in this block table, which has {len(chain)}")
    return chain


def _integrity_sentence(decoder: Decoder, entry: _Entry) -> str:
    """What ``check_integrity`` says while the host's link leads to the wrong block."""
    holder, name = (entry.follower, "parent") if entry.follower else (entry.branch, "last_block")
    setattr(holder, name, entry.other)
    try:
        decoder.check_integrity()
    except AssertionError as error:
        return str(error)
    finally:
        setattr(holder, name, entry.block)
    raise AssertionError("the integrity check missed a wrong entry")


def _next_token(decoder: Decoder, branch: Branch, is_affected: bool, honest: Tensor, corrupt: Tensor) -> NextToken:
    before, after = honest.float().softmax(-1), corrupt.float().softmax(-1)
    first, second = int(before.argmax()), int(after.argmax())
    return NextToken(
        branch_id=branch.branch_id,
        is_affected=is_affected,
        token_before=decoder._decode_text([first]),
        token_after=decoder._decode_text([second]),
        probability_before=float(before[first]),
        probability_after=float(after[second]),
        logit_change=float(torch.nan_to_num(corrupt.float() - honest.float(), nan=torch.inf).abs().max()),
    )
