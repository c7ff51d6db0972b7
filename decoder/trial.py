"""A model's first step over blocks: which kernels attend, what each layer stores, whether the logits are its own."""

import logging
import os
import time
from reprlib import repr as shown  # abbreviates: a user's value may be of any length

import torch
from transformers import PreTrainedModel

from cowbeam.decoder.attend import AttentionPath
from cowbeam.decoder.kv_cache import LayerShape
from cowbeam.decoder.model_adapter import ModelAdapter, first_line
from cowbeam.decoder.model_levels import UnpageableError
from cowbeam.decoder.placement import entry_device, on_device
from cowbeam.decoder.self_check import check_paged_logits
from cowbeam.kernels.plan import MAX_TRITON_BLOCK

logger = logging.getLogger("cowbeam")


# More than any context: a block is memory that one branch may need for itself.
MAX_BLOCK_SIZE = 2**20


def check_choices(block_size: int, compile: bool | None, prefix_reuse: bool = False) -> None:
    """Raises ValueError for what cannot be meant, before any work."""
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size must be a positive integer, got {shown(block_size)}")
    if block_size > MAX_BLOCK_SIZE:
        raise ValueError(f"block_size must be at most {MAX_BLOCK_SIZE}, got {shown(block_size)}")
    if block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two, got {block_size}")
    if not (compile is None or isinstance(compile, bool)):
        raise ValueError(f"compile must be True, False or None, got {shown(compile)}")
    if not isinstance(prefix_reuse, bool):
        raise ValueError(f"prefix_reuse must be True or False, got {shown(prefix_reuse)}")


def attention_path(attention: str, model: PreTrainedModel, block_size: int) -> AttentionPath:
    """Which kernels attend; ``attention`` is "auto", "triton" or "torch".

    Raises ValueError where the wish cannot be granted.
    """
    device = entry_device(model)
    on_cuda = device.type == "cuda"
    fits = 8 <= block_size <= MAX_TRITON_BLOCK
    triton_can = on_cuda and fits and model.dtype != torch.float64
    if attention == "torch" or (attention == "auto" and not triton_can):
        return "torch"
    if attention not in ("auto", "triton"):
        raise ValueError(f'attention must be "auto", "triton" or "torch", got {shown(attention)}')
    if not fits:
        raise ValueError(f'attention="triton" needs a block_size of 8 to {MAX_TRITON_BLOCK}, got {block_size}')
    if not on_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f'attention="triton" needs a CUDA device; the model is on {device}')
    return "triton"


def try_out(adapter: ModelAdapter, block_size: int, *, compile: bool) -> list[LayerShape]:
    """What the layers store, learnt from a trial step and checked against the model's own logits.

    Where that fails the next level is tried, with a warning. Raises UnpageableError, which is a ValueError, for a model
    whose K/V do not go into blocks on any.
    """
    for level in adapter.levels:
        adapter.level = level
        try:
            with on_device(adapter.device):
                shapes = _try_level(adapter, block_size, compile=compile and level == 1 and adapter.is_on_one_device)
        except UnpageableError as error:
            if level == adapter.levels[-1]:
                raise
            logger.warning("%s; its K/V are gathered from the blocks instead", first_line(error))
        else:
            logger.info(adapter.description)
            return shapes
    raise AssertionError("a model has a level")


def _try_level(adapter: ModelAdapter, block_size: int, *, compile: bool) -> list[LayerShape]:
    try:
        shapes = adapter.probe(num_tokens=2)
        if adapter.device.type == "cuda":  # on a CPU parts of a wider output cost more than one product gains (5 %)
            adapter.fuse_linears()
        if compile:
            _compile_layers(adapter, shapes, block_size)
        if not adapter.is_compiled:
            check_paged_logits(adapter, shapes, block_size)
    except (torch.OutOfMemoryError, UnpageableError):
        raise
    except Exception as error:  # a model is code of its own and may fail in any way
        name = type(adapter.model).__name__
        message = f"{name} cannot be decoded over KV blocks: a trial step says {first_line(error)}"
        raise UnpageableError(message) from error
    return shapes


def _compile_layers(adapter: ModelAdapter, shapes: list[LayerShape], block_size: int) -> None:
    """Compile for several rows and for one, and check the logits of both; where they are wrong, go on uncompiled."""
    name = type(adapter.model).__name__
    started = time.perf_counter()
    adapter.compile_layers(shapes)
    for num_branches in (16, 1):  # the first is what torch takes for a usual number when it chooses tiles
        if adapter.is_compiled:
            logger.info("compiling the layers of %s for %s", name, "several rows" if num_branches > 1 else "one row")
            try:
                check_paged_logits(adapter, shapes, block_size, num_branches)
            except UnpageableError as error:
                adapter.stop_compiling(first_line(error))
    if adapter.is_compiled:
        logger.info("compiled the layers of %s in %.1f s", name, time.perf_counter() - started)
