"""From a step's logits to the next step's rows, all on the device; captured as one CUDA graph where that can be.

Some forty small launches follow a forward pass: log-softmax, the best candidates, the choice, the rows. Launched one by
one they would take longer than a small model's forward pass.
"""

import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cowbeam.decoder.batch import DecodeInputs, ready_to_send, to_device
from cowbeam.decoder.candidates import CandidateSource, Choice
from cowbeam.decoder.group import Group
from cowbeam.decoder.step_graph import CapturedStep, StepGraphs
from cowbeam.kernels.advance import advance_rows

logger = logging.getLogger("cowbeam")

SIGHTINGS = 4  # of a signature before it is captured
MAX_CAPTURED = 16  # after one captured step
MAX_SIGNATURES = 1024  # whose sightings are counted


@dataclass(frozen=True)
class Flight:
    """One step of some groups, computed or being computed, of which nothing is chosen yet."""

    groups: list[Group]
    sources: list[CandidateSource]
    logits: Tensor  # [rows, vocabulary]
    rows: list[Tensor]  # each group's rows, in rank order
    given: list[Tensor]  # see `CandidateSource.propose`
    tables_before: Tensor | None = None  # the block tables of the step before, where the device laid this one out
    launched: torch.cuda.Event | None = None

    @property
    def num_rows(self) -> int:
        """Rows of all groups."""
        return sum(len(rows) for rows in self.rows)


@dataclass(frozen=True)
class Ahead:
    """What the device foresees."""

    choices: list[Choice]
    rows: list[Tensor]  # of the next step, each group's in rank order
    flat: Tensor  # float64: `candidates_of`, then tokens and slots of the next step's rows
    sizes: list[int]
    tables_before: Tensor  # the block tables as they were


def candidates_of(flight: Flight) -> tuple[list[Tensor], Tensor, list[int]]:
    """The proposals; and for the host, flat in float64 with its parts' sizes, each with its rows' greatest logits."""
    proposed = [
        source.propose(flight.logits, rows, given)
        for source, rows, given in zip(flight.sources, flight.rows, flight.given, strict=True)
    ]
    parts = [part.flatten() for proposal, maxima in proposed for part in (proposal, maxima.double())]
    return [proposal for proposal, _ in proposed], torch.cat(parts), [part.numel() for part in parts]


def look_ahead(
    flight: Flight, inputs: DecodeInputs, upcoming: Tensor, tables_before: Tensor, block_size: int, scratch_block: int
) -> Ahead:
    """Foresee the choice and make ``inputs`` the next step's, in place.

    Args:
        flight: the step just computed.
        inputs: of that step.
        upcoming: [rows] the ids of the next free blocks.
        tables_before: [rows, columns] is filled with the block tables as they are.
        block_size: tokens of a block.
        scratch_block: see `advance_rows`.
    """
    proposals, flat, sizes = candidates_of(flight)
    choices = [source.foresee(proposal) for source, proposal in zip(flight.sources, proposals, strict=True)]
    num_rows = flight.num_rows
    tables_before.copy_(inputs.block_tables[:num_rows])
    row_of = advance_rows(
        torch.cat([rows[choice.ranks] for rows, choice in zip(flight.rows, choices, strict=True)]),
        torch.cat([choice.tokens for choice in choices]),
        inputs,
        tables_before=tables_before,
        upcoming=upcoming,
        block_size=block_size,
        scratch_block=scratch_block,
    )
    made = [inputs.token_ids[:num_rows].double(), inputs.slots[:num_rows].double()]
    rows = list(torch.split(row_of, [len(rows) for rows in flight.rows]))
    return Ahead(choices, rows, torch.cat([flat, *made]), sizes, tables_before)


