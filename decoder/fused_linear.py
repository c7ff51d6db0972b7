"""Linears that read the very same input, computed as one product.

q, k and v, or gate and up, are separate modules in most models: two or three thin products where one fat one reads the
same weights in less time. Their weights are laid into one tensor, and each Linear's own Parameter becomes a view of
its share: nothing is kept twice, updates in place are seen at once, and whoever saves, loads or trains the model finds
the parameters where they were. Which Linears belong together is found by watching a forward pass, not by names.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from cowbeam.decoder.stand_ins import StandIn, in_place


class LinearGroup:
    """Linears of one input, in the order of their calls.

    ``weight`` is ``[sum of outputs, inputs]``; ``bias`` is None if none of them has one.
    """

    def __init__(self, members: Sequence[nn.Linear]) -> None:
        self.members = tuple(members)
        self._last = len(members) - 1
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        self.lay_together()

    def lay_together(self) -> None:
        """Make the members' parameters views of one tensor; the extra memory while it runs is that tensor."""
        self.sizes = [len(member.weight) for member in self.members]
        biases = [bias for member in self.members if (bias := member._parameters["bias"]) is not None]
        self.weight = _one_tensor([member.weight for member in self.members])
        self.bias = _one_tensor(biases) if biases else None
        self._places = [
            (member._parameters, name, place_of(member._parameters[name]))
            for member in self.members
            for name in ("weight", "bias")
        ]

    @property
    def is_current(self) -> bool:
        """The members' parameters are views of ``weight`` and ``bias`` yet: their owner may have put others there."""
        return all(place_of(parameters.get(name)) == place for parameters, name, place in self._places) and all(
            type(member) is nn.Linear and "forward" not in member.__dict__ for member in self.members
        )

    def part(self, index: int, x: Tensor) -> Tensor:
        """Member ``index``'s output for ``x``. The first to ask computes it for all; the last one ends it."""
        if x is not self._input:
            self._input = x
            self._parts = torch.split(nn.functional.linear(x, self.weight, self.bias), self.sizes, -1)
        part = self._parts[index]
        if index == self._last:
            self.forget()
        return part

    def forget(self) -> None:
        """Let go of input and outputs."""
        self._input = None
        self._parts = ()


def place_of(tensor: Tensor | None) -> Hashable:
    """Where a tensor's numbers lie and how: an owner can transpose or cut one without moving it."""
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


class _Share:
    """Stands in for one member's ``forward``. An object, not a closure: compiled code is shared by all of a class."""

    def __init__(self, group: LinearGroup, index: int) -> None:
        self.group = group
        self.index = index

    def forward(self, input: Tensor) -> Tensor:  # the name of nn.Linear's parameter
        return self.group.part(self.index, input)


class FusedLinears:
    """All groups of a model, and the switch that puts them in place of their members."""

    def __init__(self, groups: Sequence[Sequence[nn.Linear]]) -> None:
        self.groups = [LinearGroup(members) for members in groups]
        if any(group.weight.is_cuda for group in self.groups):
            torch.cuda.empty_cache()  # the members' own tensors: their pieces are too small for anything fused
        self._list_shares()

    def _list_shares(self) -> None:
        self._shares = [
            StandIn(member.__dict__, "forward", _Share(group, index).forward)
            for group in self.groups
            for index, member in enumerate(group.members)
        ]

    def refresh(self) -> None:
        """Lay anew what its owner has replaced since, and leave out what no longer fits."""
        stale = [group for group in self.groups if not group.is_current]
        if not stale:
            return
        for group in stale:
            # While a graph is captured nothing is copied, only noted: the parameters would hold garbage.
            is_capturing = group.weight.is_cuda and torch.cuda.is_current_stream_capturing()
            if _fit_together(group.members) and not is_capturing:
                group.lay_together()
            else:
                self.groups.remove(group)
        self._list_shares()

    def leave_out_strangers(self, model: nn.Module) -> None:
        """Let go of groups whose members their owner has taken out of the model, and of their weights."""
        modules = set(model.modules())
        self.groups = [group for group in self.groups if modules.issuperset(group.members)]
        self._list_shares()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """One product a group inside the body; outside, every Linear computes its own."""
        self.refresh()
        try:
            with in_place(self._shares):
                yield
        finally:
            for group in self.groups:
                group.forget()


