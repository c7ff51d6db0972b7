"""At every step the logits over blocks equal a full recompute from tokens, with all that no branch owns set to NaN.

The master test of references in the field: a skipped reorder, a copy not made, a slot written by the wrong branch or
read past a length gives fluent text and wrong logits (transformers #46612, vLLM #344, xLLM #1984, TensorRT-LLM #15461).
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams, scheduler
from cowbeam.decoder.backlog import Piece
from cowbeam.decoder.batch import DecodeInputs
from cowbeam.decoder.blocks import Block, BlockId, BlockPool
from cowbeam.decoder.branches import Branch
from cowbeam.decoder.chain import links
from cowbeam.decoder.engine import Engine
from cowbeam.decoder.group import Group, Request
from cowbeam.decoder.kv_cache import KVCache
from cowbeam.decoder.scheduler import Part, worst_case_blocks
from cowbeam.decoder.swap import SwappedBlocks, SwapSpace
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
        self.steps = self.rows = self.copies = self.shared_blocks = self.pieces = 0
        self._decode, self._launch_pass = engine._graphs.decode, engine._compute
        self._compute = engine._adapter.compute
        self._save, self._bring_back = engine._swap_space.save, engine._swap_space.bring_back
        self.written: dict[Block, int] = {}  # slots from the first on; a block that is given away and taken anew is new
        self.swapped: list[tuple[SwappedBlocks, list[int]]] = []  # and how many slots of each were written

    def __enter__(self) -> "Watch":
        self._patches = [
            mock.patch.object(self.engine._graphs, "decode", self.decode),
            mock.patch.object(self.engine._adapter, "compute", self.compute),
            mock.patch.object(self.engine, "_compute", self.launch_pass),
            mock.patch.object(self.engine._swap_space, "save", self.save),
            mock.patch.object(self.engine._swap_space, "bring_back", self.bring_back),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def launch_pass(self, parts: Sequence[Part]) -> Tensor | None:
        self.parts = parts
        return self._launch_pass(parts)

    def compute(self, cache: KVCache, *pass_: Any) -> Tensor:
        """What the pass computes is still to be written, also the past that another piece of it computes."""
        self.poison(cache)
        logits = self._compute(cache, *pass_)
        for (group, piece), row in zip(self.parts, logits, strict=True):
            self.compare(row[None], self.recompute([self.sequence(group, piece)]))
            self.note_written([self.pool._live[block] for block in piece.block_table], piece.end)
        self.decoder.check_integrity()
        self.pieces += len(self.parts)
        return logits

    def sequence(self, group: Group, piece: Piece) -> list[int]:
        """All tokens up to the piece's last."""
        branch = next(branch for branch in group.branches if branch.block_table == piece.block_table)
        generated = [token.token_id for token in branch.tokens]
        return [*group.request.prompt_token_ids, *generated][: piece.end]

    def note_written(self, blocks: Sequence[Block], num_slots: int) -> None:
        for column, block in enumerate(blocks):
            slots = min(self.pool.block_size, num_slots - column * self.pool.block_size)
            self.written[block] = max(slots, self.written.get(block, 0))

    def save(self, block_ids: Sequence[BlockId]) -> SwappedBlocks | None:
        saved = self._save(block_ids)
        if saved is not None:
            self.swapped.append((saved, [self.written[self.pool._live[block]] for block in block_ids]))
        return saved

    def bring_back(self, saved: SwappedBlocks, block_ids: Sequence[BlockId]) -> None:
        """Blocks that come back hold what was written in those that went."""
        self._bring_back(saved, block_ids)
        (written,) = (slots for one, slots in self.swapped if one is saved)
        for block, num_slots in zip(block_ids, written[len(written) - len(block_ids) :], strict=True):
            self.written[self.pool._live[block]] = num_slots

    def decode(self, inputs: DecodeInputs) -> Tensor:
        """Slots are reserved; the step's copies and each branch's newest slot are still to be written."""
        self.decoder.check_integrity()
        branches = inputs.owners
        groups = [group for group in self.engine._scheduler.running if group.branches[0] in branches]
        assert [branch for group in groups for branch in self.in_row_order(group)] == branches
        self.poison(self.engine._cache)
        logits = self._decode(inputs)
        for branch in branches:
            self.note_written(links(branch.last_block), branch.num_slots)
        for group in groups:
            sequences = [
                [*group.request.prompt_token_ids, *(token.token_id for token in branch.tokens)]
                for branch in group.branches
            ]
            rows = [branch.row for branch in group.branches]
            self.compare(logits[torch.tensor(rows)], self.recompute(sequences))
        self.check_rows(inputs, groups)
        self.steps += 1
        self.rows += len(branches)
        self.copies += int((inputs.copy_sources != inputs.copy_destinations).sum())
        return logits

    def in_row_order(self, group: Group) -> list[Branch]:
        return sorted(group.branches, key=lambda branch: branch.row or 0)

    def check_rows(self, inputs: DecodeInputs, groups: Sequence[Group]) -> None:
        """Rows in tree order: those of a group that share a block are neighbours: it is read once for all."""
        for group in groups:
            by_row = self.in_row_order(group)
            for branch in by_row:
                table = branch.block_table
                assert inputs.block_tables[branch.row, : len(table)].tolist() == table, "not the host's table"
            for blocks in zip(*(branch.block_table for branch in by_row), strict=True):
                changes = sum(one != other for one, other in pairwise(blocks))
                assert changes < len(set(blocks)), f"rows that share a block are apart: {blocks}"

    @property
    def pool(self) -> BlockPool:
        return self.engine.pool

    def poison(self, cache: KVCache) -> None:
        """NaN into every slot but those that were written, in blocks that are held or kept to be found."""
        holds_token = torch.zeros(cache.scratch_block + 1, cache.block_size, dtype=torch.bool)
        for block in (*self.pool._live.values(), *self.pool.prefixes.kept):
            holds_token[block.block_id, : self.written.get(block, 0)] = True
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


