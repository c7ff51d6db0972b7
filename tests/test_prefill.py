"""Packed prompts against the token-by-token reference."""

import pytest
import torch

from cowbeam.kernels.prefill import causal_attention, gather_blocks, packed_causal_attention
from cowbeam.kernels.reference import causal_attention_reference
from forests import relative_error


def check(prompt_lengths, *, kv_heads=2, group=3, dim=32, value_dim=None, sliding_window=None):
    torch.manual_seed(0)
    tokens = sum(prompt_lengths)
    query = torch.randn(tokens, kv_heads * group, dim)
    key, value = torch.randn(tokens, kv_heads, dim), torch.randn(tokens, kv_heads, value_dim or dim)
    kwargs = {"scale": dim**-0.5, "sliding_window": sliding_window}
    out = packed_causal_attention(query, key, value, prompt_lengths, **kwargs)
    truth = causal_attention_reference(query.double(), key.double(), value.double(), prompt_lengths, **kwargs)
    assert relative_error(out, truth) < 1e-6


def test_prompts_do_not_see_each_other():
    check([1, 15, 16, 17, 63])


@pytest.mark.parametrize("group", [1, 2, 7, 8])
def test_grouped_query_heads(group):
    check([40, 9], group=group)


def test_empty_prompt_between_others():
    check([5, 0, 7])


def test_value_width_of_its_own():
    check([33], value_dim=16)


@pytest.mark.parametrize("sliding_window", [1, 5, 300, 1000])
def test_sliding_window_over_several_chunks_of_queries(sliding_window):
    """600 tokens are cut in chunks: each must find the keys that lie before its first query."""
    check([600, 20], sliding_window=sliding_window, kv_heads=1, group=2, dim=16)


def test_prompt_lengths_must_cover_the_tokens():
    with pytest.raises(ValueError, match="add up to 5, not 6"):
        packed_causal_attention(torch.zeros(6, 2, 8), torch.zeros(6, 2, 8), torch.zeros(6, 2, 8), [2, 3], scale=1.0)


def test_projections_may_be_strided():
    """Queries often are slices of one fused QKV product."""
    torch.manual_seed(0)
    qkv = torch.randn(20, 8, 16)
    query, key, value = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
    out = packed_causal_attention(query, key, value, [20], scale=0.25)
    truth = causal_attention_reference(query.double(), key.double(), value.double(), [20], scale=0.25)
    assert relative_error(out, truth) < 1e-6


@pytest.mark.parametrize("sliding_window", [None, 1, 300, 2000])
@pytest.mark.parametrize("tokens", [7, 1200])
def test_the_last_tokens_see_what_they_see_in_one_pass(tokens, sliding_window):
    """A piece with its past in blocks: more queries than meet one mask, windows that end inside the past."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1300, 4, 8), torch.randn(1300, 2, 8), torch.randn(1300, 2, 4)
    kwargs = {"scale": 0.3, "sliding_window": sliding_window}
    out = causal_attention(query[-tokens:], key, value, **kwargs)
    truth = causal_attention_reference(query.double(), key.double(), value.double(), [1300], **kwargs)
    assert relative_error(out, truth[-tokens:]) < 1e-6


def test_blocks_are_gathered_in_the_tables_order():
    cache = torch.arange(5 * 2 * 4 * 3.0).view(5, 2, 4, 3)
    gathered = gather_blocks(cache, torch.tensor([3, 0]))
    assert gathered.shape == (8, 2, 3)
    assert gathered[5].equal(cache[0, :, 1])
    assert gathered[2].equal(cache[3, :, 2])
