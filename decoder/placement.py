"""Where a model lies: on one device, on several (``device_map="auto"``), or partly on none (offloaded by accelerate).

A layer's blocks lie where the layer computes. What a step needs of slots and tables goes there once a step.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


def entry_device(model: PreTrainedModel) -> torch.device:
    """Where the model takes token ids: the device on which its embedding computes."""
    embedding = model.get_input_embeddings()
    weight: Any = embedding.weight
    if weight.device.type != "meta":
        return torch.device(weight.device)
    devices = [device for module in model.modules() if (device := _brought_to(module)) and _contains(module, embedding)]
    if not devices:
        raise ValueError(f"the weights of {type(model).__name__} lie nowhere (on the device meta): load them first")
    return devices[-1]  # of the innermost module


def is_on_one_device(model: PreTrainedModel) -> bool:
    """All weights lie on one device, and none of them is brought there only for its module's forward pass."""
    devices = {parameter.device for parameter in model.parameters()}
    return len(devices) == 1 and torch.device("meta") not in devices


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make it the current device inside the body, as kernels, streams and events of our own need it."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return nullcontext()
    return torch.cuda.device(device)


def _contains(module: nn.Module, part: nn.Module) -> bool:
    return any(inside is part for inside in module.modules())


def _brought_to(module: nn.Module) -> torch.device | None:
    """Where accelerate brings the module's weights for its forward pass."""
    hook: Any = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", [hook]):
        device = getattr(one, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return None
