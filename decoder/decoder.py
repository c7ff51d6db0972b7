"""``Decoder``: the public interface."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from reprlib import repr as shown  # abbreviates: a user's value may be of any length
from typing import Any, Literal, Self, overload

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from cowbeam.decoder.attend import AttentionPath
from cowbeam.decoder.default_model import resolve_default_model
from cowbeam.decoder.engine import Engine, Run
from cowbeam.decoder.frames import Frame
from cowbeam.decoder.group import Request
from cowbeam.decoder.kv_cache import KVCache, LayerShape, kv_bytes, kv_layout
from cowbeam.decoder.model_adapter import ModelAdapter, first_line
from cowbeam.decoder.outputs import DecodeResult
from cowbeam.decoder.params import BeamSearchParams, Params, SamplingParams
from cowbeam.decoder.scheduler import MAX_PREFILL_TOKENS
from cowbeam.decoder.self_check import check_paged_logits

logger = logging.getLogger("cowbeam")

Prompt = str | Sequence[int]

DEFAULT_KV_MEMORY = 2 * 2**30  # bytes, on a CPU: memory that is never written is never taken


class Decoder:
    """Decodes beams and parallel samples of one model over copy-on-write KV blocks.

    Args:
        model: any transformers causal LM, loaded and in eval mode.
        tokenizer: needed for prompts and completions as text.
        block_size: slots a block, a power of two (the Triton path takes 8 and more).
        num_blocks: size of the pool; None derives it from memory.
        memory_fraction: on a GPU, the share of the memory left after the weights and a trial step.
        kv_memory: on a CPU, bytes of the pool (2 GiB).
        attention: "triton", "torch", or "auto": Triton on CUDA, torch elsewhere.
        compile: decode by layers that torch compiles when the decoder is made (a minute at most; less the next time,
            since torch keeps them on disk); None means on the Triton path on CUDA.

    Raises:
        ValueError: for a model that cannot be decoded over blocks, saying why, or a knob out of range.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_fraction: float = 0.9,
        kv_memory: int | None = None,
        attention: Literal["auto", "triton", "torch"] = "auto",
        compile: bool | None = None,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"model must be a loaded transformers model, got {type(model).__name__}")
        _check_knobs(block_size, num_blocks, memory_fraction, kv_memory)
        if not (compile is None or isinstance(compile, bool)):
            raise ValueError(f"compile must be True, False or None, got {shown(compile)}")
        self.model = model
        self.tokenizer = tokenizer
        self._adapter = ModelAdapter(model, _attention_path(attention, model, block_size))
        if compile is None:
            compile = self._adapter.path == "triton" and self._adapter.device.type == "cuda"
        shapes = _try_out(self._adapter, block_size, compile=compile)
        if num_blocks is None:
            num_blocks = _blocks_that_fit(self._adapter, shapes, block_size, memory_fraction, kv_memory)
        try:
            cache = KVCache(shapes, num_blocks, block_size)
        except RuntimeError as error:
            size = num_blocks * block_size * kv_bytes(shapes).per_token
            raise ValueError(
                f"{num_blocks} blocks of {block_size} tokens take {size:,} bytes, too many here"
            ) from error
        self.kv_layout = kv_layout(shapes, cache.nbytes)
        self._engine: Engine | None = Engine(self._adapter, cache, num_blocks, kv_bytes(shapes), self._decode_text)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str] | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        device_map: Any = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_fraction: float = 0.9,
        kv_memory: int | None = None,
        attention: Literal["auto", "triton", "torch"] = "auto",
        compile: bool | None = None,
        **model_kwargs: Any,
    ) -> Self:
        """Load a model and its tokenizer by hub name or path; None means the default model.

        Args:
            name_or_path: what ``AutoModelForCausalLM.from_pretrained`` takes.
            device: where the model goes; None means CUDA if there is one.
            dtype: of the weights; None means bfloat16 on CUDA and float32 on a CPU.
            device_map: given to transformers instead of ``device``.
            model_kwargs: given to ``AutoModelForCausalLM.from_pretrained``.

        The other arguments are the constructor's.

        Raises:
            ValueError: the model cannot be found, loaded or decoded over blocks.
        """
        name = resolve_default_model() if name_or_path is None else os.fspath(name_or_path)
        if name.startswith(("/", "./", "../", "~")) and not os.path.isdir(name):
            raise ValueError(f"the model {name!r:.200} cannot be loaded: there is no such folder")
        try:
            device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            if dtype is None:
                dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            tokenizer = AutoTokenizer.from_pretrained(name)
            model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, device_map=device_map, **model_kwargs)
            if device_map is None:
                model.to(device)
        except Exception as error:  # files can be broken in as many ways as there are libraries that read them
            raise ValueError(f"the model {name!r:.200} cannot be loaded: {first_line(error)}") from error
        return cls(
            model.eval(),
            tokenizer,
            block_size=block_size,
            num_blocks=num_blocks,
            memory_fraction=memory_fraction,
            kv_memory=kv_memory,
            attention=attention,
            compile=compile,
        )

    @overload
    def generate(  # type: ignore[overload-overlap]  # str is a sequence of str, but text is one prompt
        self, prompts: Prompt, params: Params | None = None
    ) -> DecodeResult: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], params: Params | Sequence[Params] | None = None
    ) -> list[DecodeResult]: ...
    def generate(self, prompts: Any, params: Any = None) -> DecodeResult | list[DecodeResult]:
        """Decode one prompt or many, together.

        Args:
            prompts: text, token ids (a list of ints is one prompt), or a list of such.
            params: for all prompts, or a list with one for each; None means ``BeamSearchParams()``.

        Returns:
            A result for one prompt; for a list of prompts a list of results in their order.

        Raises:
            ValueError: a prompt or parameter cannot be used; nothing was decoded then.
        """
        single = _is_one_prompt(prompts)
        requests = self._requests([prompts] if single else list(prompts), params)
        engine = self._running_engine()
        for request in requests:
            engine.check_fits(request)
        runs: list[Run] = []
        try:
            runs.extend(engine.add(request) for request in requests)  # one by one: `finally` knows what was added
            for run in runs:
                while not run.is_over:
                    engine.step(run)
                if run.error is not None:
                    raise run.error
        finally:
            for run in runs:
                engine.abort(run)
        results = [run.result for run in runs if run.result is not None]
        return results[0] if single else results

    def stream(self, prompt: Prompt, params: Params | None = None) -> Iterator[Frame]:
        """Decode one prompt and watch: a frame a step; the last one holds the result.

        Closing the iterator ends the search and frees its blocks. Raises ValueError before the first frame, at the
        call, for what cannot be decoded.
        """
        if not _is_one_prompt(prompt):
            raise ValueError(f"stream takes one prompt, got a {type(prompt).__name__} of {len(prompt)}")
        (request,) = self._requests([prompt], params)
        engine = self._running_engine()
        engine.check_fits(request)
        return self._frames(engine, request)

    def _frames(self, engine: Engine, request: Request) -> Iterator[Frame]:
        run = engine.add(request, watched=True)
        assert run.frames is not None
        try:
            while True:
                while run.frames:
                    yield run.frames.popleft()
                if run.error is not None:
                    raise run.error
                if run.is_over:
                    return
                engine.step(run)
        finally:
            engine.abort(run)

    def close(self) -> None:
        """Give the pool's memory back; the decoder cannot be used afterwards."""
        self._engine = None
        if self._adapter.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self._running_engine().pool.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self._running_engine().pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._running_engine().pool.num_free

    def check_integrity(self) -> None:
        """Assert every invariant of pool and branches; for tests."""
        self._running_engine().check_integrity()

    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise ValueError("the decoder is closed")
        return self._engine

    def _requests(self, prompts: Sequence[Prompt], params: Any) -> list[Request]:
        if self.model.training:
            raise ValueError("the model is in training mode: call model.eval() first")
        is_list = isinstance(params, Sequence) and not isinstance(params, str)
        each = params if is_list else [BeamSearchParams() if params is None else params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(each)} params")
        return [self._request(prompt, one) for prompt, one in zip(prompts, each, strict=True)]

    def _request(self, prompt: Prompt, params: Params) -> Request:
        if not isinstance(params, BeamSearchParams | SamplingParams):
            raise ValueError(f"params must be BeamSearchParams or SamplingParams, got {type(params).__name__}")
        token_ids = self._token_ids(prompt)
        limit = self._adapter.max_length
        if limit is not None and len(token_ids) + params.max_new_tokens > limit:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens and max_new_tokens={params.max_new_tokens} exceed the model's "
                f"{limit} positions"
            )
        draws = isinstance(params, SamplingParams) or params.do_sample
        if isinstance(params, BeamSearchParams) and draws and params.num_beams * self._adapter.vocabulary_size > 2**24:
            raise ValueError(
                f"do_sample with num_beams={params.num_beams} draws from {params.num_beams} × "
                f"{self._adapter.vocabulary_size} candidates, more than torch.multinomial's 2**24"
            )
        seed = params.seed
        if draws and seed is None:
            seed = int(np.random.SeedSequence().generate_state(1, np.uint64)[0])
        return Request(token_ids, params, self._eos_ids(params), seed if draws else None)

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("a prompt as text needs a tokenizer: Decoder(model, tokenizer)")
            if not prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt):
                raise ValueError(f"the prompt {shown(prompt)} holds bytes that are no text in UTF-8")
            prompt = self.tokenizer(prompt).input_ids
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
            raise ValueError(f"a prompt must be text or a list of token ids, got {shown(prompt)}")
        token_ids: tuple[Any, ...] = tuple(int(t) if isinstance(t, np.integer) else t for t in prompt)
        if not token_ids:
            raise ValueError("the prompt is empty: it has no tokens")
        size = self._adapter.vocabulary_size
        for position, token_id in enumerate(token_ids):
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < size:
                raise ValueError(f"prompt token {position} is {shown(token_id)}; the model knows ids 0 to {size - 1}")
        return token_ids

    def _eos_ids(self, params: Params) -> frozenset[int]:
        given: Any = params.eos_token_id
        if given is None and self.model.generation_config is not None:
            given = self.model.generation_config.eos_token_id
        if given is None:
            given = getattr(self.model.config.get_text_config(), "eos_token_id", None)
        return frozenset([given] if isinstance(given, int) else given or ())

    def _decode_text(self, token_ids: Sequence[int]) -> str:
        if self.tokenizer is None:
            return ""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return str(text)


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence):
        raise ValueError(f"a prompt must be text or a list of token ids, got {type(prompts).__name__}")
    return bool(prompts) and not isinstance(prompts[0], str | Sequence)


