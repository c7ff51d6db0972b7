# mypy: allow-untyped-defs, allow-incomplete-defs
"""`kernels/top_candidates.py` without sorting what cannot win. Groups are a dimension of every launch.

1. Every chunk of every row: its greatest logit and its sum of exponentials.
2. Of all chunks the `count` best, by the score of their greatest logit. No other chunk can hold a candidate: each of
   those `count` holds a token that ranks before all of its tokens. (Scores grow with the logits, rounding included, and
   chunks are stretches of indices, so ties between chunks fall as ties between their tokens do.)
3. Of each of these chunks the best tokens. 4. Of these tokens the best.

What is ranked is a *key*: an int64 that orders by score, equal scores by the lower index.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens of a chunk: smaller ones make more work for step 2, larger ones for step 3.
CHUNK = 2048
SMALLEST_CHUNK = 32
# Keys that a program sorts at once: fewer take more launches, but sort on more multiprocessors.
KEYS_AT_ONCE = 1024

LEAST: tl.constexpr = tl.constexpr(-(2**63))  # below every score's key
LOWEST: tl.constexpr = tl.constexpr(float("-inf"))


def top_candidates_triton(logits: Tensor, rows: Tensor, running: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `top_candidates`; four launches, more where there are more than `KEYS_AT_ONCE` keys of a group to merge."""
    (groups, width), vocabulary = rows.shape, logits.shape[1]
    rows, running = rows.contiguous(), running.contiguous()
    chunk = min(CHUNK, max(SMALLEST_CHUNK, triton.next_power_of_2(vocabulary)))
    chunks = triton.cdiv(vocabulary, chunk)
    partial_maxima, partial_sums = (running.new_empty(groups, width, chunks) for _ in range(2))
    partials_kernel[(chunks, groups * width)](
        logits, rows, partial_maxima, partial_sums, logits.stride(0), vocabulary, CHUNK=chunk, num_warps=4
    )
    maxima, log_sums = torch.empty_like(running), torch.empty_like(running)
    num_best = min(count, width * chunks)
    best_chunks = _rank_chunks(partial_maxima, partial_sums, running, maxima, log_sums, num_best)
    keep = _power(count)
    assert 2 * keep <= KEYS_AT_ONCE, f"count {count} is too large to merge {KEYS_AT_ONCE} keys at a time"
    kept = min(keep, chunk)
    keys = rows.new_empty(groups, num_best * kept)
    _tokens_kernel[(num_best, groups)](
        logits, rows, running, maxima, log_sums, best_chunks, keys, logits.stride(0), best_chunks.stride(0), width,
        vocabulary, chunks, CHUNK=chunk, KEEP=kept, num_warps=_warps(chunk),
    )  # fmt: skip
    keys = _merge(keys, keep)
    scores, indices = running.new_empty(groups, count), rows.new_empty(groups, count)
    size = max(_power(keys.shape[1]), keep)
    _unpack_kernel[(groups,)](
        keys, scores, indices, keys.shape[1], count, SIZE=size, KEEP=keep, num_warps=_warps(size)
    )  # fmt: skip
    return scores, indices, maxima


