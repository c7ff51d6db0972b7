"""The best continuations of a beam step: log-softmax, the beams' own scores, and the best of all tokens of all beams.

On CUDA a few launches that read the logits once and a few chunks of them again (`kernels/top_candidates_triton.py`),
elsewhere plain torch.
"""

import torch
from torch import Tensor

# What the kernels sort at once grows with the count, and with it the time to compile them.
MAX_TRITON_COUNT = 512
# They pack an index in 31 bits.
MAX_TRITON_TOKENS = 2**31


def top_candidates(logits: Tensor, rows: Tensor, running: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `count` best of all tokens of all ranks of each group.

    Rank w of group g scores running[g, w] + log_softmax(logits[rows[g, w]])[token], in float32. A row that holds NaN or
    +inf, or nothing but -inf, makes all its scores NaN; NaN ranks first, as in `torch.topk`. Scores of -inf rank last,
    but are candidates where there are no others. Of equal scores the kernels take the lower index first; in plain torch
    `torch.topk` decides. No host sync; shapes alone decide what is launched.

    Args:
        logits: [n, vocabulary] bfloat16, float16 or float32, the last dimension contiguous; a view is fine.
        rows: [groups, width] int64: the row of logits that each rank reads; ranks may share one.
        running: [groups, width] float32: each rank's score so far, anything but +inf.
        count: at most width * vocabulary.

    Returns:
        scores: [groups, count] float32, descending.
        indices: [groups, count] int64, rank * vocabulary + token.
        maxima: [groups, width] float32, the greatest logit of each rank's row; NaN if the row holds one.
    """
    tokens = rows.shape[1] * logits.shape[1]
    assert rows.shape == running.shape, f"rows {tuple(rows.shape)} with scores {tuple(running.shape)}"
    assert 1 <= count <= tokens, f"count {count} must be from 1 to {tokens}, which is width * vocabulary"
    assert logits.stride(1) == 1, f"a row of logits must be contiguous, not strides {logits.stride()}"
    if logits.is_cuda and count <= MAX_TRITON_COUNT and tokens <= MAX_TRITON_TOKENS:
        from cowbeam.kernels.top_candidates_triton import top_candidates_triton

        return top_candidates_triton(logits, rows, running, count)
    return top_candidates_torch(logits, rows, running, count)


def top_candidates_torch(logits: Tensor, rows: Tensor, running: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`top_candidates` in plain torch: what the kernels are compared with."""
    read = logits[rows]
    accumulated = running[:, :, None] + torch.log_softmax(read, -1, dtype=torch.float32)
    scores, indices = torch.topk(accumulated.flatten(1), count)
    return scores, indices, read.amax(-1).float()
