"""Run every family that cowbeam is tried with and print the README's table of them.

    python scripts/check_families.py [--write] [name ...]

--write  put the table into the README

A CPU gives levels, errors and tokens; a GPU gives the last column. What this machine cannot give is kept as it stands
in the README. Exits with 1 if a family is on another level than expected, beyond the tolerance, or has other tokens
than transformers.
"""

import argparse
import re
import sys
import time
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from cowbeam.decoder import BeamSearchParams, Decoder

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
TOLERANCE = 2e-5
BEGIN, END = "<!-- families: written by scripts/check_families.py -->\n", "<!-- end of families -->"
HEAD = ("family", "level", "largest error", "tokens", "CUDA graph")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [9, 2], [7, 1, 8, 2] * 5]
SEARCHES = ({"num_beams": 4, "num_return_sequences": 2}, {"num_beams": 1, "num_return_sequences": 1})
NEW_TOKENS = 12
UNKNOWN = "?"


class Row(NamedTuple):
    """One line of the table."""

    family: str
    level: str
    error: str
    tokens: str
    graph: str

    @property
    def line(self) -> str:
        return f"| {' | '.join(self)} |"


def rows_of(text: str) -> dict[str, Row]:
    """The table as it stands in the README, by family."""
    table = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    cells = [re.split(r" \| ", line.strip("| ")) for line in table.splitlines() if line.startswith("| ")]
    return {row[0]: Row(*row) for row in cells if len(row) == len(Row._fields)}


def table_of(rows: list[Row]) -> str:
    title = f"<details><summary>{len(rows)} families (transformers {transformers.__version__})</summary>"
    head = [f"| {' | '.join(HEAD)} |", "|---|---|---|---|---|"]
    return "\n".join([title, "", *head, *(row.line for row in rows), "", "</details>", ""])


class Family:
    """One family's run."""

    def __init__(self, name: str) -> None:
        import families

        self.families = families
        self.name = name
        scale = 0.15 if name in families.UNLIKE_THEMSELVES else 0.3
        self.wide = families.family_model(name, scale=scale)  # beams overtake each other
        self.wrong: list[str] = []

    def on_cpu(self) -> Row:
        forks = self.families.Forks.make()
        with Decoder(self.families.family_model(self.name), block_size=4, num_blocks=256) as decoder:
            got = self.families.block_logits(decoder, forks)
        error = self.families.largest_error(got, self.families.own_logits(self.name, forks))
        has_same = self.has_the_tokens_of_transformers()
        self.check(decoder.level == self.families.LEVELS[self.name], f"is on level {decoder.level}")
        self.check(error <= TOLERANCE, f"logits differ by {error:.1e}")
        self.check(has_same, "has other tokens than transformers")
        note = " ¹" if self.name in self.families.UNLIKE_THEMSELVES else ""
        return Row(self.name, str(decoder.level), f"{error:.0e}{note}", "equal" if has_same else "**other**", UNKNOWN)

    def has_the_tokens_of_transformers(self) -> bool:
        with Decoder(self.wide, block_size=4, num_blocks=512) as decoder:
            for search in SEARCHES:
                params = BeamSearchParams(**search, max_new_tokens=NEW_TOKENS, eos_token_id=[])
                for prompt, result in zip(PROMPTS, decoder.generate(PROMPTS, params), strict=True):
                    want = self.wide.generate(  # type: ignore[operator]
                        torch.tensor([prompt]), **search, max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=True
                    )[:, len(prompt) :]
                    if [list(completion.token_ids) for completion in result.completions] != want.tolist():
                        return False
        return True

    def graph_on_cuda(self) -> str:
        with Decoder(self.wide.to("cuda"), num_blocks=256, compile=False) as decoder:  # type: ignore[arg-type]
            result = decoder.generate(PROMPTS[0], BeamSearchParams(max_new_tokens=NEW_TOKENS, eos_token_id=[]))
        return "yes" if result.stats.cuda_graphs else "no"

    def check(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.wrong.append(what)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into the README")
    parser.add_argument("names", nargs="*", help="families; all if none is given")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from families import ALL_FAMILIES, LEVELS

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    text = README.read_text(encoding="utf-8")
    rows, failed = rows_of(text), 0
    for name in options.names or ALL_FAMILIES:
        started = time.perf_counter()
        family, before = Family(name), rows.get(name)
        if torch.cuda.is_available():
            row = (before or Row(name, str(LEVELS[name]), UNKNOWN, UNKNOWN, ""))._replace(graph=family.graph_on_cuda())
        else:
            row = family.on_cpu()._replace(graph=before.graph if before else UNKNOWN)
        rows[name] = row
        failed += bool(family.wrong)
        print(row.line, f"{time.perf_counter() - started:.1f} s", *family.wrong, flush=True)
    known = [rows[name] for name in sorted(ALL_FAMILIES, key=lambda name: (LEVELS[name], name)) if name in rows]
    if options.write:
        before_table, after_table = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        README.write_text(before_table + table_of(known) + after_table, encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
