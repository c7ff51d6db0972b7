"""What the self-check asks of a model: the same logits, paged; in half precision of one prompt in three."""

import itertools

import pytest
import torch
from torch import Tensor

from cowbeam.decoder import self_check
from cowbeam.decoder.kv_cache import KVCache
from cowbeam.decoder.model_adapter import ModelAdapter
from cowbeam.decoder.model_levels import UnpageableError
from fakes import FAMILIES, make_model


@pytest.mark.parametrize(
    ("dtype", "errors", "passes"),
    [
        (torch.bfloat16, [0.01], True),
        (torch.bfloat16, [0.52, 0.01], True),  # an expert of gpt_oss flipped in the first prompt on an H200
        (torch.bfloat16, [0.9, float("nan"), 0.8], False),
        (torch.float32, [0.002, 1e-6, 1e-6], False),
    ],
)
def test_attempts(dtype: torch.dtype, errors: list[float], passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter(errors)
    prompts: list[object] = []

    def next_error(*arguments: object) -> float:
        prompts.append(arguments[3])
        return next(found)

    monkeypatch.setattr(self_check, "_relative_error", next_error)
    adapter = ModelAdapter(make_model("llama", FAMILIES["llama"]).to(dtype), "torch")
    if passes:
        self_check.check_paged_logits(adapter, [], 4)
    else:
        with pytest.raises(UnpageableError, match="paged logits differ from its own by"):
            self_check.check_paged_logits(adapter, [], 4)
    assert len(set(prompts)) == len(prompts), "each attempt has a prompt of its own"


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_wrong_copies_show_in_half_precision_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three attempts must not let blocks through that were not copied."""
    adapter = ModelAdapter(make_model(family, FAMILIES[family]).to(torch.bfloat16), "torch")
    shapes = adapter.probe(2)
    self_check.check_paged_logits(adapter, shapes, 4)

    def copy_nothing(cache: KVCache, _: Tensor, destinations: Tensor) -> None:
        for tensor in itertools.chain.from_iterable(layer.tensors for layer in cache.layers):
            tensor[destinations] = 0  # what is left as it was may hold the right numbers of a check before

    monkeypatch.setattr(KVCache, "copy", copy_nothing)
    with pytest.raises(UnpageableError, match="paged logits differ from its own by"):
        self_check.check_paged_logits(adapter, shapes, 4)
