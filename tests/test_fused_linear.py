"""Fused projections alias the model's parameters: what the owner does with them is seen, nothing is kept twice."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune
from transformers import AutoModelForCausalLM, PreTrainedModel

from cowbeam.decoder import BeamSearchParams, Decoder
from cowbeam.decoder.fused_linear import FusedLinears, find_groups
from cowbeam.decoder.model_adapter import ModelAdapter
from fakes import FAMILIES, make_model, tiny_model
from test_compiled_layers import TOLERANCE, decode_step

PROMPT = [3, 1, 4, 1, 5, 9, 2]
BEAMS = BeamSearchParams(num_beams=4, max_new_tokens=8, eos_token_id=[])


def llama() -> PreTrainedModel:
    return make_model("llama", FAMILIES["llama"])


def decoder_of(model: PreTrainedModel) -> Decoder:
    """Fused on a CPU too, where a decoder does not do it by itself."""
    decoder = Decoder(model, num_blocks=64)
    decoder._adapter.fuse_linears()
    return decoder


def fused(decoder: Decoder) -> FusedLinears:
    return decoder._adapter._fused


def tokens(decoder: Decoder) -> tuple[int, ...]:
    return decoder.generate(PROMPT, BEAMS).completions[0].token_ids


def assert_follows(decoder: Decoder, fresh: PreTrainedModel | None = None) -> None:
    """Its beams are those of an unfused decoder of ``fresh``, which is a copy of its model as it is now."""
    fresh = copy.deepcopy(decoder.model) if fresh is None else fresh
    got, want = decoder.generate(PROMPT, BEAMS), Decoder(fresh, num_blocks=64).generate(PROMPT, BEAMS)
    assert [c.token_ids for c in got.completions] == [c.token_ids for c in want.completions]
    assert got.completions[0].score == pytest.approx(want.completions[0].score, abs=1e-5)


def storage_bytes(model: nn.Module) -> int:
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", [[32, 16, 16], [48, 48]] * 2),
        ("qwen2", [[32, 16, 16], [48, 48]] * 2),  # with biases
        ("opt", [[32, 32, 32]] * 2),
        ("phi3", []),  # fused by its makers
        ("gpt2", []),  # no Linears
    ],
)
def test_finds_what_reads_the_same_input(family: str, sizes: list[list[int]]) -> None:
    assert [group.sizes for group in fused(decoder_of(make_model(family, FAMILIES[family]))).groups] == sizes


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_are_those_of_separate_products(family: str) -> None:
    separate, fused = ModelAdapter(tiny_model(family), "torch"), ModelAdapter(tiny_model(family), "torch")
    fused.probe(2)
    fused.fuse_linears()
    for rows in (1, 3, 8):
        want = decode_step(separate, rows)
        assert float((decode_step(fused, rows) - want).norm() / want.norm()) <= TOLERANCE


def test_parameters_are_views_of_one_tensor_and_nothing_is_kept_twice() -> None:
    model = llama()
    before, parameters = storage_bytes(model), dict(model.named_parameters())
    decoder = decoder_of(model)
    assert storage_bytes(model) == before
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    group = fused(decoder).groups[0]
    assert [type(member) for member in group.members] == [nn.Linear] * 3
    group.members[1].weight.data.fill_(7.0)
    assert (group.weight[32:48] == 7).all()
    assert not (group.weight[:32] == 7).any()


def test_outside_a_pass_the_model_is_as_its_owner_left_it() -> None:
    """Bitwise the same logits and gradients, and no attribute more."""

    def attributes(model: nn.Module) -> list[set[str]]:
        return [set(module.__dict__) for module in model.modules()]

    def gradients(model: PreTrainedModel) -> list[Tensor]:
        model.zero_grad()
        ids = torch.tensor([PROMPT])
        model(input_ids=ids, labels=ids).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    model = llama()
    ids = torch.tensor([PROMPT])
    before, logits, want = attributes(model), model(ids).logits, gradients(model)
    tokens(decoder_of(model))
    assert attributes(model) == before
    assert torch.equal(model(ids).logits, logits)
    assert all(torch.equal(one, other) for one, other in zip(gradients(model), want, strict=True))


def test_training_between_two_searches_is_seen() -> None:
    """Reinforcement learning updates the weights in place between rollouts; stale rollouts teach the wrong thing."""
    model = llama()
    decoder = decoder_of(model)
    before = tokens(decoder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    ids = torch.tensor([PROMPT])
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    assert tokens(decoder) != before
    assert all(group.is_current for group in fused(decoder).groups)
    assert_follows(decoder)


def replace_data(model: Any) -> None:
    linear = model.model.layers[0].self_attn.k_proj
    linear.weight.data = linear.weight.data.flip(0).clone()


def replace_parameter(model: Any) -> None:
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach() * -1)


def replace_module(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj = nn.Linear(32, 32, bias=False)


def add_a_bias(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj.bias = nn.Parameter(torch.ones(16))


def assign_state(model: Any) -> None:
    other = make_model("llama", FAMILIES["llama"], seed=5)
    model.load_state_dict(other.state_dict(), assign=True)


def load_state(model: Any) -> None:
    model.load_state_dict(make_model("llama", FAMILIES["llama"], seed=5).state_dict())


def prune(model: Any) -> None:
    torch_prune.l1_unstructured(model.model.layers[0].mlp.gate_proj, "weight", amount=0.5)


def parametrize(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.q_proj)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.parametrizations.weight.original0.mul_(3)


def hook(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _module, _inputs, output: output * 2)


def own_forward(model: Any) -> None:
    """As accelerate does where it moves weights."""
    linear = model.model.layers[0].self_attn.q_proj
    forward = linear.forward
    linear.forward = lambda x: -forward(x)


def there_and_back(model: Any) -> None:
    model.to(torch.float64).to(torch.float32)


@pytest.mark.parametrize(
    "change",
    [
        replace_data,
        replace_parameter,
        replace_module,
        assign_state,
        load_state,
        prune,
        parametrize,
        hook,
        own_forward,
        there_and_back,
        add_a_bias,
    ],
    ids=lambda change: change.__name__,
)
def test_weights_that_their_owner_replaces_are_never_stale(change: Callable[[Any], None]) -> None:
    decoder, fresh = decoder_of(llama()), llama()
    tokens(decoder)
    for model in (decoder.model, fresh):
        torch.manual_seed(1)
        change(model)
    assert_follows(decoder, fresh)


def test_what_replaced_a_parameter_is_laid_together_again() -> None:
    decoder = decoder_of(llama())
    version = decoder._adapter.version
    replace_data(decoder.model)
    tokens(decoder)
    groups = fused(decoder).groups
    assert len(groups) == 4
    assert all(group.is_current for group in groups)
    assert decoder._adapter.version > version, "captured steps would read the old weights"
    version = decoder._adapter.version
    tokens(decoder)
    assert decoder._adapter.version == version, "captured steps are thrown away for nothing"


@pytest.mark.parametrize("safe", [True, False])
def test_a_model_saves_and_loads(safe: bool, tmp_path: Path) -> None:
    """safetensors refuses tensors that share memory, unless each has a part of its own."""
    model = llama()
    tokens(decoder_of(model))
    if safe:
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    else:
        torch.save(model.state_dict(), tmp_path / "state")
        loaded = llama()
        loaded.load_state_dict(torch.load(tmp_path / "state"))
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert_follows(decoder_of(loaded))


def test_two_decoders_share_the_tensors_of_one_model() -> None:
    model = llama()
    one = decoder_of(model)
    other = decoder_of(model)
    for mine, theirs in zip(fused(one).groups, fused(other).groups, strict=True):
        assert mine.weight.data_ptr() == theirs.weight.data_ptr()
        assert torch.equal(mine.weight, theirs.weight)
    replace_data(model)
    assert_follows(one)
    assert_follows(other)
    assert fused(one).groups[0].weight.data_ptr() == fused(other).groups[0].weight.data_ptr()


class Toy(nn.Module):
    """Four Linears of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, size, bias=size == 5) for size in (2, 3, 5, 3))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.a(x), self.b(x), self.c(x), self.d(x)]