def _attention_path(attention: str, model: PreTrainedModel, block_size: int) -> AttentionPath:
    on_cuda = model.device.type == "cuda"
    triton_can = on_cuda and block_size >= 8 and model.dtype != torch.float64
    if attention == "torch" or (attention == "auto" and not triton_can):
        return "torch"
    if attention not in ("auto", "triton"):
        raise ValueError(f'attention must be "auto", "triton" or "torch", got {shown(attention)}')
    if block_size < 8:
        raise ValueError(f'attention="triton" needs a block_size of 8 or more, got {block_size}')
    if not on_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f'attention="triton" needs a CUDA device; the model is on {model.device}')
    return "triton"


def _check_knobs(block_size: int, num_blocks: int | None, memory_fraction: float, kv_memory: int | None) -> None:
    for name, value in (("block_size", block_size), ("num_blocks", num_blocks), ("kv_memory", kv_memory)):
        is_given = value is not None or name == "block_size"
        if is_given and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive integer, got {shown(value)}")
    if block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two, got {block_size}")
    if not isinstance(memory_fraction, int | float) or not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction must be a number above 0 and at most 1, got {shown(memory_fraction)}")


def _try_out(adapter: ModelAdapter, block_size: int, *, compile: bool) -> list[LayerShape]:
    """What the layers store, learnt from a trial step and checked against the model's own logits."""
    try:
        shapes = adapter.probe(num_tokens=2)
        if adapter.device.type == "cuda":  # on a CPU parts of a wider output cost more than one product gains (5 %)
            adapter.fuse_linears()
        if compile:
            _compile_layers(adapter, shapes, block_size)
        if not adapter.is_compiled:
            check_paged_logits(adapter, shapes, block_size)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        name = type(adapter.model).__name__
        raise ValueError(f"{name} cannot be decoded over KV blocks: a trial step says {first_line(error)}") from error
    return shapes


