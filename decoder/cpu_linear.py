"""Linears of a model on a CPU, computed by oneDNN in float32.

torch hands float32 products on an x86 CPU to MKL, which is slow where a matrix of weights meets few rows, as in every
decode step: 16 rows of SmolLM2-135M take 53 ms there and 26 ms in oneDNN (2 cores of an AMD EPYC). The weights are
read where they lie: nothing is packed or kept twice, and updates in place are seen at once.
"""

import platform
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from cowbeam.decoder.stand_ins import StandIn, in_place


def is_faster_here() -> bool:
    """torch has oneDNN's product, its user has not switched it off, and the CPU is one where it was measured."""
    return (
        platform.machine().lower() in ("x86_64", "amd64")
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and bool(torch.backends.mkldnn.enabled)
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class _OneDNNLinear:
    """Stands in for a Linear's ``forward``."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear

    def forward(self, input: Tensor) -> Tensor:  # the name of nn.Linear's parameter
        weight, bias = self.linear.weight, self.linear.bias
        if torch.compiler.is_compiling():  # a compiler chooses by itself, and does not know what oneDNN is asked here
            return nn.functional.linear(input, weight, bias)
        # Asked at every call: their owner may have put others there. Of any other layout oneDNN takes 500 times as
        # long, and of several types none at all.
        if all(type(part) is nn.Parameter and part.is_contiguous() for part in (weight, bias) if part is not None) and (
            input.dtype is weight.dtype is torch.float32 and input.device.type == weight.device.type == "cpu"
        ):
            product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
            return product
        return nn.functional.linear(input, weight, bias)


class CPULinears:
    """All plain Linears of a model, and the switch that puts oneDNN in place of their own product."""

    def __init__(self, model: nn.Module) -> None:
        linears = [module for module in model.modules() if type(module) is nn.Linear]
        self._stand_ins = [StandIn(linear.__dict__, "forward", _OneDNNLinear(linear).forward) for linear in linears]

    def in_place(self) -> AbstractContextManager[None]:
        """oneDNN inside the body, without gradients; outside, every Linear computes its own."""
        return in_place(self._stand_ins)
