"""The best candidates of a step: plain torch against a sort in Python; the kernels: `test_attention_triton.py`."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cowbeam.kernels.top_candidates import top_candidates, top_candidates_torch

NAN, INF = math.nan, math.inf


class Step(NamedTuple):
    """The arguments of `top_candidates` for one group, in its order."""

    logits: Tensor
    rows: Tensor
    running: Tensor
    count: int

    @property
    def arguments(self):
        return self.logits, self.rows[None], self.running[None], self.count

    @classmethod
    def random(cls, seed, width, vocabulary, count, dtype, device="cpu"):
        """Rows of a wider buffer, out of order and shared; scores below −1, so that relative errors mean something."""
        torch.manual_seed(seed)
        buffer = torch.randn(width + 2, vocabulary + 3, device=device).mul_(4).to(dtype)
        rows = torch.randint(width + 1, (width,), device=device)
        return cls(buffer[1:, :vocabulary], rows, -1 - 5 * torch.rand(width, device=device), count)

    @property
    def accumulated(self):
        return self.running[:, None] + self.logits[self.rows].float().log_softmax(-1)


def of_one_group(found):
    return tuple(tensor.squeeze(0) for tensor in found)


def together(seed, groups, width, vocabulary, count, dtype=torch.float32):
    """Groups over one tensor of logits."""
    steps = [Step.random(seed, width, vocabulary, count, dtype)]
    torch.manual_seed(seed)
    for _ in range(groups - 1):
        rows = torch.randint(width + 1, (width,))
        steps.append(steps[0]._replace(rows=rows, running=-1 - 5 * torch.rand(width)))
    return steps


def all_at_once(function, steps):
    """`function` of all of them in one call; each one's result."""
    rows, running = (torch.stack([getattr(step, name) for step in steps]) for name in ("rows", "running"))
    found = function(steps[0].logits, rows, running, steps[0].count)
    return list(zip(*found, strict=True))


def tied(width, vocabulary, count):
    """Ranks of one score on one row in which a few logits occur again and again."""
    torch.manual_seed(count)
    logits = torch.randint(-3, 3, (1, vocabulary)).float()
    return Step(logits, torch.zeros(width, dtype=torch.long), torch.zeros(width), count)


def strange(logit, tokens, count):
    """Rank 1 of three meets a row that holds `logit` at these tokens."""
    step = Step.random(count, 3, 50, count, torch.float32)
    step.rows.copy_(torch.tensor([2, 0, 3]))
    step.logits[0, tokens] = logit
    return step


def dead_ranks(count):
    """Only rank 1 may be continued, as at the first choice."""
    step = Step.random(count, 3, 60, count, torch.float32)
    step.running.copy_(torch.tensor([-INF, -2.0, -INF]))
    return step


strange_rows = {
    "NaN": lambda count: strange(NAN, 40, count),
    "negative NaN": lambda count: strange(-torch.tensor(NAN), 3, count),
    "+inf": lambda count: strange(INF, 49, count),
    "only -inf": lambda count: strange(-INF, slice(None), count),
    "nearly only -inf": lambda count: strange(-INF, slice(1, None), count),
    "a chunk of -inf": lambda count: strange(-INF, slice(32, None), count),
    "a NaN score": lambda count: Step.random(count, 3, 60, count, torch.float32)._replace(
        running=torch.tensor([-1.0, NAN, -2.0])
    ),
    "dead ranks": dead_ranks,
}


def disagreement(found, step, *, lower_first=False):
    """Greatest relative error against plain torch, infinite where candidates cannot be right.

    Indices may differ where scores are as good as equal: each must have its score, and none come twice.
    """
    scores, indices, maxima = found
    expected_scores, _, expected_maxima = of_one_group(top_candidates_torch(*step.arguments))
    assert scores.dtype == maxima.dtype == torch.float32
    assert indices.dtype == torch.int64
    assert scores.shape == indices.shape == (step.count,)
    own = step.accumulated.view(-1)[indices]
    pairs = [(scores, expected_scores), (scores, own), (maxima, expected_maxima)]
    equal_before = scores[1:] == scores[:-1]
    if indices.unique().numel() < step.count or (lower_first and (indices.diff() < 0)[equal_before].any()):
        return INF
    return max(relative_error(*pair) for pair in pairs)


