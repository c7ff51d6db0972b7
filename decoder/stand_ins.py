"""What a model has only while a step of cowbeam runs: other forward passes, and attributes that they need."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class StandIn(NamedTuple):
    """An attribute for a while."""

    attributes: dict[str, Any]  # the object's ``__dict__``
    name: str
    value: Any


@contextmanager
def in_place(stand_ins: Iterable[StandIn]) -> Iterator[None]:
    """The objects have these attributes inside the body; outside they are as their owner left them.

    An attribute that the owner has given an object himself stays what it is.
    """
    placed: list[StandIn] = []
    try:
        for stand_in in stand_ins:
            if stand_in.name not in stand_in.attributes:
                stand_in.attributes[stand_in.name] = stand_in.value
                placed.append(stand_in)
        yield
    finally:
        for attributes, name, _ in placed:
            attributes.pop(name, None)
