"""Attention of prompts and of pieces of them: packed, each causal in itself and behind its own past."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

# Queries that meet their keys under one explicit mask: memory is linear in the keys.
_MASKED_AT_ONCE = 1024


def packed_causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prompt_lengths: Sequence[int],
    *,
    scale: float,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention inside each of several prompts laid end to end.

    Args:
        query: [tokens, heads, head_dim], tokens = sum(prompt_lengths).
        key: [tokens, kv_heads, head_dim]; query head h reads kv head h // (heads // kv_heads).
        value: [tokens, kv_heads, value_dim].
        prompt_lengths: tokens of each prompt, in packing order.
        scale: factor on the scores.
        sliding_window: a token sees itself and the sliding_window - 1 tokens before it.

    Returns:
        [tokens, heads, value_dim]
    """
    tokens, heads, _ = query.shape
    if sum(prompt_lengths) != tokens:
        raise ValueError(f"prompt_lengths {list(prompt_lengths)} add up to {sum(prompt_lengths)}, not {tokens} tokens")
    out = query.new_empty(tokens, heads, value.shape[-1])
    for span in spans(prompt_lengths):
        out[span] = causal_attention(query[span], key[span], value[span], scale=scale, sliding_window=sliding_window)
    return out


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, *, scale: float, sliding_window: int | None = None
) -> Tensor:
    """Causal attention of a sequence's last tokens over the sequence.

    Args:
        query: [tokens, heads, head_dim], of the last ``tokens`` positions.
        key: [positions, kv_heads, head_dim], positions ≥ tokens. What no query's window reaches may be left out.
        value: [positions, kv_heads, value_dim].
        scale: factor on the scores.
        sliding_window: a token sees itself and the sliding_window - 1 tokens before it.

    Returns:
        [tokens, heads, value_dim]
    """
    tokens, heads, _ = query.shape
    positions = key.shape[0]
    q, k, v = _by_kv_head(query, key, value)
    if sliding_window is not None and positions > sliding_window:
        attended = _masked_attention(q, k, v, scale=scale, sliding_window=sliding_window)
    elif tokens == positions:
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    elif q.is_cuda:
        mask = causal_lower_right(tokens, positions)  # never made: the kernels know it
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        attended = _masked_attention(q, k, v, scale=scale, sliding_window=positions)
    return attended.permute(2, 0, 1, 3).reshape(tokens, heads, -1)


def spans(lengths: Sequence[int]) -> Iterator[slice]:
    """The tokens of each sequence that has some, where they are laid end to end."""
    start = 0
    for length in lengths:
        if length:
            yield slice(start, start + length)
        start += length


def gather_blocks(cache: Tensor, block_table: Tensor) -> Tensor:
    """All slots of some blocks in the order of ``block_table`` [blocks]: [blocks * block_size, kv_heads, dim].

    A view of a copy that lies by kv head. cache: [num_blocks, kv_heads, block_size, dim].
    """
    kv_heads, dim = cache.shape[1], cache.shape[3]
    return cache.transpose(0, 1).index_select(1, block_table).view(kv_heads, -1, dim).transpose(0, 1)


def _by_kv_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views [kv_heads, heads per kv head, tokens, dim].

    KV heads stand where SDPA has the batch, so K and V are broadcast to their query heads by a stride of 0.
    `enable_gqa` would repeat them in memory on the backends that do not know it (the CPU kernel, fp32 on CUDA).
    """
    tokens, heads, _ = query.shape
    per_kv_head = heads // key.shape[1]
    return (
        query.view(tokens, -1, per_kv_head, query.shape[2]).permute(1, 2, 0, 3),
        key.permute(1, 0, 2).unsqueeze(1).expand(-1, per_kv_head, -1, -1),
        value.permute(1, 0, 2).unsqueeze(1).expand(-1, per_kv_head, -1, -1),
    )


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, sliding_window: int) -> Tensor:
    """SDPA over chunks of queries, each against the keys its window reaches: memory is linear in the positions."""
    tokens, positions = q.shape[2], k.shape[2]
    past = positions - tokens
    chunk = max(256, min(sliding_window, _MASKED_AT_ONCE))
    pieces = []
    for start in range(0, tokens, chunk):
        end = min(start + chunk, tokens)
        first = max(0, past + start + 1 - sliding_window)
        of_query = torch.arange(past + start, past + end, device=q.device)[:, None]
        behind = of_query - torch.arange(first, past + end, device=q.device)[None]
        visible = (behind >= 0) & (behind < sliding_window)
        keys = slice(first, past + end)
        pieces.append(
            F.scaled_dot_product_attention(
                q[:, :, start:end], k[:, :, keys], v[:, :, keys], attn_mask=visible, scale=scale
            )
        )
    return torch.cat(pieces, 2)
