"""Beam search and parallel sampling over copy-on-write KV blocks.

Exports are lazy: the bookkeeping (blocks, branches, strategies, scheduler) is imported and tested without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cowbeam.decoder.async_decoder import AsyncDecoder
    from cowbeam.decoder.branch_scorer import BranchScorer, BranchView
    from cowbeam.decoder.counters import Counters
    from cowbeam.decoder.decoder import Decoder
    from cowbeam.decoder.drop_in import attach, custom_generate, detach
    from cowbeam.decoder.frames import Frame
    from cowbeam.decoder.grammar import Grammar
    from cowbeam.decoder.outputs import (
        Completion,
        DecodeResult,
        DecodeStats,
        MemoryUse,
        Outcome,
        StreamedToken,
        TokenLogprob,
    )
    from cowbeam.decoder.params import BeamSearchParams, SamplingParams
    from cowbeam.decoder.run import Run

_HOME = {
    "AsyncDecoder": "async_decoder",
    "BeamSearchParams": "params",
    "BranchScorer": "branch_scorer",
    "BranchView": "branch_scorer",
    "Completion": "outputs",
    "Counters": "counters",
    "DecodeResult": "outputs",
    "DecodeStats": "outputs",
    "Decoder": "decoder",
    "Frame": "frames",
    "Grammar": "grammar",
    "MemoryUse": "outputs",
    "Outcome": "outputs",
    "Run": "run",
    "SamplingParams": "params",
    "StreamedToken": "outputs",
    "TokenLogprob": "outputs",
    "attach": "drop_in",
    "custom_generate": "drop_in",
    "detach": "drop_in",
}

__all__ = [
    "AsyncDecoder",
    "BeamSearchParams",
    "BranchScorer",
    "BranchView",
    "Completion",
    "Counters",
    "DecodeResult",
    "DecodeStats",
    "Decoder",
    "Frame",
    "Grammar",
    "MemoryUse",
    "Outcome",
    "Run",
    "SamplingParams",
    "StreamedToken",
    "TokenLogprob",
    "attach",
    "custom_generate",
    "detach",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
