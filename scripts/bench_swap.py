"""A request that must give way to older ones: what it costs to let it wait on the host, and to compute it anew.

    python scripts/bench_swap.py --shape llama-8b --case 8192x16        # the default
    python scripts/bench_swap.py --shape llama-1b --case 1024x8

A case is PROMPTxBRANCHES, samples with 64 tokens of their own. Each is sent away and brought back by the engine's own
means, several times by either way, and timed until it could take its next token; the tokens that follow must be those
of a request that was never sent away. On the host, the first time takes memory, too. The last line is JSON.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
from bench_header import print_header
from bench_models import SHAPES, random_model, spread
from transformers import PreTrainedModel

from cowbeam.decoder import Decoder, SamplingParams
from cowbeam.decoder.group import Group

OWN_TOKENS = 64
MORE_TOKENS = 4


def away_and_back(decoder: Decoder, group: Group) -> float:
    """Seconds."""
    engine = decoder._engine
    assert engine is not None, "the decoder is open"
    scheduler = engine._scheduler
    while engine._flight is not None:  # launched, because somebody came back
        decoder.step()
    _synchronize(decoder)
    started = time.perf_counter()
    scheduler.remove(group)
    group.give_back()
    scheduler.waiting.appendleft(group)
    while group not in scheduler.running:
        decoder.step()
    _synchronize(decoder)
    return time.perf_counter() - started


def measure(model: PreTrainedModel, prompt: list[int], width: int, repeats: int, swap_memory: int) -> dict[str, Any]:
    """Times, and what was generated after all of them."""
    # A step lies between two times, because one is launched when a request is computed anew.
    num_tokens = OWN_TOKENS + repeats + 1 + MORE_TOKENS
    params = SamplingParams(num_return_sequences=width, max_new_tokens=num_tokens, seed=1, eos_token_id=[])
    num_blocks = 2 * (len(prompt) // 16 + width * (num_tokens // 16 + 2))
    knobs: dict[str, Any] = {"swap_memory": swap_memory, "num_blocks": num_blocks, "prefix_reuse": False}
    with Decoder(model, compile=False, **knobs) as decoder:
        wanted = decoder.generate(prompt, params)
        run = decoder.add_request(prompt, params)
        assert decoder._engine is not None, "the decoder is open"
        decoder._engine._looks_ahead = False
        while run.group.num_generated < OWN_TOKENS:
            decoder.step()
        times = [away_and_back(decoder, run.group) for _ in range(repeats + 1)]
        while not run.is_over:
            decoder.step()
        assert run.result is not None, run.error
        stats = run.result.stats
    got, want = ([c.token_ids for c in result.completions] for result in (run.result, wanted))
    return {
        "first": times[0],
        "later": spread(times[1:]),
        "blocks": stats.swapped_blocks // (repeats + 1),
        "tokens": stats.recomputed_tokens // (repeats + 1),
        "same_tokens": got == want,
    }


def _synchronize(decoder: Decoder) -> None:
    if decoder.model.device.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--case", action="append", help="PROMPTxBRANCHES (8192x16)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype")
    options = parser.parse_args()
    facts: dict[str, Any] = dict(print_header(f"Away and back, {options.shape}"))
    dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    model = random_model(options.shape, options.device, dtype)
    facts |= {"shape": options.shape, "dtype": str(dtype), "cases": []}
    is_right = True
    for case in options.case or ["8192x16"]:
        length, width = map(int, case.split("x"))
        prompt = torch.randint(
            5, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(3)
        ).tolist()
        line: dict[str, Any] = {"case": case}
        for way, swap_memory in (("host", 2**34), ("anew", 0)):
            line[way] = found = measure(model, prompt, width, options.repeats, swap_memory)
            later = found["later"]
            what = f"{found['blocks']:,} blocks" if found["blocks"] else f"{found['tokens']:,} tokens"
            times = [f"{1e3 * seconds:.1f}" for seconds in (*later.values(), found["first"])]
            same = "same" if found["same_tokens"] else "other"
            taken = f"{times[0]} ms ({times[1]}–{times[2]}), first {times[3]} ms"
            print(f"{case:>10} {way}: {taken}; {what}; {same} tokens", flush=True)
        # In half precision what is computed anew rounds as passes do, not as steps did: only copies must be the same.
        is_right &= line["host"]["same_tokens"] and (dtype != torch.float32 or line["anew"]["same_tokens"])
        facts["cases"].append(line)
    print(json.dumps({"benchmark": "swap", **facts}))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
