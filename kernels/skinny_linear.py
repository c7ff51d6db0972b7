"""x @ weight.T for few rows, in Triton: as fast as the weight can be read.

With so few rows a product is a walk over the weight's bytes, and the tiles of a library's kernels rarely divide evenly
among the multiprocessors. Here the (tile of outputs, tile of inputs) space is cut into equal pieces, one per program of
a persistent grid (stream-K, Osama et al. 2023). A piece that ends within a tile leaves a partial result, and whoever
comes last to a tile adds its partial results up, always in the same order. The weight is the left operand, whose side
of a tensor core's product is the wide one.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from cowbeam.kernels.skinny_linear_kernel import skinny_linear_kernel

MAX_ROWS = 64


class Variant(NamedTuple):
    """A compiled form: outputs and inputs of a tile, warps, stages of the pipeline, programs per multiprocessor.

    ``early``: programs start while the kernel before still runs, fetch their first weights into L2 and wait for its end
    only then (programmatic dependent launch).
    """

    outputs: int
    inputs: int
    warps: int
    stages: int
    programs_per_sm: int
    early: bool = False


def choose_variant(rows: int, outputs: int, inputs: int) -> Variant:  # noqa: ARG001  # all to be timed
    """The form for a product of this size."""
    return Variant(64, 128, 4, 4, 2)


class Workspace:
    """What programs leave for each other. One serves all products of a stream; the counters return to zero."""

    def __init__(self, device: torch.device) -> None:
        widest = Variant(128, 128, 4, 4, 3)
        size = _num_programs(device, widest) * 2 * widest.outputs * MAX_ROWS
        self.partial = torch.empty(size, dtype=torch.float32, device=device)
        self.counters = torch.zeros(65536, dtype=torch.int32, device=device)


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, partial: Tensor, counters: Tensor, variant: Variant | None = None
) -> Tensor:
    """``x @ weight.T + bias``, accumulated in float32.

    Args:
        x: [rows, inputs], up to ``MAX_ROWS`` rows, the inputs of one contiguous.
        weight: [outputs, inputs], contiguous.
        bias: [outputs] or None.
        partial, counters: of a ``Workspace``, used by one launch at a time.
        variant: any gives the same result but for rounding; None means `choose_variant`'s.

    Returns:
        [rows, outputs]
    """
    rows, inputs = x.shape
    outputs = weight.shape[0]
    if not rows:
        return x.new_empty(0, outputs)
    assert rows <= MAX_ROWS, f"{rows} rows"
    assert x.stride(1) == 1, "a row must be contiguous"
    assert weight.is_contiguous(), "the weight must be contiguous"
    variant = choose_variant(rows, outputs, inputs) if variant is None else variant
    tiles = triton.cdiv(outputs, variant.outputs)
    steps = triton.cdiv(inputs, variant.inputs)
    programs = min(_num_programs(x.device, variant), tiles * steps)
    assert tiles <= len(counters), f"{outputs} outputs are too many"
    padded_rows = max(16, triton.next_power_of_2(rows))
    assert programs * 2 * variant.outputs * padded_rows <= len(partial), f"the workspace is too small for {variant}"
    out = x.new_empty(rows, outputs)
    skinny_linear_kernel[(programs,)](
        x,
        weight,
        bias,
        out,
        partial,
        counters,
        rows,
        outputs,
        inputs,
        x.stride(0),
        triton.cdiv(tiles * steps, programs),
        HAS_BIAS=bias is not None,
        ROWS=padded_rows,
        OUTPUTS=variant.outputs,
        INPUTS=variant.inputs,
        EVEN=outputs % variant.outputs == 0 and inputs % variant.inputs == 0,
        STAGES=variant.stages,
        UPCAST=INTERPRETED,
        EARLY=variant.early,
        **({"launch_pdl": True} if variant.early else {}),
        num_warps=variant.warps,
    )
    return out


# Triton's interpreter multiplies bfloat16 wrongly without a word; there the kernel casts up first.
INTERPRETED = bool(triton.knobs.runtime.interpret)


def _num_programs(device: torch.device, variant: Variant) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count * variant.programs_per_sm
    return 5  # the interpreter: pieces end within tiles, and a tile has more than two
