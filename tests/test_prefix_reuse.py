"""Prompts that begin alike are computed once, by whoever decodes them; changed weights and broken requests are not."""

import gc
import random
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch.optim import optimizer

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams
from fakes import FAMILIES, VOCABULARY, assert_unused, make_model, random_prompt, tiny_model, token_ids

GREEDY = BeamSearchParams(num_beams=1, max_new_tokens=6, eos_token_id=[])


def make_decoder(num_blocks: int = 256, **knobs: bool) -> Decoder:
    return Decoder(tiny_model("llama"), block_size=4, num_blocks=num_blocks, **knobs)


def poison_free_blocks(decoder: Decoder) -> None:
    """NaN into every block that nobody holds and that cannot be found."""
    engine = decoder._engine
    assert engine is not None
    for layer in engine._cache.layers:
        for tensor in layer.tensors:
            tensor[list(engine.pool._free)] = torch.nan


def test_a_system_prompt_of_a_hundred_requests_is_computed_once() -> None:
    """They arrive in one step: what one computes the next takes over in the same pass, and nothing unwritten."""
    model = make_model("llama", {**FAMILIES["llama"], "max_position_embeddings": 2100})
    system = [1 + i * i % (VOCABULARY - 1) for i in range(2000)]
    prompts = [[*system, *random_prompt(random.Random(i), 1, 20)] for i in range(100)]
    decoder = Decoder(model, block_size=16, num_blocks=700)
    poison_free_blocks(decoder)
    results = decoder.generate(prompts, GREEDY)
    counters = decoder.counters()
    assert counters.prefill_tokens == 2000 + sum(len(prompt) - 2000 for prompt in prompts)
    assert counters.reused_tokens == 99 * 2000
    assert counters.hit_rate == pytest.approx(0.985, abs=0.01)
    assert sum(result.stats.reused_tokens for result in results) == 99 * 2000
    alone = Decoder(model, block_size=16, num_blocks=700, prefix_reuse=False)
    for index in (0, 1, 57, 99):
        assert token_ids(results[index]) == token_ids(alone.generate(prompts[index], GREEDY))
    assert alone.counters().reused_tokens == 0
    assert_unused(decoder)


def test_a_chat_goes_on_where_its_answer_ended() -> None:
    decoder, alone = make_decoder(), make_decoder(prefix_reuse=False)
    chat, computed = random_prompt(random.Random(1), 11, 11), 0
    for turn in range(4):
        poison_free_blocks(decoder)
        result = decoder.generate(chat, SamplingParams(max_new_tokens=9, seed=turn, eos_token_id=[]))
        assert token_ids(result) == token_ids(
            alone.generate(chat, SamplingParams(max_new_tokens=9, seed=turn, eos_token_id=[]))
        )
        assert result.stats.reused_tokens == computed // 4 * 4
        computed = len(chat) + 8  # the last token of an answer never gets a slot
        chat = [*chat, *result.completions[0].token_ids, 5, 6]
    assert_unused(decoder)


def write_in_place(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def load_others(model: torch.nn.Module) -> None:
    model.load_state_dict(make_model("llama", FAMILIES["llama"], seed=5).state_dict())


def exchange(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.2


def optimize(model: torch.nn.Module, **how: bool) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters(), lr=0.05, **how).step()


def optimize_fused(model: torch.nn.Module) -> None:
    """Torch raises no version of what a fused step writes."""
    optimize(model, fused=True)


@pytest.mark.parametrize("change", [write_in_place, load_others, exchange, optimize, optimize_fused])
def test_other_weights_take_over_nothing(change: Callable[[torch.nn.Module], None]) -> None:
    """Rollouts between two updates of a policy: the old one's keys would be read without a word."""
    model = make_model("llama", FAMILIES["llama"])
    decoder = Decoder(model, block_size=4, num_blocks=64)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    decoder.generate(prompt, GREEDY)
    assert decoder.generate(prompt, GREEDY).stats.reused_tokens == 8
    change(model)
    result = decoder.generate(prompt, GREEDY)
    assert result.stats.reused_tokens == 0
    assert token_ids(result) == token_ids(Decoder(model, num_blocks=64).generate(prompt, GREEDY))
    assert decoder.generate(prompt, GREEDY).stats.reused_tokens == 8


def test_optimizers_of_other_models_are_none_of_its_business() -> None:
    decoder, other = make_decoder(), make_model("llama", FAMILIES["llama"])
    decoder.generate([1] * 20, GREEDY)
    optimize(other, fused=True)
    assert decoder.generate([1] * 20, GREEDY).stats.reused_tokens > 0


def test_a_decoder_that_is_gone_leaves_no_hook_with_torch() -> None:
    gc.collect()
    before = len(optimizer._global_optimizer_post_hooks)
    decoder = make_decoder()
    assert len(optimizer._global_optimizer_post_hooks) == before + 1
    del decoder
    gc.collect()
    assert len(optimizer._global_optimizer_post_hooks) == before


def test_prefixes_are_forgotten_at_a_word() -> None:
    """Where torch does not count a change: written through ``.data``, or another adapter."""
    decoder = make_decoder()
    decoder.generate([1] * 20, GREEDY)
    assert decoder.counters().cached_blocks > 0
    decoder.forget_prefixes()
    assert decoder.counters().cached_blocks == 0
    assert decoder.generate([1] * 20, GREEDY).stats.reused_tokens == 0
    assert_unused(decoder)


def test_the_knob_is_checked() -> None:
    with pytest.raises(ValueError, match="prefix_reuse must be True or False, got 1"):
        Decoder(tiny_model("llama"), num_blocks=64, prefix_reuse=1)  # type: ignore[arg-type]


def test_a_request_with_nan_leaves_nothing_to_be_found() -> None:
    """A retry must not begin with the blocks that broke the first; who runs beside it has its own tokens."""
    decoder = make_decoder()
    prompt, other = [7, 8, 9, 10, 11, 12, 13, 14, 15], [1, 2, 3, 4, 5]
    want = [token_ids(result) for result in make_decoder().generate([prompt, other], GREEDY)]
    beside = decoder.add_request(other, GREEDY)
    decoder.step()
    forward = decoder.model.forward

    def broken(*args, **kwargs):
        out = forward(*args, **kwargs)
        if 13 in kwargs["input_ids"]:
            out.logits = torch.full_like(out.logits, torch.nan)
        return out

    run = decoder.add_request(prompt, GREEDY)
    with mock.patch.object(decoder.model, "forward", broken):
        while not run.is_over:
            decoder.step()
    assert "logits hold NaN, at generated token 1 of the prompt of 9 tokens [7, 8, 9" in str(run.error)
    while not beside.is_over:
        decoder.step()
    assert token_ids(beside.result) == want[1]
    again = decoder.generate(prompt, GREEDY)
    assert again.stats.reused_tokens == 0
    assert token_ids(again) == want[0]
    assert_unused(decoder)
