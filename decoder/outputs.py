"""What a decode returns."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["eos", "stop", "length", "aborted"]


@dataclass(frozen=True)
class TokenLogprob:
    """What the model alone says of one generated token: before processors, temperature, top-k and the like.

    ``logprob`` is the log-softmax of the model's logits at ``token_id``; ``top`` are the likeliest tokens there with
    theirs, likeliest first, as many as ``logprobs`` asks for (``token_id`` is among them only if it is that likely).
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Completion:
    """One returned sequence.

    ``token_ids`` are the generated ones, the EOS included; ``logprobs`` has one number a token, of the processed
    distribution it was chosen from. ``sum(logprobs) == cumulative_logprob`` and
    ``score == cumulative_logprob / len(token_ids) ** length_penalty`` (samples count length_penalty as 1).
    ``stop_reason`` is the EOS id or the stop string that ended it. A stop string, and what its last token brings behind
    it, are missing from ``text`` alone. ``beams[t]`` is the rank of the branch that token t continued
    (transformers' ``beam_indices``, less its offset of the prompt). ``token_logprobs``: one a token, the plain model's,
    where ``logprobs`` asks for them.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cumulative_logprob: float
    score: float
    finish_reason: FinishReason
    stop_reason: int | str | None
    beams: tuple[int, ...]
    token_logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class MemoryUse:
    """KV bytes beside their baselines; in stats each at its own peak, in a frame at that step.

    ``used``: live blocks × bytes a block. ``unique``: distinct live tokens. ``copied``: one full copy a branch, as
    transformers keeps (sliding layers cropped as it crops them; cowbeam keeps what lies behind a window).
    ``contiguous``: every branch reserves its maximum length at the start.
    """

    used: int
    unique: int
    copied: int
    contiguous: int


@dataclass(frozen=True)
class DecodeStats:
    """What one request cost.

    ``steps``: tokens chosen a sequence. ``prefill_tokens``: prompt tokens computed, each once; ``reused_tokens``: those
    taken over from an earlier request. ``preemptions``: times it gave its blocks back for older requests;
    ``recomputed_tokens``: tokens computed once more after that; ``swapped_blocks``: brought back from the host, where
    they waited, instead. ``decode_tokens``: generated tokens computed.
    ``peak_blocks`` and ``peak_memory``: of this request alone. ``level``: how the model's K/V get into blocks
    (``model_levels``). ``attention``: the path its steps took ("triton", "torch", or "gathered": the model's own over
    gathered K/V). ``cuda_graphs``: they were replayed, not launched kernel by kernel. ``compiled``: by layers that
    torch compiled. ``seconds``: from the call to the result, waiting for a place included.
    """

    steps: int
    prefill_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    swapped_blocks: int
    preemptions: int
    decode_tokens: int
    cow_copies: int
    peak_blocks: int
    bytes_per_block: int
    block_size: int
    peak_memory: MemoryUse
    level: int
    attention: str
    cuda_graphs: bool
    compiled: bool
    seconds: float


@dataclass(frozen=True)
class DecodeResult:
    """The completions of one prompt (beams: best first; samples: by index) and what they cost."""

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    stats: DecodeStats
    seed: int | None


@dataclass(frozen=True)
class StreamedToken:
    """A token as it is chosen: of sample ``index``; ``text`` is what it adds to the sample's text.

    ``finish_reason`` is set with a sample's last token. A sample's texts together are its completion's.
    """

    index: int
    token_id: int
    text: str
    logprob: float
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Outcome:
    """What became of prompt number ``index`` (from 0) of many: a ``result`` or an ``error``, never both."""

    index: int
    result: DecodeResult | None
    error: BaseException | None
