"""Diverse beam search told once more, from the formulas of ``decoder/diverse_beams.py``: lists, and a full forward pass
for every beam in every step. Shares no step with cowbeam."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MASK = -1e9


class Found(NamedTuple):
    score: float
    token_ids: list[int]
    total: float


@dataclass
class _Group:
    beams: list[tuple[float, list[int]]]  # (sum, tokens)
    found: list[Found] = field(default_factory=list)
    is_done: bool = False


def diverse_beams(
    next_logprobs: Callable[[list[int]], list[float]],
    *,
    num_beams: int,
    num_beam_groups: int,
    diversity_penalty: float,
    max_new_tokens: int,
    eos_token_id: Sequence[int],
    length_penalty: float,
    early_stopping: bool | str,
    num_return_sequences: int,
    penalize: Callable[[list[int], list[float]], list[float]] = lambda _, scores: scores,
) -> list[Found]:
    """``penalize`` is what stands behind the diversity penalty: (generated tokens, scores) -> scores."""
    size = num_beams // num_beam_groups
    groups = [_Group([(0.0, [])] + [(MASK, [])] * (size - 1)) for _ in range(num_beam_groups)]
    for length in range(1, max_new_tokens + 1):
        chosen: list[int] = []
        for group in groups:
            if group.is_done:
                continue
            ranked = _ranked(group, chosen, diversity_penalty, next_logprobs, penalize)
            ranked = ranked[: max(2, 1 + len(eos_token_id)) * size]
            beams: list[tuple[float, list[int]]] = []
            for place, (total, tokens) in enumerate(ranked):
                if tokens[-1] in eos_token_id:
                    if place < size:
                        _keep(group, Found(total / length**length_penalty, tokens, total), size)
                else:
                    beams.append((total, tokens))
                if len(beams) == size:
                    break
            chosen += [tokens[-1] for _, tokens in beams]
            group.beams = beams
            if len(group.found) == size:
                far = max_new_tokens if early_stopping == "never" and length_penalty > 0 else length
                worst = min(group.found).score
                group.is_done = early_stopping is True or worst >= ranked[0][0] / far**length_penalty
        if all(group.is_done for group in groups):
            break
    for group in groups:
        if not group.is_done:
            for total, tokens in group.beams:
                _keep(group, Found(total / len(tokens) ** length_penalty, tokens, total), size)
    found = [found for group in groups for found in group.found if found.total > MASK / 2]
    return sorted(found, key=lambda one: one.score)[::-1][:num_return_sequences]


def _ranked(
    group: _Group,
    chosen: list[int],
    diversity_penalty: float,
    next_logprobs: Callable[[list[int]], list[float]],
    penalize: Callable[[list[int], list[float]], list[float]],
) -> list[tuple[float, list[int]]]:
    extended = []
    for total, tokens in group.beams:
        scores = [x - diversity_penalty * chosen.count(token) for token, x in enumerate(next_logprobs(tokens))]
        extended += [(total + x, [*tokens, token]) for token, x in enumerate(penalize(tokens, scores))]
    return sorted(extended, key=lambda one: -one[0])


def _keep(group: _Group, found: Found, size: int) -> None:
    if len(group.found) < size:
        group.found.append(found)
    elif found.score > min(one.score for one in group.found):
        group.found.remove(min(group.found, key=lambda one: one.score))
        group.found.append(found)
