"""One step of some groups, and their candidates: in as many launches as there are kinds of groups, not groups."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cowbeam.decoder.batch import to_device
from cowbeam.decoder.candidates import CandidateSource, Choice, Kind, columns_of
from cowbeam.decoder.group import Group
from cowbeam.decoder.sampling import uniforms
from cowbeam.kernels.draw_tokens import draw_tokens
from cowbeam.kernels.top_candidates import top_candidates


@dataclass(frozen=True)
class Flight:
    """One step of some groups, computed or being computed, of which nothing is chosen yet."""

    groups: list[Group]
    sources: list[CandidateSource]
    logits: Tensor  # [rows, vocabulary]
    rows: list[Tensor]  # each group's rows, in rank order
    given: list[Tensor]  # to each source: see `given_to`
    tables_before: Tensor | None = None  # the block tables of the step before, where the device laid this one out

    @property
    def num_rows(self) -> int:
        """Rows of all groups."""
        return sum(len(rows) for rows in self.rows)

    @property
    def is_whole(self) -> bool:
        """All rows of the step are the groups'."""
        return self.num_rows == len(self.logits)

    def split(self) -> tuple["Flight", "Flight"]:
        """Those whose next token is the last they may have, and those who go on."""
        last = [number for number, group in enumerate(self.groups) if group.is_at_last_token]
        others = [number for number, group in enumerate(self.groups) if not group.is_at_last_token]
        return self._part(last), self._part(others)

    def _part(self, members: Sequence[int]) -> "Flight":
        if len(members) == len(self.groups):
            return self
        return replace(
            self,
            groups=[self.groups[number] for number in members],
            sources=[self.sources[number] for number in members],
            rows=[self.rows[number] for number in members],
            given=[self.given[number] for number in members],
        )


def given_to(sources: Sequence[CandidateSource], device: torch.device) -> list[Tensor]:
    """What each source needs to propose, see `CandidateSource.propose`; sent in two pieces."""
    if not sources:
        return []
    scores = [source.beam_scores for source in sources]
    draws = [source.draws for source in sources]
    numbers = uniforms(*zip(*itertools.chain(*draws), strict=True)) if any(draws) else []
    of_beams = to_device(list(itertools.chain(*scores)), torch.float32, device)
    of_samples = to_device(numbers, torch.float64, device)
    parts = zip(
        torch.split(of_beams, list(map(len, scores))),
        torch.split(of_samples, list(map(len, draws))),
        strict=True,
    )
    return [beams if len(beams) else samples for beams, samples in parts]


class Cohort(NamedTuple):
    """Groups of a flight whose candidates are found together."""

    members: list[int]  # their numbers in the flight, ascending
    kind: Kind | None  # None: one group, by its own source


def cohorts_of(flight: Flight) -> list[Cohort]:
    """All groups of the flight, those of a kind together."""
    together: dict[Kind, list[int]] = {}
    alone: list[int] = []
    for number, (source, rows) in enumerate(zip(flight.sources, flight.rows, strict=True)):
        kind = source.kind(len(rows))
        if kind is None:
            alone.append(number)
        else:
            together.setdefault(kind, []).append(number)
    if not flight.logits.is_cuda:  # there a source of one group does with fewer passes over the logits
        alone += [numbers[0] for numbers in together.values() if len(numbers) == 1]
        together = {kind: numbers for kind, numbers in together.items() if len(numbers) > 1}
    return [Cohort(numbers, kind) for kind, numbers in together.items()] + [Cohort([number], None) for number in alone]


class Share(NamedTuple):
    """What a cohort's part of the packed proposals holds, of each member."""

    members: list[int]
    candidates: list[int]
    ranks: list[int]

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of the candidates, three each, and of the ranks."""
        return 3 * sum(self.candidates), sum(self.ranks)


@dataclass(frozen=True)
class Proposals:
    """The candidates of each cohort, its members' one after another."""

    cohorts: list[Cohort]
    columns: list[Tensor]  # [3, candidates]: see `CandidateSource.propose`
    maxima: list[Tensor]  # [ranks]
    shares: list[Share]

    @classmethod
    def of(cls, flight: Flight) -> "Proposals":
        """Find them, on the device."""
        cohorts = cohorts_of(flight)
        found = [_propose(flight, cohort) for cohort in cohorts]
        shares = [
            _share(flight, cohort, columns.shape[1], len(maxima))
            for cohort, (columns, maxima) in zip(cohorts, found, strict=True)
        ]
        return cls(cohorts, [columns for columns, _ in found], [maxima for _, maxima in found], shares)

    @property
    def packed(self) -> Tensor:
        """For the host, flat in float64."""
        both = zip(self.columns, self.maxima, strict=True)
        return torch.cat([part for columns, maxima in both for part in (columns.flatten(), maxima.double())])


