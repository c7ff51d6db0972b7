"""Models with PEFT adapters: decoded adapters and all, and as these are now: trained, switched, merged since."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model, inject_adapter_in_model

from cowbeam.decoder import BeamSearchParams, Decoder, attach, detach
from fakes import FAMILIES, make_model, token_ids
from families import family_model
from test_drop_in import decoded_by_cowbeam, heard, padded, warnings_of

PROMPT = [3, 1, 4, 1, 5]
BEAMS = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "bloom": ["query_key_value"], "jamba": ["q_proj", "in_proj"]}


def lora(family: str = "llama", name: str = "default") -> Any:
    """With adapters that change the answer: PEFT begins with such as do not."""
    model = get_peft_model(family_model(family, scale=0.3), config_of(family), adapter_name=name)
    randomize(model, seed=1)
    return model.eval()


def config_of(family: str = "llama") -> LoraConfig:
    return LoraConfig(r=4, target_modules=TARGETS[family], init_lora_weights=False, task_type="CAUSAL_LM")


@torch.no_grad()
def randomize(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.empty_like(parameter).normal_(0, 0.3, generator=generator))


def own_tokens(model: Any) -> list[int]:
    """transformers' answer, attached or not."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    tokens: list[int] = type(inner).generate(inner, torch.tensor([PROMPT]), **BEAMS)[0, len(PROMPT) :].tolist()
    return tokens


def decoded_tokens(decoder: Decoder) -> list[int]:
    return list(token_ids(decoder.generate(PROMPT, BeamSearchParams(num_beams=3, max_new_tokens=6)))[0])


@pytest.mark.parametrize("family", sorted(TARGETS))
def test_a_decoder_of_a_model_with_adapters(family: str) -> None:
    model = lora(family)
    decoder = Decoder(model, block_size=1, num_blocks=256)
    got = decoded_tokens(decoder)
    assert got == own_tokens(model)
    with model.disable_adapter():
        assert own_tokens(model) != got, "the adapter changes nothing: nothing was shown"


@pytest.mark.parametrize("family", sorted(TARGETS))
def test_an_attached_model_with_adapters(family: str) -> None:
    model = lora(family)
    inputs = padded([PROMPT, [9, 2]])
    want = model.generate(**inputs, **BEAMS)
    assert attach(model) is model
    with heard() as records:
        got = model.generate(**inputs, **BEAMS)
    assert decoded_by_cowbeam(records)
    assert not warnings_of(records)
    assert torch.equal(want, got)
    detach(model)
    with heard() as records:
        assert torch.equal(want, model.generate(**inputs, **BEAMS))
    assert not decoded_by_cowbeam(records)


def trained(model: Any) -> None:
    """One step of an optimizer, in place."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert parameters
    ids = torch.tensor([PROMPT])
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(parameters, lr=5.0).step()
    model.eval()


def copied_into(model: Any) -> None:
    """As a trainer that gathers shards does: new numbers where the old ones lay."""
    randomize(model, seed=2)


def replaced(model: Any) -> None:
    """New tensors in place of the old ones."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = -parameter.data


def scaled(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(-2.0)


def other_adapter(model: Any) -> None:
    model.add_adapter("other", config_of())
    randomize(model, seed=3)
    model.set_adapter("other")


CHANGES: list[Callable[[Any], None]] = [
    trained,
    copied_into,
    replaced,
    scaled,
    other_adapter,
    lambda model: model.base_model.disable_adapter_layers(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_calls_is_seen_at_once(change: Callable[[Any], None]) -> None:
    model = lora()
    decoder, attached = Decoder(model, block_size=1, num_blocks=256), attach(copy.deepcopy(model))
    before = decoded_tokens(decoder)
    assert attached.generate(torch.tensor([PROMPT]), **BEAMS)[0, len(PROMPT) :].tolist() == before
    for one in (model, attached):
        change(one)
    want = own_tokens(model)
    assert want != before, "the change changes nothing: nothing was shown"
    assert decoded_tokens(decoder) == want
    assert attached.generate(torch.tensor([PROMPT]), **BEAMS)[0, len(PROMPT) :].tolist() == want


def test_weights_merged_and_back() -> None:
    model = lora()
    decoder = Decoder(model, block_size=1, num_blocks=256)
    want = decoded_tokens(decoder)
    model.merge_adapter()
    assert decoded_tokens(decoder) == own_tokens(model) == want
    model.unmerge_adapter()
    assert decoded_tokens(decoder) == want


@pytest.mark.parametrize("change", [scaled, other_adapter, lambda model: model.base_model.disable_adapter_layers()])
def test_steps_captured_before_are_none_of_a_switched_models(change: Callable[[Any], None]) -> None:
    """A captured step computes what it was captured with: no tensor of the model has moved, and yet it is wrong."""
    model = lora()
    adapter = Decoder(model, block_size=1, num_blocks=256)._adapter
    adapter.follow_owner()
    before = adapter.version
    adapter.follow_owner()
    assert adapter.version == before
    change(model)
    adapter.follow_owner()
    assert adapter.version > before


def test_nothing_is_written_out_to_see_whether_the_model_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' models have a method named as PEFT's switch: its repr, the whole model's, took 12 ms a prefill."""
    model = make_model("llama", FAMILIES["llama"])
    monkeypatch.setattr(torch.nn.Module, "__repr__", lambda self: pytest.fail(f"repr of {type(self).__name__}"))
    Decoder(model, block_size=4, num_blocks=64)._adapter.follow_owner()


def test_adapters_without_a_wrapper() -> None:
    """As transformers' own ``add_adapter`` leaves a model."""
    model: Any = make_model("llama", FAMILIES["llama"])
    plain = own_tokens(model)
    inject_adapter_in_model(config_of(), model)
    randomize(model, seed=1)
    model.eval()
    want = own_tokens(model)
    assert want != plain
    assert decoded_tokens(Decoder(model, block_size=1, num_blocks=256)) == want


def test_an_adapter_for_each_row_is_left_to_transformers() -> None:
    model = lora()
    model.add_adapter("other", config_of())
    randomize(model, seed=3)
    inputs = padded([PROMPT, PROMPT])
    call = {**inputs, **BEAMS, "num_beams": 1, "adapter_names": ["default", "other"]}
    want = model.generate(**call)
    assert not torch.equal(want[0], want[1])
    attach(model)
    with heard() as records:
        got = model.generate(**call)
    assert "an adapter of its own for each row" in warnings_of(records)[0]
    assert torch.equal(want, got)


def test_virtual_tokens_are_refused() -> None:
    """Prompt learning puts them before the prompt, outside the model: to ignore them would be a wrong answer."""
    config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    base = attach(make_model("llama", FAMILIES["llama"]))
    model = get_peft_model(base, config).eval()
    for refuse in (Decoder, attach):
        with pytest.raises(ValueError, match="PeftModelForCausalLM with PromptTuningConfig cannot be decoded over KV"):
            refuse(model)
    with heard() as records:
        got = model.generate(**padded([PROMPT]), **BEAMS)
    assert "prepared in a way of its owner's" in warnings_of(records)[0]
    detach(base)
    assert torch.equal(model.generate(**padded([PROMPT]), **BEAMS), got)
