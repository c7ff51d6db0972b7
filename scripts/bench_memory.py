"""KV memory: what cowbeam holds, beside what others hold for the same tokens.

    python scripts/bench_memory.py                      # all four parts, with the default model
    python scripts/bench_memory.py --part b --requests 8
    python scripts/bench_memory.py --plot memory.png

a  peak bytes of beam search: cowbeam, transformers' own cache (measured in the same run), a contiguous reserve
b  blocks saved by sharing, the PagedAttention paper's measure (SOSP 2023, section 6.3), for its two traces
c  block sizes: unused slots, copies, bytes copied a token
d  one queue of requests, memory in stretches or in blocks: used, reserved in vain, idle, moved

--quick takes a small random model and small cases: it shows that the benchmark works and measures nothing worth
keeping. The last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import memory_searches as searches
import torch
import traces
import transformers
from bench_header import print_header
from contiguous import serve_all_ways
from rich.console import Console
from rich.table import Table

from cowbeam.decoder import BeamSearchParams, SamplingParams

MIB = 2**20
Row = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """How much is run."""

    beams: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    prompts: tuple[int, ...] = (64, 512, 2048)
    new_tokens: int = 32
    traces: tuple[str, ...] = ("alpaca", "sharegpt")
    branches: tuple[int, ...] = (2, 4, 6)
    requests: int = 8
    queue: int = 600
    small_model: bool = False


QUICK = Scale((1, 4, 16), (64, 512), 16, ("alpaca",), (2, 4), 3, 200, True)


def compare_peaks(scale: Scale) -> Iterator[Row]:
    """Part a. Tokens are compared first: memory of different searches is not comparable."""
    decoder = searches.load_decoder(scale.small_model)
    for num_prompt in scale.prompts:
        prompt = searches.make_prompt(decoder, num_prompt, seed=num_prompt)
        for num_beams in scale.beams:
            peer = searches.run_transformers(decoder.model, prompt, num_beams, scale.new_tokens)
            params = BeamSearchParams(num_beams=num_beams, max_new_tokens=scale.new_tokens, eos_token_id=[])
            result = decoder.generate(prompt, params)
            memory = result.stats.peak_memory
            yield {
                "prompt": num_prompt,
                "beams": num_beams,
                "cowbeam": memory.used,
                "unique": memory.unique,
                "transformers": peer.peak_bytes,
                "contiguous": memory.contiguous,
                "same_tokens": result.completions[0].token_ids == peer.token_ids,
            }


def compare_sharing(scale: Scale) -> Iterator[Row]:
    """Part b. No request ends early, as in the paper: each generates as many tokens as its trace says.

    A sample's block table does not depend on which tokens are drawn, so samples come from the small model, and from
    four times as many requests.
    """
    for strategy in ("sampling", "beams"):
        decoder = searches.load_decoder(scale.small_model or strategy == "sampling")
        requests = scale.requests * (4 if strategy == "sampling" else 1)
        for trace in scale.traces:
            lengths = traces.draw_lengths(trace, requests)
            prompts = [searches.make_prompt(decoder, it.prompt, seed) for seed, it in enumerate(lengths)]
            for branches in scale.branches:
                params = [_branching(strategy, branches, it.generated) for it in lengths]
                states = searches.watch(decoder, prompts, params).states
                saved = sum(it.saved_blocks for it in states) / sum(it.blocks_without_sharing for it in states)
                low, high = traces.PAPER_SAVINGS[trace, strategy]
                row = {"trace": trace, "strategy": strategy, "branches": branches, "requests": requests}
                yield {**row, "saved": saved, "paper": [low / 100, high / 100]}


def _branching(strategy: str, branches: int, new_tokens: int) -> BeamSearchParams | SamplingParams:
    if strategy == "beams":
        return BeamSearchParams(num_beams=branches, max_new_tokens=new_tokens, eos_token_id=[])
    return SamplingParams(num_return_sequences=branches, max_new_tokens=new_tokens, eos_token_id=[], seed=1)


def compare_block_sizes(scale: Scale) -> Iterator[Row]:
    """Part c. Unused: no token was written there yet. Duplicated: a copy holds a token that its source holds too."""
    num_prompt, new_tokens = (40, 16) if scale.small_model else (100, 96)
    decoder = searches.load_decoder(scale.small_model)
    prompts = [searches.make_prompt(decoder, num_prompt + 7 * seed, seed) for seed in range(3)]
    params = [BeamSearchParams(num_beams=8, max_new_tokens=new_tokens, eos_token_id=[])] * len(prompts)
    moved = [searches.run_transformers(decoder.model, prompt, 8, new_tokens).moved_bytes for prompt in prompts]
    for block_size in (8, 16, 32, 64):
        decoder = searches.load_decoder(scale.small_model, block_size)
        watched = searches.watch(decoder, prompts, params)
        stats = [result.stats for result in watched.results]
        slots = sum(it.live_blocks for it in watched.states) * block_size
        tokens = sum(it.decode_tokens for it in stats)
        copies = sum(it.cow_copies for it in stats)
        yield {
            "block_size": block_size,
            "unused": sum(it.unused_slots for it in watched.states) / slots,
            "duplicated": sum(it.duplicated_slots for it in watched.states) / slots,
            "peak_bytes": sum(it.peak_memory.used for it in stats),
            "copies_per_token": copies / tokens,
            "bytes_copied_per_token": copies * stats[0].bytes_per_block / tokens,
            "transformers_bytes_copied_per_token": sum(moved) / tokens,
        }


def compare_allocation(scale: Scale) -> Iterator[Row]:
    """Part d: lengths as in ShareGPT, one sequence a request, 16,384 slots (about what the paper's OPT-13B had)."""
    requests = traces.draw_lengths("sharegpt", scale.queue)
    for way, shares in serve_all_ways(requests, size=16_384, longest=traces.LONGEST).items():
        yield {
            "way": way,
            "used": shares.share("used"),
            "reserved": shares.share("reserved"),
            "idle": shares.share("idle"),
            "filled": shares.filled,
            "moved_per_token": shares.moved_per_token,
            "preemptions_per_request": shares.preemptions / scale.queue,
            "steps": shares.steps,
        }


PARTS: dict[str, tuple[str, Callable[[Scale], Iterator[Row]]]] = {
    "a": ("Peak KV memory of beam search, MiB", compare_peaks),
    "b": ("Blocks saved by sharing, over all steps of all requests", compare_sharing),
    "c": ("Block sizes: 8 beams, 3 requests, shares of the slots held over all steps", compare_block_sizes),
    "d": ("One queue, 16,384 slots: shares of the whole memory over all steps", compare_allocation),
}


def show(title: str, rows: list[Row]) -> None:
    """The rows as a table; shares as per cent, bytes as MiB."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    Console(width=150).print(table)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(_cell(name, each) for each in value)
    if name in {"cowbeam", "unique", "transformers", "contiguous", "peak_bytes"}:
        return f"{value / MIB:.2f}"
    if "bytes" in name:
        return f"{value:,.0f}"
    if name.endswith(("_per_token", "_per_request")):
        return f"{value:.3f}"
    return f"{value:.1%}" if isinstance(value, float) else str(value)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted(PARTS), action="append", help="only this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a small random model and small cases")
    parser.add_argument("--requests", type=int, help=f"of each trace in part b ({Scale.requests})")
    parser.add_argument("--beams", type=int, nargs="+", help="widths of part a")
    parser.add_argument("--prompts", type=int, nargs="+", help="prompt lengths of part a")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw what was run (needs matplotlib)")
    options = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    scale = QUICK if options.quick else Scale()
    if scale.small_model:
        torch.set_num_threads(1)  # more would only wait for each other
    given = {name: getattr(options, name) for name in ("requests", "beams", "prompts")}
    scale = Scale(**{**asdict(scale), **{name: value for name, value in given.items() if value}})
    facts = print_header("KV memory, " + ("a small random model" if scale.small_model else "SmolLM2-135M-Instruct"))
    results: dict[str, list[Row]] = {}
    with torch.inference_mode():
        for part in options.part or sorted(PARTS):
            title, measure = PARTS[part]
            results[part] = []
            for row in measure(scale):
                print(f"{part}: {row}", file=sys.stderr, flush=True)  # some take minutes
                results[part].append(row)
            show(f"{part}: {title}", results[part])
    if options.plot:
        from plot_memory import plot

        plot(results, options.plot)
    print(json.dumps({"benchmark": "memory", **facts, **results}))
    return 0 if all(row["same_tokens"] for row in results.get("a", [])) else 1


if __name__ == "__main__":
    raise SystemExit(main())
