"""The rows that the device makes for itself against those of the host's block tables, which decide."""

import random

import pytest
import torch
from torch import Tensor

from cowbeam.decoder.batch import Batch, DecodeInputs, lay_out
from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.group import Group, KVBytes, Request
from cowbeam.decoder.params import BeamSearchParams
from cowbeam.decoder.strategy import Continuation
from cowbeam.kernels.advance import advance_rows

SCRATCH = 9999


class Walk:
    """Groups whose branches continue random parents, on the host and on the device."""

    def __init__(self, seed: int, block_size: int, device: str = "cpu") -> None:
        self.rng = random.Random(seed)
        self.block_size = block_size
        self.device = torch.device(device)
        self.pool = BlockPool(2000, block_size)
        self.batch = Batch(block_size, self.device, SCRATCH)
        self.groups = [self.plant() for _ in range(self.rng.randint(1, 4))]
        self.fill_up(self.upload())

    def plant(self) -> Group:
        length, width = self.rng.randint(1, 3 * self.block_size), self.rng.choice([1, 2, 5, 16, 40])
        params = BeamSearchParams(num_beams=width, max_new_tokens=400)
        group = Group(Request((1,) * length, params, frozenset(), seed=None), self.pool, KVBytes(1, ()))
        group.plant()
        self.batch.add_group(group)
        self.choose(group, [0] * width)
        return group

    def choose(self, group: Group, parents: list[int]) -> list[int]:
        tokens = [self.rng.randrange(1000) for _ in parents]
        group._advance(group.branches, [Continuation(p, t, 0.0) for p, t in zip(parents, tokens, strict=True)])
        return tokens

    def upload(self) -> DecodeInputs:
        self.layout = lay_out(self.groups)
        return self.batch.upload(self.layout)

    @property
    def num_rows(self) -> int:
        return len(self.layout.branches)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in vars(self.inputs).items() if isinstance(value, Tensor)}

    def fill_up(self, inputs: DecodeInputs) -> None:
        """As in a captured step: more rows and columns than are used."""
        self.inputs = DecodeInputs(**{name: self.pad(name, value) for name, value in vars(inputs).items()})
        self.padding = {name: value[len(inputs.token_ids) :].clone() for name, value in self.tensors.items()}

    def pad(self, name: str, value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        columns = (0, 40) if name == "block_tables" else ()
        padded = torch.nn.functional.pad(value, (*columns, 0, 3), value=7 if name != "group_starts" else True)
        return padded.clone()

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def divide(self) -> tuple[list[list[int]], list[Group]]:
        """The rows of the groups that go on, and those that end here: one of twenty."""
        staying = [number for number in range(len(self.groups)) if self.rng.random() < 0.95] or [0]
        ending = [group for number, group in enumerate(self.groups) if number not in staying]
        self.groups = [self.groups[number] for number in staying]
        return [self.layout.rows_of_group[number] for number in staying], ending

    def step(self) -> None:
        """Both sides choose the same; then every number of theirs must be the same."""
        num_rows = self.num_rows
        rows_of_group, ending = self.divide()
        sizes = list(map(len, rows_of_group))
        upcoming = torch.tensor(self.pool.upcoming(sum(sizes)), device=self.device)
        for group in ending:
            group.free()
        parent_rows, tokens = [], []
        for group, rows in zip(self.groups, rows_of_group, strict=True):
            parents = [self.rng.randrange(len(rows)) for _ in rows]
            if self.rng.random() < 0.2:
                parents = list(range(len(rows)))  # as samples go on
            tokens += self.choose(group, parents)
            parent_rows += [rows[parent] for parent in parents]
        table = self.inputs.block_tables
        row_of = advance_rows(
            torch.tensor(parent_rows, device=self.device),
            torch.tensor(tokens, device=self.device),
            self.inputs,
            tables_before=table[:num_rows].clone(),
            upcoming=upcoming,
            block_size=self.block_size,
            scratch_block=SCRATCH,
        )
        if ending:
            self.fill_up(self.inputs.first(sizes))
            table = self.inputs.block_tables
        host = self.upload()
        assert row_of.tolist() == [row for rows in self.layout.rows_of_group for row in rows]
        for name in ("token_ids", "positions", "slots", "lengths", "copy_sources", "copy_destinations", "group_starts"):
            assert getattr(self.inputs, name)[: self.num_rows].tolist() == getattr(host, name).tolist(), name
        for row, branch in enumerate(self.layout.branches):
            assert table[row, : len(branch.block_table)].tolist() == branch.block_table
        for name, value in self.padding.items():
            assert torch.equal(self.tensors[name][self.num_rows :], value), f"{name} of the padding rows"


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(12))
def test_the_device_makes_the_rows_that_the_host_makes(seed: int, block_size: int) -> None:
    """Also where groups of other widths end: windows of attention lay across the others' borders from there on."""
    walk = Walk(seed, block_size)
    walk.go(40)


def test_a_copy_less_would_be_noticed() -> None:
    """The comparison compares: with another block size on the device it fails."""
    walk = Walk(3, 4)
    walk.block_size = 8
    with pytest.raises(AssertionError):
        walk.go(10)
