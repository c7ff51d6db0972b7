"""How many blocks a pool may have here."""

from collections.abc import Iterable, Sequence

import torch

from cowbeam.decoder.kv_cache import LayerShape, kv_bytes
from cowbeam.decoder.model_adapter import ModelAdapter
from cowbeam.decoder.scheduler import MAX_PASS_TOKENS

DEFAULT_KV_MEMORY = 2 * 2**30  # bytes, on a CPU: memory that is never written is never taken
MAX_EMPTY_BLOCKS = 2**16
# On a GPU there is room beside the pool for the dense states of this many branches, before and after a step.
STATES_BESIDE_POOL = 64


def blocks_that_fit(
    adapter: ModelAdapter, shapes: Sequence[LayerShape], block_size: int, memory_fraction: float, kv_memory: int | None
) -> int:
    """As many as ``kv_memory`` holds; None: as what a GPU has left after the weights and a trial step, or 2 GiB.

    Of several devices the one that holds the fewest, for its layers, decides.
    """
    by_device: dict[torch.device, list[LayerShape]] = {}
    for shape in shapes:
        by_device.setdefault(shape.device, []).append(shape)
    left = {} if kv_memory is not None else _left_after_trial_step(adapter, by_device)
    fitting = []
    for device, there in by_device.items():
        memory = DEFAULT_KV_MEMORY if kv_memory is None else kv_memory
        bytes_per_block = block_size * kv_bytes(shapes).per_token
        if device in left:
            memory = int(memory_fraction * left[device]) - 2 * STATES_BESIDE_POOL * adapter.state_bytes
            bytes_per_block = block_size * kv_bytes(there).per_token
        if memory < bytes_per_block:
            given = "" if kv_memory is None else f"kv_memory={kv_memory}: "
            raise ValueError(f"{given}{memory} bytes hold no block: one of {block_size} tokens takes {bytes_per_block}")
        fitting.append(memory // bytes_per_block)
    return min(fitting, default=MAX_EMPTY_BLOCKS)  # where no layer keeps K/V blocks only count tokens


def _left_after_trial_step(adapter: ModelAdapter, devices: Iterable[torch.device]) -> dict[torch.device, int]:
    """Bytes of memory that a full prefill leaves free on each GPU."""
    gpus = [device for device in devices if device.type == "cuda"]
    if not gpus:
        return {}
    torch.cuda.empty_cache()
    before = {gpu: torch.cuda.memory_allocated(gpu) for gpu in gpus}
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    adapter.probe(min(MAX_PASS_TOKENS, adapter.max_length or MAX_PASS_TOKENS))
    activations = {gpu: torch.cuda.max_memory_allocated(gpu) - before[gpu] for gpu in gpus}
    torch.cuda.empty_cache()
    return {gpu: int(torch.cuda.mem_get_info(gpu)[0]) - activations[gpu] for gpu in gpus}
