"""A user's script before and after the one line: `python scripts/attach_before_after.py`.

The same ``generate`` twice, each time in a process of its own, so that neither has the other's memory: as it is, and
behind ``attach(model)``. Reported are the greatest KV memory, what the process's resident memory grew by at most, and
the time of the call (that of ``attach`` included). All beams are returned and must be equal. On a CPU transformers
computes a prompt once a beam: 50 beams of 1,000 tokens take minutes there. Fails too where the blocks hold more than
1.2 × the slots that a shared prompt and each beam's own tokens need. The last line is JSON.
"""

import argparse
import json
import logging
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import traces
import transformers
from bench_header import print_header
from memory_searches import watched_cache
from transformers import AutoModelForCausalLM, AutoTokenizer

from cowbeam.decoder import attach
from cowbeam.decoder.default_model import resolve_default_model

MIB = 2**20
SLACK = 1.2  # of the blocks over the slots that are needed: the last block of each beam is not full


class UseOfBlocks(logging.Handler):
    """Takes down what cowbeam says of its pool, in blocks and tokens."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("generate:"):
            *_, self.peak_blocks, self.block_size = record.args  # type: ignore[misc]
        elif record.levelno >= logging.WARNING:
            raise RuntimeError(record.getMessage())  # else transformers would be measured twice


def run_side(options: argparse.Namespace) -> dict[str, Any]:
    """The user's script; all else measures."""
    name = options.model or resolve_default_model()
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    prompt = torch.tensor([traces.make_prompt(lambda text: tokenizer(text).input_ids, options.prompt, seed=0)])
    use, logger = UseOfBlocks(), logging.getLogger("cowbeam")
    logger.addHandler(use)
    logger.setLevel(logging.INFO)
    settings = {"num_beams": options.beams, "num_return_sequences": options.beams, "max_new_tokens": options.new_tokens}
    settings |= {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    model(prompt[:, :2])  # reads all weights, which lie in the file until then
    loaded, started = peak_resident(), time.perf_counter()
    if options.side == "after":
        attach(model)
    with watched_cache(model) if options.side == "before" else nullcontext() as seen:
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    seconds = time.perf_counter() - started

    side = {
        "seconds": seconds,
        "resident_bytes": peak_resident() - loaded,
        "tokens": output[:, options.prompt :].tolist(),
    }
    if options.side == "before":
        assert seen is not None
        return {**side, "kv_bytes": max(seen.sizes)}
    slots, config = use.peak_blocks * use.block_size, model.config
    bytes_a_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return {**side, "kv_bytes": slots * bytes_a_token, "slots": slots}


def peak_resident() -> int:
    """Of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name or path in place of the default model: a Llama")
    parser.add_argument("--beams", type=int, default=50)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--side", choices=("before", "after"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if options.side:
        print(json.dumps(run_side(options)))
        return 0
    facts = print_header(
        f"generate() before and after attach(model): {options.beams} beams, a prompt of {options.prompt} tokens, "
        f"{options.new_tokens} new ones"
    )
    print(f"{'':8}{'KV MiB':>10}{'resident MiB':>14}{'seconds':>10}")
    sides = {}
    for side in ("after", "before"):
        command = [sys.executable, str(Path(__file__)), "--side", side, *sys.argv[1:]]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        sides[side] = json.loads(printed.splitlines()[-1])
        kv, resident = sides[side]["kv_bytes"] / MIB, sides[side]["resident_bytes"] / MIB
        print(f"{side:8}{kv:>10,.0f}{resident:>14,.0f}{sides[side]['seconds']:>10.1f}", flush=True)
    needed = options.prompt + options.beams * options.new_tokens
    same = sides["after"].pop("tokens") == sides["before"].pop("tokens")
    slots = sides["after"]["slots"]
    print(f"same output: {same}; at most {slots:,} slots, {slots / needed:.2f} × {needed:,}")
    asked = {"beams": options.beams, "prompt": options.prompt, "new_tokens": options.new_tokens}
    print(json.dumps({"benchmark": "attach", **facts, **asked, **sides, "same_output": same}))
    return 0 if same and slots <= SLACK * needed else 1


if __name__ == "__main__":
    raise SystemExit(main())
