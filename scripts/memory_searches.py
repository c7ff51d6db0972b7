"""Real searches, watched for what they hold: cowbeam's by its frames, transformers' by a look into its cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import traces
from transformers import AutoModelForCausalLM, Cache, LlamaConfig, PreTrainedModel

from cowbeam.decoder import BeamSearchParams, Decoder, DecodeResult, SamplingParams
from cowbeam.decoder.frames import Frame

Params = BeamSearchParams | SamplingParams


def small_model(seed: int = 0) -> PreTrainedModel:
    """A random Llama of two layers whose beams part and die as those of a real model do."""
    config = LlamaConfig(
        vocab_size=997, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Wide enough that the next token depends on the history; the usual 0.02 would hardly move.
                parameter.normal_(0, 0.3, generator=generator)
    return model


def load_decoder(small: bool, block_size: int = 16) -> Decoder:
    """The default model's decoder, or the small random one's."""
    if small:
        return Decoder(small_model(), block_size=block_size, kv_memory=64 * 2**20, prefix_reuse=False)
    # float32 everywhere, so that the tokens can be compared with transformers' one by one.
    return Decoder.from_pretrained(block_size=block_size, dtype="float32", prefix_reuse=False)


def make_prompt(decoder: Decoder, num_tokens: int, seed: int) -> list[int]:
    """English for a model that has a tokenizer, random ids for one that has none."""
    tokenizer = decoder.tokenizer
    if tokenizer is None:
        generator = torch.Generator().manual_seed(seed)
        size = decoder.model.config.vocab_size
        return [int(token_id) for token_id in torch.randint(1, size, (num_tokens,), generator=generator)]
    return traces.make_prompt(lambda text: tokenizer(text).input_ids, num_tokens, seed)


@dataclass(frozen=True)
class PeerRun:
    """transformers' best sequence, its cache's greatest size after a forward pass, and the bytes its reorders wrote."""

    token_ids: tuple[int, ...]
    peak_bytes: int
    moved_bytes: int


def run_transformers(model: PreTrainedModel, prompt: Sequence[int], num_beams: int, new_tokens: int) -> PeerRun:
    """transformers' own beam search. A reorder's second copy, which lives for a moment, is not in the peak."""
    ids = torch.tensor([list(prompt)], device=model.device)
    with watched_cache(model) as seen:
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=num_beams, max_new_tokens=new_tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    best = tuple(int(token_id) for token_id in output[0, len(prompt) :])
    return PeerRun(best, max(seen.sizes), seen.moved)


class _Seen:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.moved = 0


@contextmanager
def watched_cache(model: PreTrainedModel) -> Iterator[_Seen]:
    """Notes the cache's bytes after each forward pass, and at each reorder of it."""
    seen = _Seen()

    def after_forward(_model: Any, _arguments: Any, output: Any) -> None:
        # Found by its type: the field is called `cache` since transformers 5.24, `past_key_values` before.
        (cache,) = (value for value in output.values() if isinstance(value, Cache))
        seen.sizes.append(cache_bytes(cache))

    original = Cache.reorder_cache

    def reorder(cache: Cache, beam_idx: torch.Tensor) -> None:
        seen.moved += cache_bytes(cache)
        original(cache, beam_idx)

    hook = model.register_forward_hook(after_forward)
    Cache.reorder_cache = reorder
    try:
        yield seen
    finally:
        Cache.reorder_cache = original
        hook.remove()


def cache_bytes(cache: Cache) -> int:
    """Bytes of all tensors of a transformers cache."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class StepMemory:
    """What one request held in one step, when its slots were reserved and nothing was freed yet.

    ``live_blocks`` = distinct blocks; ``blocks_without_sharing`` = one table after the other. Of the slots of the live
    blocks, ``unused_slots`` hold nothing and ``duplicated_slots`` hold a token that another slot holds too.
    """

    live_blocks: int
    blocks_without_sharing: int
    unused_slots: int
    duplicated_slots: int

    @property
    def saved_blocks(self) -> int:
        """What sharing saves."""
        return self.blocks_without_sharing - self.live_blocks


def step_memory(frame: Frame, block_size: int) -> StepMemory:
    """Counted from the block tables alone, not taken from the engine's own counters, except ``live_tokens``."""
    filled: dict[int, int] = {}
    for branch in frame.branches:
        for position, block in enumerate(branch.block_table):
            filled[block] = max(filled.get(block, 0), min(block_size, branch.num_tokens - position * block_size))
    assert len(filled) == frame.live_blocks, f"{len(filled)} blocks in tables, {frame.live_blocks} counted"
    written = sum(filled.values())
    return StepMemory(
        live_blocks=len(filled),
        blocks_without_sharing=sum(len(branch.block_table) for branch in frame.branches),
        unused_slots=len(filled) * block_size - written,
        duplicated_slots=written - frame.live_tokens,
    )


@dataclass(frozen=True)
class Watched:
    """All requests' states, step by step, and their results in order."""

    states: list[StepMemory]
    results: list[DecodeResult]


def watch(decoder: Decoder, prompts: Sequence[Sequence[int]], params: Sequence[Params]) -> Watched:
    """Decode all requests together and look at every frame."""
    # No text is wanted: without a tokenizer a frame does not detokenise its branches.
    tokenizer, decoder.tokenizer = decoder.tokenizer, None
    try:
        streams = [decoder.stream(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        frames: list[list[Frame]] = [[] for _ in streams]
        # Taken in turns: each turn of the engine advances every stream that has begun.
        for turn in zip_longest(*streams):
            for collected, frame in zip(frames, turn, strict=True):
                collected += [frame] if frame is not None else []
    finally:
        decoder.tokenizer = tokenizer
    results = [each[-1].result for each in frames]
    block_size = next(result.stats.block_size for result in results if result is not None)
    states = [step_memory(frame, block_size) for each in frames for frame in each if frame.branches]
    return Watched(states, [result for result in results if result is not None])
