"""Writes into a model's weights, as far as they can be noticed: K/V by other weights must not be taken over."""

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class WeightWrites:
    """Counts them by torch's versions of tensors, and by steps of optimizers, since fused ones raise no version.

    Unseen are writes through ``.data``, by ``torch.distributed``, and into tensors made under ``inference_mode``.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._steps = 0
        this = weakref.ref(self)

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            writes = this()
            if writes is not None:
                writes._note(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(note).remove)

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        own = {id(parameter) for parameter in self._model.parameters()}
        self._steps += any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def count(self) -> int:
        """Grows with every write that is seen."""
        versions = sum(0 if p.is_inference() else p._version for p in self._model.parameters())
        return self._steps + versions
