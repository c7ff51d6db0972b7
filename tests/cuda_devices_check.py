"""Models of every level on GPUs; on a machine with two GPUs or more also on several. Not collected by pytest.

    PYTHONPATH=.cache/types:tests python3 tests/cuda_devices_check.py [on_the_first] [offloaded] [split] [on_the_second]

Each model lies wholly on a GPU, or half on one and half on the next (accelerate's hooks), or wholly on the second one,
or with weights offloaded to the host. Tokens must be those of the same model on a CPU, and by `generate` those of
transformers; logits through forks those of a plain pass. Prints a line a case and exits with 1 if one fails.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import cpu_offload, dispatch_model
from torch import nn
from transformers import PreTrainedModel

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams, attach
from cowbeam.decoder.placement import entry_device
from fakes import token_ids
from families import LEVELS, Forks, block_logits, eager_logits, family_model, largest_error

FAMILIES = ("llama", "gemma2", "gpt_oss", "qwen3_moe", "gpt2", "bloom", "llama4_text", "jamba", "qwen3_next", "mamba")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [9, 2], [7] * 40]
PARAMS = (
    BeamSearchParams(num_beams=4, max_new_tokens=20, eos_token_id=[]),
    SamplingParams(num_return_sequences=5, max_new_tokens=20, seed=3, eos_token_id=[]),
)
TOLERANCE = 2e-5


def split(model: PreTrainedModel) -> Any:
    """The first half of the layers on GPU 0, the others and the head on GPU 1."""
    name, layers = next((name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList))
    device_map: dict[str, Any] = {f"{name}.{n}": 0 if n < (len(layers) + 1) // 2 else 1 for n in range(len(layers))}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for part, module in model.named_modules():
        if module is head and head.weight is embedding.weight:
            device_map[part] = 0  # one tensor lies on one device
    is_before = True  # embeddings come before the layers, norms and heads after; what has buffers serves all layers
    for part, module in model.named_modules():
        is_before &= part != name
        holds_layers = name.startswith(part) or part.startswith(name)
        is_placed = any(part == other or part.startswith(f"{other}.") for other in device_map)
        if part and not holds_layers and not is_placed:
            device_map[part] = 0 if is_before or list(module.buffers()) else 1
    return dispatch_model(model, device_map, main_device=0)


def on_the_first(model: PreTrainedModel) -> Any:
    return model.to("cuda:0")


def on_the_second(model: PreTrainedModel) -> Any:
    return model.to("cuda:1")


def offloaded(model: PreTrainedModel) -> Any:
    return cpu_offload(model, execution_device=torch.device("cuda:0"))


def tokens_of(model: Any, **knobs: Any) -> list[Any]:
    with Decoder(model, block_size=16, num_blocks=256, compile=False, **knobs) as decoder:
        return [token_ids(result) for params in PARAMS for result in decoder.generate(PROMPTS, params)]


def generated(model: Any) -> list[Any]:
    """By `generate`, of one prompt: beams."""
    ids = torch.tensor([PROMPTS[0]], device=entry_device(model))
    return model.generate(ids, num_beams=4, max_new_tokens=20, do_sample=False, use_cache=True)[0].tolist()


def check(name: str, place: Callable[[PreTrainedModel], Any]) -> list[str]:
    """What is wrong."""
    wanted = tokens_of(family_model(name, scale=0.3))
    own = generated(on_the_first(family_model(name, scale=0.3)))
    wrong = []
    for attention in ("auto", "torch"):
        model = place(family_model(name, scale=0.3))
        if tokens_of(model, attention=attention) != wanted:
            wrong.append(f"other tokens than on a CPU (attention {attention})")
        if generated(attach(model, attention=attention, compile=False)) != own:
            wrong.append(f"other tokens than transformers, attached (attention {attention})")
    forks = Forks.make()
    with Decoder(place(family_model(name)), block_size=16, num_blocks=64, compile=False) as decoder:
        got = block_logits(decoder, forks)
        level = decoder.level
        capturing = decoder._engine._graphs.is_capturing  # type: ignore[union-attr]
    error = largest_error(got, eager_logits(on_the_first(family_model(name)), forks))
    if not error <= TOLERANCE:
        wrong.append(f"logits differ by {error:.1e}")
    if level != LEVELS[name]:
        wrong.append(f"decoded on level {level} instead of {LEVELS[name]}")
    if capturing and place in (split, offloaded):
        wrong.append("steps are captured, although weights lie on several devices")
    return wrong


def main() -> int:
    torch.backends.cuda.matmul.allow_tf32 = False
    several = torch.cuda.device_count() > 1
    if not several:
        print("one GPU only: several of them are not tried")
    failures = 0
    wanted = sys.argv[1:]
    places = on_the_first, offloaded, *((split, on_the_second) if several else ())
    for place in (place for place in places if not wanted or place.__name__ in wanted):
        for name in FAMILIES:
            if place is offloaded and name == "llama4_text":
                continue  # its own code sends token ids to where its offloaded embedding lies: nowhere
            started = time.perf_counter()
            try:
                wrong = check(name, place)
            except Exception as error:
                wrong = [f"{type(error).__name__}: {error}"]
            failures += bool(wrong)
            print(f"{place.__name__:14}{name:14}{time.perf_counter() - started:6.1f} s  {'; '.join(wrong) or 'ok'}")
    print(f"{failures} cases failed" if failures else "all cases are right")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
