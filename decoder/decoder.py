"""``Decoder``: the public interface."""

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as shown  # abbreviates: a user's value may be of any length
from typing import Any, Literal, Self, get_args, overload

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from cowbeam.decoder.adapters import inside_wrapper
from cowbeam.decoder.counters import Counters
from cowbeam.decoder.default_model import resolve_default_model
from cowbeam.decoder.engine import Engine
from cowbeam.decoder.frames import Frame
from cowbeam.decoder.group import Request
from cowbeam.decoder.job_progress import JobProgress
from cowbeam.decoder.kv_cache import KVCache, kv_bytes, kv_layout
from cowbeam.decoder.many_prompts import ManyPrompts, pairs_of
from cowbeam.decoder.model_adapter import ModelAdapter, first_line
from cowbeam.decoder.model_levels import Level
from cowbeam.decoder.outputs import DecodeResult, Outcome
from cowbeam.decoder.params import BeamSearchParams, Params
from cowbeam.decoder.pool_size import blocks_that_fit
from cowbeam.decoder.request_maker import Prompt, RequestMaker
from cowbeam.decoder.run import Run, Watch
from cowbeam.decoder.scheduler import MAX_ROWS
from cowbeam.decoder.swap import DEFAULT_SWAP_MEMORY
from cowbeam.decoder.trial import attention_path, check_choices, try_out


