"""Every family on its level: logits through forks equal a plain eager pass, tokens those of transformers."""

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
    assert decoder.level == LEVELS[name]
    error = largest_error(block_logits(decoder, forks), own_logits(name, forks))
    assert error <= TOLERANCE, f"{name} on level {decoder.level}: {error:.1e}"


@pytest.mark.parametrize("name", UNLIKE_THEMSELVES)
def test_families_that_are_unlike_themselves(name: str) -> None:
    """Once their own two ways agree they belong with the others."""
    forks = Forks.make()
    model = family_model(name)
    assert largest_error(cached_logits(model, forks), eager_logits(model, forks)) > TOLERANCE
