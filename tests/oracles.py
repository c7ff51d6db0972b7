"""What the right answer is, by code that shares no step with cowbeam.

transformers' own ``generate`` runs on dense caches; full recomputes run without any cache. Where draws are made, only
the source of random numbers is exchanged for cowbeam's, since it defines the stream.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

PAD = 0


class Expected(NamedTuple):
    """One sequence as it should be returned; ``score`` is None where transformers gives none (no beams)."""

    token_ids: list[int]
    beams: list[int]
    logprobs: list[float]
    score: float | None


def transformers_generate(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], settings: dict[str, Any], *, do_sample: bool = False
) -> list[list[Expected]]:
    """``model.generate`` on one left-padded batch; a list of ``num_return_sequences`` sequences a prompt."""
    width = max(map(len, prompts))
    token_ids = torch.tensor([[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    own = {name: value for name, value in settings.items() if name != "seed"}
    own["eos_token_id"] = list(own["eos_token_id"]) or None
    if do_sample:
        own = {"top_k": 0, **own}  # transformers' default is 50
    config = GenerationConfig(
        do_sample=do_sample, pad_token_id=PAD, return_dict_in_generate=True, output_scores=True, **own
    )
    out = model.generate(
        input_ids=token_ids.to(model.device), attention_mask=mask.to(model.device), generation_config=config
    )
    num_beams, each = own.get("num_beams", 1), own["num_return_sequences"]
    if num_beams > 1:
        rows = _read_beams(model, out, width)
    else:
        rows = _read_chains(model, out, width, each, own["eos_token_id"] or [])
    by_prompt = [rows[number * each : (number + 1) * each] for number in range(len(prompts))]
    return [[_rebased(row, number * num_beams) for row in group] for number, group in enumerate(by_prompt)]


def _read_beams(model: PreTrainedModel, out: Any, width: int) -> list[Expected]:
    transitions = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    found = []
    for row, beams in enumerate(out.beam_indices):
        length = int((beams >= 0).sum())
        found.append(
            Expected(
                out.sequences[row, width : width + length].tolist(),
                beams[:length].tolist(),
                transitions[row, :length].tolist(),
                float(out.sequences_scores[row]),
            )
        )
    return found


def _read_chains(model: PreTrainedModel, out: Any, width: int, each: int, eos_ids: Sequence[int]) -> list[Expected]:
    """Greedy search and samples: each row goes on by itself and is padded behind its EOS."""
    transitions = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    found = []
    for row, padded in enumerate(out.sequences[:, width:].tolist()):
        ends = [position for position, token in enumerate(padded) if token in eos_ids]
        length = ends[0] + 1 if ends else len(padded)
        found.append(Expected(padded[:length], [], transitions[row, :length].tolist(), None))
    return found


def _rebased(expected: Expected, first_row: int) -> Expected:
    """transformers counts beams through the batch; cowbeam within their prompt."""
    return expected._replace(beams=[beam - first_row for beam in expected.beams])


def last_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Logits of the next token, everything computed anew: ``[vocabulary]``."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([list(token_ids)], device=model.device), use_cache=False).logits[
            0, -1
        ]
    return logits


def uniform(seed: int, index: int, position: int) -> float:
    """The number of (seed, i, t), by numpy's generator."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=[0, position, index, 0])).random())


@contextmanager
def drawing_samples(seed: int) -> Iterator[None]:
    """transformers' ``_sample`` draws row i's token t by the uniform number of (seed, i, t), for one prompt."""
    positions = itertools.count()

    def multinomial(probabilities: Tensor, num_samples: int) -> Tensor:
        assert num_samples == 1, "one token a sample"
        position = next(positions)
        rows = probabilities.double().tolist()
        drawn = [[first_above(row, uniform(seed, index, position))] for index, row in enumerate(rows)]
        return torch.tensor(drawn, device=probabilities.device)

    with mock.patch.object(torch, "multinomial", multinomial):
        yield


def first_above(probabilities: Sequence[float], number: float) -> int:
    """Inverse CDF, told as one tells it: walk until the sum exceeds the number."""
    total = math.fsum(probabilities)
    reached = 0.0
    for token, probability in enumerate(probabilities):
        reached += probability / total
        if reached > number:
            return token
    return max(token for token, probability in enumerate(probabilities) if probability > 0)


@contextmanager
def drawing_beams(seed: int) -> Iterator[None]:
    """transformers' beam sampling draws position t's candidates with the generator of (seed, t), for one prompt."""
    original, positions = torch.multinomial, itertools.count()

    def multinomial(probabilities: Tensor, num_samples: int) -> Tensor:
        key = np.random.SeedSequence([seed, next(positions)]).generate_state(1, np.uint64)[0]
        generator = torch.Generator(probabilities.device).manual_seed(int(key))
        drawn = original(probabilities, num_samples, generator=generator)
        # Best first, as transformers itself orders them since 5.24.
        order = probabilities.gather(-1, drawn).argsort(dim=-1, descending=True, stable=True)
        return drawn.gather(-1, order)

    with mock.patch.object(torch, "multinomial", multinomial):
        yield


def best_of_all(
    next_logprobs: Callable[[tuple[int, ...]], Sequence[float]],
    *,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    length_penalty: float,
) -> list[tuple[float, tuple[int, ...]]]:
    """Every sequence that ends by an EOS or at the greatest length, with its score, best first."""
    found: list[tuple[float, tuple[int, ...]]] = []
    open_ends: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    while open_ends:
        total, tokens = open_ends.pop()
        for token, logprob in enumerate(next_logprobs(tokens)):
            longer = (total + logprob, (*tokens, token))
            if token in eos_ids or len(longer[1]) == max_new_tokens:
                found.append((longer[0] / len(longer[1]) ** length_penalty, longer[1]))
            else:
                open_ends.append(longer)
    return sorted(found, reverse=True)