def _compile_layers(adapter: ModelAdapter, shapes: list[LayerShape], block_size: int) -> None:
    """Compile for several rows and for one, and check the logits of both; where they are wrong, go on uncompiled."""
    name = type(adapter.model).__name__
    started = time.perf_counter()
    adapter.compile_layers(shapes)
    for num_branches in (16, 1):  # the first is what torch takes for a usual number when it chooses tiles
        if adapter.is_compiled:
            logger.info("compiling the layers of %s for %s", name, "several rows" if num_branches > 1 else "one row")
            try:
                check_paged_logits(adapter, shapes, block_size, num_branches)
            except ValueError as error:
                adapter.stop_compiling(first_line(error))
    if adapter.is_compiled:
        logger.info("compiled the layers of %s in %.1f s", name, time.perf_counter() - started)


def _blocks_that_fit(
    adapter: ModelAdapter, shapes: Sequence[LayerShape], block_size: int, memory_fraction: float, kv_memory: int | None
) -> int:
    """As many as memory holds: on a GPU what is left after the weights and a trial step, on a CPU ``kv_memory``."""
    bytes_per_block = block_size * kv_bytes(shapes).per_token
    memory = DEFAULT_KV_MEMORY if kv_memory is None else kv_memory
    if kv_memory is None and adapter.device.type == "cuda":
        memory = int(memory_fraction * _left_after_trial_step(adapter))
    if memory < bytes_per_block:
        raise ValueError(f"{memory} bytes hold no block: one of {block_size} tokens takes {bytes_per_block}")
    return memory // bytes_per_block


def _left_after_trial_step(adapter: ModelAdapter) -> int:
    """Bytes of GPU memory that a full prefill leaves free."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(adapter.device)
    before = torch.cuda.memory_allocated(adapter.device)
    adapter.probe(min(MAX_PREFILL_TOKENS, adapter.max_length or MAX_PREFILL_TOKENS))
    activations = torch.cuda.max_memory_allocated(adapter.device) - before
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(adapter.device)
    return int(free) - activations
