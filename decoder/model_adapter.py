"""Runs any transformers causal LM over blocks, with no model code touched.

One attention function, registered with transformers' ``AttentionInterface``, writes the step's K/V to their slots and
attends by the step's plan. What belongs to the step (slots, tables, plans) reaches it through a ContextVar, since not
every model hands keyword arguments down. The model is switched to that function, to fused projections and to compiled
layers for the duration of a forward pass only: outside of one it is as its owner left it.
"""

import functools
import inspect
import logging
import sys
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from cowbeam.decoder.batch import DecodeInputs
from cowbeam.decoder.compiled_layers import NUMBER, CompiledLayers, find_layers
from cowbeam.decoder.fused_linear import FusedLinears, find_groups
from cowbeam.decoder.kv_cache import KVCache, LayerShape
from cowbeam.kernels.attention_torch import paged_attention_torch
from cowbeam.kernels.plan import Plan, build_plan, rows_per_window
from cowbeam.kernels.prefill import packed_causal_attention

logger = logging.getLogger("cowbeam")

AttentionPath = Literal["triton", "torch"]

# Two decoders may share a model, and the switch lies in the model's config: whoever finishes first would switch the
# attention back under the other's forward pass. So one pass at a time, of all decoders.
_SWITCH = threading.RLock()

# No "flash", "sdpa" or "/" in it: transformers looks for those inside the name. It has no entry among the mask
# functions, so transformers builds no mask for it.
IMPLEMENTATION = "cowbeam"

# On the torch path rows share one gathered copy of the blocks that all of them see.
TORCH_ROWS_PER_WINDOW = 64


@dataclass
class PrefillStep:
    """Whole prompts, packed end to end. ``block_tables`` has one row a prompt."""

    cache: KVCache
    path: AttentionPath
    slots: Tensor
    prompt_lengths: list[int]
    block_tables: Tensor
    plans: dict[tuple[int | None, int], Plan] = field(default_factory=dict)
    writes: dict[Hashable, Tensor] = field(default_factory=dict)  # `write_kv`'s memo

    def attend(self, call: "AttentionCall") -> Tensor:
        """SDPA a prompt, except where scores are capped or a sink joins: those go through the paged kernel."""
        if call.softcap is None and call.sinks is None:
            return packed_causal_attention(
                call.query,
                call.key,
                call.value,
                self.prompt_lengths,
                scale=call.scale,
                sliding_window=call.sliding_window,
            )
        rows = _rows_per_window(call, self.path, max(self.prompt_lengths))
        return _paged_attention(self.path, call, self.cache, self._plan(call.sliding_window, rows))

    def _plan(self, sliding_window: int | None, rows_per_window: int) -> Plan:
        """A row a token: the same table, one more visible key each."""
        key = (sliding_window, rows_per_window)
        if key not in self.plans:
            counts = torch.tensor(self.prompt_lengths, device=self.block_tables.device)
            lengths = torch.cat([torch.arange(1, n + 1) for n in self.prompt_lengths]).int()
            self.plans[key] = build_plan(
                self.block_tables.repeat_interleave(counts, 0),
                lengths.to(self.block_tables.device),
                [i == 0 for n in self.prompt_lengths for i in range(n)],
                block_size=self.cache.block_size,
                rows_per_window=rows_per_window,
                sliding_window=sliding_window,
            )
        return self.plans[key]


@dataclass
class DecodeStep:
    """One token a row. Plans are made once and shared by all layers with the same window."""

    cache: KVCache
    path: AttentionPath
    inputs: DecodeInputs
    plans: dict[tuple[int | None, int], Plan] = field(default_factory=dict)
    writes: dict[Hashable, Tensor] = field(default_factory=dict)  # `write_kv`'s memo

    @property
    def slots(self) -> Tensor:
        """Where the step's K/V go."""
        return self.inputs.slots

    def attend(self, call: "AttentionCall") -> Tensor:
        """Every row over its blocks, each shared block read once."""
        rows = _rows_per_window(call, self.path, self.inputs.widest_group)
        key = (call.sliding_window, rows)
        if key not in self.plans:
            self.plans[key] = build_plan(
                self.inputs.block_tables,
                self.inputs.lengths,
                self.inputs.group_starts,
                block_size=self.cache.block_size,
                rows_per_window=rows,
                sliding_window=call.sliding_window,
            )
        return _paged_attention(self.path, call, self.cache, self.plans[key])


