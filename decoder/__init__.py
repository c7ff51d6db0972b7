"""Beam search and parallel sampling over copy-on-write KV blocks.

Exports are lazy: the bookkeeping (blocks, branches, strategies, scheduler) is imported and tested without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cowbeam.decoder.decoder import Decoder
    from cowbeam.decoder.drop_in import attach, custom_generate, detach
    from cowbeam.decoder.frames import Frame
    from cowbeam.decoder.outputs import Completion, DecodeResult, DecodeStats, MemoryUse
    from cowbeam.decoder.params import BeamSearchParams, SamplingParams

_HOME = {
    "BeamSearchParams": "params",
    "Completion": "outputs",
    "DecodeResult": "outputs",
    "DecodeStats": "outputs",
    "Decoder": "decoder",
    "Frame": "frames",
    "MemoryUse": "outputs",
    "SamplingParams": "params",
    "attach": "drop_in",
    "custom_generate": "drop_in",
    "detach": "drop_in",
}

__all__ = [
    "BeamSearchParams",
    "Completion",
    "DecodeResult",
    "DecodeStats",
    "Decoder",
    "Frame",
    "MemoryUse",
    "SamplingParams",
    "attach",
    "custom_generate",
    "detach",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
