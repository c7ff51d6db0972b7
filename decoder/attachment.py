"""What ``attach`` keeps of a model: how it decodes over blocks, its KV memory, and which warnings it has given."""

import logging
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from cowbeam.decoder.group import KVBytes, Request
from cowbeam.decoder.kv_cache import KVCache, LayerShape, kv_bytes
from cowbeam.decoder.model_adapter import ModelAdapter, first_line
from cowbeam.decoder.paged_rows import Memory, PagedRows
from cowbeam.decoder.scheduler import worst_case_blocks
from cowbeam.decoder.step_graph import StepGraphs
from cowbeam.decoder.trial import attention_path, try_out

logger = logging.getLogger("cowbeam")


@dataclass(frozen=True)
class Knobs:
    """What the user chose; see ``attach``."""

    block_size: int
    attention: str
    compile: bool | None


@dataclass
class Fitted:
    """A model that was tried out where it lies now and as deep as it is, and the KV memory between two calls.

    Memory is kept on a GPU only, where captured steps are bound to it; on a CPU getting it anew costs nothing.
    """

    adapter: ModelAdapter
    shapes: list[LayerShape]
    place: Hashable
    kv_bytes: KVBytes
    kept: Memory | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def open_rows(self, requests: Sequence[Request], block_size: int) -> PagedRows:
        """Rows for these prompts over memory for their worst case. Raises MemoryError if there is no such memory."""
        return PagedRows(self.adapter, self._borrow(requests, block_size), self.kv_bytes, requests)

    def close_rows(self, rows: PagedRows) -> None:
        """Their blocks are free, their memory is kept or given back."""
        rows.close()
        if rows.memory.graphs.is_capturing:
            with self.lock:
                self.kept = rows.memory

    def _borrow(self, requests: Sequence[Request], block_size: int) -> Memory:
        num_blocks = sum(worst_case_blocks(request, block_size) for request in requests)
        # A call within a call, or in another thread, finds nothing kept and gets memory of its own.
        with self.lock:
            kept, self.kept = self.kept, None
        if kept is not None and kept.num_blocks >= num_blocks:
            return kept
        kept = None  # before the greater one is asked for
        smallest = max(1, num_blocks // 16)
        while num_blocks >= smallest:
            try:
                cache = KVCache(self.shapes, num_blocks, block_size)
            except RuntimeError:  # beams share so much that far less than the worst case may do
                num_blocks = num_blocks * 3 // 4
            else:
                return Memory(cache, StepGraphs(self.adapter, cache), num_blocks)
        raise MemoryError(f"there is no memory for {smallest} KV blocks of {block_size} tokens")


class Attachment:
    """One model's. A copy of the model gets a fresh one with the same knobs."""

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self._fitted: Fitted | None = None
        self._refused: tuple[Any, str] | None = None
        self.view_class: type | None = None  # of `model_view`; made once
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return Attachment, (self.knobs,)

    def fitted(self, model: PreTrainedModel) -> Fitted:
        """The model tried out, now or before. Raises ValueError saying why it cannot be decoded over blocks."""
        if model.training:
            raise ValueError("the model is in training mode")
        place = (model.device, model.dtype, getattr(model.config.get_text_config(), "num_hidden_layers", None))
        if self._refused is not None and self._refused[0] == place:
            raise ValueError(self._refused[1])
        if self._fitted is None or self._fitted.place != place:
            try:
                self._fitted = self._fit(model, place)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a model is code of its own and may fail in any way: that is the reason then
                self._refused = (place, first_line(error))
                raise ValueError(self._refused[1]) from error
        return self._fitted

    def _fit(self, model: PreTrainedModel, place: Hashable) -> Fitted:
        self._fitted = None
        adapter = ModelAdapter(model, attention_path(self.knobs.attention, model, self.knobs.block_size))
        on_cuda = adapter.path == "triton" and adapter.device.type == "cuda"
        compiled = on_cuda if self.knobs.compile is None else self.knobs.compile
        shapes = try_out(adapter, self.knobs.block_size, compile=compiled)
        return Fitted(adapter, shapes, place, kv_bytes(shapes))

    def warn(self, model: PreTrainedModel, reason: str) -> None:
        """Say why transformers decodes instead: each reason once."""
        if reason not in self._warned:
            self._warned.add(reason)
            logger.warning("%s.generate is left to transformers: %s", type(model).__name__, reason)