class Decoder:
    """Decodes beams and parallel samples of one model over copy-on-write KV blocks.

    Args:
        model: any transformers causal LM, loaded and in eval mode; or one with adapters of PEFT in its layers (LoRA).
        tokenizer: needed for prompts and completions as text.
        block_size: slots a block, a power of two (the Triton path takes 8 to 32768).
        num_blocks: size of the pool; None derives it from memory.
        memory_fraction: on a GPU, the share of the memory left after the weights and a trial step.
        kv_memory: bytes of the pool, in place of that share; None means 2 GiB on a CPU. Not beside ``num_blocks``.
        attention: "triton", "torch", or "auto": Triton on CUDA, torch elsewhere.
        prefix_reuse: a prompt that begins like an earlier one takes over the blocks of that beginning, as long as they
            are not needed for anything else. Weights that change and adapters that are switched are noticed, but not
            what is written through ``.data``, by ``torch.distributed``, or into tensors made under
            ``inference_mode``: call ``forget_prefixes`` then.
        swap_memory: bytes on the host for the blocks of requests that must give way to older ones for a while; None
            means 4 GiB beside a GPU and none beside a CPU. One that finds no room there is computed anew.
        max_rows: branches that decode together; later requests wait, and one with more branches runs alone. More than
            512 seldom pay: the weights are read for so many already, and steps of more are not captured as CUDA graphs.
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
        swap_memory: int | None = None,
        prefix_reuse: bool = True,
        max_rows: int = MAX_ROWS,
        compile: bool | None = None,
    ) -> None:
        model = inside_wrapper(model)
        if not isinstance(model, PreTrainedModel):
            raise ValueError(f"model must be a loaded transformers model, got {type(model).__name__}")
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise ValueError(f"tokenizer must be the model's tokenizer or None, got {shown(tokenizer)}")
        check_choices(block_size, compile, prefix_reuse)
        _check_knobs(num_blocks, memory_fraction, kv_memory, swap_memory, max_rows)
        self.model = model
        self._dtype = model.dtype
        self._adapter = ModelAdapter(model, attention_path(attention, model, block_size))
        self._request_maker = RequestMaker(self._adapter, tokenizer)
        if compile is None:
            compile = self._adapter.path == "triton" and self._adapter.device.type == "cuda"
        shapes = try_out(self._adapter, block_size, compile=compile)
        if swap_memory is None:
            swap_memory = DEFAULT_SWAP_MEMORY if self._adapter.device.type == "cuda" else 0
        if num_blocks is None:
            num_blocks = blocks_that_fit(self._adapter, shapes, block_size, memory_fraction, kv_memory)
        try:
            cache = KVCache(shapes, num_blocks, block_size)
        except (RuntimeError, TypeError) as error:  # torch's sizes have 64 bits
            size = num_blocks * block_size * kv_bytes(shapes).per_token
            raise ValueError(
                f"{num_blocks} blocks of {block_size} tokens take {size:,} bytes, too many here"
            ) from error
        self.kv_layout = kv_layout(shapes, cache.nbytes)
        self._engine: Engine | None = Engine(
            self._adapter,
            cache,
            num_blocks,
            kv_bytes(shapes),
            self.text_of,
            prefix_reuse=prefix_reuse,
            max_rows=max_rows,
            swap_memory=swap_memory,
        )

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
        swap_memory: int | None = None,
        prefix_reuse: bool = True,
        max_rows: int = MAX_ROWS,
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
        if not isinstance(name_or_path, str | os.PathLike | None):
            raise ValueError(f"name_or_path must be a hub name or a path, got {shown(name_or_path)}")
        name = resolve_default_model() if name_or_path is None else os.fspath(name_or_path)
        _check_folder(name)
        device = _usable_device(device)
        if not _is_dtype(dtype):
            raise ValueError(f"dtype={shown(dtype)} is none of torch's")
        try:
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
            swap_memory=swap_memory,
            prefix_reuse=prefix_reuse,
            max_rows=max_rows,
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
    @overload
    def generate(
        self, prompts: Iterator[Prompt], params: Params | Iterable[Params] | None = None
    ) -> Iterator[Outcome]: ...
    def generate(self, prompts: Any, params: Any = None) -> DecodeResult | list[DecodeResult] | Iterator[Outcome]:
        """Decode one prompt or many, together.

        Args:
            prompts: text, token ids (a list of ints is one prompt), or a list of such; an iterator (a generator, a
                file, ``map(…)``) goes to ``generate_many``.
            params: for all prompts, or a list with one for each; None means ``BeamSearchParams()``.

        Returns:
            A result for one prompt; for a list of prompts a list of results in their order; for an iterator an
            iterator of outcomes as they finish.

        Raises:
            ValueError: a prompt or parameter cannot be used; nothing was decoded then.
        """
        if isinstance(prompts, Iterator):
            return self.generate_many(prompts, params)
        single = _is_one_prompt(prompts)
        requests = self._requests([prompts] if single else list(prompts), params)
        engine = self._running_engine()
        for request in requests:
            engine.check_fits(request)
        runs: list[Run] = []
        try:
            # One by one: `finally` knows what was added.
            runs.extend(engine.add_request(request) for request in requests)
            for run in runs:
                while not run.is_over:
                    self._turn(engine, runs, run)
                if run.error is not None:
                    raise run.error
        finally:
            for run in runs:
                engine.abort(run)
        results = [run.result for run in runs if run.result is not None]
        return results[0] if single else results

    def generate_many(
        self, prompts: Iterable[Prompt], params: Params | Iterable[Params] | None = None, *, progress: bool = False
    ) -> Iterator[Outcome]:
        """Decode prompts without number: outcomes are given back as they finish, each with the index of its prompt.

        Prompts are taken as there is room for them, so a million of them take no more memory than what is in flight. A
        prompt that cannot be decoded is an outcome with its error; the others go on. Where a turn of the engine fails
        (out of memory, a fault of the model), the requests in flight are tried again by halves, so that only those that
        fail alone have the error; three such in succession end the iteration with it. Closing the iterator aborts what
        is in flight.

        Args:
            prompts: any iterable of text or token ids.
            params: for all prompts, or an iterable with one for each.
            progress: show on standard error how far it is.

        Raises:
            ValueError: for prompts and params that are as many as one another cannot be. What an iterable raises ends
                the iteration, behind the outcomes of what it gave before.
        """
        self.check_ready()
        if isinstance(prompts, str | bytes) or (isinstance(prompts, Sequence) and prompts and _is_one_prompt(prompts)):
            raise ValueError("generate_many takes an iterable of prompts, got one prompt")
        if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
            raise ValueError(f"generate_many takes an iterable of prompts, got {shown(prompts)}")
        outcomes = self.generate_pairs(pairs_of(prompts, params))
        total = operator.length_hint(prompts) or None
        return JobProgress(total, self.counters).over(outcomes) if progress else outcomes

    def generate_pairs(self, pairs: Iterable[tuple[Prompt, Params | None]]) -> Iterator[Outcome]:
        """``generate_many`` for prompts that come with their parameters."""
        return ManyPrompts(self, pairs).outcomes()

    def stream(self, prompt: Prompt, params: Params | None = None) -> Iterator[Frame]:
        """Decode one prompt and watch: a frame a step; the last one holds the result.

        Closing the iterator ends the search and frees its blocks. Raises ValueError before the first frame, at the
        call, for what cannot be decoded.
        """
        if not _is_one_prompt(prompt):
            raise ValueError(f"stream takes one prompt, got a {type(prompt).__name__} of {len(prompt)}")
        return self._frames(self._running_engine(), self.prepare(prompt, params))

    def _frames(self, engine: Engine, request: Request) -> Iterator[Frame]:
        run = engine.add_request(request, watch="frames")
        assert run.frames is not None
        try:
            while True:
                is_over = run.is_over  # asked before the frames are taken: another thread may end the run meanwhile
                while run.frames:
                    yield run.frames.popleft()
                if run.error is not None:
                    raise run.error
                if is_over:
                    return
                self._turn(engine, [run], run)
        finally:
            engine.abort(run)

    @staticmethod
    def _turn(engine: Engine, runs: Sequence[Run], run: Run) -> None:
        """A turn for ``run``. Raises what it raises, unless all of ``runs`` had finished before that."""
        try:
            engine.step(run)
        except Exception:  # of another caller's request
            if any(run.result is None for run in runs):
                raise

    def prepare(self, prompt: Prompt, params: Params | None = None) -> Request:
        """Tokenize and check one prompt; nothing is queued. Raises ValueError for what cannot be decoded."""
        if not _is_one_prompt(prompt) and prompt:
            raise ValueError(f"one prompt is taken here, got a {type(prompt).__name__} of {len(prompt)}")
        (request,) = self._requests([prompt], params)
        self._running_engine().check_fits(request)
        return request

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of generated tokens, less special ones; nothing without a tokenizer."""
        return self._request_maker.text_of(token_ids)

    def check_ready(self) -> None:
        """Raises ValueError if the decoder is closed or its model in training mode."""
        self._running_engine()
        if self.model.training:
            raise ValueError("the model is in training mode: call model.eval() first")
        if self.model.dtype != self._dtype:
            raise ValueError(f"the model is {self.model.dtype} now, and was {self._dtype}: make another decoder of it")

    def add_request(self, prompt: Prompt | Request, params: Params | None = None, *, watch: Watch | None = None) -> Run:
        """Queue one prompt and return at once, for a loop of your own::

            runs = [decoder.add_request(prompt, params) for prompt in prompts]
            while not all(run.is_over for run in runs):
                for run in decoder.step():
                    print(run.error or run.result)

        A request that was prepared before is taken as it is. ``watch="frames"`` collects a frame a step in
        ``run.frames``, ``watch="tokens"`` the tokens of samples in ``run.tokens``. Raises ValueError for what cannot be
        decoded.
        """
        if watch is not None and watch not in get_args(Watch):
            raise ValueError(f'watch must be "frames", "tokens" or None, got {shown(watch)}')
        request = prompt if isinstance(prompt, Request) else self.prepare(prompt, params)
        return self._running_engine().add_request(request, watch=watch)

    def step(self) -> list[Run]:
        """One turn for everything in flight: new prompts are computed, or every branch gets a token.

        Returns the runs that ended in it, whoever added them, and none at once where nothing is in flight. With other
        threads at work a run may end in a turn of theirs: ask ``run.is_over``. Raises what the model raises; everything
        in flight has ended with an error then, and the decoder takes requests as before.
        """
        return self._running_engine().step()

    def abort(self, run: Run) -> None:
        """Drop a request, queued or running: its blocks are free on return and ``run.error`` says that it was aborted.

        Nothing happens to a run that is over. Raises ValueError for what is no run of this decoder.
        """
        if not isinstance(run, Run):
            raise ValueError(f"abort takes what add_request returned, got {shown(run)}")
        if self._engine is not None:
            self._engine.abort(run)

    def counters(self) -> Counters:
        """A snapshot: requests and blocks now, tokens and copies so far."""
        return self._running_engine().counters()

    def forget_prefixes(self) -> None:
        """Take over nothing that was computed so far: the model gives other answers than before."""
        self._running_engine().forget_prefixes()

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
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """For prompts and completions as text; may be set."""
        return self._request_maker.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._request_maker.tokenizer = tokenizer

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
        """Blocks that nobody holds, also where they keep what a later prompt may begin with."""
        return self._running_engine().pool.num_free

    @property
    def level(self) -> Level:
        """How the model is decoded over blocks: see ``model_levels``."""
        return self._adapter.level

    def describe(self) -> str:
        """How the model is decoded, in a sentence."""
        return self._adapter.description

    def check_integrity(self) -> None:
        """Assert every invariant of pool and branches; for tests."""
        self._running_engine().check_integrity()

    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise ValueError("the decoder is closed")
        return self._engine

    def _requests(self, prompts: Sequence[Prompt], params: Any) -> list[Request]:
        self.check_ready()
        if isinstance(params, Sequence) and not isinstance(params, str):
            pairs: Iterable[tuple[Prompt, Any]] = pairs_of(prompts, params)
        else:
            one = BeamSearchParams() if params is None else params
            pairs = ((prompt, one) for prompt in prompts)
        return [self._request_maker.make(prompt, own) for prompt, own in pairs]


