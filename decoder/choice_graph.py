"""From a step's logits to the next step's rows, all on the device; captured as one CUDA graph where that can be.

Some forty small launches follow a forward pass: log-softmax, the best candidates, the choice, the rows. Launched one by
one they would take longer than a small model's forward pass.
"""

import logging
import weakref
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from cowbeam.decoder.batch import DecodeInputs, ready_to_send, to_device
from cowbeam.decoder.candidates import Choice
from cowbeam.decoder.flight import Flight, Proposals, foresee, in_order, parents_of
from cowbeam.decoder.step_graph import CapturedStep, GraphMemory, StepGraphs
from cowbeam.kernels.advance import advance_rows

logger = logging.getLogger("cowbeam")

SIGHTINGS = 4  # of a signature before it is captured
MAX_CAPTURED = 16  # after one captured step
MAX_SIGNATURES = 1024  # whose sightings are counted


@dataclass(frozen=True)
class Ahead:
    """What the device foresees."""

    proposals: Proposals
    choices: list[Choice]  # of each cohort
    row_of: Tensor  # [rows] the row of each chosen token, in the flight's order
    packed: Tensor  # float64: `Proposals.packed`, then tokens and slots of the next step's rows
    tables_before: Tensor  # the block tables as they were
    sizes: list[int]  # rows of each group

    @cached_property
    def rows(self) -> list[Tensor]:
        """Of the next step, each group's in rank order."""
        return list(torch.split(self.row_of, self.sizes))

    @cached_property
    def choice_of_group(self) -> list[Choice]:
        """In the flight's order."""
        cohorts = self.proposals.cohorts
        parts = (in_order(cohorts, part, self.sizes) for part in zip(*self.choices, strict=True))
        return [Choice(*of_group) for of_group in zip(*parts, strict=True)]


def look_ahead(
    flight: Flight, inputs: DecodeInputs, upcoming: Tensor, tables_before: Tensor, block_size: int, scratch_block: int
) -> Ahead:
    """Foresee the choice and make ``inputs`` the next step's, in place.

    Args:
        flight: the step just computed.
        inputs: of that step, whose rows may be more than the flight's.
        upcoming: [rows] the ids of the next free blocks.
        tables_before: [all rows, columns] is filled with the block tables as they are.
        block_size: tokens of a block.
        scratch_block: see `advance_rows`.
    """
    proposals = Proposals.of(flight)
    choices = foresee(flight, proposals)
    sizes, cohorts = [len(rows) for rows in flight.rows], proposals.cohorts
    parents = [parents_of(flight, cohort, choice) for cohort, choice in zip(cohorts, choices, strict=True)]
    tokens = [choice.tokens for choice in choices]
    num_rows = flight.num_rows
    tables_before.copy_(inputs.block_tables[: len(tables_before)])
    row_of = advance_rows(
        parents[0] if len(cohorts) == 1 else torch.cat(in_order(cohorts, parents, sizes)),
        tokens[0] if len(cohorts) == 1 else torch.cat(in_order(cohorts, tokens, sizes)),
        inputs,
        tables_before=tables_before,
        upcoming=upcoming,
        block_size=block_size,
        scratch_block=scratch_block,
    )
    made = [inputs.token_ids[:num_rows].double(), inputs.slots[:num_rows].double()]
    return Ahead(proposals, choices, row_of, torch.cat([proposals.packed, *made]), tables_before, sizes)


class _CapturedChoice:
    """`look_ahead` for flights of one signature after one captured step, over buffers of its own.

    The buffers lie outside the graphs' memory, which a captured step may use for something else. What a replay leaves
    in them, the next one begins with: its flight's rows, and the scores of its beams.
    """

    def __init__(self, flight: Flight, ahead: Ahead, inputs: DecodeInputs) -> None:
        """``flight`` is one of the signature, ``ahead`` what followed it."""
        self._inputs = inputs
        self._upcoming = torch.empty(flight.num_rows, dtype=torch.long, device=flight.logits.device)
        choices = [Choice(*(part.clone() for part in choice)) for choice in ahead.choices]
        self._ahead = replace(
            ahead,
            choices=choices,
            row_of=ahead.row_of.clone(),
            packed=ahead.packed.clone(),
            tables_before=torch.empty_like(ahead.tables_before),
        )
        self._given = [
            choice.scores if source.is_beams else given.clone()
            for source, choice, given in zip(flight.sources, self._ahead.choice_of_group, flight.given, strict=True)
        ]
        self._flight = replace(flight, groups=[], rows=self._ahead.rows, given=self._given)
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, memory: GraphMemory, block_size: int, scratch_block: int) -> None:
        """Record, without running it."""
        mine = self._ahead
        with memory.capture(self._graph):
            now = look_ahead(self._flight, self._inputs, self._upcoming, mine.tables_before, block_size, scratch_block)
            for name in ("tokens", "ranks", "scores"):
                _copy([getattr(c, name) for c in mine.choices], [getattr(c, name) for c in now.choices])
            _copy([mine.row_of], [now.row_of])
            _copy([mine.packed], [now.packed])
        # The graph reads and writes what the sources own, and they may be gone before it.
        self._kept = [source.buffers for source in self._flight.sources]
        self._flight = replace(self._flight, sources=[])

    def replay(self, flight: Flight, upcoming: Sequence[int]) -> Ahead:
        """What is returned lies in the buffers: valid until the next call."""
        for mine, theirs in ((self._flight.rows, flight.rows), (self._given, flight.given)):
            pairs = [pair for pair in zip(mine, theirs, strict=True) if pair[0] is not pair[1]]
            _copy([static for static, _ in pairs], [now for _, now in pairs])
        self._upcoming.copy_(ready_to_send(upcoming, torch.long, self._upcoming.device), non_blocking=True)
        self._graph.replay()
        return self._ahead


def _copy(buffers: list[Tensor], tensors: list[Tensor]) -> None:
    """In as few launches as there are types."""
    if buffers:
        torch._foreach_copy_(buffers, tensors)


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
        """`look_ahead` after the last decoded step, ``flight``, or for a part of its groups."""
        step = self._graphs.step
        signature = tuple(s.signature(len(rows)) for s, rows in zip(flight.sources, flight.rows, strict=True))
        if step is None or None in signature or not flight.is_whole or not self._can_capture:
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
            assert self._graphs.memory is not None, "a step was captured"
            captured.capture(self._graphs.memory, self._block_size, self._scratch_block)
        except RuntimeError as error:  # the step itself is computed: what is lost is only time
            logger.warning("choices go on without CUDA graphs: %s", str(error).splitlines()[0])
            self._can_capture = False
            return
        choices.keep(signature, captured)

    def _look_ahead(self, flight: Flight, upcoming: Sequence[int]) -> Ahead:
        inputs = self._graphs.inputs
        before = torch.empty_like(inputs.block_tables[: len(flight.logits)])
        ids = to_device(upcoming, torch.long, flight.logits.device)
        return look_ahead(flight, inputs, ids, before, self._block_size, self._scratch_block)