@dataclass
class ProbeStep:
    """Notes what each layer stores; attends plainly (the outputs are not used)."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    modules: dict[int, torch.nn.Module] = field(default_factory=dict)


class AttentionCall(NamedTuple):
    """What a layer asks for. query ``[rows, heads, dim]``; key, value ``[rows, kv_heads, dim]``."""

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None


_STEP: ContextVar[PrefillStep | DecodeStep | ProbeStep] = ContextVar("cowbeam_step")


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query ``[batch, heads, length, dim]`` → ``[batch, length, heads, dim]``."""
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"{type(module).__name__} makes an attention mask of its own, which cannot be paged")
    for name in ("position_bias", "indices", "block_indices", "attn_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} attends with {name}, which cannot be paged")
    batch, heads, length, dim = query.shape
    scale = dim**-0.5 if scaling is None else scaling
    query = query.transpose(1, 2).reshape(batch * length, heads, dim)
    key = key.transpose(1, 2).reshape(batch * length, key.shape[1], -1)
    value = value.transpose(1, 2).reshape(batch * length, value.shape[1], -1)
    if torch.compiler.is_compiling():
        # No plain number of the layer: torch would compile every layer anew.
        out = _attend_compiled(query, key, value, s_aux, getattr(module, NUMBER), scale, softcap)
    else:
        window = _sliding_window(module, kwargs)
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        call = AttentionCall(layer, query, key, value, scale, window, softcap, s_aux)
        out = _attend(module, call, [batch * length])
    return out.view(batch, length, heads, -1), None


def _attend(module: torch.nn.Module, call: "AttentionCall", lengths: list[int]) -> Tensor:
    step = _current_step()
    if isinstance(step, ProbeStep):
        step.shapes[call.layer] = _layer_shape(call)
        step.modules[call.layer] = module
        return packed_causal_attention(call.query, call.key, call.value, lengths, scale=call.scale)
    return _write_and_attend(step, call)


def _current_step() -> "PrefillStep | DecodeStep | ProbeStep":
    step = _STEP.get(None)
    if step is None:
        raise RuntimeError("the model is in the middle of a step of cowbeam in another thread; call it after that")
    return step


def _write_and_attend(step: "PrefillStep | DecodeStep", call: "AttentionCall") -> Tensor:
    step.cache.layers[call.layer].write(call.key, call.value, step.slots, step.writes)
    return step.attend(call)


@torch.library.custom_op("cowbeam::attend", mutates_args=())
def _attend_compiled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    number: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """What compiled layers call. Opaque to torch: the step, with blocks and plans, is looked up when it runs."""
    step = _current_step()
    assert isinstance(step, DecodeStep), "layers run compiled in decode steps only"
    layer = int(number)
    window = step.cache.layers[layer].sliding_window
    return _write_and_attend(step, AttentionCall(layer, query, key, value, scale, window, softcap, sinks))


