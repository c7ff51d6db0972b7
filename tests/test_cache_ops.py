"""Writes into the pool: exact, in place, and nowhere else."""

import pytest
import torch

from cowbeam.kernels.cache_ops import copy_blocks, read_kv, write_kv
from cowbeam.kernels.reference import copy_blocks_reference, write_kv_reference


def pool(block_size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((12, 2, 3, block_size, 8), float("nan"), dtype=dtype)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_tokens_land_in_their_slots_and_nowhere_else(block_size, slot_dtype):
    kv, truth = pool(block_size), pool(block_size)
    slots = torch.randperm(12 * block_size)[: 5 * block_size].to(slot_dtype)
    key, value = torch.randn(len(slots), 3, 8), torch.randn(len(slots), 3, 8)
    write_kv(key, value, kv[:, 0], kv[:, 1], slots)
    write_kv_reference(key, value, truth[:, 0], truth[:, 1], slots)
    torch.testing.assert_close(kv, truth, rtol=0, atol=0, equal_nan=True)
    assert int((~kv.isnan()).sum()) == 2 * key.numel()


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_slots_are_read_in_any_order(block_size):
    kv = torch.randn(12, 2, 3, block_size, 8)
    slots, memo = torch.randint(0, 12 * block_size, (5, 7)), {}
    for cache in (kv[:, 0], kv[:, 1], torch.randn(12, 3, block_size, 10)):
        want = cache.transpose(1, 2).reshape(12 * block_size, 3, -1)[slots].transpose(1, 2)
        assert torch.equal(read_kv(cache, slots, memo=memo), want)
    assert len(memo) == 2, "keys and values of one pool lie alike"


def test_widths_of_key_and_value_may_differ():
    key_cache, value_cache = torch.zeros(4, 1, 8, 6), torch.zeros(4, 1, 8, 10)
    key, value = torch.randn(2, 1, 6), torch.randn(2, 1, 10)
    write_kv(key, value, key_cache, value_cache, torch.tensor([9, 31]))
    assert torch.equal(key_cache[1, :, 1], key[0])
    assert torch.equal(value_cache[3, :, 7], value[1])


def test_strided_keys_as_a_fused_projection_gives_them():
    kv = pool(4)
    qkv = torch.randn(3, 9, 8)
    write_kv(qkv[:, 3:6], qkv[:, 6:], kv[:, 0], kv[:, 1], torch.tensor([0, 5, 47]))
    assert torch.equal(kv[1, 0, :, 1], qkv[1, 3:6])
    assert torch.equal(kv[11, 1, :, 3], qkv[2, 6:])


def test_copies_reach_every_layer_and_spare_other_blocks():
    layers = [torch.randn(12, 2, 3, 4, 8) for _ in range(3)]
    truth = [layer.clone() for layer in layers]
    sources, destinations = torch.tensor([3, 3, 7], dtype=torch.int32), torch.tensor([0, 11, 5], dtype=torch.int32)
    copy_blocks(layers, sources, destinations)
    copy_blocks_reference(truth, sources, destinations)
    for layer, expected in zip(layers, truth, strict=True):
        assert torch.equal(layer, expected)


def test_padding_copies_a_scratch_block_onto_itself():
    """A captured step has a fixed number of copies; the idle ones must change nothing."""
    layer = torch.randn(6, 2, 1, 4, 8)
    before = layer.clone()
    copy_blocks([layer], torch.tensor([5, 5]), torch.tensor([5, 5]))
    assert torch.equal(layer, before)