def of_each_group(packed: Tensor, shares: Sequence[Share]) -> list[tuple[Tensor, Tensor]]:
    """Of each group its candidates, [3, n], and its rows' greatest logits."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    numbers = iter(torch.split(packed, [size for share in shares for size in share.sizes]))
    for members, candidates, ranks in shares:
        columns, maxima = next(numbers).view(3, -1), next(numbers)
        parts = zip(torch.split(columns, candidates, 1), torch.split(maxima, ranks), strict=True)
        found |= dict(zip(members, parts, strict=True))
    return [found[number] for number in range(len(found))]


def foresee(flight: Flight, proposals: Proposals) -> list[Choice]:
    """What each cohort's strategies will choose; see `CandidateSource.foresee`."""
    return [
        flight.sources[cohort.members[0]].foresee(columns, len(cohort.members))
        for cohort, columns in zip(proposals.cohorts, proposals.columns, strict=True)
    ]


def parents_of(flight: Flight, cohort: Cohort, choice: Choice) -> Tensor:
    """The rows that the cohort's choice continues, its members' one after another."""
    rows = [flight.rows[member] for member in cohort.members]
    if cohort.kind is None:
        return rows[0][choice.ranks]
    if cohort.kind.name == "beams":
        return torch.stack(rows).gather(1, choice.ranks.view(len(rows), -1)).flatten()
    return torch.cat(rows)  # each rank goes on by itself


def in_order(cohorts: Sequence[Cohort], parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Of tensors with a part a cohort the groups' shares, in the flight's order; ``sizes`` has one a group."""
    found: dict[int, Tensor] = {}
    for cohort, part in zip(cohorts, parts, strict=True):
        found |= dict(zip(cohort.members, torch.split(part, [sizes[member] for member in cohort.members]), strict=True))
    return [found[number] for number in range(len(found))]


def _propose(flight: Flight, cohort: Cohort) -> tuple[Tensor, Tensor]:
    """Columns and maxima of the cohort."""
    logits, vocabulary = flight.logits, flight.logits.shape[1]
    members, kind = cohort
    if kind is None:
        (member,) = members
        return flight.sources[member].propose(logits, flight.rows[member], flight.given[member])
    if kind.name == "beams":
        count = min(kind.num_candidates, kind.width * vocabulary)
        rows, given = (torch.stack([part[member] for member in members]) for part in (flight.rows, flight.given))
        scores, indices, maxima = top_candidates(logits, rows, given, count)
        return columns_of(scores.flatten(), indices.flatten(), vocabulary), maxima.flatten()
    rows = torch.cat([_ranks(flight, member) for member in members])
    ranks = torch.cat([flight.sources[member].ranks(len(_ranks(flight, member))) for member in members])
    if kind.name == "samples":
        tokens, scores, maxima = draw_tokens(logits, rows, torch.cat([flight.given[member] for member in members]))
    else:
        read = logits[rows].float()
        tokens, maxima = read.argmax(-1), read.amax(-1)
        scores = torch.log_softmax(read, -1).gather(1, tokens[:, None])[:, 0]
    return torch.stack([scores.double(), ranks, tokens.double()]), maxima


def _share(flight: Flight, cohort: Cohort, candidates: int, ranks: int) -> Share:
    members = cohort.members
    if cohort.kind is None or cohort.kind.name == "beams":
        return Share(members, *([total // len(members)] * len(members) for total in (candidates, ranks)))
    widths = [len(_ranks(flight, member)) for member in members]
    return Share(members, widths, widths)


def _ranks(flight: Flight, member: int) -> Tensor:
    """The row of each rank: at the first choice all stand on one."""
    rows, width = flight.rows[member], len(flight.given[member])
    return rows.expand(width) if width else rows
