"""Runs any transformers causal LM over blocks, with no model code touched.

The model is switched to cowbeam's attention (``attend.py``), to faster products and to compiled layers for the duration
of a forward pass only: outside of one it is as its owner left it.
"""

import inspect
import itertools
import logging
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cowbeam.decoder.adapters import switches_of
from cowbeam.decoder.attend import IMPLEMENTATION, STEP, AttentionPath, DecodeStep, PrefillStep, ProbeStep
from cowbeam.decoder.batch import DecodeInputs
from cowbeam.decoder.branch_states import StateOwner
from cowbeam.decoder.compiled_layers import CompiledLayers, find_around, find_layers
from cowbeam.decoder.cpu_linear import CPULinears, is_faster_here
from cowbeam.decoder.experts import BatchedExperts
from cowbeam.decoder.fused_linear import FusedLinears, find_groups, place_of
from cowbeam.decoder.gathered import GatheredModel
from cowbeam.decoder.kv_cache import KVCache, LayerShape
from cowbeam.decoder.model_levels import Level, UnpageableError, levels_of, refuse_unsupported
from cowbeam.decoder.placement import entry_device, is_on_one_device
from cowbeam.decoder.weight_writes import WeightWrites

logger = logging.getLogger("cowbeam")

# Two decoders may share a model, and the switch lies in the model's config: whoever finishes first would switch the
# attention back under the other's forward pass. So one pass at a time, of all decoders.
ONE_PASS_AT_A_TIME = threading.RLock()


def first_line(error: Exception) -> str:
    """The message in short; it may quote what the user gave, control characters included."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    return "".join(character if character.isprintable() else "?" for character in line)


def _reason(error: Exception) -> str:
    """torch wraps what a compiler raises, and names the compiler in the first line."""
    return first_line(getattr(error, "inner_exception", error))


def _parts_of(model: PreTrainedModel) -> list[Hashable]:
    """What a captured step of the model is bound to: where its tensors lie, hooks, adapters, its modules' functions."""
    found: list[Hashable] = []
    for module in model.modules():
        tensors: tuple[Any, ...] = (*module._parameters.values(), *module._buffers.values())
        found.append(id(type(module)))
        found += [place_of(tensor) for tensor in tensors if type(tensor) in (torch.nn.Parameter, Tensor)]
        found += [*module._forward_pre_hooks, *module._forward_hooks, switches_of(module)]
        if "forward" in module.__dict__:
            found.append(id(module.__dict__["forward"]))
    return found


