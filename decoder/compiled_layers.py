"""The model's layers, compiled: torch fuses norms, rotary positions, activations and residuals.

One compilation serves all layers of a kind and all numbers of rows of a step; one more serves a single row, and one
prompts of all lengths. The layers are compiled each by itself, not the model as a whole, which would take minutes.
Attention is one opaque operator in them. What the model calls before its first layer and behind its last (embeddings,
the angles of rotary positions, the last norm) is compiled likewise: a few launches in place of some thirty.
"""

import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cowbeam.decoder.stand_ins import StandIn, in_place

LayerForward = Callable[..., Any]

# An attention module's attribute while its layer runs compiled: the layer's number, as a tensor on the CPU. A plain
# int would be a constant of the compiled code, which then would serve one layer only.
NUMBER = "_cowbeam_number"


class CompiledLayers:
    """Compiled forward passes of a model's layers, and the switch that puts them in place.

    Args:
        layers: the decoder layers.
        kinds: one hashable a layer; layers of one kind differ in their weights only.
        attention_modules: the one inside each layer, in the same order.
        around: what is called before and behind the layers.
        backend: of ``torch.compile``.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        kinds: Sequence[Any],
        attention_modules: Sequence[nn.Module],
        around: Sequence[nn.Module],
        backend: str = "inductor",
    ) -> None:
        compiled = {kind: _compile(type(layer), backend) for layer, kind in zip(layers, kinds, strict=True)}
        self._stand_ins = [
            StandIn(layer.__dict__, "forward", partial(_forward, compiled[kind], layer))
            for layer, kind in zip(layers, kinds, strict=True)
        ]
        self._stand_ins += [
            StandIn(module.__dict__, "forward", partial(_forward, _compile(type(module), backend, whole=False), module))
            for module in around
        ]
        for number, module in enumerate(attention_modules):
            self._stand_ins.append(StandIn(module.__dict__, NUMBER, torch.tensor(number)))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The layers run compiled inside the body; outside they are as their owner left them.

        A layer that its owner gave a forward pass of its own keeps it.
        """
        # By default torch goes on with code that knows nothing of a hook which came later.
        with in_place(self._stand_ins), torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            yield


def _compile(layer_type: type[nn.Module], backend: str, whole: bool = True) -> LayerForward:
    """A compiled form of the class's forward pass, the layer being its first argument.

    ``whole``: what cannot be compiled in one piece raises, else it is compiled in pieces. The code object is this one's
    own: torch keeps at most 8 compilations of one, which several models would use up.
    """
    own = types.FunctionType(_run.__code__.replace(co_name=f"decode_{layer_type.__name__}"), globals())
    # Independent kernels, as of rotary queries and rotary keys, become one launch.
    options: dict[str, Any] | None = {"combo_kernels": True} if backend == "inductor" else None
    compiled: LayerForward = torch.compile(own, fullgraph=whole, dynamic=False, backend=backend, options=options)
    return compiled


def _run(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _forward(compiled: LayerForward, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Rows of a step lie side by side, [rows, 1, …], tokens of prompts one after another, [1, tokens, …]."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim() > 1]
    dim = 0 if len(tensors[0]) > 1 else 1
    number = tensors[0].shape[dim]
    for tensor in tensors:
        if tensor.shape[dim] == number > 1:
            torch._dynamo.mark_dynamic(tensor, dim)
    return compiled(layer, args, kwargs)


def find_layers(model: nn.Module, attention_modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules that hold one attention module each and lie side by side in a list; [] if there are no such."""
    for module in model.modules():
        if not isinstance(module, nn.ModuleList):
            continue
        inside = [(layer, set(map(id, layer.modules()))) for layer in module]
        found = [layer for attention in attention_modules for layer, modules in inside if id(attention) in modules]
        if len(found) == len(attention_modules) == len(set(map(id, found))):
            return found
    return []


def find_around(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules outside the layers that have parameters or buffers, each as a whole; Linears are left out."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    known = set(inside)
    found: list[nn.Module] = []
    for module in model.modules():
        if id(module) in known or isinstance(module, nn.Linear) or not inside.isdisjoint(map(id, module.modules())):
            continue
        if any(True for _ in itertools.chain(module.parameters(), module.buffers())):
            found.append(module)
            known.update(map(id, module.modules()))
    return found
