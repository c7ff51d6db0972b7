"""What a grammar costs a step of a beam search, by length: `python scripts/bench_grammar.py` (needs xgrammar).

The default model's tokenizer; JSON: a list of words without end. Beams fork and are dropped as in a search, at random.
Beside the time of ``follow`` and ``fill_masks``, tokens are counted, without any noise: those that matchers read, and
those that forks copied. The last line is JSON.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections import Counter
from typing import Any, ClassVar

import torch
from bench_header import print_header
from transformers import AutoTokenizer

from cowbeam.decoder.default_model import resolve_default_model
from cowbeam.decoder.grammar import Grammar, GrammarCompiler
from cowbeam.decoder.grammar_states import GrammarStates, Reader

LENGTHS = (100, 1_000, 10_000, 50_000)
WORDS = '"sun", "river", "apple", "a small horse", '


class CountingReader(Reader):
    """Counts for the whole process."""

    counts: ClassVar[Counter[str]] = Counter()

    def fork(self) -> Reader:
        self.counts["copied"] += self.place.depth
        return super().fork()

    def move(self, place: Any, common: Any) -> None:
        self.counts["read_again"] += place.depth - common.depth
        super().move(place, common)


def parents(rng: random.Random, width: int) -> list[int]:
    """The better a beam, the more of its continuations are kept."""
    return sorted(min(rng.randrange(width), rng.randrange(width)) for _ in range(width))


def measure(states: GrammarStates, text: "itertools.cycle[int]", rng: random.Random, steps: int) -> dict[str, float]:
    width = len(states._readers)
    masks = torch.zeros(width, states.num_words, dtype=torch.int32)
    counts, taken = CountingReader.counts, []
    counts.clear()
    for token in itertools.islice(text, steps):
        chosen = parents(rng, width)
        started = time.perf_counter()
        states.follow(chosen, [token] * width)
        states.fill_masks(masks)
        taken.append((time.perf_counter() - started) * 1e6)
    low, median, high = statistics.quantiles(taken, n=4)
    per_step = {name: counts[name] / steps for name in ("read_again", "copied")}
    return {"median_us": median, "low_quartile_us": low, "high_quartile_us": high, **per_step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beams", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200, help="behind each length")
    options = parser.parse_args()
    facts = print_header(f"A step of {options.beams} beams in a grammar, by length")
    tokenizer = AutoTokenizer.from_pretrained(resolve_default_model())
    compiler = GrammarCompiler(tokenizer, len(tokenizer))
    schema = {"type": "array", "items": {"type": "string"}}
    states = compiler.states(compiler.compile(Grammar.json_schema(schema)), [tokenizer.eos_token_id])
    states._readers = [CountingReader(reader.matcher, reader.place) for reader in states._readers if reader]
    # One token a step; a cut of the words anywhere is a beginning of such a list.
    text = itertools.cycle(tokenizer(WORDS, add_special_tokens=False).input_ids)
    states.follow([0] * options.beams, tokenizer("[", add_special_tokens=False).input_ids * options.beams)
    rng, results = random.Random(0), []
    print(f"{'tokens':>8}{'µs a step':>11}{'quartiles':>16}{'read again':>12}{'copied':>10}   (tokens a step)")
    for length in LENGTHS:
        while states.depth < length:
            states.follow(parents(rng, options.beams), [next(text)] * options.beams)
        row = {"tokens": length, **measure(states, text, rng, options.steps)}
        results.append(row)
        spread = f"{row['low_quartile_us']:.0f} to {row['high_quartile_us']:.0f}"
        print(
            f"{length:>8}{row['median_us']:>11.0f}{spread:>16}{row['read_again']:>12.1f}{row['copied']:>10.1f}",
            flush=True,
        )
    print(json.dumps({"benchmark": "grammar", **facts, "beams": options.beams, "results": results}))


if __name__ == "__main__":
    main()
