"""Experts of a mixture in a captured step.

transformers hands experts to ``torch.nn.functional.grouped_mm`` by default. Where torch has no kernel of its own for
the type or the GPU, it asks the device how many tokens each expert has and multiplies one by one, and no graph can be
captured over such a question (``offs.cpu()`` in ``ATen/native/GroupedMMUtils.h``). transformers' ``batched_mm`` asks
nothing: it gathers the weights of each pair of a token and an expert, which for the few tokens of a step is little.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

MAX_GATHERED_BYTES = 2**30  # of one layer's experts, for all pairs of a step


class BatchedExperts:
    """The model's experts that are computed by ``grouped_mm``, and the switch to ``batched_mm``."""

    def __init__(self, model: PreTrainedModel) -> None:
        modules = [module for module in model.modules() if _is_switchable(module)]
        self._configs: list[Any] = list({id(module.config): module.config for module in modules}.values())
        text_config: Any = model.config.get_text_config()
        most = max((int(module.num_experts) for module in modules), default=0)  # type: ignore[arg-type]
        self._pairs_a_row = int(getattr(text_config, "num_experts_per_tok", None) or most)
        self._expert_bytes = max(map(_bytes_of_one, modules), default=0)

    def __bool__(self) -> bool:
        return bool(self._configs)

    @contextmanager
    def in_place(self, rows: int) -> Iterator[None]:
        """``batched_mm`` inside the body, if what it gathers for so many rows is not too much."""
        fits = rows * self._pairs_a_row * self._expert_bytes <= MAX_GATHERED_BYTES
        changed = [(config, config._experts_implementation) for config in self._configs if fits]
        try:
            for config, _ in changed:
                config._experts_implementation = "batched_mm"
            yield
        finally:
            for config, before in changed:
                config._experts_implementation = before


def _is_switchable(module: nn.Module) -> bool:
    """transformers has put its choice of implementations before the module's own forward pass."""
    config = getattr(module, "config", None)
    chosen = getattr(config, "_experts_implementation", None)
    return hasattr(type(module), "_apply_gate") and hasattr(module, "num_experts") and chosen == "grouped_mm"


def _bytes_of_one(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters()) // int(module.num_experts)  # type: ignore[arg-type]
