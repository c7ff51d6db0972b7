"""Frames: the whole state of a search once a step, for people who watch it. ``trace`` writes them down as deltas."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from cowbeam.decoder.branch_texts import BranchTexts, DecodeText
from cowbeam.decoder.branches import Branch, Event
from cowbeam.decoder.group import Group, hypothesis_text, hypothesis_token_ids
from cowbeam.decoder.outputs import DecodeResult, FinishReason, MemoryUse
from cowbeam.decoder.strategy import Hypothesis


@dataclass(frozen=True)
class BranchFrame:
    """One live branch. ``parent_id`` is the branch of the frame before that it continues (itself, or forked from).

    ``num_tokens`` counts the prompt too; ``block_table`` covers all of them. ``token_text`` is its newest token's.
    """

    branch_id: int
    parent_id: int
    text: str
    token_id: int
    token_text: str
    logprob: float
    cumulative_logprob: float
    num_tokens: int
    block_table: tuple[int, ...]


@dataclass(frozen=True)
class FinishedFrame:
    """One finished sequence that would be returned if the search ended now.

    ``rank`` is that of the branch it continued, in the frame before the one it first appears in; ``token_text`` and
    ``logprob`` are of its last token, which never gets a slot.
    """

    index: int
    rank: int
    text: str
    token_text: str
    logprob: float
    cumulative_logprob: float
    num_generated: int
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class Frame:
    """The state after step ``step``: branches in rank order with their new tokens chosen and slots reserved.

    ``sharers`` tells for each live block how many branches' tables hold it. ``events`` are in the order they happened:
    in the first frame the prompt's allocations; forks, prunes and frees, then allocations and copies. ``live_tokens``
    are distinct, prompt included.
    The last frame has no branches but the ``result``.
    """

    step: int
    branches: tuple[BranchFrame, ...]
    finished: tuple[FinishedFrame, ...]
    events: tuple[Event, ...]
    sharers: Mapping[int, int]
    live_blocks: int
    live_tokens: int
    memory: MemoryUse
    result: DecodeResult | None


def make_frame(group: Group, texts: BranchTexts, decode_text: DecodeText, result: DecodeResult | None = None) -> Frame:
    """The group as it stands. O(rows × blocks): only groups that are watched pay it."""
    tables = [tuple(branch.block_table) for branch in group.branches]
    newest = [branch.last_token for branch in group.branches if branch.last_token is not None]
    branches = [
        _branch_frame(branch, table, parent_id, score, text, decode_text([token.token_id]))
        for branch, token, table, parent_id, score, text in zip(
            group.branches,
            newest,
            tables,
            group.parents,
            group.strategy.scores,
            texts.of(newest, decode_text),
            strict=True,
        )
    ]
    finished = [_finished_frame(group, hypothesis, decode_text) for hypothesis in group.strategy.hypotheses]
    return Frame(
        step=group.steps,
        branches=tuple(branches),
        finished=tuple(finished),
        events=group.take_events(),
        sharers=Counter(block for table in tables for block in table),
        live_blocks=group.tree.num_blocks,
        live_tokens=group.tree.num_tokens,
        memory=group.memory,
        result=result,
    )


def _branch_frame(
    branch: Branch, table: tuple[int, ...], parent_id: int, score: float, text: str, token_text: str
) -> BranchFrame:
    assert branch.last_token is not None, "a frame comes after a step, which chose a token for every branch"
    return BranchFrame(
        branch_id=branch.branch_id,
        parent_id=parent_id,
        text=text,
        token_id=branch.last_token.token_id,
        token_text=token_text,
        logprob=branch.last_token.logprob,
        cumulative_logprob=score,
        num_tokens=branch.num_slots,
        block_table=table,
    )


def _finished_frame(group: Group, hypothesis: Hypothesis, decode_text: DecodeText) -> FinishedFrame:
    token_ids = hypothesis_token_ids(hypothesis)
    return FinishedFrame(
        index=hypothesis.index,
        rank=hypothesis.last.beam,
        text=hypothesis_text(group.request, hypothesis, decode_text),
        token_text=decode_text(token_ids[-1:]),
        logprob=hypothesis.last.logprob,
        cumulative_logprob=hypothesis.cumulative_logprob,
        num_generated=len(token_ids),
        score=hypothesis.score,
        finish_reason=hypothesis.finish_reason,
    )
