"""The least time that a load can take on a GPU, from its bytes and operations."""

from typing import Any, NamedTuple

import torch
from serve_load import Load
from transformers import PreTrainedModel

# Dense peak of half-precision products in operations a second, bandwidth in bytes a second: the vendor's data sheets.
_GPUS = {"H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.039e12)}


class Peaks(NamedTuple):
    """What a device does at best, a second."""

    operations: float
    bytes: float

    @classmethod
    def of(cls, device: torch.device, dtype: torch.dtype) -> "Peaks | None":
        """None where the data sheet is not known, or not for this type."""
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return None
        name = torch.cuda.get_device_name(device)
        return next((cls(*peaks) for part, peaks in _GPUS.items() if part in name), None)


class Floor(NamedTuple):
    """Seconds. The parts of a step follow one another, since a layer's attention needs its products first.

    ``prefill``: products and attention of all prompts, operations at their peak. ``products``: of the steps; weights
    read once a step, or operations, whichever takes longer. ``attention``: of the steps; every distinct token's K and V
    read once a step, or operations. ``bytes_alone``: weights and K/V of the steps, were there no operations in them.
    """

    prefill: float
    products: float
    attention: float
    bytes_alone: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.prefill + self.products + self.attention


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Of all layers, each with full attention."""
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * _head_dim(config) * model.dtype.itemsize


def floor_of(load: Load, model: PreTrainedModel, peaks: Peaks) -> Floor:
    """All branches run from the first step to the last, as if the batch took any number; the first token is prefill's.

    Counts a dense model's linear layers and full attention. Of W beams' generated tokens the fewest are counted that
    can be distinct: one chain whose last token has W siblings.
    """
    config: Any = model.config.get_text_config()
    output, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    head = output.numel()
    layers = sum(p.numel() for p in model.parameters() if p.dim() > 1 and p is not output and p is not embedding)
    per_pair = 4 * config.num_attention_heads * _head_dim(config) * config.num_hidden_layers  # a query meets a key
    length, steps, rows = load.prompt_length, load.new_tokens - 1, load.prompts * load.width
    prefill = 2 * layers * load.prompts * length + 2 * head * load.prompts
    prefill += per_pair * load.prompts * length * (length + 1) // 2

    weights = (layers + head) * model.dtype.itemsize
    products = steps * max(weights / peaks.bytes, 2 * (layers + head) * rows / peaks.operations)
    attention = read = 0.0
    for made in range(1, load.new_tokens):  # tokens of each branch before the step, the one that it computes included
        distinct = length + (made * load.width if load.kind == "samples" else made + load.width - 1)
        kv = load.prompts * distinct * kv_bytes_per_token(model)
        read += kv
        attention += max(kv / peaks.bytes, rows * (length + made) * per_pair / peaks.operations)
    return Floor(prefill / peaks.operations, products, attention, (read + steps * weights) / peaks.bytes)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
