"""transformers under the loads of `bench_serve.py`: its `generate` in batches, and its continuous batching."""

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from serve_floor import kv_bytes_per_token
from serve_load import Load
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.utils import WorkloadHints

Peer = Callable[[PreTrainedModel, Load, list[list[int]], float], dict[str, Any]]
SHARE_OF_FREE = 0.85  # of the memory that is free, for what a batch is thought to take
PILOT = 8  # this part of the prompts tells how long the others would take


def run_generate(model: PreTrainedModel, load: Load, prompts: list[list[int]], budget: float) -> dict[str, Any]:
    """One batch of as many prompts as fit; where not even one does, of as many of its samples as fit.

    Other batches would take as long, so one tells the rate; after ``budget`` seconds it is cut off.
    """
    _give_back()
    count, width = _batch_that_fits(model, load)
    _call(model, load, prompts[:1], 1 if load.kind == "samples" else width, budget, new_tokens=2)
    while True:
        _give_back()
        started = time.perf_counter()
        try:
            new_tokens = _call(model, load, prompts[:count], width, budget, load.new_tokens)
        except torch.OutOfMemoryError:
            if count == 1 and (width == 1 or load.kind == "beams"):
                return {"error": "not even one prompt fits"}
            count, width = (count, width // 2) if count == 1 else (count // 2, width)
            continue
        seconds = time.perf_counter() - started
        rate = count * width * new_tokens / seconds
        batch = {"prompts": count, "width": width, "new_tokens": new_tokens, "is_cut_off": new_tokens < load.new_tokens}
        return {"tokens_per_second": rate, "seconds": seconds, **batch}


def _call(
    model: PreTrainedModel, load: Load, prompts: list[list[int]], width: int, budget: float, new_tokens: int
) -> int:
    """New tokens a branch."""
    ids = torch.tensor(prompts, device=model.device)
    search = {"do_sample": True, "top_k": 0} if load.kind == "samples" else {"do_sample": False, "num_beams": width}
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_return_sequences=width, max_new_tokens=new_tokens,
            max_time=budget, eos_token_id=None, pad_token_id=0, **search,
        )  # fmt: skip
    return out.shape[1] - ids.shape[1]


def _batch_that_fits(model: PreTrainedModel, load: Load) -> tuple[int, int]:
    """Prompts and branches of each. It computes every branch's prompt anew: K/V, and four activations of its MLP."""
    if model.device.type != "cuda":
        return load.prompts, load.width
    config: Any = model.config.get_text_config()
    per_token = kv_bytes_per_token(model) + 4 * config.intermediate_size * model.dtype.itemsize
    free = SHARE_OF_FREE * torch.cuda.mem_get_info()[0]
    branches = int(free / (per_token * (load.prompt_length + load.new_tokens)))
    if branches >= load.width or load.kind == "beams":
        return max(1, min(load.prompts, branches // load.width)), load.width
    return 1, max(1, branches)


def run_continuous(model: PreTrainedModel, load: Load, prompts: list[list[int]], budget: float) -> dict[str, Any]:
    """As many of the prompts as a pilot says take ``budget`` seconds. Capturing its graphs is not counted."""
    if load.kind == "beams":
        return {"error": "it has no beam search"}
    count = max(1, load.prompts // PILOT)
    pilot = _batch(model, load, prompts[:count], budget)
    if "error" in pilot or count == load.prompts:
        return pilot
    count = max(count, min(load.prompts, int(count * budget / pilot["seconds"])))
    return _batch(model, load, prompts[:count], 2 * budget)


def _batch(model: PreTrainedModel, load: Load, prompts: list[list[int]], limit: float) -> dict[str, Any]:
    _give_back()
    settings = GenerationConfig(
        do_sample=True, top_k=0, num_return_sequences=load.width, max_new_tokens=load.new_tokens, eos_token_id=-1,
        pad_token_id=0,
    )  # fmt: skip
    hints = WorkloadHints(load.prompt_length, load.new_tokens, len(prompts) * load.width)  # as `generate_batch` does
    try:
        with model.continuous_batching_context_manager(
            generation_config=settings,
            continuous_batching_config=_config(model, load),
            workload_hints=hints,
            block=True,
            timeout=5,
        ) as manager:
            seconds, outputs = _run_through(manager, load, prompts, limit)
    except Exception as error:  # it fails in as many ways as it has parts, and the other figures stand
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    errors = [output.error for output in outputs if output.error is not None]
    tokens = sum(len(output.generated_tokens) for output in outputs)
    expected = len(prompts) * load.width * load.new_tokens
    if errors or tokens != expected:
        came = f"{tokens} of {expected} tokens came out in {seconds:.1f} s"
        return {"error": "; ".join([came, *errors[:1]])}
    return {"tokens_per_second": tokens / seconds, "seconds": seconds, "prompts": len(prompts), "width": load.width}


def _run_through(
    manager: ContinuousBatchingManager, load: Load, prompts: list[list[int]], limit: float
) -> tuple[float, list[Any]]:
    """Seconds, and what has come out: all, unless its thread ends or ``limit`` seconds pass."""
    started = time.perf_counter()
    manager.add_requests(prompts, max_new_tokens=load.new_tokens)
    outputs: list[Any] = []
    while len(outputs) < len(prompts) * load.width and time.perf_counter() - started < limit:
        output = manager.get_result(timeout=1)
        if output is not None and output.is_finished():
            outputs.append(output)
        elif output is None and not manager.is_running():
            break
    return time.perf_counter() - started, outputs


def _config(model: PreTrainedModel, load: Load) -> ContinuousBatchingConfig:
    """Its own defaults; on a CPU, where they take most of the machine's memory, what the load needs."""
    if model.device.type == "cuda":
        return ContinuousBatchingConfig()
    blocks = load.prompts * load.width * (load.prompt_length + load.new_tokens) // 256
    return ContinuousBatchingConfig(num_blocks=blocks + 64, max_batch_tokens=512)


def _give_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


PEERS: dict[str, Peer] = {"generate": run_generate, "continuous": run_continuous}
