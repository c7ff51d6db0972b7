# mypy: allow-untyped-defs, allow-incomplete-defs
"""The pool's writes as Triton kernels, see `kernels/cache_ops.py`."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

COPY_WORDS = 2048  # of 4 bytes, per program


def write_kv_triton(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """`write_kv` in one launch: a program writes all kv heads of one token."""
    tokens, kv_heads, head_dim = key.shape
    value_dim = value.shape[2]
    for tensor in (key, value, key_cache, value_cache):
        assert tensor.stride(-1) == 1, f"the inner dimension must be contiguous, not strides {tensor.stride()}"
    if tokens:
        _write_kernel[(tokens,)](
            key,
            value,
            key_cache,
            value_cache,
            slots.contiguous(),
            *(key.stride()[:2] + value.stride()[:2]),
            *(key_cache.stride()[:3] + value_cache.stride()[:3]),
            BLOCK_SIZE=key_cache.shape[2],
            KV_HEADS=kv_heads,
            KV_HEADS_PAD=triton.next_power_of_2(kv_heads),
            HEAD_DIM=head_dim,
            VALUE_DIM=value_dim,
            DIM_PAD=triton.next_power_of_2(max(head_dim, value_dim)),
            num_warps=4,
        )


def copy_blocks_triton(layers: Sequence[Tensor], sources: Tensor, destinations: Tensor, pointers: Tensor) -> None:
    """`copy_blocks` in one launch over (copy, layer, part of the block); `pointers` from `layer_pointers`."""
    block_bytes = layers[0][0].numel() * layers[0].element_size()
    for layer in layers:
        assert layer.is_contiguous(), "a layer's pool must be contiguous"
        assert layer[0].numel() * layer.element_size() == block_bytes, "blocks must have one size in all layers"
    for ids in (sources, destinations):
        assert ids.is_contiguous(), f"block ids must be contiguous, not strides {ids.stride()}"
    assert block_bytes % 4 == 0, f"a block of {block_bytes} bytes is no whole number of words"
    words = block_bytes // 4
    _copy_kernel[(sources.shape[0], len(layers), triton.cdiv(words, COPY_WORDS))](
        pointers, sources, destinations, words, WORDS=COPY_WORDS, ALIGNED=block_bytes % 16 == 0, num_warps=4
    )


@triton.jit
def _write_kernel(
    KEY, VALUE, KEY_CACHE, VALUE_CACHE, SLOTS,
    key_token, key_head, value_token, value_head,
    key_block, key_cache_head, key_offset, value_block, value_cache_head, value_offset,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, KV_HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Where a value is not finite, its key becomes NaN and the value 0.

    A tile of `attention_kernel` holds keys of several requests, and what a mask hides counts 0 times: 0 times NaN would
    reach the others. A NaN score is hidden from them, and those who see it get NaN, as they would have.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOTS + token).to(tl.int64)
    block_id, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head = tl.arange(0, KV_HEADS_PAD)[:, None]
    dim = tl.arange(0, DIM_PAD)[None, :]
    live = (head < KV_HEADS) & (dim < VALUE_DIM)
    value = tl.load(VALUE + token * value_token + head * value_head + dim, mask=live, other=0.0)
    is_finite = tl.min((tl.abs(value.to(tl.float32)) < float("inf")).to(tl.int32), 1, keep_dims=True) == 1
    tl.store(
        VALUE_CACHE + block_id * value_block + offset * value_offset + head.to(tl.int64) * value_cache_head + dim,
        tl.where(is_finite, value, 0.0),
        mask=live,
    )
    live = (head < KV_HEADS) & (dim < HEAD_DIM)
    key = tl.load(KEY + token * key_token + head * key_head + dim, mask=live)
    tl.store(
        KEY_CACHE + block_id * key_block + offset * key_offset + head.to(tl.int64) * key_cache_head + dim,
        tl.where(is_finite, key, float("nan")),
        mask=live,
    )


@triton.jit
def _copy_kernel(POINTERS, SOURCES, DESTINATIONS, words, WORDS: tl.constexpr, ALIGNED: tl.constexpr):
    copy = tl.program_id(0)
    source = tl.load(SOURCES + copy).to(tl.int64)
    destination = tl.load(DESTINATIONS + copy).to(tl.int64)
    if source != destination:  # an idle copy of a captured step
        layer = tl.load(POINTERS + tl.program_id(1)).to(tl.pointer_type(tl.int32))
        if ALIGNED:
            layer = tl.multiple_of(layer, 16)
        word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
        tl.store(
            layer + destination * words + word,
            tl.load(layer + source * words + word, mask=word < words),
            mask=word < words,
        )