class ModelAdapter:
    """The model as the engine sees it: tokens and steps in, logits out."""

    def __init__(self, model: PreTrainedModel, path: AttentionPath) -> None:
        refuse_unsupported(model)
        self.model = model
        self.levels = levels_of(model)
        self.level: Level = self.levels[0]
        self._kernels: AttentionPath = path
        embedding = model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor), "the input embedding is a matrix"
        self.device = entry_device(model)
        self.is_on_one_device = is_on_one_device(model)
        self.vocabulary_size = len(embedding)  # token ids the embedding knows
        self._configs = self._find_configs()
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._attention_modules: list[torch.nn.Module] = []
        self._gathered = GatheredModel(model, self._run_as_it_is)
        self._fused = FusedLinears([])
        self._on_cpu = self._find_cpu_linears()
        self._compiled: CompiledLayers | None = None
        self._compiles_prompts = False
        self._batched_experts: BatchedExperts | None = None
        self._parts: list[Hashable] = []
        self._writes = WeightWrites(model)
        self._num_writes = 0
        self.version = 0

    @property
    def path(self) -> Literal["triton", "torch", "gathered"]:
        """What attends: cowbeam's kernels, or the model itself over K/V gathered from blocks."""
        return self._kernels if self.level == 1 else "gathered"

    @property
    def description(self) -> str:
        """On which level the model is decoded, in a sentence."""
        ways = {
            1: f"cowbeam attends over its blocks ({self._kernels})",
            2: "it attends itself, over K/V gathered from blocks",
            3: f"it attends itself, over K/V gathered from blocks; {self.state_bytes:,} bytes of states a branch",
        }
        return f"{type(self.model).__name__} is decoded on level {self.level}: {ways[self.level]}"

    @property
    def can_look_ahead(self) -> bool:
        """A step may run that is dropped later: what it wrote lies in slots that nobody reads, or in no branch."""
        return self.level < 3

    @property
    def computes_pieces(self) -> bool:
        """A prompt may be computed piece by piece, and what others have computed of it be taken over."""
        return self.level < 3

    @property
    def can_capture(self) -> bool:
        """A step is a chain of launches on one GPU, the host waits for none of them, and weights lie where they lie."""
        return self.path == "triton" and self.device.type == "cuda" and self.is_on_one_device

    @property
    def state_bytes(self) -> int:
        """Bytes of the dense states that a branch has beside its K/V."""
        return self._gathered.state_bytes if self.level == 3 else 0

    @property
    def is_compiled(self) -> bool:
        """Decode steps run compiled layers."""
        return self._compiled is not None

    @property
    def has_hooks(self) -> bool:
        """Functions of its owner's look at what passes between its modules."""
        return any(module._forward_pre_hooks or module._forward_hooks for module in self.model.modules())

    @property
    def max_length(self) -> int | None:
        """Positions that can be decoded rightly, prompt and new tokens together.

        Long-RoPE (Phi-3-128k) takes other factors for a whole forward pass once one position in it is past the
        original length: a neighbour would change the answer. So the original length is the limit there.
        """
        config: Any = self.model.config.get_text_config()
        names = ("max_position_embeddings", "max_seq_len")  # the second is MPT's
        limit = min((value for name in names if (value := getattr(config, name, None)) is not None), default=None)
        rope: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
        if "longrope" in (rope.get("rope_type"), rope.get("type")):
            original = rope.get("original_max_position_embeddings")
            limit = original or getattr(config, "original_max_position_embeddings", limit)
        return None if limit is None else int(limit)

    def probe(self, num_tokens: int) -> list[LayerShape]:
        """One plain forward pass that tells what each layer stores."""
        if self.level > 1:
            return self._gathered.probe(num_tokens, self.device)
        step = self._probe(num_tokens)
        layers = sorted(step.shapes)
        if not layers or layers != list(range(len(layers))):
            name = type(self.model).__name__
            raise UnpageableError(
                f"{name} cannot be decoded over KV blocks: its attention layers are numbered {layers}"
            )
        self._attention_modules = [step.modules[layer] for layer in layers]
        return [step.shapes[layer] for layer in layers]

    def _probe(self, num_tokens: int) -> ProbeStep:
        step = ProbeStep()
        token_ids = torch.zeros(1, num_tokens, dtype=torch.long, device=self.device)
        positions = torch.arange(num_tokens, device=self.device)[None]
        self._forward(token_ids, positions, step, last=self._last([num_tokens]))
        return step

    def _last(self, lengths: Sequence[int]) -> Tensor | list[int]:
        """Where the last tokens of packed pieces are.

        The last hidden states may lie on another device than the first, where accelerate would bring a tensor: numbers
        go with any.
        """
        last = [end - 1 for end in itertools.accumulate(lengths)]
        return torch.tensor(last, device=self.device) if self.is_on_one_device else last

    def follow_owner(self) -> None:
        """Raise ``version`` if the model's tensors lie elsewhere or it has other hooks than before.

        Captured steps read the old tensors and run the old hooks then. Weights that change in place are seen without.
        Asked once a prefill, since it takes one to three milliseconds.
        """
        with ONE_PASS_AT_A_TIME:
            self._fused.refresh()
            self._num_writes = self._writes.count()
            parts = _parts_of(self.model)
            if parts != self._parts:
                self._parts = parts
                self.version += 1
                self._configs = self._find_configs()  # a copied layer has one of its own
                self._fused.leave_out_strangers(self.model)
                self._on_cpu = self._find_cpu_linears()

    def _find_configs(self) -> list[Any]:
        """Of the model and of its parts, which read there how they attend."""
        configs = (getattr(module, "config", None) for module in self.model.modules())
        return list({id(config): config for config in configs if config is not None}.values())

    def _find_cpu_linears(self) -> CPULinears | None:
        return CPULinears(self.model) if self.device.type == "cpu" and is_faster_here() else None

    @property
    def weights_seen(self) -> Hashable:
        """Changes when ``follow_owner`` finds other weights, or weights written in place as `WeightWrites` counts."""
        return self.version, self._num_writes

    def fuse_linears(self) -> None:
        """Compute Linears that read the same input as one product, from now on."""
        self._fused = FusedLinears(find_groups(self.model, lambda: self.probe(2)))
        try:
            self.probe(2)
        except RuntimeError as error:  # a model may view an output as only a tensor of its own can be viewed
            self._fused = FusedLinears([])
            logger.warning("%s decodes without fused projections: %s", type(self.model).__name__, first_line(error))

    def compile_layers(self, shapes: Sequence[LayerShape], backend: str = "inductor") -> None:
        """Run steps and prompts by compiled layers from now on; those that follow compile them, where that works."""
        layers = find_layers(self.model, self._attention_modules)
        if not layers:
            logger.warning("%s decodes without compiled layers: it has no list of them", type(self.model).__name__)
            return
        kinds = [(type(layer), shape.sliding_window) for layer, shape in zip(layers, shapes, strict=True)]
        around = find_around(self.model, layers)
        self._compiled = CompiledLayers(layers, kinds, self._attention_modules, around, backend)
        self._compiles_prompts = True

    def batch_experts(self) -> bool:
        """Compute experts without a question to the device from now on, in decode steps. False if nothing changes."""
        if self._batched_experts is not None:
            return False
        self._batched_experts = BatchedExperts(self.model)
        return bool(self._batched_experts)

    def stop_compiling(self, reason: str) -> None:
        """Run decode steps by the model's own layers again."""
        logger.warning("%s decodes without compiled layers: %s", type(self.model).__name__, reason)
        self._compiled = None

    def prefill(
        self,
        cache: KVCache,
        prompts: Sequence[Sequence[int]],
        tables: Sequence[Sequence[int]],
        owners: Sequence[StateOwner] = (),
    ) -> Tensor:
        """Compute whole prompts, each once; logits ``[prompts, vocabulary]`` of their last tokens.

        ``owners``, one a prompt, get the dense states that it leaves behind, where the model has such.
        """
        self.follow_owner()
        return self.compute(cache, prompts, tables, [0] * len(prompts), owners)

    def compute(
        self,
        cache: KVCache,
        pieces: Sequence[Sequence[int]],
        tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        owners: Sequence[StateOwner] = (),
    ) -> Tensor:
        """Compute pieces of prompts; logits ``[pieces, vocabulary]`` of their last tokens.

        Args:
            cache: where K/V go, and lie.
            pieces: token ids.
            tables: the block ids of each piece's sequence, from position 0 to the end of the piece at least.
            starts: the position of each piece's first token. What lies before it has been computed, or is another
                piece of this pass, listed before it. All are 0 where not ``computes_pieces``.
            owners: one a piece; each gets the dense states that its piece leaves behind, where the model has such.
        """
        if self.level == 1:
            return self._compute_packed(cache, pieces, tables, starts)
        token_ids = [torch.tensor(piece, device=self.device) for piece in pieces]
        blocks = [torch.tensor(table, device=self.device) for table in tables]
        each = zip(token_ids, blocks, owners or itertools.repeat(None, len(pieces)), starts, strict=True)
        return torch.stack([self._gathered.prefill(cache, *one) for one in each])

    def _compute_packed(
        self,
        cache: KVCache,
        pieces: Sequence[Sequence[int]],
        tables: Sequence[Sequence[int]],
        starts: Sequence[int],
    ) -> Tensor:
        lengths = [len(piece) for piece in pieces]
        columns = max(len(table) for table in tables)
        padded = torch.tensor([[*table, *[0] * (columns - len(table))] for table in tables], dtype=torch.int32)
        spans = zip(starts, lengths, strict=True)
        positions = torch.cat([torch.arange(start, start + length) for start, length in spans])
        piece_of_token = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        blocks = padded[piece_of_token, positions // cache.block_size].long()
        slots = blocks * cache.block_size + positions % cache.block_size
        step = PrefillStep(cache, self._kernels, slots.to(self.device), lengths, list(starts), padded.to(self.device))
        token_ids = torch.tensor([token for piece in pieces for token in piece], device=self.device)
        inputs = token_ids[None], positions.to(self.device)[None], step, self._last(lengths)
        if self._compiled is not None and self._compiles_prompts:
            try:
                with ONE_PASS_AT_A_TIME, self._compiled.in_place():
                    return self._forward(*inputs)[0]
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # as in `decode`; steps may compile where prompts do not
                self._compiles_prompts = False
                logger.info("%s computes prompts uncompiled: %s", type(self.model).__name__, _reason(error))
        return self._forward(*inputs)[0]

    def decode(self, cache: KVCache, inputs: DecodeInputs) -> Tensor:
        """The step's copies, then one token a row; logits ``[rows, vocabulary]``."""
        cache.copy(inputs.copy_sources, inputs.copy_destinations)
        if self._compiled is not None:
            try:
                with ONE_PASS_AT_A_TIME, self._compiled.in_place():
                    return self._decode(cache, inputs)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # compilers fail in many ways; what fails without them too is raised below
                if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    raise  # compiled before; whatever it is, this capture is lost
                self.stop_compiling(_reason(error))
        return self._decode(cache, inputs)

    def _decode(self, cache: KVCache, inputs: DecodeInputs) -> Tensor:
        if self.level > 1:
            return self._gathered.decode(cache, inputs)
        step = DecodeStep(cache, self._kernels, inputs)
        experts = self._batched_experts
        with ONE_PASS_AT_A_TIME, experts.in_place(len(inputs.token_ids)) if experts else nullcontext():
            return self._forward(inputs.token_ids[:, None], inputs.positions[:, None], step, last=None)[:, -1]

    def own_logits(self, token_ids: Sequence[int]) -> Tensor:
        """The model's own answer, nothing of cowbeam in it: logits ``[tokens, vocabulary]``.

        By its eager attention, which every model has: some releases let SDPA drop a model's soft-capping. (Beyond level
        1 by its owner's, which attends in the steps too.)
        """
        ids = torch.tensor([token_ids], device=self.device)
        with torch.inference_mode(), self._implementation("eager" if self.level == 1 else None):
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits.to(self.device)

    def _run_as_it_is(self, **inputs: Any) -> Any:
        """The model's forward pass with its owner's attention."""
        with torch.inference_mode(), self._implementation(None), self._faster_products():
            return self.model(**inputs)

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        step: PrefillStep | DecodeStep | ProbeStep,
        last: Tensor | list[int] | None,
    ) -> Tensor:
        """``last``: the positions whose logits are wanted, None for all."""
        keep = {"logits_to_keep": last} if last is not None and self._keeps_logits else {}
        token = STEP.set(step)
        try:
            with torch.inference_mode(), self._implementation(IMPLEMENTATION), self._faster_products():
                out = self.model(input_ids=token_ids, position_ids=positions, use_cache=False, **keep)
        finally:
            STEP.reset(token)
        logits: Tensor = out.logits.to(self.device)
        return logits if last is None or keep else logits[:, last]

    @contextmanager
    def _faster_products(self) -> Iterator[None]:
        with self._fused.in_place(), nullcontext() if self._on_cpu is None else self._on_cpu.in_place():
            yield

    @contextmanager
    def _implementation(self, name: str | None) -> Iterator[None]:
        """The model attends by this implementation inside the body (None: its owner's), and by its owner's outside.

        It computes in its own type: blocks hold that, and steps are captured with it, whatever autocast is on outside.
        """
        with ONE_PASS_AT_A_TIME, torch.autocast(self.device.type, enabled=False):
            if name is None:
                yield
                return
            before = [config._attn_implementation for config in self._configs]
            try:
                # The setter of the config, not the model's `set_attn_implementation`, which walks all modules (0.4 ms).
                for config in self._configs:
                    config._attn_implementation = name
                yield
            finally:
                for config, found in zip(self._configs, before, strict=True):
                    config._attn_implementation = found
