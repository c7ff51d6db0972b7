"""PEFT: a model with adapters (LoRA) is decoded as the transformers model inside its wrapper, adapters and all.

They lie inside that model's layers, so nothing is to be done for them but to see when they are switched. The library
itself is not needed: its objects are known by what they offer.
"""

from collections.abc import Hashable
from functools import partial
from typing import Any

from torch import nn


def inside_wrapper(model: Any) -> Any:
    """The model that a wrapper of PEFT's or of ``torch.compile`` holds; any other object as it is.

    Raises ValueError for adapters that lie outside of the model's layers, where cowbeam does not see them.
    """
    model = getattr(model, "_orig_mod", model)  # whose own `generate` is what a compiled model offers
    if not (hasattr(model, "get_base_model") and hasattr(model, "active_peft_config")):
        return model
    config = model.active_peft_config
    name = f"{type(model).__name__} with {type(config).__name__}"
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(f"{name} cannot be decoded over KV blocks: it puts virtual tokens before the prompt")
    if getattr(config, "alora_invocation_tokens", None):
        raise ValueError(f"{name} cannot be decoded over KV blocks: its adapter begins in the middle of a prompt")
    return model.get_base_model()


def switches_of(module: nn.Module) -> Hashable:
    """Which adapters of the module take part, and how much; None where it has none."""
    switch = getattr(type(module), "disable_adapters", None)
    if switch is None or callable(switch):  # transformers' models have a method of this name, and no switch
        return None
    names = ("disable_adapters", "active_adapters", "merged_adapters", "scaling")
    return tuple(repr(getattr(module, name, None)) for name in names)


def has_adapters_by_row(model: nn.Module) -> bool:
    """Each row of the batch has been given an adapter of its own, or a place where its adapter begins."""
    return any(
        isinstance(hook, partial) and not hook.keywords.keys().isdisjoint(("adapter_names", "alora_offsets"))
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )
