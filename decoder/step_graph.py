"""One CUDA graph a step: the whole forward pass, plans included, replayed instead of launched kernel by kernel.

A graph is captured per bucket of rows and columns over static buffers; a step copies its rows into them and replays.
Rows that only fill the bucket have length 0 and write to the cache's scratch block. What cannot be captured (a model
whose forward pass waits for the device) goes on eagerly, found out at the first step.
"""

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from cowbeam.decoder.batch import DecodeInputs
from cowbeam.decoder.kv_cache import KVCache
from cowbeam.decoder.model_adapter import ModelAdapter

logger = logging.getLogger("cowbeam")

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# The fewest columns of a captured block table; more come in powers of two.
MIN_COLUMNS = 64


@dataclass(frozen=True)
class _Bucket:
    rows: int
    columns: int
    widest_group: int

    @classmethod
    def of(cls, inputs: DecodeInputs) -> "_Bucket | None":
        """The least bucket that holds the step; None if there is none."""
        rows, columns = inputs.block_tables.shape
        fitting = [bucket for bucket in ROW_BUCKETS if bucket >= rows]
        if not fitting:
            return None
        return cls(fitting[0], _power_of_two(max(columns, MIN_COLUMNS)), _power_of_two(inputs.widest_group))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class GraphMemory:
    """Where graphs of one decoder are captured: they share memory, since only one runs at a time.

    The stream is part of it: torch lets a graph reuse what others of the same stream have given back. And it is the
    device's own: torch's default is made once, for whatever device was the first to capture.
    """

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[None]:
        """What the body launches is recorded, not run. Other threads may use the device meanwhile."""
        captures: AbstractContextManager[None] = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        return captures


class CapturedStep:
    """One bucket's graph and the buffers it reads and writes."""

    def __init__(self, adapter: ModelAdapter, cache: KVCache, bucket: _Bucket, memory: "GraphMemory") -> None:
        self._adapter = adapter
        self._cache = cache
        self._memory = memory
        self._graph = torch.cuda.CUDAGraph()
        rows, device = bucket.rows, adapter.device
        self._padding_slot = cache.scratch_block * cache.block_size
        self.inputs = DecodeInputs(
            token_ids=torch.zeros(rows, dtype=torch.long, device=device),
            positions=torch.zeros(rows, dtype=torch.long, device=device),
            slots=torch.full((rows,), self._padding_slot, dtype=torch.long, device=device),
            lengths=torch.zeros(rows, dtype=torch.int32, device=device),
            block_tables=torch.zeros(rows, bucket.columns, dtype=torch.int32, device=device),
            group_starts=torch.ones(rows, dtype=torch.bool, device=device),
            copy_sources=torch.full((rows,), cache.scratch_block, dtype=torch.long, device=device),
            copy_destinations=torch.full((rows,), cache.scratch_block, dtype=torch.long, device=device),
            widest_group=bucket.widest_group,
        )

    def load(self, inputs: DecodeInputs) -> None:
        """Copy the step into the buffers; rows behind it become padding."""
        rows, columns = inputs.block_tables.shape
        mine = self.inputs
        for static, now in (
            (mine.token_ids, inputs.token_ids),
            (mine.positions, inputs.positions),
            (mine.slots, inputs.slots),
            (mine.lengths, inputs.lengths),
            (mine.group_starts, inputs.group_starts),
            (mine.copy_sources, inputs.copy_sources),
            (mine.copy_destinations, inputs.copy_destinations),
        ):
            static[:rows] = now
        mine.block_tables[:rows, :columns] = inputs.block_tables
        mine.lengths[rows:] = 0
        mine.slots[rows:] = self._padding_slot
        mine.group_starts[rows:] = True
        mine.copy_sources[rows:] = self._cache.scratch_block
        mine.copy_destinations[rows:] = self._cache.scratch_block

    def capture(self) -> None:
        """Run the loaded step once, which compiles its kernels, then capture it. Both only repeat the same writes."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._adapter.decode(self._cache, self.inputs)
        torch.cuda.current_stream().wait_stream(stream)
        with self._memory.capture(self._graph):
            self._logits = self._adapter.decode(self._cache, self.inputs)

    def replay(self, rows: int) -> Tensor:
        """Logits of the loaded step, ``[rows, vocabulary]``, valid until the next replay."""
        self._graph.replay()
        return self._logits[:rows]


class StepGraphs:
    """Decodes by captured steps where that works, else eagerly.

    ``inputs`` are those of the last step, where the next one may find its own: who advances them in place need not send
    a step's inputs from the host (`decode_again`).
    """

    inputs: DecodeInputs

    def __init__(self, adapter: ModelAdapter, cache: KVCache) -> None:
        self._adapter = adapter
        self._cache = cache
        self.step: CapturedStep | None = None  # the last one, where it was captured
        self._rows = 0
        self._captured: dict[_Bucket, CapturedStep] = {}
        self._version = adapter.version
        self.memory: GraphMemory | None = None
        self.is_capturing = adapter.can_capture

    @torch.inference_mode()
    def decode(self, inputs: DecodeInputs) -> Tensor:
        """One token a row; logits ``[rows, vocabulary]``, valid until the next call."""
        if self._version != self._adapter.version:
            self._forget()
        bucket = _Bucket.of(inputs) if self.is_capturing else None
        step = self._captured.get(bucket) if bucket else None
        if step is not None:
            step.load(inputs)
        elif bucket is not None:
            step = self._capture(bucket, inputs)
        self.step, self._rows = step, len(inputs.token_ids)
        self.inputs = inputs if step is None else step.inputs
        return self.decode_again()

    @torch.inference_mode()
    def decode_again(self) -> Tensor:
        """The step that ``inputs`` now hold."""
        if self.step is None:
            return self._adapter.decode(self._cache, self.inputs)
        return self.step.replay(self._rows)

    @property
    def max_length(self) -> int:
        """Tokens for which a row of ``inputs.block_tables`` has columns."""
        return self.inputs.block_tables.shape[1] * self._cache.block_size

    def _forget(self) -> None:
        """Let go of what was captured: it reads memory that may be another's by now.

        Of the graphs' memory too: torch gives it back with the last graph and captures nothing into it any more.
        """
        self._captured.clear()
        self.step = self.memory = None
        self._version = self._adapter.version

    def _capture(self, bucket: _Bucket, inputs: DecodeInputs) -> CapturedStep | None:
        if self.memory is None:
            self.memory = GraphMemory(self._adapter.device)
        step = CapturedStep(self._adapter, self._cache, bucket, self.memory)
        step.load(inputs)
        try:
            step.capture()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # A forward pass that waits for the device cannot be captured; nothing of the step is lost by that.
            if self._adapter.batch_experts():
                self.memory = None  # torch takes it for one that is being captured into yet
                return self._capture(bucket, inputs)
            name = type(self._adapter.model).__name__
            logger.warning("%s decodes without CUDA graphs: %s", name, str(error).splitlines()[0])
            self.is_capturing = False
            return None
        self._captured[bucket] = step
        return step