class _CapturedChoice:
    """`look_ahead` for flights of one signature after one captured step, over buffers of its own.

    The buffers lie outside the graphs' memory, which a captured step may use for something else.
    """

    def __init__(self, flight: Flight, ahead: Ahead, inputs: DecodeInputs) -> None:
        """``flight`` is one of the signature, ``ahead`` what followed it."""
        self._inputs = inputs
        self._upcoming = torch.empty(flight.num_rows, dtype=torch.long, device=flight.logits.device)
        self._flight = Flight(
            groups=[],
            sources=flight.sources,
            logits=flight.logits,
            rows=[rows.clone() for rows in ahead.rows],
            given=[given.clone() for given in flight.given],
        )
        self._choices = [Choice(*(part.clone() for part in choice)) for choice in ahead.choices]
        self._flat, self._sizes = ahead.flat.clone(), ahead.sizes
        self._tables_before = torch.empty_like(ahead.tables_before)
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, pool: Any, block_size: int, scratch_block: int) -> None:
        """Record, without running it."""
        mine = self._flight
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            ahead = look_ahead(mine, self._inputs, self._upcoming, self._tables_before, block_size, scratch_block)
            self._flat.copy_(ahead.flat)
            for static, rows in zip(mine.rows, ahead.rows, strict=True):
                static.copy_(rows)
            for choice, now in zip(self._choices, ahead.choices, strict=True):
                for buffer, part in zip(choice, now, strict=True):
                    buffer.copy_(part)
        # The graph writes into what the sources own, and they may be gone before it.
        self._kept = [source.buffers for source in mine.sources]
        self._flight = Flight([], [], mine.logits, mine.rows, mine.given)

    def replay(self, flight: Flight, upcoming: Sequence[int]) -> Ahead:
        """What is returned lies in the buffers: valid until the next call."""
        for static, now in zip([*self._flight.rows, *self._flight.given], [*flight.rows, *flight.given], strict=True):
            if static is not now:
                static.copy_(now)
        self._upcoming.copy_(ready_to_send(upcoming, torch.long, self._upcoming.device), non_blocking=True)
        self._graph.replay()
        return Ahead(self._choices, self._flight.rows, self._flat, self._sizes, self._tables_before)


class _Choices:
    """The captured choices after one captured step, the last used ones. A capture costs as much as some dozen steps."""

    def __init__(self) -> None:
        self._captured: OrderedDict[Hashable, _CapturedChoice] = OrderedDict()
        self._sightings: Counter[Hashable] = Counter()

    def find(self, signature: Hashable) -> _CapturedChoice | None:
        if signature in self._captured:
            self._captured.move_to_end(signature)
        return self._captured.get(signature)

    def is_worth_it(self, signature: Hashable) -> bool:
        """It is seen often: widths that samples only pass through while they end are not."""
        if len(self._sightings) > MAX_SIGNATURES:
            self._sightings.clear()
        self._sightings[signature] += 1
        return self._sightings[signature] >= SIGHTINGS

    def keep(self, signature: Hashable, captured: _CapturedChoice) -> None:
        self._captured[signature] = captured
        if len(self._captured) > MAX_CAPTURED:
            self._captured.popitem(last=False)


class ChoiceGraphs:
    """Looks ahead by captured graphs where the step is captured and the choice can be, else launch by launch."""

    def __init__(self, graphs: StepGraphs, block_size: int, scratch_block: int) -> None:
        self._graphs = graphs
        self._block_size = block_size
        self._scratch_block = scratch_block
        self._captured: weakref.WeakKeyDictionary[CapturedStep, _Choices] = weakref.WeakKeyDictionary()
        self._can_capture = True

    def choose(self, flight: Flight, upcoming: Sequence[int]) -> Ahead:
        """`look_ahead` after the last decoded step, ``flight``."""
        step = self._graphs.step
        signature = tuple(s.signature(len(rows)) for s, rows in zip(flight.sources, flight.rows, strict=True))
        if step is None or None in signature or not self._can_capture:
            return self._look_ahead(flight, upcoming)
        choices = self._captured.setdefault(step, _Choices())
        captured = choices.find(signature)
        if captured is not None:
            return captured.replay(flight, upcoming)
        ahead = self._look_ahead(flight, upcoming)
        if choices.is_worth_it(signature):
            self._capture(choices, signature, flight, ahead)
        return ahead

    def _capture(self, choices: "_Choices", signature: Hashable, flight: Flight, ahead: Ahead) -> None:
        captured = _CapturedChoice(flight, ahead, self._graphs.inputs)
        try:
            captured.capture(self._graphs.pool, self._block_size, self._scratch_block)
        except RuntimeError as error:  # the step itself is computed: what is lost is only time
            logger.warning("choices go on without CUDA graphs: %s", str(error).splitlines()[0])
            self._can_capture = False
            return
        choices.keep(signature, captured)

    def _look_ahead(self, flight: Flight, upcoming: Sequence[int]) -> Ahead:
        inputs = self._graphs.inputs
        before = torch.empty_like(inputs.block_tables[: flight.num_rows])
        ids = to_device(upcoming, torch.long, flight.logits.device)
        return look_ahead(flight, inputs, ids, before, self._block_size, self._scratch_block)
