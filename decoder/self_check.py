"""Does paged decoding of this very model give the model's own logits? Asked once, when a decoder is made."""

import random
from itertools import pairwise

import torch
from torch import Tensor

from cowbeam.decoder.batch import Batch, lay_out
from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.group import Group, KVBytes, Request
from cowbeam.decoder.kv_cache import KVCache, LayerShape
from cowbeam.decoder.model_adapter import ModelAdapter
from cowbeam.decoder.model_levels import UnpageableError
from cowbeam.decoder.params import SamplingParams
from cowbeam.decoder.scheduler import worst_case_blocks
from cowbeam.decoder.strategy import Candidate

# ‖paged − own‖ / ‖own‖. float32 lands near 1e-6; half precision near 1e-2, more where a mixture of experts routes a
# token differently. Reading a wrong block gives an error near 1.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
TOLERANCE_HALF = 0.2
# Prompts tried in half precision, where rounding may send a token to another expert. Wrong blocks show in each of them.
ATTEMPTS_HALF = 3


def check_paged_logits(adapter: ModelAdapter, shapes: list[LayerShape], block_size: int, num_branches: int = 3) -> None:
    """Decode a short prompt through a fork and compare. Raises UnpageableError if the logits differ.

    A prompt of odd length is prefilled, forked in the middle of a block and each of the branches given other tokens:
    a write into the shared block, a read of another branch's or a wrong one of several copies shows.
    """
    dtype = adapter.model.dtype
    tolerance = TOLERANCE.get(dtype, TOLERANCE_HALF)
    errors = []
    for seed in range(1 if dtype in TOLERANCE else ATTEMPTS_HALF):
        rng = random.Random(seed)
        prompt = tuple(rng.randrange(adapter.vocabulary_size) for _ in range(7))
        appended = [[rng.randrange(adapter.vocabulary_size) for _ in range(3)] for _ in range(num_branches)]
        errors.append(_relative_error(adapter, shapes, block_size, prompt, appended))
        if errors[-1] <= tolerance:
            return
    raise UnpageableError(
        f"{type(adapter.model).__name__} cannot be decoded over KV blocks: its paged logits differ from its own by "
        f"{min(errors):.1e} (relative, {tolerance:g} allowed)"
    )


def _relative_error(
    adapter: ModelAdapter,
    shapes: list[LayerShape],
    block_size: int,
    prompt: tuple[int, ...],
    appended: list[list[int]],
) -> float:
    paged = _paged_logits(adapter, shapes, block_size, prompt, appended)
    worst = 0.0
    for branch, tokens in enumerate(appended):
        own = adapter.own_logits([*prompt, *tokens])[len(prompt) - 1 :].double()
        difference = torch.stack(paged[branch]).double() - own
        worst = max(worst, float(difference.norm() / own.norm().clamp(min=1e-30)))
        if not torch.isfinite(difference).all():
            return float("nan")
    return worst


def _paged_logits(
    adapter: ModelAdapter,
    shapes: list[LayerShape],
    block_size: int,
    prompt: tuple[int, ...],
    appended: list[list[int]],
) -> list[list[Tensor]]:
    steps = len(appended[0])
    params = SamplingParams(num_return_sequences=len(appended), max_new_tokens=steps + 1)
    request = Request(prompt, params, frozenset(), seed=0)
    pool = BlockPool(worst_case_blocks(request, block_size), block_size)
    group = Group(request, pool, KVBytes(1, ()))
    cache = KVCache(shapes, pool.num_blocks, block_size)
    batch = Batch(block_size, adapter.device, cache.scratch_block)
    group.plant()
    batch.add_group(group)
    # In two pieces where the model computes such, so that the second one's past is read from blocks.
    adapter.follow_owner()
    planted = group.branches[0]
    starts = [0, 3] if adapter.computes_pieces else [0]
    pieces = [prompt[start:end] for start, end in pairwise([*starts, len(prompt)])]
    first = adapter.compute(cache, pieces, [planted.block_table] * len(pieces), starts, [planted] * len(pieces))[-1]
    logits = [[first] for _ in appended]
    for step in range(steps):
        group.choose([Candidate(0.0, rank, tokens[step]) for rank, tokens in enumerate(appended)])
        layout = lay_out([group])
        out = adapter.decode(cache, batch.upload(layout))
        for rank, row in enumerate(layout.rows_of_group[0]):
            logits[rank].append(out[row])
    return logits