@contextmanager
def short_passes(num_tokens: int) -> Iterator[None]:
    """Passes of so few tokens that prompts of tests are cut in many."""
    with (
        mock.patch.object(scheduler, "MAX_PASS_TOKENS", num_tokens),
        mock.patch.object(scheduler, "SHARE_OF_LONG", max(1, num_tokens // 2)),
    ):
        yield


def mixed_requests(rng: random.Random) -> tuple[list[list[int]], list[Any]]:
    """Half of the prompts begin alike; widths and kinds are mixed."""
    begin = random_prompt(rng, 18, 18)
    prompts = [[*begin[: rng.choice([8, 16, 17])], *random_prompt(rng, 1, 9)] for _ in range(4)]
    prompts += [random_prompt(rng, 1, 24) for _ in range(3)] + [prompts[0], [*begin[:16]]]
    params: list[Any] = [
        BeamSearchParams(num_beams=rng.randint(1, 5), max_new_tokens=rng.randint(3, 14), eos_token_id=[5, 6])
        if rng.random() < 0.5
        else SamplingParams(num_return_sequences=rng.randint(1, 4), max_new_tokens=14, seed=i, eos_token_id=[5, 6, 7])
        for i in range(len(prompts))
    ]
    return prompts, params


@pytest.mark.parametrize("swap_memory", [0, 2**24])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_chunks_preemption_and_reuse_keep_every_step_equal(family: str, swap_memory: int) -> None:
    """Prompts cut anywhere, blocks taken over in the same pass or later, groups that come back as trees of blocks."""
    rng = random.Random(family)
    block_size = rng.choice([1, 2, 4])
    prompts, params = mixed_requests(rng)
    params[1] = params[2] = SamplingParams(num_return_sequences=4, max_new_tokens=20, seed=1, eos_token_id=[])
    requests = [Request(tuple(p), q, frozenset(), None) for p, q in zip(prompts, params, strict=True)]
    num_blocks = max(worst_case_blocks(request, block_size) for request in requests)
    decoder = Decoder(tiny_model(family), block_size=block_size, num_blocks=num_blocks, swap_memory=swap_memory)
    with short_passes(rng.choice([5, 11])), Watch(decoder) as watch:
        decoder.generate(prompts, params)
        decoder.generate(prompts[:2], params[:2])
    counters = decoder.counters()
    assert watch.pieces > 12
    assert counters.preemptions, "nobody had to go: nothing was shown"
    assert bool(counters.swapped_blocks) == bool(swap_memory), "preempted groups came back the other way"
    assert counters.reused_tokens, "nothing was taken over: nothing was shown"
    assert decoder.num_free_blocks == decoder.num_blocks


def test_the_watch_catches_blocks_that_do_not_come_back() -> None:
    params = SamplingParams(num_return_sequences=4, max_new_tokens=20, seed=1, eos_token_id=[])
    request = Request((3, 1, 4, 1, 5), params, frozenset(), None)
    decoder = Decoder(tiny_model("llama"), block_size=2, num_blocks=worst_case_blocks(request, 2), swap_memory=2**24)
    with (
        mock.patch.object(SwapSpace, "bring_back", lambda self, saved, _: self.drop(saved)),
        Watch(decoder),
        pytest.raises(AssertionError, match="logits differ by nan"),
    ):
        decoder.generate([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], params)


def test_the_watch_catches_blocks_that_are_found_before_they_are_written() -> None:
    """A block that can be found as soon as it is taken, of a prompt that is not computed to its end yet."""
    decoder = Decoder(tiny_model("llama"), block_size=4, num_blocks=64)
    greedy = BeamSearchParams(num_beams=1, max_new_tokens=2, eos_token_id=[])
    prompt = [*range(1, 24)]

    def take(self: Group, limit: int) -> Piece:
        self.tree.pool.enter_prefix(prompt, self.branches[0].block_table, 0)
        return self.backlog.take(limit)

    with (
        short_passes(8),
        mock.patch.object(Group, "take", take),
        Watch(decoder),
        pytest.raises(AssertionError, match="logits differ by nan"),
    ):
        decoder.generate([prompt, prompt], greedy)
