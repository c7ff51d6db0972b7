"""Drawn tokens: plain torch against exact sums in Python; the kernels: `test_attention_triton.py`."""

import bisect
import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cowbeam.kernels.draw_tokens import draw_tokens, draw_tokens_torch

NAN, INF = math.nan, math.inf
BELOW_ONE = math.nextafter(1.0, 0.0)


class Draw(NamedTuple):
    """The arguments of `draw_tokens`, in its order."""

    logits: Tensor
    rows: Tensor
    numbers: Tensor

    @classmethod
    def random(cls, seed, width, vocabulary, dtype, device="cpu"):
        """Rows of a wider buffer, out of order and shared; numbers at both ends among them."""
        torch.manual_seed(seed)
        buffer = torch.randn(width + 2, vocabulary + 3, device=device).mul_(4).to(dtype)
        rows = torch.randint(width + 1, (width,), device=device)
        numbers = torch.rand(width, dtype=torch.float64, device=device)
        numbers[:1], numbers[-1:] = 0.0, BELOW_ONE
        return cls(buffer[1:, :vocabulary], rows, numbers)

    @classmethod
    def masked(cls, seed, vocabulary, allowed):
        """Only these tokens may be drawn, as after top-k; numbers all over [0, 1), both ends included."""
        torch.manual_seed(seed)
        logits = torch.full((1, vocabulary), -INF)
        logits[0, allowed] = torch.randn(len(allowed))
        numbers = torch.cat([torch.rand(30, dtype=torch.float64), torch.tensor([0.0, BELOW_ONE], dtype=torch.float64)])
        return cls(logits, torch.zeros(len(numbers), dtype=torch.long), numbers)


def strange(logit, tokens):
    draw = Draw.random(1, 3, 80, torch.float32)
    draw.rows.copy_(torch.tensor([2, 0, 3]))
    draw.logits[0, tokens] = logit
    return draw


strange_rows = {
    "NaN": lambda: strange(NAN, 40),
    "NaN in the last chunk": lambda: strange(NAN, 79),
    "+inf": lambda: strange(INF, 49),
    "only -inf": lambda: strange(-INF, slice(None)),
}


def disagreement(found, draw):
    """Greatest error against plain torch: of scores, and by how much a number missed the interval of its token.

    Where sums are made in another order, a number that falls within rounding of an edge may draw its neighbour.
    """
    tokens, scores, maxima = found
    _, want_scores, want_maxima = draw_tokens_torch(*draw)
    assert (tokens.dtype, scores.dtype, maxima.dtype) == (torch.int64, torch.float32, torch.float32)
    assert ((tokens >= 0) & (tokens < draw.logits.shape[1])).all()
    torch.testing.assert_close(maxima, want_maxima, rtol=0, atol=0, equal_nan=True)
    usable = ~want_scores.isnan()
    assert scores[~usable].isnan().all()
    tokens, scores, numbers = tokens[usable, None], scores[usable], draw.numbers[usable]
    log_probs = torch.log_softmax(draw.logits[draw.rows[usable]].float(), -1)
    probabilities = log_probs.double().exp()
    assert (probabilities.gather(1, tokens) > 0).all(), "a token of probability 0 was drawn"
    above = (probabilities.cumsum(-1) / probabilities.sum(-1, keepdim=True)).gather(1, tokens)[:, 0]
    below = above - probabilities.gather(1, tokens)[:, 0]
    missed = torch.maximum(below - numbers, numbers - above).clamp(min=0)
    own = log_probs.gather(1, tokens)[:, 0]
    return max((missed.tolist() + ((scores - own) / own.abs().clamp(min=1)).abs().tolist()), default=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("width", "vocabulary"), [(1, 1), (2, 3), (7, 1000), (3, 5003)])
def test_the_first_token_whose_cumulative_probability_exceeds_the_number(width, vocabulary, dtype):
    draw = Draw.random(width, width, vocabulary, dtype)
    tokens, scores, maxima = draw_tokens(*draw)
    for rank, (row, number) in enumerate(zip(draw.rows.tolist(), draw.numbers.tolist(), strict=True)):
        log_probs = torch.log_softmax(draw.logits[row].float(), -1)
        edges = list(itertools.accumulate(math.exp(log_prob) for log_prob in log_probs.tolist()))
        wanted = min(bisect.bisect_right(edges, number * edges[-1]), bisect.bisect_left(edges, edges[-1]))
        assert tokens[rank] == wanted
        assert scores[rank] == log_probs[wanted]
        assert maxima[rank] == draw.logits[row].max()


def test_frequencies_are_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, -INF, 2.0, -1.0]])
    numbers = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    tokens, _, _ = draw_tokens(logits, torch.zeros(100_000, dtype=torch.long), numbers)
    found = torch.bincount(tokens, minlength=5) / 100_000
    torch.testing.assert_close(found, torch.softmax(logits[0], -1), rtol=0, atol=2e-5)


@pytest.mark.parametrize("allowed", [[0], [79], [3, 4, 5], [0, 40, 79]])
def test_a_token_that_is_not_allowed_is_never_drawn(allowed):
    """The last number below 1, times a total above 1, rounds to the total: it drew the last token of the vocabulary."""
    draw = Draw.masked(len(allowed), 80, allowed)
    tokens, scores, _ = draw_tokens(*draw)
    assert set(tokens.tolist()) <= set(allowed)
    assert scores.isfinite().all()


@pytest.mark.parametrize("name", strange_rows)
def test_unusable_rows_show_as_nan(name):
    _, scores, maxima = draw_tokens(*strange_rows[name]())
    assert scores.isnan().tolist() == [False, True, False]
    assert maxima[[0, 2]].isfinite().all()
