"""Mixtures of experts: computed without a question to the device, where a step could not be captured else."""

from typing import Any

import pytest
import torch

from cowbeam.decoder import BeamSearchParams, Decoder, experts, step_graph
from cowbeam.decoder.attend import DecodeStep
from cowbeam.decoder.model_adapter import ModelAdapter
from cowbeam.decoder.step_graph import StepGraphs
from fakes import FAMILIES, make_model, token_ids
from test_compiled_layers import decode_step

MIXTURES = ["gpt_oss", "mixtral", "qwen3_moe"]
BEAMS = BeamSearchParams(num_beams=4, max_new_tokens=12, eos_token_id=[])
PROMPT = [3, 1, 4, 1, 5]


def implementations(model: Any) -> set[str]:
    return {module.config._experts_implementation for module in model.modules() if hasattr(type(module), "_apply_gate")}


@pytest.mark.parametrize("family", MIXTURES)
def test_logits_are_those_of_grouped_experts(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(family, FAMILIES[family])
    grouped, batched = ModelAdapter(model, "torch"), ModelAdapter(model, "torch")
    assert batched.batch_experts()
    assert not batched.batch_experts(), "there is nothing more to change"
    during: list[set[str]] = []
    forward = ModelAdapter._forward

    def watched(self: ModelAdapter, token_ids: Any, positions: Any, step: Any, last: Any) -> Any:
        if isinstance(step, DecodeStep):
            during.append(implementations(model))
        return forward(self, token_ids, positions, step, last)

    monkeypatch.setattr(ModelAdapter, "_forward", watched)
    for rows in (1, 3, 8):
        want, got = decode_step(grouped, rows), decode_step(batched, rows)
        assert float((got - want).norm() / want.norm()) <= 1e-6
    assert during == [{"grouped_mm"}, {"batched_mm"}] * 3
    assert implementations(model) == {"grouped_mm"}, "outside of a step the model is as its owner left it"


def test_too_much_to_gather_stays_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of a token and an expert takes a copy of the expert's weights."""
    model = make_model("mixtral", FAMILIES["mixtral"])
    batched = experts.BatchedExperts(model)
    expert = 3 * 32 * 48 * 4  # gate, up and down of one, in bytes
    monkeypatch.setattr(experts, "MAX_GATHERED_BYTES", 5 * 2 * expert)  # two experts a token
    for rows, expected in ((5, "batched_mm"), (6, "grouped_mm")):
        with batched.in_place(rows):
            assert implementations(model) == {expected}
        assert implementations(model) == {"grouped_mm"}


def test_models_without_experts_have_nothing_to_change() -> None:
    assert not ModelAdapter(make_model("llama", FAMILIES["llama"]), "torch").batch_experts()


def test_the_owners_choice_stays() -> None:
    model: Any = make_model("mixtral", FAMILIES["mixtral"])
    model.set_experts_implementation("eager")
    assert not ModelAdapter(model, "torch").batch_experts()


@pytest.mark.parametrize(("family", "captured"), [("mixtral", True), ("llama", False)])
def test_a_failed_capture_is_tried_once_more(family: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits in it may be the experts; a model without them goes on uncaptured."""
    adapter = ModelAdapter(make_model(family, FAMILIES[family]), "torch")
    adapter.probe(2)
    attempts: list[bool] = []
    memories: list[torch.device] = []

    class Step:
        def __init__(self, *args: Any) -> None:
            pass

        def load(self, inputs: Any) -> None:
            pass

        def capture(self) -> None:
            attempts.append(adapter._batched_experts is not None)
            if not attempts[-1]:
                raise RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture")

    monkeypatch.setattr(step_graph, "CapturedStep", Step)
    monkeypatch.setattr(step_graph, "GraphMemory", memories.append)
    graphs = StepGraphs(adapter, None)  # type: ignore[arg-type]
    graphs.is_capturing = True
    step = graphs._capture(None, None)  # type: ignore[arg-type]
    assert (step is not None, graphs.is_capturing) == (captured, captured)
    assert attempts == ([False, True] if captured else [False])
    assert len(memories) == len(attempts), "torch captures nothing more into memory whose capture failed"


@pytest.mark.cuda
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", MIXTURES)
def test_steps_with_experts_are_captured(family: str, dtype: torch.dtype, compile: bool) -> None:
    """They were not, but in bfloat16: "Cannot copy between CPU and CUDA tensors during CUDA graph capture …"."""
    model = make_model(family, FAMILIES[family])
    want = token_ids(Decoder(model, num_blocks=64).generate(PROMPT, BEAMS))
    result = Decoder(model.to("cuda", dtype), num_blocks=64, compile=compile).generate(PROMPT, BEAMS)
    assert result.stats.cuda_graphs
    assert result.stats.compiled == compile
    if dtype == torch.float32:
        assert token_ids(result) == want
