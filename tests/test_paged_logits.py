"""At every step the logits over blocks equal a full recompute from tokens, with all that no branch owns set to NaN.

The master test of references in the field: a skipped reorder, a copy not made, a slot written by the wrong branch or
read past a length gives fluent text and wrong logits (transformers #46612, vLLM #344, xLLM #1984, TensorRT-LLM #15461).
"""

import random
from itertools import pairwise
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams
from cowbeam.decoder.batch import DecodeInputs
from cowbeam.decoder.branches import Branch
from cowbeam.decoder.engine import Engine
from cowbeam.decoder.group import Group
from cowbeam.decoder.kv_cache import KVCache
from fakes import BLOCK_SIZES, FAMILIES, random_prompt, tiny_model
from families import LEVEL_2, LEVEL_3, UNLIKE_THEMSELVES, family_model

TOLERANCE = 1e-4  # of the greatest logit


class Watch:
    """Stands between the engine and the model: poisons what must not be read, and compares what comes out."""

    def __init__(self, decoder: Decoder) -> None:
        engine = decoder._engine
        assert engine is not None
        self.decoder = decoder
        self.engine: Engine = engine
        engine._looks_ahead = False  # the host's branches must be those of the step that is looked at
        self.adapter = engine._adapter
        self.steps = self.rows = self.copies = self.shared_blocks = 0
        self._decode, self._prefill = engine._graphs.decode, self.adapter.prefill

    def __enter__(self) -> "Watch":
        self._patches = [
            mock.patch.object(self.engine._graphs, "decode", self.decode),
            mock.patch.object(self.adapter, "prefill", self.prefill),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def prefill(
        self, cache: KVCache, prompts: list[list[int]], tables: list[list[int]], owners: list[Branch]
    ) -> Tensor:
        """Nothing of the prompts is written yet: all but the running branches' slots is poisoned."""
        planted = [branch for group in self.groups for branch in group.branches if branch.row is None]
        self.poison(cache, unwritten=dict.fromkeys(planted, 0))
        logits = self._prefill(cache, prompts, tables, owners)
        for prompt, row in zip(prompts, logits, strict=True):
            self.compare(row[None], self.recompute([list(prompt)]))
        self.decoder.check_integrity()
        return logits

    def decode(self, inputs: DecodeInputs) -> Tensor:
        """Slots are reserved; the step's copies and each branch's newest slot are still to be written."""
        self.decoder.check_integrity()
        branches = [branch for group in self.groups for branch in group.branches]
        self.poison(self.engine._cache, unwritten={branch: branch.num_slots - 1 for branch in branches})
        logits = self._decode(inputs)
        for group in self.groups:
            sequences = [
                [*group.request.prompt_token_ids, *(token.token_id for token in branch.tokens)]
                for branch in group.branches
            ]
            rows = [branch.row for branch in group.branches]
            self.compare(logits[torch.tensor(rows)], self.recompute(sequences))
        self.check_rows(inputs)
        self.steps += 1
        self.rows += len(branches)
        self.copies += int((inputs.copy_sources != inputs.copy_destinations).sum())
        return logits

    def check_rows(self, inputs: DecodeInputs) -> None:
        """Rows in tree order: those that share a block are neighbours, and the kernel reads it once for all."""
        columns = max(len(branch.block_table) for group in self.groups for branch in group.branches)
        by_row = sorted((b for group in self.groups for b in group.branches), key=lambda b: b.row or 0)
        tables = [branch.block_table for branch in by_row]
        for row, table in enumerate(tables):
            assert inputs.block_tables[row, : len(table)].tolist() == table, "the device's table is not the host's"
        for column in range(columns):
            blocks = [table[column] if column < len(table) else None for table in tables]
            changes = sum(one != other for one, other in pairwise(blocks) if other is not None)
            assert changes <= len(set(blocks) - {None}), f"rows that share a block are apart: {blocks}"

    @property
    def groups(self) -> list[Group]:
        return self.engine._scheduler.running

    def poison(self, cache: KVCache, unwritten: dict[Branch, int]) -> None:
        """NaN into every slot but those that hold a token of a live branch, recounted from the block tables."""
        holds_token = torch.zeros(cache.scratch_block + 1, cache.block_size, dtype=torch.bool)
        for group in self.groups:
            for branch in group.branches:
                written = unwritten.get(branch, branch.num_slots)
                for column, block in enumerate(branch.block_table):
                    holds_token[block, : max(0, written - column * cache.block_size)] = True
        for layer in cache.layers:
            for view in (layer.key, layer.value):
                view.transpose(1, 2)[~holds_token] = torch.nan

    def recompute(self, sequences: list[list[int]]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.decoder.model(
                input_ids=torch.tensor(sequences, device=self.decoder.model.device), use_cache=False
            ).logits[:, -1]
        return logits

    def compare(self, got: Tensor, want: Tensor) -> None:
        error = float((got - want).abs().max())
        assert error <= TOLERANCE * max(1.0, float(want.abs().max())), f"step {self.steps}: logits differ by {error}"


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_step_equals_a_full_recompute(family: str, block_size: int) -> None:
    assert_every_step_equals_a_full_recompute(tiny_model(family), block_size, f"{family} {block_size}")


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("family", [*LEVEL_2, *(name for name in LEVEL_3 if name not in UNLIKE_THEMSELVES)])
def test_every_step_equals_a_full_recompute_on_other_levels(family: str, block_size: int) -> None:
    """Rows of unequal length are padded, and no weight of 0 meets a NaN; states fork with their branches."""
    assert_every_step_equals_a_full_recompute(family_model(family, scale=0.3), block_size, f"{family} {block_size}")


def assert_every_step_equals_a_full_recompute(model: PreTrainedModel, block_size: int, seed: str) -> None:
    """Beams that fork in the middle of blocks, samples and greedy search side by side, of odd prompt lengths."""
    rng = random.Random(seed)
    decoder = Decoder(model, block_size=block_size, num_blocks=1024 // block_size)
    prompts = [random_prompt(rng, 1, 22) for _ in range(3)]
    params = [
        BeamSearchParams(num_beams=rng.randint(3, 6), max_new_tokens=9, eos_token_id=[]),
        SamplingParams(num_return_sequences=3, max_new_tokens=rng.randint(4, 12), seed=1, eos_token_id=[5, 6, 7]),
        BeamSearchParams(num_beams=rng.randint(1, 2), max_new_tokens=rng.randint(4, 12), eos_token_id=[]),
    ]
    with Watch(decoder) as watch:
        decoder.generate(prompts, params)
    assert watch.steps >= 8
    assert block_size == 1 or watch.copies, "no block was copied: nothing was shown"
    assert decoder.num_free_blocks == decoder.num_blocks


def without_copies(cache: KVCache, sources: Tensor, destinations: Tensor) -> None:
    """The bug of xLLM #1984: copy-on-write decided, and not run on this back end."""


def test_the_watch_catches_a_copy_that_is_not_run() -> None:
    decoder = Decoder(tiny_model("llama"), block_size=4, num_blocks=256)
    with (
        mock.patch.object(KVCache, "copy", without_copies),
        Watch(decoder),
        pytest.raises(AssertionError, match="logits differ by nan"),
    ):
        decoder.generate([3, 1, 4, 1, 5], BeamSearchParams(num_beams=4, max_new_tokens=6, eos_token_id=[]))
    assert decoder.num_free_blocks == decoder.num_blocks


def test_the_watch_catches_rows_in_the_wrong_order() -> None:
    """The bug of transformers #46612: the reorder after a choice is skipped, tokens go on beside others' caches."""
    decoder = Decoder(tiny_model("llama"), block_size=4, num_blocks=256)
    with Watch(decoder) as watch:
        decode = watch._decode

        def shuffled(inputs: DecodeInputs) -> Tensor:
            inputs.block_tables.copy_(inputs.block_tables.flip(0))
            return decode(inputs)

        watch._decode = shuffled
        with pytest.raises(AssertionError, match="logits differ by"):
            decoder.generate([3, 1, 4, 1, 5], BeamSearchParams(num_beams=4, max_new_tokens=8, eos_token_id=[]))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200))
def test_every_step_equals_a_full_recompute_of_longer_searches(seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice(BLOCK_SIZES)
    decoder = Decoder(tiny_model(rng.choice(sorted(FAMILIES))), block_size=block_size, num_blocks=8192 // block_size)
    prompts = [random_prompt(rng, 1, 150) for _ in range(rng.randint(1, 4))]
    params = [
        BeamSearchParams(num_beams=rng.randint(1, 20), max_new_tokens=rng.randint(1, 40), eos_token_id=[5])
        for _ in prompts
    ]
    with Watch(decoder):
        decoder.generate(prompts, params)
