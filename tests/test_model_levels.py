"""Models beyond cowbeam's own attention: K/V gathered from blocks, and dense states that fork with their branch."""

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams, attach, attend, branch_states, scheduler
from cowbeam.decoder.branch_states import BranchState, StateRows, take
from cowbeam.decoder.model_adapter import ModelAdapter
from cowbeam.decoder.self_check import check_paged_logits
from fakes import assert_unused, random_beam_settings, random_prompt
from families import LEVEL_2, LEVEL_3, UNLIKE_THEMSELVES, family_model
from oracles import drawing_samples, transformers_generate
from test_exact_beams import differences
from test_exact_samples import assert_same, random_warpers

BEYOND = {**LEVEL_2, **LEVEL_3}
SETTINGS_A_FAMILY = 3
PROMPT = [3, 1, 4, 1, 5, 9, 2]
BEAMS = BeamSearchParams(num_beams=4, max_new_tokens=6, eos_token_id=[])


def make_model(name: str) -> PreTrainedModel:
    """With weights so wide that beams overtake each other, where the model bears it."""
    return family_model(name, scale=0.15 if name in UNLIKE_THEMSELVES else 0.3)


def make_decoder(name: str, block_size: int = 4) -> Decoder:
    return Decoder(make_model(name), block_size=block_size, num_blocks=1024 // block_size)


@pytest.fixture(params=sorted(BEYOND))
def decoder(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    with make_decoder(request.param) as decoder:
        yield decoder
        assert_unused(decoder)


def test_searches_equal_transformers(decoder: Decoder) -> None:
    """Prompts of unequal length together; transformers is asked one by one, since padding may change its states."""
    for seed in range(SETTINGS_A_FAMILY):
        rng = random.Random(seed)
        prompts, settings = [random_prompt(rng) for _ in range(3)], random_beam_settings(rng)
        results = decoder.generate(prompts, BeamSearchParams(**settings))
        expected = [transformers_generate(decoder.model, [prompt], settings)[0] for prompt in prompts]
        assert not differences(expected, results, settings), f"seed {seed}: {settings}"


def test_samples_equal_transformers(decoder: Decoder) -> None:
    for seed in range(SETTINGS_A_FAMILY):
        rng = random.Random(seed)
        prompt, settings = random_prompt(rng), random_warpers(rng) | {"num_return_sequences": 4, "max_new_tokens": 8}
        with drawing_samples(settings["seed"]):
            (want,) = transformers_generate(decoder.model, [prompt], settings, do_sample=True)
        assert_same(want, decoder.generate(prompt, SamplingParams(**settings)).completions, f"seed {seed}")


@pytest.mark.parametrize("name", sorted(BEYOND))
def test_an_attached_model_answers_as_before(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(name)
    prompts = torch.tensor([PROMPT, [0, 0, 0, *PROMPT[:4]]])
    call = {
        "input_ids": prompts,
        "attention_mask": (prompts != 0).long(),
        "num_beams": 3,
        "num_return_sequences": 2,
        "max_new_tokens": 8,
        "do_sample": False,
        "use_cache": True,  # MPT's configuration says no
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    want = model.generate(**call)
    got = attach(model, block_size=4).generate(**call)
    assert not [record.getMessage() for record in caplog.records if record.name == "cowbeam"]
    assert torch.equal(want.sequences, got.sequences)
    assert torch.equal(want.beam_indices, got.beam_indices)
    assert torch.allclose(want.sequences_scores, got.sequences_scores, atol=1e-4)


@pytest.mark.parametrize(("name", "attention"), [("llama", "torch"), ("bloom", "gathered"), ("jamba", "gathered")])
def test_stats_and_description_tell_the_level(name: str, attention: str) -> None:
    decoder = make_decoder(name)
    stats = decoder.generate(PROMPT, BEAMS).stats
    assert (stats.level, stats.attention) == (decoder.level, attention)
    assert f"decoded on level {decoder.level}: " in decoder.describe()
    assert ("bytes of states a branch" in decoder.describe()) == (decoder.level == 3)


def test_where_cowbeams_attention_is_wrong_the_models_own_attends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A family that masks in a way its config does not tell: here a window that cowbeam is kept from seeing."""
    monkeypatch.setattr(attend, "_sliding_window", lambda *_: None)
    decoder = make_decoder("mistral")
    assert decoder.level == 2
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "cowbeam"]
    assert "its paged logits differ from its own by" in warning
    assert warning.endswith("its K/V are gathered from the blocks instead")
    settings = random_beam_settings(random.Random(0))
    results = decoder.generate([PROMPT], BeamSearchParams(**settings))
    assert not differences(transformers_generate(decoder.model, [PROMPT], settings), results, settings)


def test_where_cowbeams_attention_fails_the_models_own_attends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the model's code raises when it is called in a way it does not know."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("use_cache"):
            raise KeyError("cache")
        return original(self, *args, **kwargs)

    model = family_model("llama")
    original = type(model.model).forward
    monkeypatch.setattr(type(model.model), "forward", forward)
    monkeypatch.setattr("cowbeam.decoder.trial.check_paged_logits", lambda *_: None)
    assert Decoder(model, num_blocks=64).level == 2
    assert "a trial step says 'cache'" in caplog.text


class Owner:
    """Stands for a branch."""

    def __init__(self) -> None:
        self.state: object | None = None


@pytest.mark.parametrize("name", sorted(LEVEL_2))
@pytest.mark.parametrize("first", [1, 4, 5])
def test_a_prompt_in_two_parts(name: str, first: int) -> None:
    """The second part attends to the first one's K/V in the blocks."""
    engine = make_decoder(name)._engine
    assert engine is not None
    gathered, cache = engine._adapter._gathered, engine._cache
    tokens, table = torch.tensor(PROMPT), torch.tensor([2, 9])
    want = gathered.prefill(cache, tokens, torch.tensor([7, 3]), None)
    gathered.prefill(cache, tokens[:first], table, None)
    got = gathered.prefill(cache, tokens[first:], table, None, start=first)
    assert float((got - want).abs().max()) <= 1e-5


def test_a_step_leaves_the_states_before_it_as_they_were() -> None:
    """Branches that fork share one state: whoever went on in place would change the others'."""
    engine = make_decoder("jamba")._engine
    assert engine is not None
    owner = Owner()
    engine._adapter._gathered.prefill(engine._cache, torch.tensor(PROMPT), torch.tensor([7, 3]), owner)
    assert isinstance(owner.state, BranchState)
    kept = [tensor for layer in owner.state.rows.layers for tensor in branch_states._tensors(layer)]
    before = [tensor.clone() for tensor in kept]
    for layer in take([owner, owner]):
        for tensor in branch_states._tensors(layer):
            tensor.fill_(torch.nan)
    assert before
    assert all(torch.equal(one, other) for one, other in zip(before, kept, strict=True))


def test_states_of_dropped_branches_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last step's are alive while it runs, and none when nothing does."""
    alive: weakref.WeakSet[StateRows] = weakref.WeakSet()
    most = 0

    def give(owners: Any, layers: Any) -> None:
        nonlocal most
        original(owners, layers)
        alive.update(owner.state.rows for owner in owners)
        most = max(most, len(alive))

    original = branch_states.give
    monkeypatch.setattr("cowbeam.decoder.gathered.give", give)
    decoder = make_decoder("jamba")
    decoder.generate(PROMPT, BEAMS)
    gc.collect()
    assert most == 1
    assert not alive
    assert_unused(decoder)


def shared(layer: Any, _rows: Any) -> Any:
    """The bug that a fork's state is its parent's: no copy is made."""
    return layer


def test_wrong_states_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check sees states that do not fork: no level is left then."""
    monkeypatch.setattr(branch_states, "_selected", shared)
    with pytest.raises(ValueError, match="JambaForCausalLM cannot be decoded over KV blocks"):
        make_decoder("jamba")


@pytest.mark.parametrize("name", ["bloom", "qwen3_next"])
def test_unread_slots_may_hold_anything(name: str) -> None:
    """A weight of 0 times NaN is NaN: what pads a shorter row must be a number."""
    clean, poisoned = make_decoder(name), make_decoder(name)
    for layer in poisoned._engine._cache.layers:  # type: ignore[union-attr]
        layer.key.fill_(torch.nan)
        layer.value.fill_(torch.nan)
    prompts = [PROMPT * 3, [5], PROMPT]
    assert [r.completions for r in clean.generate(prompts, BEAMS)] == [
        r.completions for r in poisoned.generate(prompts, BEAMS)
    ]


def test_a_step_that_would_be_dropped_is_not_begun() -> None:
    """A state once stepped cannot be stepped back: no step runs ahead, also where it is asked for."""
    decoder = make_decoder("jamba")
    engine = decoder._engine
    assert engine is not None
    asked = (engine._adapter, engine._cache, decoder.num_blocks, engine._kv_bytes, engine._decode_text)
    assert not type(engine)(*asked, looks_ahead=True)._looks_ahead


def test_no_kv_at_all() -> None:
    """Pure Mamba: blocks of no bytes, whose tables count tokens only; memory is the states'."""
    with Decoder(family_model("mamba")) as decoder:
        result = decoder.generate(PROMPT, BEAMS)
        assert result.stats.bytes_per_block == 0
        assert decoder.kv_layout.per_token == 0


def test_a_long_search_over_many_blocks() -> None:
    settings = {"num_beams": 6, "num_return_sequences": 2, "max_new_tokens": 40, "eos_token_id": []}
    prompt = random_prompt(random.Random(1), 150, 150)
    for name in ("bloom", "gpt_neo", "qwen3_next", "falcon_h1"):
        decoder = make_decoder(name, block_size=16)
        results = decoder.generate([prompt], BeamSearchParams(**settings))
        assert not differences(transformers_generate(decoder.model, [prompt], settings), results, settings), name


@pytest.mark.parametrize("name", sorted(BEYOND))
def test_with_fused_projections(name: str) -> None:
    """On a GPU Linears of one input are one product, on every level."""
    adapter = ModelAdapter(make_model(name), "torch")
    shapes = adapter.probe(2)
    adapter.fuse_linears()
    check_paged_logits(adapter, shapes, block_size=4)


@pytest.mark.parametrize("name", ["bloom", "gpt_neo", "jamba", "qwen3_next", "mamba"])
def test_preempted_groups_go_on_as_they_were(name: str) -> None:
    """Their K/V are computed anew: in pieces on level 2, each branch from its begin on level 3."""
    prompts = [PROMPT * 2, PROMPT[:3], [5, 6] * 6]
    params = [
        BeamSearchParams(num_beams=4, max_new_tokens=12, eos_token_id=[]),
        SamplingParams(num_return_sequences=3, max_new_tokens=14, seed=1, eos_token_id=[]),
        BeamSearchParams(num_beams=3, max_new_tokens=12, eos_token_id=[]),
    ]
    with make_decoder(name) as roomy:
        alone = [roomy.generate(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    with Decoder(make_model(name), block_size=4, num_blocks=20) as decoder:
        together = decoder.generate(prompts, params)
        assert any(result.stats.preemptions for result in together)
        assert_unused(decoder)
    for one, other in zip(alone, together, strict=True):
        assert [c.token_ids for c in one.completions] == [c.token_ids for c in other.completions]


@pytest.mark.parametrize("name", ["bloom", "llama4_text", "jamba", "mamba"])
def test_prompts_longer_than_a_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_PASS_TOKENS", 8)
    monkeypatch.setattr(scheduler, "SHARE_OF_LONG", 4)
    prompts = [random_prompt(random.Random(1), 30, 30), PROMPT]
    params = BeamSearchParams(num_beams=3, max_new_tokens=6, eos_token_id=[])
    with make_decoder(name) as decoder:
        results = decoder.generate(prompts, params)
        settings = {"num_beams": 3, "num_return_sequences": 1, "max_new_tokens": 6, "eos_token_id": []}
        expected = [transformers_generate(decoder.model, [prompt], settings)[0] for prompt in prompts]
        assert not differences(expected, results, settings | {"length_penalty": 1.0})
