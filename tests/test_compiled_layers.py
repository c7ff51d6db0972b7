"""Compiled layers give the model's own logits, compile once a kind, and leave nothing behind on the model."""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from cowbeam.decoder import BeamSearchParams, Decoder
from cowbeam.decoder.attend import AttentionPath
from cowbeam.decoder.batch import DecodeInputs
from cowbeam.decoder.compiled_layers import NUMBER, find_around, find_layers
from cowbeam.decoder.kv_cache import KVCache, LayerShape
from cowbeam.decoder.model_adapter import ModelAdapter
from fakes import DEVICE, FAMILIES, make_model, tiny_model

TOLERANCE = 1e-5  # ‖difference‖ / ‖logits‖
KINDS = {"gemma2": 2, "gemma3_text": 2, "gpt_oss": 2}  # a layer with a sliding window and one without; else one
TWICE = {"gemma3_text": 1}  # rotary positions of both kinds of layers
BLOCK_SIZE = 8
PATH: AttentionPath = "triton" if DEVICE == "cuda" else "torch"
QUICK = ("gemma2", "llama", "qwen3")


@pytest.fixture(autouse=True)
def _no_compilations_of_other_tests() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def using(backend: Any) -> Any:
    """Fuse as on CUDA, and compile by another backend: the default one needs a C++ compiler here, and its time."""
    compile_layers = ModelAdapter.compile_layers

    def fuse_and_compile(adapter: ModelAdapter, shapes: Sequence[LayerShape]) -> None:
        adapter.fuse_linears()
        compile_layers(adapter, shapes, backend)

    return mock.patch.object(ModelAdapter, "compile_layers", fuse_and_compile)


def decode_step(adapter: ModelAdapter, rows: int) -> Tensor:
    """Logits of one step: rows that share two blocks of random K/V and have the third to themselves."""
    torch.manual_seed(rows)
    cache = KVCache(adapter.probe(2), rows + 2, BLOCK_SIZE)
    for layer in cache.layers:
        for tensor in layer.tensors:
            tensor.normal_()
    own = torch.arange(2, rows + 2)
    inputs = DecodeInputs(
        token_ids=(torch.arange(rows) % 60).to(DEVICE),
        positions=torch.full((rows,), 2 * BLOCK_SIZE + 1, device=DEVICE),
        slots=(own * BLOCK_SIZE + 1).to(DEVICE),
        lengths=torch.full((rows,), 2 * BLOCK_SIZE + 2, dtype=torch.int32, device=DEVICE),
        block_tables=torch.stack([torch.zeros(rows), torch.ones(rows), own], 1).int().to(DEVICE),
        group_starts=(torch.arange(rows) == 0).to(DEVICE),
        widest_group=rows,
        copy_sources=torch.zeros(rows, dtype=torch.long, device=DEVICE),
        copy_destinations=torch.zeros(rows, dtype=torch.long, device=DEVICE),
    )
    return adapter.decode(cache, inputs).clone()


