"""The token of every sample: the first whose cumulative probability exceeds the sample's uniform number.

On CUDA three launches that read the logits a few times (`kernels/draw_tokens_triton.py`), elsewhere plain torch.
"""

import torch
from torch import Tensor


def draw_tokens(logits: Tensor, rows: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a rank from softmax(logits[rows[w]]) by inversion of its cumulative distribution.

    Log-probs are float32, as a model's are; what is made of them is float64: in float32 the sums would end some 1e-7
    beside 1, and a number that falls there would draw a token that may not be drawn. No token of probability 0 is ever
    drawn. A row that holds NaN or +inf, or nothing but -inf, gives some token and the score NaN. No host sync.

    Args:
        logits: [n, vocabulary] bfloat16, float16 or float32, the last dimension contiguous; a view is fine.
        rows: [width] int64: the row of logits that each rank reads; ranks may share one.
        numbers: [width] float64 in [0, 1).

    Returns:
        tokens: [width] int64.
        scores: [width] float32, the tokens' log-probs.
        maxima: [width] float32, the greatest logit of each rank's row; NaN if the row holds one.
    """
    assert rows.shape == numbers.shape, f"{len(rows)} rows for {len(numbers)} numbers"
    assert logits.stride(1) == 1, f"a row of logits must be contiguous, not strides {logits.stride()}"
    if logits.is_cuda:
        from cowbeam.kernels.draw_tokens_triton import draw_tokens_triton

        return draw_tokens_triton(logits, rows, numbers)
    return draw_tokens_torch(logits, rows, numbers)


def draw_tokens_torch(logits: Tensor, rows: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`draw_tokens` in plain torch: what the kernels are compared with."""
    read = logits[rows].float()
    log_probs = torch.log_softmax(read, -1)
    cumulative = log_probs.double().exp().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    tokens = torch.searchsorted(cumulative, numbers[:, None] * total, right=True)
    # A number next to 1 may be rounded up to the total, which the first token that reaches it stands for.
    tokens = torch.minimum(tokens, torch.searchsorted(cumulative, total))[:, 0].clamp_(max=logits.shape[1] - 1)
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0], read.amax(-1)
