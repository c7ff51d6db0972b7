"""oneDNN's products stand in for torch's during a forward pass, and only where they are what torch would compute."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from cowbeam.decoder import BeamSearchParams, Decoder
from cowbeam.decoder.cpu_linear import CPULinears, is_faster_here
from fakes import FAMILIES, make_model

pytestmark = pytest.mark.skipif(not is_faster_here(), reason="torch has no oneDNN on this CPU")
PROMPT = [3, 1, 4, 1, 5, 9, 2]
BEAMS = BeamSearchParams(num_beams=4, max_new_tokens=8, eos_token_id=[])


def in_place(model: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode(), CPULinears(model).in_place():
        return model(x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0, 24), (1, 24), (16, 24), (3, 1, 24), (2, 5, 24), (300, 24)])
def test_it_is_the_same_product(shape: tuple[int, ...], bias: bool):
    linear = nn.Linear(24, 40, bias=bias)
    x = torch.randn(shape)
    want = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    got = in_place(linear, x)
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_an_input_may_be_a_view():
    linear, x = nn.Linear(24, 40), torch.randn(16, 3, 48)
    for view in (x[:, 1, :24], x[:, 1, ::2], x[:, :, :24], x[:1, :1, :24].expand(4, 2, 24)):
        torch.testing.assert_close(in_place(linear, view), linear(view), rtol=1e-5, atol=1e-5)


def is_left_to_torch(linear: nn.Linear, x: Tensor) -> bool:
    """Only torch's own product is what it is bit for bit, and the one that raises what torch raises."""
    asked: list[object] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            asked.append(function)
            return function(*args, **(kwargs or {}))

    with Watch():
        got = in_place(linear, x)
    torch.testing.assert_close(got, linear(x), rtol=0, atol=0)
    return not any("mkldnn" in str(function) for function in asked)


def transposed() -> nn.Linear:
    linear = nn.Linear(24, 24)
    linear.weight = nn.Parameter(linear.weight.detach().t())
    return linear


def own_class() -> nn.Linear:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    return Doubled(24, 24)


def parametrized() -> nn.Linear:
    linear = nn.Linear(24, 24)
    parametrize.register_parametrization(linear, "weight", nn.Tanh())
    return linear


def with_own_forward() -> nn.Linear:
    linear = nn.Linear(24, 24)
    linear.forward = lambda input: input + 1  # what accelerate does to offload a module
    return linear


@pytest.mark.parametrize("make", [transposed, own_class, parametrized, with_own_forward])
def test_what_is_not_plain_is_left_to_torch(make: Callable[[], nn.Linear]):
    assert is_left_to_torch(make(), torch.randn(5, 24))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_torch(dtype: torch.dtype):
    assert is_left_to_torch(nn.Linear(24, 24, dtype=dtype), torch.randn(5, 24, dtype=dtype))


def test_a_plain_one_is_not_left_to_torch():
    """Else the tests above could not fail."""
    with pytest.raises(AssertionError):
        assert is_left_to_torch(nn.Linear(576, 96), torch.randn(5, 576))


def test_a_compiler_sees_torchs_own_product():
    """inductor fell over oneDNN's with weights that are no constants: no model could be compiled on a CPU."""
    seen: list[str] = []

    def note(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    linear, x = nn.Linear(24, 40), torch.randn(5, 24)
    torch._dynamo.reset()
    got = in_place(linear, x)
    with torch.inference_mode(), CPULinears(linear).in_place():
        compiled = torch.compile(lambda x: linear(x), backend=note, fullgraph=True)(x)
    torch.testing.assert_close(compiled, got, rtol=1e-5, atol=1e-5)
    assert any("linear" in target for target in seen)
    assert not any("mkldnn" in target for target in seen)


def test_the_model_is_as_its_owner_left_it():
    """After a step, and after one that raised; gradients flow."""
    model = make_model("llama", FAMILIES["llama"])
    Decoder(model, num_blocks=64).generate(PROMPT, BEAMS)
    linears = CPULinears(model)
    with pytest.raises(RuntimeError, match="on the way"), linears.in_place():
        raise RuntimeError("on the way")
    assert not any("forward" in module.__dict__ for module in model.modules())
    model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_weights_that_change_are_used_at_once():
    """In place, behind autograd's back, and by another tensor: after each as a new decoder has it."""
    model = make_model("llama", FAMILIES["llama"])
    decoder = Decoder(model, num_blocks=64)
    head = model.lm_head

    def negate_in_place() -> None:
        with torch.no_grad():
            head.weight.mul_(-1)

    def negate_data() -> None:
        head.weight.data.mul_(-0.7)

    def replace_weight() -> None:
        head.weight = nn.Parameter(torch.randn_like(head.weight))

    def replace_module() -> None:
        model.lm_head = nn.Linear(head.in_features, head.out_features, bias=False)

    before = decoder.generate(PROMPT, BEAMS).completions[0].token_ids
    for change in (negate_in_place, negate_data, replace_weight, replace_module):
        change()
        got = decoder.generate(PROMPT, BEAMS).completions[0].token_ids
        assert got == Decoder(model, num_blocks=64).generate(PROMPT, BEAMS).completions[0].token_ids
        assert got != before
        before = got