def prompts_logits(adapter: ModelAdapter, lengths: Sequence[int]) -> Tensor:
    """Logits of packed prompts, and of a second piece of the first."""
    columns = -(-max(lengths) // BLOCK_SIZE) + 1
    cache = KVCache(adapter.probe(2), columns * len(lengths), BLOCK_SIZE)
    tables = [list(range(columns * number, columns * (number + 1))) for number in range(len(lengths))]
    prompts = [[(3 * token + number) % 60 for token in range(length)] for number, length in enumerate(lengths)]
    whole = adapter.prefill(cache, prompts, tables).clone()
    piece = adapter.compute(cache, [[4, 2, 4][: lengths[0]]], tables[:1], lengths[:1])
    return torch.cat([whole, piece])


def assert_equal_to_eager(family: str, backend: str) -> None:
    model = tiny_model(family)
    eager, compiled = ModelAdapter(model, PATH), ModelAdapter(model, PATH)
    shapes = compiled.probe(2)
    compiled.fuse_linears()
    compiled.compile_layers(shapes, backend)
    for rows in (8, 1, 3, 2, 13):
        want, got = decode_step(eager, rows), decode_step(compiled, rows)
        assert compiled.is_compiled
        assert float((got - want).norm() / want.norm()) <= TOLERANCE, f"{rows} rows"
    for lengths in ((5,), (1,), (13, 2, 7)):
        want, got = prompts_logits(eager, lengths), prompts_logits(compiled, lengths)
        assert compiled._compiles_prompts
        assert float((got - want).norm() / want.norm()) <= TOLERANCE, f"prompts of {lengths} tokens"
    around = find_around(model, find_layers(model, compiled._attention_modules))
    compilations = KINDS.get(family, 1) + len(around) + TWICE.get(family, 0)
    assert counters["stats"]["unique_graphs"] == 3 * compilations, "for one row, for many and for prompts"


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in QUICK else pytest.mark.long) for family in sorted(FAMILIES)]
)
def test_logits_are_those_of_the_models_own_layers(family: str) -> None:
    assert_equal_to_eager(family, "aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_of_generated_code_are_those_of_the_models_own_layers(family: str) -> None:
    """As above, with the code generator that CUDA gets too; it needs a C++ compiler on a CPU."""
    assert_equal_to_eager(family, "inductor")


def test_one_compilation_serves_all_layers() -> None:
    """A layer's number as a constant of the code would compile each layer anew, and the ninth not at all."""
    model = make_model("llama", {**FAMILIES["llama"], "num_hidden_layers": 12})
    with using("eager"):
        decoder = Decoder(model, num_blocks=64, compile=True)
    assert decoder._adapter.is_compiled
    # The layers, the embedding, the positions and the last norm.
    assert counters["stats"]["unique_graphs"] == 3 * 4, "for one row, for many and for prompts"


def test_many_models_are_compiled_side_by_side() -> None:
    """torch keeps 8 compilations of one function: each decoder's layers count for themselves."""
    with using("eager"):
        for seed in range(5):
            model = make_model("llama", {**FAMILIES["llama"], "hidden_size": 16 + 8 * seed, "num_hidden_layers": 1})
            assert Decoder(model, num_blocks=64, compile=True)._adapter.is_compiled


def test_beams_are_those_of_the_models_own_layers_and_nothing_stays_on_the_model() -> None:
    params = BeamSearchParams(num_beams=5, max_new_tokens=10, eos_token_id=[7])
    model = make_model("gemma2", FAMILIES["gemma2"])
    ids = torch.tensor([[3, 1, 4]])
    with torch.no_grad():
        own = model(ids).logits
    attributes = [set(module.__dict__) for module in model.modules()]
    want = Decoder(model, num_blocks=64).generate([3, 1, 4], params)
    with using("eager"):
        decoder = Decoder(model, num_blocks=64, compile=True)
    got = decoder.generate([3, 1, 4], params)
    assert [c.token_ids for c in got.completions] == [c.token_ids for c in want.completions]
    assert (want.stats.compiled, got.stats.compiled) == (False, True)
    assert [set(module.__dict__) for module in model.modules()] == attributes
    assert not any(hasattr(module, NUMBER) for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, own)


class AsksTheDevice(nn.Module):
    """An activation that waits for a number: nothing to compile."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid() if float(x.sum().item()) == 1e9 else x.tanh()


def broken(_graph: Any, _examples: Any) -> Callable[..., Any]:
    raise RuntimeError("no C++ compiler\nfound here")


def wrong(graph: Any, _examples: Any) -> Callable[..., Any]:
    """A compiler that miscompiles."""
    return lambda *arguments: [2 * output for output in graph(*arguments)]


@pytest.mark.parametrize(
    ("backend", "activation", "reason"),
    [
        (broken, None, "no C\\+\\+ compiler"),
        (wrong, None, "paged logits differ from its own"),
        ("eager", AsksTheDevice(), "data-dependent|item"),
    ],
    ids=["broken compiler", "wrong code", "uncompilable model"],
)
def test_what_does_not_compile_decodes_by_the_models_own_layers(
    backend: Any, activation: nn.Module | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning that says why, and the right tokens."""
    model: Any = make_model("llama", FAMILIES["llama"])
    if activation is not None:
        for layer in model.model.layers:
            layer.mlp.act_fn = activation
    params = BeamSearchParams(num_beams=4, max_new_tokens=6, eos_token_id=[])
    want = Decoder(model, num_blocks=64).generate([3, 1, 4], params)
    with using(backend), caplog.at_level(logging.WARNING, "cowbeam"):
        decoder = Decoder(model, num_blocks=64, compile=True)
    got = decoder.generate([3, 1, 4], params)
    (warning,) = [record.message for record in caplog.records if record.name == "cowbeam"]
    assert warning.startswith("LlamaForCausalLM decodes without compiled layers: ")
    assert "\n" not in warning
    assert re.search(reason, warning), warning
    assert not got.stats.compiled
    assert [c.token_ids for c in got.completions] == [c.token_ids for c in want.completions]


def test_weights_that_change_are_seen_by_compiled_layers() -> None:
    model: Any = make_model("llama", FAMILIES["llama"])
    params = BeamSearchParams(num_beams=4, max_new_tokens=6, eos_token_id=[])
    with using("eager"):
        decoder = Decoder(model, num_blocks=64, compile=True)
    decoder.generate([3, 1, 4], params)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-2)  # in place
        attention = model.model.layers[1].self_attn
        attention.k_proj.weight.data = attention.k_proj.weight.flip(0)  # elsewhere
        attention.o_proj.weight.data = attention.o_proj.weight * 3
    got, want = decoder.generate([3, 1, 4], params), Decoder(model, num_blocks=64).generate([3, 1, 4], params)
    assert got.stats.compiled
    assert [c.token_ids for c in got.completions] == [c.token_ids for c in want.completions]


