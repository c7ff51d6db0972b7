"""The attention function that transformers models call in a step: K/V to their slots, then attention by the plan.

What belongs to the step (slots, tables, plans) reaches it through a ContextVar, since not every model hands keyword
arguments down.
"""

import functools
import inspect
import sys
from collections.abc import Hashable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from cowbeam.decoder.batch import DecodeInputs
from cowbeam.decoder.compiled_layers import NUMBER
from cowbeam.decoder.kv_cache import KVCache, LayerShape
from cowbeam.decoder.model_levels import UnpageableError
from cowbeam.decoder.placement import on_device
from cowbeam.kernels.attention_torch import paged_attention_torch
from cowbeam.kernels.plan import Plan, build_plan, rows_per_window
from cowbeam.kernels.prefill import causal_attention, gather_blocks, packed_causal_attention, spans

AttentionPath = Literal["triton", "torch"]

# No "flash", "sdpa" or "/" in it: transformers looks for those inside the name. It has no entry among the mask
# functions, so transformers builds no mask for it.
IMPLEMENTATION = "cowbeam"

# On the torch path rows share one gathered copy of the blocks that all of them see.
TORCH_ROWS_PER_WINDOW = 64


@dataclass
class PrefillStep:
    """Prompts and pieces of prompts, packed end to end. ``block_tables`` has one row a piece.

    ``starts`` are the positions of the pieces' first tokens: what lies before them was written in an earlier step, or
    is written in this one by another piece (a layer writes all its K/V before it attends).
    """

    cache: KVCache
    path: AttentionPath
    slots: Tensor
    lengths: list[int]
    starts: list[int]
    block_tables: Tensor
    plans: dict[tuple[int | None, int], Plan] = field(default_factory=dict)
    writes: dict[Hashable, Tensor] = field(default_factory=dict)  # `write_kv`'s memo
    elsewhere: dict[torch.device, "PrefillStep"] = field(default_factory=dict)

    def on(self, device: torch.device) -> "PrefillStep":
        """The step for layers that lie on ``device``."""
        if device == self.slots.device:
            return self
        if device not in self.elsewhere:
            slots, block_tables = self.slots.to(device), self.block_tables.to(device)
            self.elsewhere[device] = PrefillStep(self.cache, self.path, slots, self.lengths, self.starts, block_tables)
        return self.elsewhere[device]

    def attend(self, call: "AttentionCall") -> Tensor:
        """SDPA a piece, except where scores are capped or a sink joins: those go through the paged kernel."""
        if call.softcap is None and call.sinks is None:
            if not any(self.starts):
                window = call.sliding_window
                return packed_causal_attention(
                    call.query, call.key, call.value, self.lengths, scale=call.scale, sliding_window=window
                )
            return self._attend_by_piece(call)
        context = self.block_tables.shape[1] * self.cache.block_size
        rows = _rows_per_window(call, self.path, max(self.lengths), context)
        return _paged_attention(self.path, call, self.cache, self._plan(call.sliding_window, rows))

    def _attend_by_piece(self, call: "AttentionCall") -> Tensor:
        out = call.query.new_empty(*call.query.shape[:2], call.value.shape[-1])
        for piece, span in enumerate(spans(self.lengths)):
            key, value = (call.key[span], call.value[span]) if not self.starts[piece] else self._gather(call, piece)
            out[span] = causal_attention(
                call.query[span], key, value, scale=call.scale, sliding_window=call.sliding_window
            )
        return out

    def _gather(self, call: "AttentionCall", piece: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the piece and of what it sees before it, from their blocks."""
        layer, block_size = self.cache.layers[call.layer], self.cache.block_size
        start, end = self.starts[piece], self.starts[piece] + self.lengths[piece]
        first = 0 if call.sliding_window is None else max(0, start + 1 - call.sliding_window) // block_size
        table = self.block_tables[piece, first : -(-end // block_size)]
        num_slots = end - first * block_size
        return gather_blocks(layer.key, table)[:num_slots], gather_blocks(layer.value, table)[:num_slots]

    def _plan(self, sliding_window: int | None, rows_per_window: int) -> Plan:
        """A row a token: the same table, one more visible key each."""
        key = (sliding_window, rows_per_window)
        if key not in self.plans:
            counts = torch.tensor(self.lengths, device=self.block_tables.device)
            pieces = zip(self.starts, self.lengths, strict=True)
            lengths = torch.cat([torch.arange(start + 1, start + n + 1) for start, n in pieces]).int()
            self.plans[key] = build_plan(
                self.block_tables.repeat_interleave(counts, 0),
                lengths.to(self.block_tables.device),
                [i == 0 for n in self.lengths for i in range(n)],
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
    elsewhere: dict[torch.device, "DecodeStep"] = field(default_factory=dict)

    def on(self, device: torch.device) -> "DecodeStep":
        """The step for layers that lie on ``device``."""
        if device == self.slots.device:
            return self
        if device not in self.elsewhere:
            self.elsewhere[device] = DecodeStep(self.cache, self.path, self.inputs.to(device))
        return self.elsewhere[device]

    @property
    def slots(self) -> Tensor:
        """Where the step's K/V go."""
        return self.inputs.slots

    def attend(self, call: "AttentionCall") -> Tensor:
        """Every row over its blocks, each shared block read once."""
        context = self.inputs.block_tables.shape[1] * self.cache.block_size
        rows = _rows_per_window(call, self.path, self.inputs.widest_group, context)
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


STEP: ContextVar[PrefillStep | DecodeStep | ProbeStep] = ContextVar("cowbeam_step")


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
        raise UnpageableError(f"{type(module).__name__} makes an attention mask of its own, which cannot be paged")
    for name in ("position_bias", "indices", "block_indices", "attn_bias"):
        if kwargs.get(name) is not None:
            raise UnpageableError(f"{type(module).__name__} attends with {name}, which cannot be paged")
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
    step = STEP.get(None)
    if step is None:
        raise RuntimeError("the model is in the middle of a step of cowbeam in another thread; call it after that")
    return step


def _write_and_attend(step: "PrefillStep | DecodeStep", call: "AttentionCall") -> Tensor:
    device = call.key.device
    step = step.on(device)
    with on_device(device):
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
    assert not isinstance(step, ProbeStep), "a model is probed by its own layers"
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


def _rows_per_window(call: AttentionCall, path: AttentionPath, widest_group: int, context: int) -> int:
    if path == "torch":
        return TORCH_ROWS_PER_WINDOW
    from cowbeam.kernels.attention import most_lines  # here: the torch path works where triton is missing

    lines = most_lines(call.query, call.value.shape[2], call.softcap, context)
    return rows_per_window(call.query.shape[1], call.key.shape[1], widest_group, lines)


def _paged_attention(path: AttentionPath, call: AttentionCall, cache: KVCache, plan: Plan) -> Tensor:
    layer = cache.layers[call.layer]
    if path == "triton":
        from cowbeam.kernels.attention import paged_attention  # here: the torch path works where triton is missing
    else:
        paged_attention = paged_attention_torch
    return paged_attention(
        call.query, layer.key, layer.value, plan, scale=call.scale, softcap=call.softcap, sinks=call.sinks
    )
