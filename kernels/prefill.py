"""Attention of whole prompts that have no past in the cache: packed, each causal in itself."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


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
    for start, length in _spans(prompt_lengths):
        span = slice(start, start + length)
        q, k, v = _by_kv_head(query[span], key[span], value[span])
        if sliding_window is None or length <= sliding_window:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        else:
            attended = _sliding_window_attention(q, k, v, scale=scale, sliding_window=sliding_window)
        out[span] = attended.permute(2, 0, 1, 3).reshape(length, heads, -1)
    return out


def _spans(prompt_lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first token, length) of each prompt that has tokens."""
    start = 0
    for length in prompt_lengths:
        if length:
            yield start, length
        start += length


def _by_kv_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views [kv_heads, heads per kv head, tokens, dim].

    KV heads stand where SDPA has the batch, so K and V are broadcast to their query heads by a stride of 0.
    `enable_gqa` would repeat them in memory on the backends that do not know it (the CPU kernel, fp32 on CUDA).
    """
    tokens, kv_heads, _ = key.shape
    per_kv_head = query.shape[1] // kv_heads
    return (
        query.view(tokens, kv_heads, per_kv_head, -1).permute(1, 2, 0, 3),
        key.permute(1, 0, 2).unsqueeze(1).expand(-1, per_kv_head, -1, -1),
        value.permute(1, 0, 2).unsqueeze(1).expand(-1, per_kv_head, -1, -1),
    )


def _sliding_window_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, sliding_window: int) -> Tensor:
    """SDPA over chunks of queries, each against the keys its window reaches: memory is linear in the prompt."""
    length = q.shape[2]
    chunk = max(256, min(sliding_window, 1024))
    pieces = []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        first = max(0, start + 1 - sliding_window)
        behind = torch.arange(start, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)[None]
        visible = (behind >= 0) & (behind < sliding_window)
        pieces.append(
            F.scaled_dot_product_attention(
                q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], attn_mask=visible, scale=scale
            )
        )
    return torch.cat(pieces, 2)
