# mypy: allow-untyped-defs, allow-incomplete-defs
"""`kernels/draw_tokens.py` with every row cut into chunks, so that few rows fill a GPU too.

1. Every chunk of every row: its greatest logit and its sum of exponentials, which together give the row's log-sum-exp.
2. Every chunk's probability, summed in float64. 3. Of each row the chunk in which its number falls, and its token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cowbeam.kernels.top_candidates_triton import LOWEST, partials_kernel, row_totals

CHUNK = 1024


def draw_tokens_triton(logits: Tensor, rows: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `draw_tokens`; three launches."""
    width, vocabulary = rows.shape[0], logits.shape[1]
    rows, numbers = rows.contiguous(), numbers.contiguous()
    chunks = triton.cdiv(vocabulary, CHUNK)
    chunks_pad = max(2, triton.next_power_of_2(chunks))
    maxima, log_sums = (torch.empty(width, device=rows.device) for _ in range(2))
    partial_maxima, partial_sums = maxima.new_empty(width, chunks), maxima.new_empty(width, chunks)
    masses = numbers.new_empty(width, chunks)
    tokens, scores = torch.empty_like(rows), torch.empty_like(maxima)
    partials_kernel[(chunks, width)](
        logits, rows, partial_maxima, partial_sums, logits.stride(0), vocabulary, CHUNK=CHUNK, num_warps=4
    )
    _masses_kernel[(chunks, width)](
        logits, rows, partial_maxima, partial_sums, masses, maxima, log_sums, logits.stride(0), vocabulary,
        CHUNK=CHUNK, CHUNKS_PAD=chunks_pad, num_warps=4,
    )  # fmt: skip
    _draw_kernel[(width,)](
        logits, rows, numbers, masses, maxima, log_sums, tokens, scores, logits.stride(0), vocabulary, chunks,
        CHUNK=CHUNK, CHUNKS_PAD=chunks_pad, num_warps=4,
    )  # fmt: skip
    return tokens, scores, maxima


@triton.jit
def _log_probs(LOGITS, row, token, vocabulary, maximum, log_sum):
    """In torch's order of operations, which decides the last bits; -inf behind the last token."""
    x = tl.load(LOGITS + row + token, mask=token < vocabulary, other=LOWEST).to(tl.float32)
    return tl.where(token < vocabulary, (x - maximum) - log_sum, LOWEST)


@triton.jit
def _place(masses, cumulative, target, PLACES: tl.constexpr):
    """The first place of a mass whose sum exceeds the target; the last of any mass where rounding leaves none.

    Only places of a mass count: a scan in parallel adds in another order at every place, so that its sums may rise by
    a rounding behind the last mass.
    """
    place = tl.arange(0, PLACES)
    first = tl.min(tl.where((masses > 0) & (cumulative > target), place, PLACES), 0)
    return tl.minimum(first, tl.max(tl.where(masses > 0, place, 0), 0))


@triton.jit
def _masses_kernel(
    LOGITS, ROWS, PARTIAL_MAXIMA, PARTIAL_SUMS, MASSES, MAXIMA, LOG_SUMS, logits_row, vocabulary,
    CHUNK: tl.constexpr, CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    chunk, rank, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    other = tl.arange(0, CHUNKS_PAD)[None, :]
    at = rank * chunks + other
    partial = tl.load(PARTIAL_MAXIMA + at, mask=other < chunks, other=LOWEST)
    sums = tl.load(PARTIAL_SUMS + at, mask=other < chunks, other=0.0)
    maximum, log_sum = row_totals(partial, sums)
    maximum, log_sum = tl.max(maximum, 0), tl.max(log_sum, 0)
    row = tl.load(ROWS + rank).to(tl.int64) * logits_row
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    log_probs = _log_probs(LOGITS, row, token, vocabulary, maximum, log_sum)
    tl.store(MASSES + rank * chunks + chunk, tl.sum(tl.exp(log_probs.to(tl.float64)), 0))
    if chunk == 0:
        tl.store(MAXIMA + rank, maximum)
        tl.store(LOG_SUMS + rank, log_sum)


@triton.jit
def _draw_kernel(
    LOGITS, ROWS, NUMBERS, MASSES, MAXIMA, LOG_SUMS, TOKENS, SCORES, logits_row, vocabulary, chunks,
    CHUNK: tl.constexpr, CHUNKS_PAD: tl.constexpr,
):  # fmt: skip
    rank = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_PAD)
    maximum, log_sum = tl.load(MAXIMA + rank), tl.load(LOG_SUMS + rank)
    row = tl.load(ROWS + rank).to(tl.int64) * logits_row
    masses = tl.load(MASSES + rank * chunks + chunk, mask=chunk < chunks, other=0.0)
    cumulative = tl.cumsum(masses, 0)
    target = tl.load(NUMBERS + rank) * tl.max(cumulative, 0)
    place = _place(masses, cumulative, target, CHUNKS_PAD)
    before = tl.max(tl.where(chunk < place, cumulative, 0.0), 0)
    token = place * CHUNK + tl.arange(0, CHUNK)
    probabilities = tl.exp(_log_probs(LOGITS, row, token, vocabulary, maximum, log_sum).to(tl.float64))
    # NaN is no mass: the place is 0.
    drawn = place * CHUNK + _place(probabilities, before + tl.cumsum(probabilities, 0), target, CHUNK)
    tl.store(TOKENS + rank, drawn.to(tl.int64))
    tl.store(SCORES + rank, (tl.load(LOGITS + row + drawn).to(tl.float32) - maximum) - log_sum)
