"""Runs any transformers causal LM over blocks, with no model code touched.

The model is switched to cowbeam's attention (``attend.py``), to faster products and to compiled layers for the duration
of a forward pass only: outside of one it is as its owner left it.
"""

import inspect
import logging
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cowbeam.decoder.attend import IMPLEMENTATION, STEP, AttentionPath, DecodeStep, PrefillStep, ProbeStep
from cowbeam.decoder.batch import DecodeInputs
from cowbeam.decoder.compiled_layers import CompiledLayers, find_layers
from cowbeam.decoder.cpu_linear import CPULinears, is_faster_here
from cowbeam.decoder.fused_linear import FusedLinears, find_groups, place_of
from cowbeam.decoder.kv_cache import KVCache, LayerShape

logger = logging.getLogger("cowbeam")

# Two decoders may share a model, and the switch lies in the model's config: whoever finishes first would switch the
# attention back under the other's forward pass. So one pass at a time, of all decoders.
_SWITCH = threading.RLock()


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


def _parts_of(model: PreTrainedModel) -> list[Hashable]:
    """What a captured step of the model is bound to: where its tensors lie, its hooks, its modules' functions."""
    found: list[Hashable] = []
    for module in model.modules():
        tensors: tuple[Any, ...] = (*module._parameters.values(), *module._buffers.values())
        found.append(id(type(module)))
        found += [place_of(tensor) for tensor in tensors if type(tensor) in (torch.nn.Parameter, Tensor)]
        found += [*module._forward_pre_hooks, *module._forward_hooks]
        if "forward" in module.__dict__:
            found.append(id(module.__dict__["forward"]))
    return found


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
        self._on_cpu = self._find_cpu_linears()
        self._compiled: CompiledLayers | None = None
        self._parts: list[Hashable] = []
        self._edits = 0
        self.version = 0

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

    def follow_owner(self) -> None:
        """Raise ``version`` if the model's tensors lie elsewhere or it has other hooks than before.

        Captured steps read the old tensors and run the old hooks then. Weights that change in place are seen without.
        Asked once a prefill, since it takes about half a millisecond.
        """
        with _SWITCH:
            self._fused.refresh()
            self._edits = sum(0 if p.is_inference() else p._version for p in self.model.parameters())
            parts = _parts_of(self.model)
            if parts != self._parts:
                self._parts = parts
                self.version += 1
                self._fused.leave_out_strangers(self.model)
                self._on_cpu = self._find_cpu_linears()

    def _find_cpu_linears(self) -> CPULinears | None:
        return CPULinears(self.model) if self.device.type == "cpu" and is_faster_here() else None

    @property
    def weights_seen(self) -> Hashable:
        """Changes when ``follow_owner`` finds other weights or weights written in place, as far as torch counts that.

        (It does not where somebody writes through ``.data``.)
        """
        return self.version, self._edits

    def fuse_linears(self) -> None:
        """Compute Linears that read the same input as one product, from now on."""
        self._fused = FusedLinears(find_groups(self.model, lambda: self._probe(2)))
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
        self.follow_owner()
        return self.compute(cache, prompts, tables, [0] * len(prompts))

    def compute(
        self,
        cache: KVCache,
        pieces: Sequence[Sequence[int]],
        tables: Sequence[Sequence[int]],
        starts: Sequence[int],
    ) -> Tensor:
        """Compute pieces of prompts, packed; logits ``[pieces, vocabulary]`` of their last tokens.

        Args:
            cache: where K/V go, and lie.
            pieces: token ids.
            tables: the block ids of each piece's sequence, from position 0 to the end of the piece at least.
            starts: the position of each piece's first token. What lies before it has been computed, or is another
                piece of this pass.
        """
        lengths = [len(piece) for piece in pieces]
        columns = max(len(table) for table in tables)
        padded = torch.tensor([[*table, *[0] * (columns - len(table))] for table in tables], dtype=torch.int32)
        spans = zip(starts, lengths, strict=True)
        positions = torch.cat([torch.arange(start, start + length) for start, length in spans])
        piece_of_token = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        blocks = padded[piece_of_token, positions // cache.block_size].long()
        slots = blocks * cache.block_size + positions % cache.block_size
        step = PrefillStep(cache, self.path, slots.to(self.device), lengths, list(starts), padded.to(self.device))
        token_ids = torch.tensor([token for piece in pieces for token in piece], device=self.device)
        last = (torch.tensor(lengths).cumsum(0) - 1).to(self.device)
        return self._forward(token_ids[None], positions.to(self.device)[None], step, last=last)[0]

    def decode(self, cache: KVCache, inputs: DecodeInputs) -> Tensor:
        """The step's copies, then one token a row; logits ``[rows, vocabulary]``."""
        cache.copy(inputs.copy_sources, inputs.copy_destinations)
        if self._compiled is not None:
            try:
                with _SWITCH, self._compiled.in_place():
                    return self._decode(cache, inputs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # compilers fail in many ways; what fails without them too is raised below
                if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    raise  # compiled before; whatever it is, this capture is lost
                # torch wraps what a compiler raises, and names the compiler in the first line.
                self.stop_compiling(first_line(getattr(error, "inner_exception", error)))
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
        token = STEP.set(step)
        try:
            with torch.inference_mode(), self._implementation(IMPLEMENTATION), self._faster_products():
                out = self.model(input_ids=token_ids, position_ids=positions, use_cache=False, **keep)
        finally:
            STEP.reset(token)
        logits: Tensor = out.logits
        return logits if last is None or keep else logits[:, last]

    @contextmanager
    def _faster_products(self) -> Iterator[None]:
        with self._fused.in_place(), nullcontext() if self._on_cpu is None else self._on_cpu.in_place():
            yield

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
