"""Steps in flight: the device begins a step before the host has seen the candidates of the one before.

The device foresees what the host will choose (`CandidateSource.foresee`), lays out its rows and takes its blocks as the
host will (`kernels/advance.py`), and computes on. Meanwhile the host chooses, forks, frees and appends. Where it finds
that a branch has ended, the step in flight is dropped: what that step wrote lies in slots that nobody reads.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from cowbeam.decoder.batch import DecodeInputs, Layout, to_device
from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.candidates import CandidateSource
from cowbeam.decoder.choice_graph import ChoiceGraphs
from cowbeam.decoder.flight import Flight, Proposals, Share, given_to, of_each_group
from cowbeam.decoder.group import Group
from cowbeam.decoder.step_graph import StepGraphs


class Landing:
    """A flight's candidates on their way to the host, and the rows of the next step where the device made them."""

    def __init__(self, packed: Tensor, shares: Sequence[Share]) -> None:
        self._shares = shares
        self._size = sum(itertools.chain.from_iterable(share.sizes for share in shares))
        self._host = packed
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
        self._sent = mark(packed)

    def candidates(self) -> list[tuple[Tensor, Tensor]]:
        """Wait; of each group the candidates, [3, n] as ``propose`` gives them, and its rows' greatest logits."""
        if self._sent is not None:
            self._sent.synchronize()
        return of_each_group(self._host[: self._size], self._shares)

    def check(self, layout: Layout, block_size: int) -> None:
        """Assert that the device has laid out the next step as the host has."""
        tokens = [branch.last_token.token_id for branch in layout.branches if branch.last_token is not None]
        made = self._host[self._size :].tolist()
        assert made == [*tokens, *layout.slots(block_size)], "the device took other rows, tokens or slots than the host"


class Lookahead:
    """Launches steps: from the host's layout, or from the choice that the device foresees."""

    def __init__(self, graphs: StepGraphs, block_size: int, scratch_block: int) -> None:
        self._graphs = graphs
        self._choices = ChoiceGraphs(graphs, block_size, scratch_block)

    def launch(
        self, groups: Sequence[Group], sources: Sequence[CandidateSource], inputs: DecodeInputs, layout: Layout
    ) -> Flight:
        """A step as the host laid it out."""
        logits = self._graphs.decode(inputs)
        rows = to_device(list(itertools.chain(*layout.rows_of_group)), torch.long, logits.device)
        of_group = list(torch.split(rows, list(map(len, layout.rows_of_group))))
        given = given_to(sources, logits.device)
        return Flight(list(groups), list(sources), logits, of_group, given)

    def may_follow(self, flight: Flight, pool: BlockPool) -> bool:
        """A next step is sure to be needed unless all branches end early, and there is room for it."""
        return (
            flight.num_rows <= pool.num_free
            and all(source.is_foreseeable for source in flight.sources)
            and not all(group.is_at_last_token for group in flight.groups)
            and max(branch.num_slots for g in flight.groups for branch in g.branches) < self._graphs.max_length
        )

    @torch.inference_mode()
    def land(self, flight: Flight) -> Landing:
        """Propose candidates and send them to the host."""
        proposals = Proposals.of(flight)
        return Landing(proposals.packed, proposals.shares)

    @torch.inference_mode()
    def land_and_go_on(self, flight: Flight, pool: BlockPool) -> tuple[Landing, Flight]:
        """The same, and begin the step after ``flight`` with what the device foresees.

        Of a part of a step's groups, too: the others have landed before, and the next step is without them.
        """
        ahead = self._choices.choose(flight, pool.upcoming(flight.num_rows))
        landing = Landing(ahead.packed, ahead.proposals.shares)
        if flight.is_whole:
            logits = self._graphs.decode_again()
        else:
            logits = self._graphs.decode(self._graphs.inputs.first(list(map(len, flight.rows))))
        choices = ahead.choice_of_group
        for source, choice in zip(flight.sources, choices, strict=True):
            source.follow(choice.ranks, choice.tokens)
        others = iter(given_to([source for source in flight.sources if not source.is_beams], logits.device))
        given = [
            choice.scores if source.is_beams else next(others)
            for source, choice in zip(flight.sources, choices, strict=True)
        ]
        next_flight = Flight(flight.groups, flight.sources, logits, ahead.rows, given, ahead.tables_before)
        return landing, next_flight

    def tables(self, flight: Flight) -> Tensor:
        """The device's block tables of the last launched step, ``flight``."""
        return self._graphs.inputs.block_tables[: flight.num_rows]

    def drop(self, flight: Flight) -> Tensor:
        """Forget a step in flight; returns the block tables of the step before."""
        for source in flight.sources:
            source.unfollow()
        assert flight.tables_before is not None, "only a step that the device laid out itself is dropped"
        return flight.tables_before


def mark(tensor: Tensor) -> torch.cuda.Event | None:
    """The point by which the device is done with all that was launched so far; None where it is done at once."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def wait_for(launched: torch.cuda.Event | None) -> None:
    """The device waits, not the host: each turn runs on the stream of the thread that turns the engine.

    It may be another stream than the one that something was launched on.
    """
    if launched is not None:
        torch.cuda.current_stream().wait_event(launched)
