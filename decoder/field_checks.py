"""Checks of single fields of the parameters: each returns the value as it is kept, or raises ValueError naming both."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from reprlib import repr as shown  # abbreviates: a user's value may be of any length
from typing import Any

import numpy as np

MAX_STOP_STRING = 1000  # characters: as many of a branch's text are looked at for every candidate

TokenIds = tuple[int, ...]


def plain(value: Any) -> Any:
    """Python's own number for one of numpy's; anything else as it is."""
    return value.item() if isinstance(value, np.number) else value


def check_integer(name: str, value: object, minimum: int) -> None:
    """An integer of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {shown(value)}")


def check_number(name: str, value: object, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """``low <= value <= high`` (``low < value`` with ``above``) and finite."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not number or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        bounds = [f"{'above' if above else 'at least'} {low:g}"] if low > -math.inf else []
        bounds += [f"at most {high:g}"] if high < math.inf else []
        bound = f" {' and '.join(bounds)}" if bounds else ""
        raise ValueError(f"{name} must be a finite number{bound}, got {shown(value)}")


def check_flag(name: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")


def check_seed(seed: object) -> None:
    """An integer of 64 bits, or None."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64):
        raise ValueError(f"seed must be an integer from 0 to 2**64 - 1, got {shown(seed)}")


def eos_ids(given: Any) -> TokenIds | None:
    """One id or several, each once; integers of any library."""
    if given is None:
        return None
    try:
        each: list[Any] = [given] if isinstance(given, int | str | bytes) else list(given)
    except TypeError:
        raise ValueError(f"eos_token_id must be token ids, got {shown(given)}") from None
    ids = [int(i) if hasattr(i, "__index__") and not isinstance(i, bool) else i for i in each]
    for token_id in ids:
        check_integer("eos_token_id", token_id, 0)
        if token_id >= 2**63:
            raise ValueError(f"eos_token_id must be token ids, got {shown(token_id)}")
    return tuple(dict.fromkeys(ids))


def stop_strings(given: Any) -> tuple[str, ...] | None:
    """One text or several, each once; None where there is none."""
    each = [given] if isinstance(given, str) else () if given is None else given
    if isinstance(each, bytes) or not isinstance(each, Sequence):
        raise ValueError(f"stop_strings must be text or a list of texts, got {shown(given)}")
    for stop in each:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_STRING:
            raise ValueError(f"stop_strings must be texts of 1 to {MAX_STOP_STRING} characters, got {shown(stop)}")
        if "\N{REPLACEMENT CHARACTER}" in stop:
            raise ValueError(f"stop_strings: {shown(stop)} holds what stands for a part of a character")
    return tuple(dict.fromkeys(each)) or None


def token_ids(name: str, given: Any) -> TokenIds | None:
    """A list of token ids; None where there is none."""
    ids = () if given is None else tuple(plain(token_id) for token_id in _items(name, given))
    for token_id in ids:
        check_integer(f"a token id of {name}", token_id, 0)
    return ids or None


def token_sequences(name: str, given: Any) -> tuple[TokenIds, ...] | None:
    """A list of lists of token ids, none of them empty; None where there is none."""
    return tuple(_sequence(name, each) for each in (() if given is None else _items(name, given))) or None


def sequence_bias(given: Any) -> tuple[tuple[TokenIds, float], ...] | None:
    """Pairs of a token sequence and its bias; ``given`` in either of the forms that transformers takes."""
    name = "sequence_bias"
    pairs = () if given is None else tuple(given.items()) if isinstance(given, Mapping) else _items(name, given)
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2 or isinstance(pair, str | bytes):
            raise ValueError(f"{name} must map token sequences to numbers, got {shown(pair)}")
        check_number(f"a bias of {name}", pair[1], -math.inf, float(np.finfo(np.float32).max))
    return tuple((_sequence(name, ids), float(bias)) for ids, bias in pairs) or None


def functions(name: str, given: Any) -> tuple[Callable[..., Any], ...] | None:
    """A list of things that can be called; None where there is none."""
    each = () if given is None else _items(name, given)
    for function in each:
        if not callable(function):
            raise ValueError(f"{name} must be functions, got {shown(function)}")
        if isinstance(function, type):
            raise ValueError(f"{name} must be functions, got the class {function.__name__}: give one of its objects")
    return each or None


def _items(name: str, given: object) -> tuple[Any, ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise ValueError(f"{name} must be a list, got {shown(given)}")
    return tuple(given)


def _sequence(name: str, given: object) -> TokenIds:
    ids = token_ids(f"each sequence of {name}", given)
    if ids is None:
        raise ValueError(f"{name} holds a sequence without token ids")
    return ids
