"""Every family on its level: logits through forks equal a plain eager pass, tokens those of transformers."""

from pathlib import Path

import pytest
import torch

from cowbeam.decoder import Decoder
from families import (
    ALL_FAMILIES,
    LEVELS,
    UNLIKE_THEMSELVES,
    Forks,
    block_logits,
    cached_logits,
    eager_logits,
    family_model,
    largest_error,
    own_logits,
)

TOLERANCE = 2e-5
README = Path(__file__).resolve().parent.parent / "README.md"


def make_decoder(name: str, block_size: int = 4) -> Decoder:
    decoder = Decoder(family_model(name), block_size=block_size, num_blocks=256)
    for layer in decoder._engine._cache.layers:  # type: ignore[union-attr]
        for tensor in layer.tensors:
            tensor.fill_(torch.nan)  # nothing is read before it is written
    return decoder


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_logits_through_forks_equal_eager(name: str) -> None:
    forks = Forks.make()
    decoder = make_decoder(name)
    # CodeGen and GPT-J use the attention interface since a release after 5.17.
    assert decoder.level == LEVELS[name] or not decoder.model._can_set_attn_implementation()
    error = largest_error(block_logits(decoder, forks), own_logits(name, forks))
    assert error <= TOLERANCE, f"{name} on level {decoder.level}: {error:.1e}"


def test_the_readme_tells_of_every_family() -> None:
    """`python scripts/check_families.py --write` makes its table."""
    text = README.read_text(encoding="utf-8")
    missing = [name for name, level in LEVELS.items() if f"\n| {name} | {level} | " not in text]
    assert not missing
    assert text.count("| equal |") == len(LEVELS), "a family has other tokens than transformers"


@pytest.mark.parametrize("name", UNLIKE_THEMSELVES)
def test_families_that_are_unlike_themselves(name: str) -> None:
    """Once their own two ways agree they belong with the others."""
    forks = Forks.make()
    model = family_model(name)
    assert largest_error(cached_logits(model, forks), eager_logits(model, forks)) > TOLERANCE
