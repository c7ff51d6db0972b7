"""Steps in flight: the device begins a step before the host has seen the candidates of the one before.

The device foresees what the host will choose (`CandidateSource.foresee`), lays out its rows and takes its blocks as the
host will (`kernels/advance.py`), and computes on. Meanwhile the host chooses, forks, frees and appends. Where it finds
that a branch has ended, the step in flight is dropped: what that step wrote lies in slots that nobody reads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cowbeam.decoder.batch import DecodeInputs, Layout
from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.candidates import CandidateSource, to_device
from cowbeam.decoder.group import Group
from cowbeam.decoder.step_graph import StepGraphs
from cowbeam.kernels.advance import advance_rows


class Flight:
    """One step of some groups, computed or being computed; its candidates are on their way to the host.

    ``rows`` are each group's rows on the device, in rank order. ``inputs`` are the step's tokens and slots where the
    device made them, [2, rows]; ``tables_before`` the block tables of the step before.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        sources: Sequence[CandidateSource],
        logits: Sequence[Tensor],
        running: Sequence[Tensor],
        rows: Sequence[Tensor] = (),
        inputs: Tensor | None = None,
        tables_before: Tensor | None = None,
    ) -> None:
        self.groups = list(groups)
        self.sources = list(sources)
        self.logits = list(logits)
        self.maxima: list[Tensor] = []
        self.rows = list(rows)
        self.tables_before = tables_before
        self.proposals = [s.propose(of, scores) for s, of, scores in zip(sources, logits, running, strict=True)]
        flat = [proposal.flatten() for proposal in self.proposals]
        self._download = _Download(torch.cat(flat if inputs is None else [*flat, inputs.double().flatten()]))
        self._expected: list[int] | None = None

    def let_go_of_logits(self) -> None:
        """Their memory is the next step's; what tells a fault in them is kept."""
        self.maxima = [logits.amax(-1) for logits in self.logits]
        self.logits = []

    def expect(self, layout: Layout, block_size: int) -> None:
        """What the host has laid out for this step; compared with what the device did when it lands."""
        tokens = [branch.last_token.token_id for branch in layout.branches if branch.last_token is not None]
        self._expected = [*tokens, *layout.slots(block_size)]

    def land(self) -> list[Tensor]:
        """Wait for the candidates, [3, candidates] of each group as ``propose`` gives them, on the host."""
        numbers = self._download.wait()
        if self._expected is not None:
            found = numbers[len(numbers) - len(self._expected) :].long().tolist()
            assert found == self._expected, "the device took other rows, tokens or slots than the host"
        sizes = [proposal.numel() for proposal in self.proposals]
        return [flat.view(3, -1) for flat in torch.split(numbers[: sum(sizes)], sizes)]


class _Download:
    """A copy to the host that the host need not wait for at once."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host


class Lookahead:
    """Launches steps: from the host's layout, or from the choice that the device foresees."""

    def __init__(self, graphs: StepGraphs, block_size: int, scratch_block: int) -> None:
        self._graphs = graphs
        self._block_size = block_size
        self._scratch_block = scratch_block

    def launch(
        self, groups: Sequence[Group], sources: Sequence[CandidateSource], inputs: DecodeInputs, layout: Layout
    ) -> Flight:
        """A step as the host laid it out."""
        logits = self._graphs.decode(inputs)
        of_group = [_take_rows(logits, rows) for rows in layout.rows_of_group]
        rows = [to_device(rows, torch.long, logits.device) for rows in layout.rows_of_group]
        return Flight(groups, sources, of_group, [source.running for source in sources], rows)

    def may_follow(self, flight: Flight, pool: BlockPool) -> bool:
        """A next step is sure to be needed unless a branch ends early, and there is room for it."""
        return (
            sum(map(len, flight.rows)) <= pool.num_free
            and all(g.num_generated + 1 < g.request.params.max_new_tokens for g in flight.groups)
            and all(p.shape[1] >= len(rows) for p, rows in zip(flight.proposals, flight.rows, strict=True))
            and max(branch.num_slots for g in flight.groups for branch in g.branches) < self._graphs.max_length
        )

    def launch_next(self, flight: Flight, pool: BlockPool) -> Flight:
        """The step after ``flight``, from what the device foresees."""
        choices = [s.foresee(proposal) for s, proposal in zip(flight.sources, flight.proposals, strict=True)]
        parents = torch.cat([rows[choice.ranks] for rows, choice in zip(flight.rows, choices, strict=True)])
        inputs, num_rows = self._graphs.inputs, len(parents)
        tables_before = inputs.block_tables[:num_rows].clone()
        row_of = advance_rows(
            parents,
            torch.cat([choice.tokens for choice in choices]),
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            slots=inputs.slots,
            lengths=inputs.lengths,
            block_tables=inputs.block_tables,
            tables_before=tables_before,
            copy_sources=inputs.copy_sources,
            copy_destinations=inputs.copy_destinations,
            upcoming=to_device(pool.upcoming(num_rows), torch.long, parents.device),
            block_size=self._block_size,
            scratch_block=self._scratch_block,
        )
        rows = torch.split(row_of, [len(choice.ranks) for choice in choices])
        made = torch.stack([inputs.token_ids[:num_rows], inputs.slots[:num_rows]])
        flight.let_go_of_logits()
        logits = self._graphs.decode_again()
        for source, choice in zip(flight.sources, choices, strict=True):
            source.follow(choice.ranks, choice.tokens)
        return Flight(
            flight.groups,
            flight.sources,
            [logits[of_group] for of_group in rows],
            [choice.scores for choice in choices],
            rows,
            made,
            tables_before,
        )

    def tables(self, flight: Flight) -> Tensor:
        """The device's block tables of the last launched step, ``flight``."""
        return self._graphs.inputs.block_tables[: sum(map(len, flight.rows))]

    def drop(self, flight: Flight) -> Tensor:
        """Forget a step in flight; returns the block tables of the step before."""
        for source in flight.sources:
            source.unfollow()
        assert flight.tables_before is not None, "only a step that the device laid out itself is dropped"
        return flight.tables_before


def _take_rows(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """A group's logits in rank order."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return logits[rows[0] : rows[0] + len(rows)]
    return logits[torch.tensor(rows, device=logits.device)]