def relative_error(ours, theirs):
    """Of each number; what is not finite must be the same."""
    finite = theirs.isfinite()
    torch.testing.assert_close(ours[~finite], theirs[~finite], rtol=0, atol=0, equal_nan=True)
    return float(((ours - theirs)[finite] / theirs[finite]).abs().amax()) if finite.any() else 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "vocabulary", "count"), [(1, 2, 1), (2, 37, 4), (16, 1000, 32), (40, 37, 80), (2, 2, 4), (3, 5003, 400)]
)
def test_best_of_all_tokens_of_all_ranks(width, vocabulary, count, dtype):
    step = Step.random(count, width, vocabulary, count, dtype)
    scores, indices, maxima = of_one_group(top_candidates(*step.arguments))
    truth = []
    for rank, row in enumerate(step.rows.tolist()):
        logits = step.logits[row].double()
        own = logits - logits.exp().sum().log() + step.running[rank]
        truth += [(-score, rank * vocabulary + token) for token, score in enumerate(own.tolist())]
        assert maxima[rank] == logits.max()
    best = [-score for score, _ in sorted(truth)[:count]]
    assert scores.tolist() == pytest.approx(best, rel=1e-6)
    assert [-truth[index][0] for index in indices.tolist()] == pytest.approx(best, rel=1e-6)
    assert len(set(indices.tolist())) == count


@pytest.mark.parametrize("name", ["NaN", "+inf", "only -inf"])
def test_unusable_rows_show_as_nan_and_rank_first(name):
    """The engine tells a broken model by a NaN score among the candidates: it must not be outranked."""
    scores, indices, maxima = of_one_group(top_candidates(*strange_rows[name](64).arguments))
    assert scores.isnan().tolist() == [True] * 50 + [False] * 14
    assert sorted(indices[:50].tolist()) == list(range(50, 100))
    expected = {"NaN": NAN, "+inf": INF, "only -inf": -INF}[name]
    torch.testing.assert_close(maxima[1], torch.tensor(expected), equal_nan=True)
    assert maxima[[0, 2]].isfinite().all()


def test_impossible_tokens_come_last_but_come():
    scores, indices, _ = of_one_group(top_candidates(*dead_ranks(61).arguments))
    assert scores.isfinite().tolist() == [True] * 60 + [False]
    assert sorted(indices[:60].tolist()) == list(range(60, 120))
    assert scores[60] == -INF


def test_more_candidates_than_tokens_are_refused():
    with pytest.raises(AssertionError, match="width \\* vocabulary"):
        top_candidates(*Step.random(0, 2, 5, 11, torch.float32).arguments)


def test_groups_do_not_meet():
    steps = together(3, 4, 5, 77, 10)
    for found, step in zip(all_at_once(top_candidates, steps), steps, strict=True):
        for ours, alone in zip(found, of_one_group(top_candidates(*step.arguments)), strict=True):
            assert torch.equal(ours, alone)


@pytest.mark.parametrize("wrong", ["score", "index", "twice", "order", "maximum"])
def test_a_wrong_result_is_noticed(wrong):
    """What the kernels are compared by can fail."""
    step = tied(2, 50, 10)._replace(running=torch.full((2,), -1.0))
    scores, indices, maxima = of_one_group(top_candidates_torch(*step.arguments))
    indices = step.accumulated.view(-1).sort(descending=True, stable=True).indices[:10]
    assert disagreement((scores, indices, maxima), step, lower_first=True) == 0
    if wrong == "score":
        scores[3] *= 1 + 1e-5
    elif wrong == "index":
        indices[9] = step.accumulated.argmin()
    elif wrong == "twice":
        indices[1] = indices[0]
    elif wrong == "order":
        indices = indices[[1, 0, *range(2, 10)]]
    else:
        maxima[0] += 1
    assert disagreement((scores, indices, maxima), step, lower_first=True) > 1e-6
