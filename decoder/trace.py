"""A search as a list of JSON objects: one ``start``, a ``step`` a frame with only what changed, one ``end``.

Written for viewers that replay (a few kilobytes a step whatever the context). A *place* is a line of the picture, 0 to
width − 1: a branch's first child stays in its place, the others take places that fell free. Version 1:

    start  {type, v, mode, width, num_blocks, block_size, prompt, prompt_len, max_len, bytes_per_token, steps, ...}
    step   {type, t,
            nodes:   [[id, parent, text, logprob, cumulative], ...]   new tokens; parent -1 is the prompt. The texts
                     along a path are the text: a token that ends inside a character has "", the next one all of it
            live:    [node of each place, or null],  parents: [the place each place's branch descends from, or null]
            len:     [tokens of each place, prompt included],  done: [is the place empty]
            scores:  [cumulative log-prob of each place, or null],  rank: [rank of each place, or null]
            tabs:    [[place, keep, tail], ...]      its new table is the first `keep` ids of its old one, then tail
            ref:     [[block, sharers], ...]         where the number of tables that hold the block changed
            ev:      [["fork", from, to] | ["prune", place] | ["free", block] | ["alloc", block, place]
                      | ["cow", source block, block, place, tokens copied]
                      | ["finish", node, reason], ...]                               in the order they happened
            mem:     {used, ideal, copies, contiguous}, bytes
            finished: [[index, text, score, reason, node], ...] where it changed}    what would be returned now
    end    {type, best, reason, stats}                                               stats: those of the result
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from cowbeam.decoder.branches import Event
from cowbeam.decoder.frames import BranchFrame, FinishedFrame, Frame
from cowbeam.decoder.outputs import DecodeResult

VERSION = 1

Record = dict[str, Any]


class TraceWriter:
    """Turns the frames of one search into trace records."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._places: dict[int, int] = {}  # branch id → place
        self._tables: dict[int, tuple[int, ...]] = {}  # place → block ids
        self._nodes: dict[int, int] = {}  # branch id → its newest token's node
        self._ranked: list[int] = []  # branch ids of the frame before, in rank order
        self._texts: dict[int, str] = {}  # node → the text of its path
        self._finished: list[FinishedFrame] = []
        self._finished_nodes: dict[tuple[int, int, str, float], int] = {}
        self._sharers: dict[int, int] = {}
        self._num_nodes = 0

    def step(self, frame: Frame) -> Record:
        """The record of one frame."""
        before = dict(self._places)
        self._settle(frame.branches)
        at = {self._places[branch.branch_id]: (rank, branch) for rank, branch in enumerate(frame.branches)}
        places = [at.get(place) for place in range(self._width)]
        # Before the first frame everything descends from the prompt, in place 0.
        parents = [before.get(entry[1].parent_id, 0) if entry else None for entry in places]
        ends, end_events = self._new_ends(frame.finished)
        record = {
            "type": "step",
            "t": frame.step,
            "nodes": ends + self._new_nodes(frame.branches),
            "live": [self._nodes[entry[1].branch_id] if entry else None for entry in places],
            "parents": parents,
            "len": [entry[1].num_tokens if entry else 0 for entry in places],
            "done": [entry is None for entry in places],
            "scores": [entry[1].cumulative_logprob if entry else None for entry in places],
            "rank": [entry[0] if entry else None for entry in places],
            "tabs": self._changed_tables(at),
            "ref": self._changed_sharers(frame),
            "ev": end_events + [self._event(event, before) for event in frame.events],
            "mem": {
                "used": frame.memory.used,
                "ideal": frame.memory.unique,
                "copies": frame.memory.copied,
                "contiguous": frame.memory.contiguous,
            },
        }
        if list(frame.finished) != self._finished:
            self._finished = list(frame.finished)
            record["finished"] = [
                [f.index, f.text, f.score, f.finish_reason, self._finished_nodes[_identity(f)]] for f in frame.finished
            ]
        self._places = {branch.branch_id: self._places[branch.branch_id] for branch in frame.branches}
        self._ranked = [branch.branch_id for branch in frame.branches]
        return record

    def _settle(self, branches: Iterable[BranchFrame]) -> None:
        """Give the new branches the places that fell free, lowest first."""
        branches = list(branches)
        taken = {self._places[b.branch_id] for b in branches if b.branch_id in self._places}
        free = iter(sorted(set(range(self._width)) - taken))
        for branch in branches:
            if branch.branch_id not in self._places:
                self._places[branch.branch_id] = next(free)

    def _new_nodes(self, branches: Iterable[BranchFrame]) -> list[list[Any]]:
        nodes: list[list[Any]] = []
        newest: dict[int, int] = {}
        for branch in branches:
            parent = self._nodes.get(branch.parent_id, -1)
            text = self._added_text(parent, branch.text, branch.token_text)
            newest[branch.branch_id] = self._num_nodes
            nodes.append([self._num_nodes, parent, text, branch.logprob, branch.cumulative_logprob])
            self._num_nodes += 1
        self._nodes = newest
        return nodes

    def _new_ends(self, finished: Iterable[FinishedFrame]) -> tuple[list[list[Any]], list[list[Any]]]:
        """Nodes and events of the sequences that ended since the frame before. Called before ``_new_nodes``."""
        nodes: list[list[Any]] = []
        events: list[list[Any]] = []
        for end in finished:
            if _identity(end) in self._finished_nodes:
                continue
            parent = self._nodes.get(self._ranked[end.rank], -1) if self._ranked else -1
            text = self._added_text(parent, end.text, end.token_text)
            nodes.append([self._num_nodes, parent, text, end.logprob, end.cumulative_logprob])
            events.append(["finish", self._num_nodes, end.finish_reason])
            self._finished_nodes[_identity(end)] = self._num_nodes
            self._num_nodes += 1
        return nodes, events

    def _added_text(self, parent: int, text: str, token_text: str) -> str:
        """What the next node adds to its parent's path. A character whose last bytes are to come is held back."""
        before = self._texts.get(parent, "")
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        added = whole.removeprefix(before) if whole.startswith(before) else token_text
        self._texts[self._num_nodes] = before + added
        return added

    def _changed_tables(self, at: dict[int, tuple[int, BranchFrame]]) -> list[list[Any]]:
        changed: list[list[Any]] = []
        for place in range(self._width):
            old = self._tables.get(place, ())
            new = at[place][1].block_table if place in at else ()
            if old != new:
                same = (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
                keep = next(same, min(len(old), len(new)))
                changed.append([place, keep, list(new[keep:])])
            self._tables[place] = new
        return changed

    def _changed_sharers(self, frame: Frame) -> list[list[int]]:
        blocks = sorted(self._sharers.keys() | frame.sharers.keys())
        old, self._sharers = self._sharers, dict(frame.sharers)
        return [[b, self._sharers.get(b, 0)] for b in blocks if self._sharers.get(b, 0) != old.get(b, 0)]

    def _event(self, event: Event, before: dict[int, int]) -> list[Any]:
        place = None if event.branch is None else self._places.get(event.branch, before.get(event.branch, 0))
        match event.kind:
            case "fork":
                source = event.source if event.source is not None else 0
                return ["fork", before.get(source, self._places.get(source, 0)), place]
            case "prune":
                return ["prune", place]
            case "free":
                return ["free", event.block]
            case "allocate":
                return ["alloc", event.block, place]
            case "cow":
                return ["cow", event.source, event.block, place, event.tokens]


def _identity(end: FinishedFrame) -> tuple[int, int, str, float]:
    return end.index, end.num_generated, end.text, end.cumulative_logprob


def end_record(result: DecodeResult | None, reason: str = "aborted") -> Record:
    """The last record; without a result ``reason`` says why there is none."""
    best = result.completions[0] if result and result.completions else None
    return {
        "type": "end",
        "best": best and best.text,
        "reason": best.finish_reason if best else reason,
        "stats": dataclasses.asdict(result.stats) if result else None,
    }
