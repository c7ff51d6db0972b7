"""A wrong entry of a block table changes the branches that pass through it, no others, and is named by the check."""

import math

import pytest
import torch

from cowbeam.decoder import BeamSearchParams
from cowbeam.decoder.what_if import Position, corrupt_entry
from fakes import tiny_decoder

PROMPT = list(range(5, 18))
PARAMS = BeamSearchParams(num_beams=5, max_new_tokens=16, eos_token_id=[])


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder("llama", block_size=4)


@pytest.mark.parametrize("step", [1, 6, 12])
@pytest.mark.parametrize("from_the_end", [1, 2, 4])
def test_those_that_pass_through_the_entry_change_and_no_others(decoder, step, from_the_end):
    column = -(-(len(PROMPT) + step) // 4) - from_the_end
    other = Position(0, 1 if column == 0 else 0)
    answer = corrupt_entry(decoder, PROMPT, PARAMS, step=step, entry=Position(0, column), other=other)
    first, affected = answer.tables[0], [token.is_affected for token in answer.tokens]
    assert (answer.block_before, answer.block_after) == (first[column], first[other.column])
    is_last = column + 1 == len(first)
    assert affected == [t is first if is_last else t[column + 1] == first[column + 1] for t in answer.tables]
    # Rows that pass by change by rounding at most: the blocks are read in other groups.
    assert affected == [token.logit_change > 1e-4 for token in answer.tokens]
    assert answer.integrity.startswith(f"block {answer.block_before} ") or answer.integrity.startswith(
        f"block {answer.block_after} "
    )
    assert "holders" in answer.integrity


def test_slots_that_nothing_wrote_are_no_chance(decoder, monkeypatch):
    """The newest block is not full: read as an earlier one, what fresh memory held came out, or no number at all."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    ask = {"step": 2, "entry": Position(0, 1), "other": Position(0, 3)}
    torch.use_deterministic_algorithms(True)  # fresh memory is NaN then
    try:
        answer = corrupt_entry(decoder, PROMPT, PARAMS, **ask)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(math.isfinite(token.logit_change) for token in answer.tokens)
    assert answer.tokens == corrupt_entry(decoder, PROMPT, PARAMS, **ask).tokens


def test_the_search_is_dropped_afterwards(decoder):
    """The link is put right again before the blocks are freed, or ids would be freed twice."""
    ask = {"step": 3, "entry": Position(0, 1), "other": Position(0, 0)}
    first = corrupt_entry(decoder, PROMPT, PARAMS, **ask)
    assert decoder.num_free_blocks == decoder.num_blocks
    decoder.check_integrity()
    again = corrupt_entry(decoder, PROMPT, PARAMS, **ask)
    assert again.tokens == first.tokens


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step": 0}, "step 0 has no branches"),
        ({"step": 99}, "step 99 has no branches"),
        ({"entry": Position(5, 0)}, "no branch of rank 5"),
        ({"entry": Position(0, 99)}, "entry 99 is not in this block table"),
        ({"other": Position(0, -1)}, "entry -1 is not in this block table"),
        ({"other": Position(3, 0)}, "already"),
    ],
)
def test_what_is_not_there_is_named(decoder, wrong, message):
    where = {"step": 2, "entry": Position(0, 0), "other": Position(0, 1), **wrong}
    with pytest.raises(ValueError, match=message):
        corrupt_entry(decoder, PROMPT, PARAMS, **where)
    assert decoder.num_free_blocks == decoder.num_blocks