def add_hook(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda _module, _inputs, output: -2 * output)


def give_a_linear_a_forward(model: Any) -> None:
    linear = model.model.layers[0].mlp.up_proj
    forward = linear.forward
    linear.forward = lambda x: -2 * forward(x)


def give_a_layer_a_forward(model: Any) -> None:
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: -2 * forward(*args, **kwargs)


@pytest.mark.parametrize("change", [add_hook, give_a_linear_a_forward, give_a_layer_a_forward])
def test_what_the_owner_adds_later_runs(change: Callable[[Any], None]) -> None:
    """torch skips the guards on hooks by default: compiled code would go on without them."""
    model: Any = make_model("llama", FAMILIES["llama"])
    params = BeamSearchParams(num_beams=4, max_new_tokens=6, eos_token_id=[])
    with using("eager"):
        decoder = Decoder(model, num_blocks=64, compile=True)
    before, version = decoder.generate([3, 1, 4], params), decoder._adapter.version
    change(model)
    attributes = [dict(module.__dict__) for module in model.modules()]
    got, want = decoder.generate([3, 1, 4], params), Decoder(model, num_blocks=64).generate([3, 1, 4], params)
    assert [c.token_ids for c in got.completions] == [c.token_ids for c in want.completions]
    assert [c.token_ids for c in got.completions] != [c.token_ids for c in before.completions]
    assert [dict(module.__dict__) for module in model.modules()] == attributes, "what the owner added is gone"
    assert decoder._adapter.version > version, "captured steps would go on without"


def test_layers_are_found_by_where_attention_lies() -> None:
    model: Any = tiny_model("llama")
    attention = [layer.self_attn for layer in model.model.layers]
    assert find_layers(model, attention) == list(model.model.layers)
    assert find_layers(model, attention[:1] + attention[:1]) == [], "two in one layer"
    assert find_layers(model, [nn.Linear(1, 1)]) == []


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_lies_around_the_layers_is_found_by_its_numbers(family: str) -> None:
    model = tiny_model(family)
    adapter = ModelAdapter(model, PATH)
    adapter.probe(2)
    layers = find_layers(model, adapter._attention_modules)
    around = find_around(model, layers)
    held = {id(tensor) for module in [*layers, *around] for tensor in (*module.parameters(), *module.buffers())}
    head = model.get_output_embeddings()
    assert all(id(tensor) in held for tensor in (*model.parameters(), *model.buffers()) if tensor is not head.weight)
    assert not any(module is head or module is layers[0] for module in around)


def test_compile_must_be_a_bool() -> None:
    with pytest.raises(ValueError, match="compile must be True, False or None, got 'yes'"):
        Decoder(tiny_model("llama"), compile="yes")  # type: ignore[arg-type]
