"""Dense states of recurrent and convolutional layers: one a branch, forked with it.

A state is a value that nothing changes: a step makes new ones. So a fork is one more reference, whatever the state's
size, and what a branch no longer refers to is gone.
"""

import copy
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class StateOwner(Protocol):
    """A branch, or what stands for one."""

    state: object | None


class StateRows:
    """The states that one forward pass left behind, of all its rows.

    ``layers`` are transformers' own cache layers, of which each tensor is ``[rows, …]``.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = tuple(layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(tensor.nbytes for layer in self.layers for tensor in _tensors(layer))


class BranchState(NamedTuple):
    """One row of these: what a branch holds."""

    rows: StateRows
    row: int


def take(owners: Sequence[StateOwner]) -> list[Any]:
    """The owners' states as cache layers of a forward pass over them, in their order. Copies: the pass writes them."""
    states = [_state_of(owner) for owner in owners]
    runs = [(rows, [state.row for state in run]) for rows, run in groupby(states, key=lambda state: state.rows)]
    return [
        _joined([_selected(layer, numbers) for layer, (_, numbers) in zip(layers, runs, strict=True)])
        for layers in zip(*(rows.layers for rows, _ in runs), strict=True)
    ]


def give(owners: Sequence[StateOwner], layers: Sequence[Any]) -> None:
    """Let the owners hold what a forward pass over them, in their order, has left in its cache layers."""
    rows = StateRows(layers)
    for number, owner in enumerate(owners):
        owner.state = BranchState(rows, number)


def _state_of(owner: StateOwner) -> BranchState:
    assert isinstance(owner.state, BranchState), "a branch without a state is decoded"
    return owner.state


def _tensors(layer: Any) -> list[Tensor]:
    kept = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [tensor for tensor in kept if tensor is not None]


def _selected(layer: Any, rows: Sequence[int]) -> Any:
    """A copy of these rows of a layer."""

    def select(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.index_select(0, torch.tensor(rows, device=tensor.device))

    chosen = copy.copy(layer)
    for name in ("conv_states", "recurrent_states"):
        setattr(chosen, name, {key: select(tensor) for key, tensor in getattr(layer, name).items()})
    return chosen


def _joined(parts: Sequence[Any]) -> Any:
    """Parts of one layer, one below the other."""
    if len(parts) == 1:
        return parts[0]
    joined = copy.copy(parts[0])
    for name in ("conv_states", "recurrent_states"):
        columns = {key: [getattr(part, name)[key] for part in parts] for key in getattr(joined, name)}
        setattr(joined, name, {key: None if c[0] is None else torch.cat(c) for key, c in columns.items()})
    return joined