def names(toy: nn.Module, groups: list[list[nn.Linear]]) -> list[list[str]]:
    return [[name for member in group for name, child in toy.named_children() if child is member] for group in groups]


def find(toy: nn.Module) -> list[list[str]]:
    return names(toy, find_groups(toy, lambda: toy(torch.randn(2, 4))))


def test_groups_only_linears_of_one_kind() -> None:
    toy = Toy()
    assert find(toy) == [["a", "b", "d"]], "with and without bias apart"
    toy.a.register_forward_hook(lambda *_: None)
    assert find(toy) == [["b", "d"]]
    toy.d.weight = toy.b.weight
    assert find(toy) == [], "tied to another module"


def test_leaves_memory_that_overlaps_where_it_is() -> None:
    toy = Toy()
    whole = torch.randn(8, 4)
    toy.register_buffer("whole", whole)
    toy.b.weight.data = whole[2:5]
    toy.d.weight.data = whole[5:]
    assert find(toy) == []


class ChangesItsInput(Toy):
    """The same tensor object, other numbers in it."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.a(x), self.b(x), self.d(x.mul_(2))]


class CallsTwice(Toy):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.a(x), self.a(x), self.b(x), self.d(x)]


def test_an_input_that_changes_is_not_the_same_input() -> None:
    assert find(ChangesItsInput()) == [["a", "b"]]
    assert find(CallsTwice()) == [["b", "d"]]


def test_members_compute_their_own_product_for_an_input_of_their_own() -> None:
    toy = Toy()
    x, other = torch.randn(2, 4), torch.randn(3, 4)
    linears = FusedLinears(find_groups(toy, lambda: toy(x)))
    with torch.no_grad():
        want = [toy.a(x), toy.d(other), toy.b(x), toy.b(other), toy.a(other)]
        with linears.in_place():
            got = [toy.a(x), toy.d(other), toy.b(x), toy.b(other), toy.a(other)]
    torch.testing.assert_close(got, want)


class Flatten(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(-1).sigmoid().view(x.shape)


def test_a_model_that_cannot_take_parts_decodes_unfused(caplog: pytest.LogCaptureFixture) -> None:
    """`view` wants a tensor of its own where the parts of a product lie side by side."""
    model: Any = llama()
    model.model.layers[0].mlp.act_fn = Flatten()
    with caplog.at_level(logging.WARNING, "cowbeam"):
        decoder = decoder_of(model)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "LlamaForCausalLM decodes without fused projections"
    ]
    assert_follows(decoder)


class Triple(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 3 * super().forward(input)


@pytest.mark.parametrize("change", ["transposed", "cut", "class"])
def test_a_parameter_that_stays_where_it_is_and_is_read_otherwise(change: str) -> None:
    """Same address, other strides, another shape, or a module of another class: once taken for unchanged."""
    model = llama()
    decoder = decoder_of(model)
    tokens(decoder)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    if change == "transposed":
        attention.q_proj.weight.data = attention.q_proj.weight.data.t()
    elif change == "cut":
        for linear in (mlp.gate_proj, mlp.up_proj):
            linear.weight.data = linear.weight.data[:32]
        mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :32].contiguous()
    else:
        attention.q_proj.__class__ = Triple
    assert_follows(decoder)


def test_weights_of_linears_that_left_the_model_are_let_go() -> None:
    """An owner who quantizes or wraps a Linear puts another module in its place; the old weights were kept."""
    model = llama()
    decoder = decoder_of(model)
    before = len(fused(decoder).groups)
    attention = model.model.layers[0].self_attn
    attention.q_proj = copy.deepcopy(attention.q_proj)
    assert_follows(decoder)
    assert len(fused(decoder).groups) == before - 1