def _rank_chunks(
    partial_maxima: Tensor, partial_sums: Tensor, running: Tensor, maxima: Tensor, log_sums: Tensor, num_best: int
) -> Tensor:
    """Keys of each group's best chunks, best first, [groups, ≥ num_best]; fills `maxima` and `log_sums`."""
    groups, width, chunks = partial_maxima.shape
    chunks_pad = _power(chunks)
    rows_pad = min(triton.next_power_of_2(width), max(1, KEYS_AT_ONCE // chunks_pad))
    programs = triton.cdiv(width, rows_pad)
    size = rows_pad * chunks_pad
    keep = min(_power(num_best), size)
    keys = torch.empty(groups, programs * keep, dtype=torch.int64, device=running.device)
    _chunks_kernel[(programs, groups)](
        partial_maxima, partial_sums, running, maxima, log_sums, keys, width, chunks,
        ROWS_PAD=rows_pad, CHUNKS_PAD=chunks_pad, KEEP=keep, num_warps=_warps(size),
    )  # fmt: skip
    if programs == 1:
        return keys
    keep = _power(num_best)
    while keys.shape[1] > keep:
        keys = _merge_once(keys, keep)
    return keys


def _merge(keys: Tensor, keep: int) -> Tensor:
    """Few enough keys of a group for one program, the best `keep` among them."""
    while keys.shape[1] > KEYS_AT_ONCE:
        keys = _merge_once(keys, keep)
    return keys


def _merge_once(keys: Tensor, keep: int) -> Tensor:
    groups, number = keys.shape
    size = min(KEYS_AT_ONCE, _power(number))
    programs = triton.cdiv(number, size)
    merged = keys.new_empty(groups, programs * keep)
    _merge_kernel[(programs, groups)](keys, merged, number, SIZE=size, KEEP=keep, num_warps=_warps(size))
    return merged


def _power(number: int) -> int:
    """The next power of two, at least 2: `tl.topk` of Triton 3.6 cannot keep a single key."""
    return max(2, int(triton.next_power_of_2(number)))


def _warps(keys: int) -> int:
    """Most programs that sort have a multiprocessor to themselves, so more warps mean less waiting."""
    return 8 if keys >= 1024 else 4


@triton.jit
def _key(score, index):
    """Order-preserving bits of the score above the inverted index. All NaN are one, above +inf."""
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(score != score, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index.to(tl.int64))


@triton.jit
def _index(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
def _score(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def partials_kernel(
    LOGITS, ROWS, MAXIMA, SUMS, logits_row, vocabulary,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The greatest logit of every chunk of every rank's row, and its sum of exp(logit - greatest)."""
    chunk, rank = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    row = tl.load(ROWS + rank).to(tl.int64)
    x = tl.load(LOGITS + row * logits_row + token, mask=token < vocabulary, other=LOWEST).to(tl.float32)
    is_nan = x != x
    maximum = tl.max(tl.where(is_nan, LOWEST, x), 0)
    # A chunk of -inf has the sum 0, unless the whole row is: that shows when the row's chunks meet.
    total = tl.sum(tl.exp(x - tl.where(maximum == LOWEST, 0.0, maximum)), 0)
    at = rank * tl.num_programs(0) + chunk
    # Not every machine's maximum lets NaN through.
    tl.store(MAXIMA + at, tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), maximum))
    tl.store(SUMS + at, total)


@triton.jit
def row_totals(partial, sums):
    """[rows] each, of [rows, chunks] as `partials_kernel` gives them: the greatest logit, NaN if there is one, and the
    logarithm of the sum of exp(logit - greatest), NaN in a row of -inf and in one with +inf or NaN."""
    is_nan = partial != partial
    maximum = tl.max(tl.where(is_nan, LOWEST, partial), 1)
    maximum = tl.where(tl.max(is_nan.to(tl.int32), 1) > 0, float("nan"), maximum)
    total = tl.sum(sums * tl.exp(partial - maximum[:, None]), 1)
    # In float32 the GPU's logarithm is approximate: too far off where a row has one likely token.
    return maximum, tl.log(total.to(tl.float64)).to(tl.float32)


@triton.jit
def _chunks_kernel(
    PARTIAL_MAXIMA, PARTIAL_SUMS, RUNNING, MAXIMA, LOG_SUMS, KEYS, width, chunks,
    ROWS_PAD: tl.constexpr, CHUNKS_PAD: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    rank = tl.program_id(0) * ROWS_PAD + tl.arange(0, ROWS_PAD)
    chunk = tl.arange(0, CHUNKS_PAD)[None, :]
    at = rank[:, None] * chunks + chunk
    live = (rank[:, None] < width) & (chunk < chunks)
    partial = tl.load(PARTIAL_MAXIMA + group * width * chunks + at, mask=live, other=LOWEST)
    sums = tl.load(PARTIAL_SUMS + group * width * chunks + at, mask=live, other=0.0)
    maximum, log_sum = row_totals(partial, sums)
    tl.store(MAXIMA + group * width + rank, maximum, mask=rank < width)
    tl.store(LOG_SUMS + group * width + rank, log_sum, mask=rank < width)
    running = tl.load(RUNNING + group * width + rank, mask=rank < width, other=0.0)
    score = running[:, None] + ((partial - maximum[:, None]) - log_sum[:, None])
    keys = tl.reshape(tl.where(live, _key(score, at), LEAST), [ROWS_PAD * CHUNKS_PAD])
    to = KEYS + (group * tl.num_programs(0) + tl.program_id(0)) * KEEP
    tl.store(to + tl.arange(0, KEEP), tl.topk(keys, KEEP))


@triton.jit
def _tokens_kernel(
    LOGITS, ROWS, RUNNING, MAXIMA, LOG_SUMS, BEST_CHUNKS, KEYS, logits_row, best_row, width, vocabulary, chunks,
    CHUNK: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    best = _index(tl.load(BEST_CHUNKS + group * best_row + tl.program_id(0)))
    rank = best // chunks
    token = best % chunks * CHUNK + tl.arange(0, CHUNK)
    at = group * width + rank
    row = tl.load(ROWS + at).to(tl.int64)
    x = tl.load(LOGITS + row * logits_row + token, mask=token < vocabulary, other=LOWEST).to(tl.float32)
    # torch's order of operations, which decides what is equal.
    score = tl.load(RUNNING + at) + ((x - tl.load(MAXIMA + at)) - tl.load(LOG_SUMS + at))
    keys = tl.where(token < vocabulary, _key(score, rank * vocabulary + token), LEAST)
    to = KEYS + (group * tl.num_programs(0) + tl.program_id(0)) * KEEP
    tl.store(to + tl.arange(0, KEEP), tl.topk(keys, KEEP))


@triton.jit
def _merge_kernel(KEYS, MERGED, size, SIZE: tl.constexpr, KEEP: tl.constexpr):
    group = tl.program_id(1)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    keys = tl.load(KEYS + group * size + at, mask=at < size, other=LEAST)
    to = MERGED + (group * tl.num_programs(0) + tl.program_id(0)) * KEEP
    tl.store(to + tl.arange(0, KEEP), tl.topk(keys, KEEP))


@triton.jit
def _unpack_kernel(KEYS, SCORES, INDICES, size, count, SIZE: tl.constexpr, KEEP: tl.constexpr):
    group = tl.program_id(0)
    at = tl.arange(0, SIZE)
    keys = tl.topk(tl.load(KEYS + group * size + at, mask=at < size, other=LEAST), KEEP)
    place = tl.arange(0, KEEP)
    tl.store(SCORES + group * count + place, _score(keys), mask=place < count)
    tl.store(INDICES + group * count + place, _index(keys), mask=place < count)
