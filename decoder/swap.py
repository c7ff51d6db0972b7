"""Where the blocks of preempted groups wait on the host, so that nothing of them is computed anew.

To the host and back K/V take a fraction of the time that computing them takes (`BENCHMARKS.md`). The room is bounded: a
group that finds none is computed anew. On a CPU all are, unless `swap_memory` is given: the pool lies in the host's
memory already.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cowbeam.decoder.batch import to_device
from cowbeam.decoder.blocks import BlockId
from cowbeam.decoder.kv_cache import KVCache
from cowbeam.decoder.placement import on_device

logger = logging.getLogger("cowbeam")

DEFAULT_SWAP_MEMORY = 4 * 2**30  # bytes, beside a GPU
# Pinned memory is slow to get, so it comes in pieces of one size that are used again: so many blocks of all layers, or
# as many as there is room for.
CHUNK_BLOCKS = 32

_Chunk = list[Tensor]  # of each tensor of the cache: [blocks, *block]


@dataclass
class SwappedBlocks:
    """What so many blocks held, in their order."""

    chunks: list[_Chunk]
    num_blocks: int


class SwapSpace:
    """Room for ``capacity`` bytes, in whole chunks, taken when it is first needed.

    Copies run on the current stream, one behind the other: blocks may be given away as soon as they are being saved.
    """

    def __init__(self, cache: KVCache, capacity: int) -> None:
        self._tensors = cache.tensors
        self._block_bytes = sum(tensor[0].nbytes for tensor in self._tensors)
        self._free: list[_Chunk] = []
        blocks = capacity // self._block_bytes if self._block_bytes else 0
        self._chunk_blocks = max(1, min(CHUNK_BLOCKS, blocks))
        self._num_to_make = blocks // self._chunk_blocks

    def save(self, block_ids: Sequence[BlockId]) -> SwappedBlocks | None:
        """Copy blocks out; None if there is no room for them."""
        chunks = self._take(-(-len(block_ids) // self._chunk_blocks))
        if chunks is None:
            return None
        saved = SwappedBlocks(chunks, len(block_ids))
        for tensor, ids, host in self._pieces(saved, block_ids, 0):
            host.copy_(tensor[ids], non_blocking=True)
        return saved

    def bring_back(self, saved: SwappedBlocks, block_ids: Sequence[BlockId]) -> None:
        """Copy what was saved into these blocks; if they are fewer, the last of it."""
        first = saved.num_blocks - len(block_ids)
        for tensor, ids, host in self._pieces(saved, block_ids, first):
            tensor[ids] = host.to(tensor.device, non_blocking=True)
        self.drop(saved)

    def drop(self, saved: SwappedBlocks) -> None:
        """Nobody will ask for it any more."""
        self._free += saved.chunks
        saved.chunks = []

    def _pieces(
        self, saved: SwappedBlocks, block_ids: Sequence[BlockId], first: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Tensors of the cache, ids of blocks in them, and what belongs to these on the host, from number first on."""
        ids_on = {device: to_device(block_ids, torch.long, device) for device in {t.device for t in self._tensors}}
        for index, tensor in enumerate(self._tensors):
            with on_device(tensor.device):
                for number in range(first // self._chunk_blocks, len(saved.chunks)):
                    start = max(first, number * self._chunk_blocks)
                    end = min((number + 1) * self._chunk_blocks, saved.num_blocks)
                    host = saved.chunks[number][index][
                        start - number * self._chunk_blocks : end - number * self._chunk_blocks
                    ]
                    yield tensor, ids_on[tensor.device][start - first : end - first], host

    def _take(self, number: int) -> list[_Chunk] | None:
        if number > len(self._free) + self._num_to_make:
            return None
        try:
            while len(self._free) < number:
                self._free.append(self._make())
                self._num_to_make -= 1
        except RuntimeError as error:  # what can be pinned is bounded by the system, too
            logger.warning("preempted requests are computed anew: %s", str(error).splitlines()[0])
            self._num_to_make = 0
            return None
        taken, self._free = self._free[:number], self._free[number:]
        return taken

    def _make(self) -> _Chunk:
        is_pinned = any(tensor.is_cuda for tensor in self._tensors)
        whole = torch.empty(self._chunk_blocks * self._block_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        parts = torch.split(whole, [self._chunk_blocks * tensor[0].nbytes for tensor in self._tensors])
        return [
            part.view(tensor.dtype).view(self._chunk_blocks, *tensor.shape[1:])
            for part, tensor in zip(parts, self._tensors, strict=True)
        ]