def find_groups(model: nn.Module, forward_pass: Callable[[], Any]) -> list[list[nn.Linear]]:
    """The Linears that got the very same tensor in ``forward_pass``, with what it held still the same."""
    called: Counter[nn.Linear] = Counter()
    inputs: dict[int, tuple[Tensor, Tensor, list[nn.Linear]]] = {}  # keeps the tensors, so that no id comes twice

    def note(linear: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(linear, nn.Linear)
        called[linear] += 1
        if len(arguments) != 1:
            return
        x = arguments[0]
        _, held, linears = inputs.setdefault(id(x), (x, x.clone(), []))
        if torch.equal(held, x):
            linears.append(linear)

    overlapping = _overlapping_parameters(model)
    fusible = [module for module in model.modules() if _is_fusible(module, overlapping)]
    hooks = [module.register_forward_pre_hook(note) for module in fusible]
    try:
        forward_pass()
    finally:
        for hook in hooks:
            hook.remove()
    groups: list[list[nn.Linear]] = []
    for _, _, linears in inputs.values():
        by_kind: dict[tuple[Any, ...], list[nn.Linear]] = {}
        for linear in linears:
            if called[linear] == 1:
                by_kind.setdefault(_kind(linear), []).append(linear)
        groups += [members for members in by_kind.values() if len(members) > 1]
    return groups


def _kind(linear: nn.Linear) -> tuple[Any, ...]:
    """What members of a group have in common."""
    return (linear.in_features, linear.weight.dtype, linear.weight.device, linear.bias is None)


def _fit_together(members: Sequence[nn.Linear]) -> bool:
    return all(_is_plain(member) for member in members) and len({_kind(member) for member in members}) == 1


def _is_plain(module: nn.Module) -> bool:
    """A Linear of torch's own, with parameters of torch's own."""
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    return isinstance(module._parameters.get("weight"), nn.Parameter) and all(
        type(parameter) is nn.Parameter
        and parameter.is_contiguous()
        and not parameter.is_inference()
        and parameter.device.type != "meta"
        for parameter in parameters
    )


def _is_fusible(module: nn.Module, overlapping: set[int]) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return (
        _is_plain(module)
        and not any(getattr(module, name) for name in hooks)
        and not any(id(parameter) in overlapping for parameter in module.parameters())
    )


def _overlapping_parameters(model: nn.Module) -> set[int]:
    """ids of the parameters whose memory another module or another tensor has too: to move them would untie them."""
    found: set[int] = set()
    end, last = 0, None  # of the memory seen so far, and whose end it is
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    plain = [tensor for _, tensor in named if type(tensor) in (nn.Parameter, Tensor)]
    for tensor in sorted(plain, key=lambda tensor: tensor.data_ptr()):
        if last is not None and tensor.nbytes and (tensor is last or tensor.data_ptr() < end):
            found |= {id(last), id(tensor)}
        if last is None or tensor.data_ptr() + tensor.nbytes > end:
            end, last = tensor.data_ptr() + tensor.nbytes, tensor
    return found


def _one_tensor(parameters: Sequence[Tensor]) -> Tensor:
    """The parameters one below the other as one tensor, of which they become views.

    Taken as it is where they lie so already: two decoders may share a model.
    """
    with torch.inference_mode(False), torch.no_grad():  # else the owner could not train them any more
        first = parameters[0]
        rows = [len(parameter) for parameter in parameters]
        if _lie_together(parameters):
            return first.data.as_strided((sum(rows), *first.shape[1:]), first.stride(), first.storage_offset())
        together = torch.empty(sum(rows), *first.shape[1:], dtype=first.dtype, device=first.device)
        for parameter, share in zip(parameters, torch.split(together, rows), strict=True):
            share.copy_(parameter)
            parameter.data = share
        return together


def _lie_together(parameters: Sequence[Tensor]) -> bool:
    return all(
        before.data_ptr() + before.nbytes == after.data_ptr()
        and before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        for before, after in pairwise(parameters)
    )
