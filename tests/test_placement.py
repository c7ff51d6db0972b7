"""Models that lie on several devices, or whose weights accelerate brings in layer by layer.

One machine without GPUs has one device that computes. What two GPUs do is shown by ``tests/cuda_devices_check.py``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch import nn

from cowbeam.decoder import BeamSearchParams, Decoder, attach
from cowbeam.decoder.attend import DecodeStep, PrefillStep
from cowbeam.decoder.batch import DecodeInputs
from cowbeam.decoder.kv_cache import KVCache, LayerShape
from cowbeam.decoder.placement import entry_device, is_on_one_device
from fakes import FAMILIES, make_model, token_ids
from families import family_model
from test_drop_in import decoded_by_cowbeam, heard, padded

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [9, 2]]
BEAMS = BeamSearchParams(num_beams=3, max_new_tokens=8)
CPU, META = torch.device("cpu"), torch.device("meta")


def block_list(model: Any) -> tuple[str, int]:
    """The name of the model's list of layers, and how many there are."""
    return next((name, len(module)) for name, module in model.named_modules() if isinstance(module, nn.ModuleList))


def on_cpu(model: Any, _folder: Path) -> Any:
    return cpu_offload(model, execution_device=CPU)


def on_disk(model: Any, folder: Path) -> Any:
    return disk_offload(model, str(folder), execution_device=CPU)


def partly_on_disk(model: Any, folder: Path) -> Any:
    """As ``device_map="auto"`` leaves a model that memory does not hold: some layers here, the others on the disk."""
    name, count = block_list(model)
    layers = {f"{name}.{number}": "disk" if number else "cpu" for number in range(count)}
    parts = [part for part, _ in model.named_modules() if part and not part.startswith(name)]
    outer = {part: "cpu" for part in parts if not name.startswith(part)}
    return dispatch_model(model, {**outer, **layers}, main_device="cpu", offload_dir=str(folder))


PLACES = [on_cpu, on_disk, partly_on_disk]


def test_no_hook_can_bring_an_index_to_another_device(tmp_path: Path) -> None:
    """accelerate's hook on the whole model brings each tensor it is called with to the first device.

    What ``logits_to_keep`` picks from lies on the last one: every model split over two GPUs was left to gathered
    keys and values.
    """
    model = partly_on_disk(family_model("llama"), tmp_path)
    kept: list[Any] = []
    model.register_forward_pre_hook(lambda _, __, kwargs: kept.append(kwargs.get("logits_to_keep")), with_kwargs=True)
    with Decoder(model, num_blocks=64) as decoder:
        assert decoder.level == 1
        decoder.generate(PROMPTS, BEAMS)
    assert [6, 8] in kept, "where the two prompts end"
    assert not any(isinstance(indices, torch.Tensor) for indices in kept)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bloom", "jamba"])
def test_offloaded_weights(place: Callable[[Any, Path], Any], family: str, tmp_path: Path) -> None:
    """The same tokens as before; the weights are where accelerate keeps them, also after a step."""
    want = [token_ids(r) for r in Decoder(family_model(family, scale=0.3), num_blocks=64).generate(PROMPTS, BEAMS)]
    model = place(family_model(family, scale=0.3), tmp_path)
    assert not is_on_one_device(model)
    decoder = Decoder(model, num_blocks=64)
    assert [token_ids(result) for result in decoder.generate(PROMPTS, BEAMS)] == want
    assert entry_device(model) == CPU
    assert any(parameter.device == META for parameter in model.parameters())


@pytest.mark.parametrize("place", PLACES)
def test_an_offloaded_model_attached(place: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    model = place(family_model("llama", scale=0.3), tmp_path)
    call = {**padded(PROMPTS), "num_beams": 3, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    want = model.generate(**call)
    attach(model)
    with heard() as records:
        got = model.generate(**call)
    assert decoded_by_cowbeam(records)
    assert torch.equal(want, got)


def test_a_model_that_was_never_loaded() -> None:
    model = make_model("llama", FAMILIES["llama"]).to(META)
    with pytest.raises(ValueError, match="the weights of LlamaForCausalLM lie nowhere"):
        Decoder(model)


def shapes_on(*devices: torch.device) -> list[LayerShape]:
    return [LayerShape(2, 8, 8, torch.float32, device, None) for device in devices]


def test_layers_of_several_devices_have_their_blocks_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies run on each of them, with ids that lie there: one launch cannot reach another GPU's memory."""
    copied: list[tuple[torch.device, int]] = []

    def copy_blocks(tensors: Any, *ids: torch.Tensor, pointers: torch.Tensor) -> None:
        assert {tensor.device for tensor in (*tensors, *ids)} == {pointers.device}
        copied.append((pointers.device, len(tensors)))

    monkeypatch.setattr("cowbeam.decoder.kv_cache.copy_blocks", copy_blocks)
    cache = KVCache(shapes_on(CPU, META, CPU), num_blocks=4, block_size=4)
    assert [layer.key.device for layer in cache.layers] == [CPU, META, CPU]
    cache.copy(torch.tensor([3]), torch.tensor([1]))
    assert copied == [(CPU, 2), (META, 1)]


def decode_inputs() -> DecodeInputs:
    numbers = torch.tensor([1, 2])
    return DecodeInputs(
        token_ids=numbers,
        positions=numbers,
        slots=numbers,
        lengths=numbers.int(),
        block_tables=numbers[:, None].int(),
        copy_sources=numbers,
        copy_destinations=numbers,
        group_starts=numbers == 1,
        widest_group=2,
        owners=[],
    )


def test_a_step_goes_where_a_layer_lies_and_once() -> None:
    cache = KVCache(shapes_on(CPU, META), num_blocks=4, block_size=4)
    decode = DecodeStep(cache, "torch", decode_inputs())
    prefill = PrefillStep(cache, "torch", torch.tensor([0, 1]), [2], [0], torch.tensor([[0]], dtype=torch.int32))
    for step in (decode, prefill):
        assert step.on(CPU) is step
        there = step.on(META)
        assert there is step.on(META)
        assert there.slots.device == META
        assert there.plans is not step.plans
    tensors = [value for value in vars(decode.on(META).inputs).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 8
    assert all(tensor.device == META for tensor in tensors)