@_attend_compiled.register_fake
def _(query: Tensor, _key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


AttentionInterface.register(IMPLEMENTATION, attend)


def _sliding_window(module: torch.nn.Module, kwargs: dict[str, Any]) -> int | None:
    """The layer's window: the keyword if present (None means full), else the config's word on this layer.

    Some models (PhiMoE, Qwen2-MoE) build a window mask without handing the window down. Others have a window in their
    config that they never use: only the word of a model whose code masks by windows counts.
    """
    if "sliding_window" in kwargs:
        window: int | None = kwargs["sliding_window"]
        return window
    if not _masks_by_windows(type(module).__module__):
        return None
    config: Any = module.config
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None and layer_types[module.layer_idx] != "sliding_attention":
        return None
    return window


@functools.cache
def _masks_by_windows(module_name: str) -> bool:
    """The model's code builds sliding-window masks: read off its source, as transformers finds out such things too."""
    return "sliding_window_causal_mask" in inspect.getsource(sys.modules[module_name])


def _layer_shape(call: AttentionCall) -> LayerShape:
    _, kv_heads, key_dim = call.key.shape
    return LayerShape(kv_heads, key_dim, call.value.shape[-1], call.key.dtype, call.key.device, call.sliding_window)


def _rows_per_window(call: AttentionCall, path: AttentionPath, widest_group: int) -> int:
    if path == "torch":
        return TORCH_ROWS_PER_WINDOW
    return rows_per_window(call.query.shape[1], call.key.shape[1], widest_group)


def _paged_attention(path: AttentionPath, call: AttentionCall, cache: KVCache, plan: Plan) -> Tensor:
    layer = cache.layers[call.layer]
    if path == "triton":
        from cowbeam.kernels.attention import paged_attention  # here: the torch path works where triton is missing
    else:
        paged_attention = paged_attention_torch
    return paged_attention(
        call.query, layer.key, layer.value, plan, scale=call.scale, softcap=call.softcap, sinks=call.sinks
    )


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raises ValueError, naming the model and the reason, if its layers cannot keep their K/V in blocks."""
    name, config = type(model).__name__, model.config
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; cowbeam decodes causal language models")
    if model.training:
        raise ValueError(f"{name} is in training mode: call model.eval() first")
    parameters = inspect.signature(model.forward).parameters
    if not model.can_generate() or "input_ids" not in parameters:
        raise ValueError(f"{name} has no language-model head; load it as AutoModelForCausalLM")
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    types = set(getattr(config.get_text_config(), "layer_types", None) or ["full_attention"])
    # A DummyLayer belongs to a layer that attends to another one's K/V; it keeps its own copy here.
    recurrent = [layer for layer in layers if type(layer).__name__ not in _PLAIN_LAYERS]
    if recurrent or not types <= {"full_attention", "sliding_attention"}:
        kinds = sorted(types - {"full_attention", "sliding_attention"}) or [type(recurrent[0]).__name__]
        raise ValueError(f"{name} cannot be decoded over KV blocks: it has layers of kind {', '.join(kinds)}")
    if not model._can_set_attn_implementation() or "position_ids" not in parameters:
        raise ValueError(f"{name} cannot be decoded over KV blocks: it does not use transformers' attention interface")


def first_line(error: Exception) -> str:
    """The message in short; it may quote what the user gave, control characters included."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    return "".join(character if character.isprintable() else "?" for character in line)


_PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")


class ModelAdapter:
    """The model as the engine sees it: tokens and steps in, logits out."""

    def __init__(self, model: PreTrainedModel, path: AttentionPath) -> None:
        refuse_unsupported(model)
        self.model = model
        self.path: AttentionPath = path
        embedding = model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor), "the input embedding is a matrix"
        self.device = embedding.device
        self.vocabulary_size = len(embedding)  # token ids the embedding knows
        configs = (getattr(module, "config", None) for module in model.modules())
        self._configs: list[Any] = list({id(config): config for config in configs if config is not None}.values())
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._attention_modules: list[torch.nn.Module] = []
        self._fused = FusedLinears([])
        self._compiled: CompiledLayers | None = None

    @property
    def is_compiled(self) -> bool:
        """Decode steps run compiled layers."""
        return self._compiled is not None

    @property
    def max_length(self) -> int | None:
        """Positions that can be decoded rightly, prompt and new tokens together.

        Long-RoPE (Phi-3-128k) takes other factors for a whole forward pass once one position in it is past the
        original length: a neighbour would change the answer. So the original length is the limit there.
        """
        config: Any = self.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        rope: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if "longrope" in (rope.get("rope_type"), rope.get("type")):
            original = rope.get("original_max_position_embeddings")
            limit = original or getattr(config, "original_max_position_embeddings", limit)
        return None if limit is None else int(limit)

    def probe(self, num_tokens: int) -> list[LayerShape]:
        """One plain forward pass that tells what each layer stores."""
        step = self._probe(num_tokens)
        if any(shape.device != self.device for shape in step.shapes.values()):
            raise ValueError("the model's layers lie on several devices: cowbeam decodes on one")
        layers = sorted(step.shapes)
        if not layers or layers != list(range(len(layers))):
            name = type(self.model).__name__
            raise ValueError(f"{name} cannot be decoded over KV blocks: its attention layers are numbered {layers}")
        self._attention_modules = [step.modules[layer] for layer in layers]
        return [step.shapes[layer] for layer in layers]

    def _probe(self, num_tokens: int) -> ProbeStep:
        step = ProbeStep()
        token_ids = torch.zeros(1, num_tokens, dtype=torch.long, device=self.device)
        positions = torch.arange(num_tokens, device=self.device)[None]
        self._forward(token_ids, positions, step, last=torch.tensor([num_tokens - 1], device=self.device))
        return step

    def fuse_linears(self) -> None:
        """Compute Linears that read the same input as one product, from now on."""
        fused = FusedLinears(find_groups(self.model, lambda: self._probe(2)))
        self._fused = fused
        try:
            self._probe(2)
        except RuntimeError as error:  # a model may view an output as only a tensor of its own can be viewed
            self._fused = FusedLinears([])
            logger.warning("%s decodes without fused projections: %s", type(self.model).__name__, first_line(error))

    def compile_layers(self, shapes: Sequence[LayerShape], backend: str = "inductor") -> None:
        """Run decode steps by compiled layers from now on; the steps that follow compile them, where that works."""
        layers = find_layers(self.model, self._attention_modules)
        if not layers:
            logger.warning("%s decodes without compiled layers: it has no list of them", type(self.model).__name__)
            return
        kinds = [(type(layer), shape.sliding_window) for layer, shape in zip(layers, shapes, strict=True)]
        self._compiled = CompiledLayers(layers, kinds, self._attention_modules, backend)

    def stop_compiling(self, reason: str) -> None:
        """Run decode steps by the model's own layers again."""
        logger.warning("%s decodes without compiled layers: %s", type(self.model).__name__, reason)
        self._compiled = None

    def prefill(self, cache: KVCache, prompts: Sequence[Sequence[int]], tables: Sequence[Sequence[int]]) -> Tensor:
        """Compute whole prompts, each once, packed; logits ``[prompts, vocabulary]`` of their last tokens."""
        lengths = [len(prompt) for prompt in prompts]
        columns = max(len(table) for table in tables)
        padded = torch.tensor([[*table, *[0] * (columns - len(table))] for table in tables], dtype=torch.int32)
        positions = torch.cat([torch.arange(length) for length in lengths])
        prompt_of_token = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        blocks = padded[prompt_of_token, positions // cache.block_size].long()
        slots = blocks * cache.block_size + positions % cache.block_size
        step = PrefillStep(cache, self.path, slots.to(self.device), lengths, padded.to(self.device))
        token_ids = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        last = (torch.tensor(lengths).cumsum(0) - 1).to(self.device)
        return self._forward(token_ids[None], positions.to(self.device)[None], step, last=last)[0]

    def decode(self, cache: KVCache, inputs: DecodeInputs) -> Tensor:
        """One token a row; logits ``[rows, vocabulary]``."""
        if self._compiled is not None:
            try:
                with _SWITCH, self._compiled.in_place():
                    return self._decode(cache, inputs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # compilers fail in many ways; what fails without them too is raised below
                if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    raise  # compiled before; whatever it is, this capture is lost
                self.stop_compiling(first_line(error))
        return self._decode(cache, inputs)

    def _decode(self, cache: KVCache, inputs: DecodeInputs) -> Tensor:
        step = DecodeStep(cache, self.path, inputs)
        return self._forward(inputs.token_ids[:, None], inputs.positions[:, None], step, last=None)[:, -1]

    def own_logits(self, token_ids: Sequence[int]) -> Tensor:
        """The model's own answer, nothing of cowbeam in it: logits ``[tokens, vocabulary]``.

        By its eager attention, which every model has: some releases let SDPA drop a model's soft-capping.
        """
        ids = torch.tensor([token_ids], device=self.device)
        with torch.inference_mode(), self._implementation("eager"):
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits

    def _forward(
        self, token_ids: Tensor, positions: Tensor, step: PrefillStep | DecodeStep | ProbeStep, last: Tensor | None
    ) -> Tensor:
        """``last``: the positions whose logits are wanted, None for all."""
        keep = {"logits_to_keep": last} if last is not None and self._keeps_logits else {}
        token = _STEP.set(step)
        try:
            with torch.inference_mode(), self._implementation(IMPLEMENTATION), self._fused.in_place():
                out = self.model(input_ids=token_ids, position_ids=positions, use_cache=False, **keep)
        finally:
            _STEP.reset(token)
        logits: Tensor = out.logits
        return logits if last is None or keep else logits[:, last]

    @contextmanager
    def _implementation(self, name: str) -> Iterator[None]:
        """The model attends by this implementation inside the body, and by its owner's outside."""
        with _SWITCH:
            before = [config._attn_implementation for config in self._configs]
            try:
                # The setter of the config, not the model's `set_attn_implementation`, which walks all modules (0.4 ms).
                for config in self._configs:
                    config._attn_implementation = name
                yield
            finally:
                for config, found in zip(self._configs, before, strict=True):
                    config._attn_implementation = found