def _check_folder(name: str) -> None:
    """Raises ValueError for what looks like the path of a model and is none."""
    missing = None
    if name.startswith(("/", "./", "../", "~")) and not os.path.isdir(name):
        missing = "there is no such folder"
    elif os.path.isdir(name) and not any(Path(name).glob("*.json")):
        missing = "the folder holds no config.json"
    if missing:
        raise ValueError(f"the model {name!r:.200} cannot be loaded: {missing}")


def _usable_device(device: str | torch.device | None) -> torch.device:
    """The device; None means CUDA if there is one. Raises ValueError for one that is not here."""
    try:
        found = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
        torch.empty(0, device=found)
    except Exception as error:  # torch says it by a RuntimeError, an AssertionError, a NotImplementedError, …
        raise ValueError(f"device={shown(device)} cannot be used: {first_line(error)}") from error
    return found


def _is_dtype(dtype: Any) -> bool:
    """None and "auto" stand for one."""
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return dtype in (None, "auto") or isinstance(named, torch.dtype)


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    if not isinstance(prompts, Sequence):
        raise ValueError(f"a prompt must be text or a list of token ids, got {type(prompts).__name__}")
    return bool(prompts) and not isinstance(prompts[0], str | Sequence)


def _check_knobs(
    num_blocks: int | None, memory_fraction: float, kv_memory: int | None, swap_memory: int | None, max_rows: int
) -> None:
    may_be_none = (("num_blocks", num_blocks, 1), ("kv_memory", kv_memory, 1), ("swap_memory", swap_memory, 0))
    for name, value, least in (*(knob for knob in may_be_none if knob[1] is not None), ("max_rows", max_rows, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"{name} must be {'a positive' if least else 'a non-negative'} integer, got {shown(value)}"
            )
    if num_blocks is not None and kv_memory is not None:
        raise ValueError(f"num_blocks={num_blocks} or kv_memory={kv_memory} sets the pool's size, not both")
    is_number = isinstance(memory_fraction, int | float) and not isinstance(memory_fraction, bool)
    if not is_number or not 0 < memory_fraction <= 1:
        raise ValueError(f"memory_fraction must be a number above 0 and at most 1, got {shown(memory_fraction)}")
