"""Draws the README's moving picture from the recorded run of the demo: python scripts/draw_film.py

Block tables and memory, step by step: writes scripts/figures/search.gif.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from draw_figures import last_words, shade
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from cowbeam.ui.frontend import recorded_run

FILM = Path(__file__).parent / "figures" / "search.gif"
COPIED = "#d55e00"
FRAMES_A_SECOND = 5
WORDS_SHOWN = 46
MARGIN = 1.5  # the picture's width in widths of the tables: the rest is for words


class Still(NamedTuple):
    """One step: a line a branch, neighbours share; its text; the blocks that this step copied; bytes in use."""

    tables: list[list[int]]
    texts: list[str]
    copied: set[int]
    memory: dict[str, int]


def stills(records: list[dict[str, Any]]) -> Iterator[Still]:
    """The trace, replayed (its records are described in decoder/trace.py)."""
    width = records[0]["width"]
    tables: list[list[int]] = [[] for _ in range(width)]
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    texts = {-1: ""}
    for record in records:
        if record["type"] != "step" or not any(node is not None for node in record["live"]):
            continue
        for node, parent, text, *_ in record["nodes"]:
            paths[node] = (*paths[parent], node)
            texts[node] = texts[parent] + text
        for place, keep, tail in record["tabs"]:
            tables[place][keep:] = tail
        live = {place: node for place, node in enumerate(record["live"]) if node is not None}
        order = sorted(live, key=lambda place: paths[live[place]])
        copied = {event[2] for event in record["ev"] if event[0] == "cow"}
        words = [last_words(texts[live[place]], WORDS_SHOWN) for place in order]
        yield Still([list(tables[place]) for place in order], words, copied, record["mem"])


def draw_tables(axes: Axes, still: Still, columns: int) -> None:
    sharers = Counter(block for table in still.tables for block in table)
    for column in range(columns):
        row = 0
        while row < len(still.tables):
            here = still.tables[row][column : column + 1]
            end = row + 1
            while end < len(still.tables) and still.tables[end][column : column + 1] == here:
                end += 1
            if here:
                draw_block(axes, column, row, end, here[0], sharers[here[0]], here[0] in still.copied)
            row = end
    for row, text in enumerate(still.texts):
        axes.text(columns + 0.2, row + 0.5, text, va="center", fontsize=7.5, family="DejaVu Sans", parse_math=False)
    axes.set_xlim(0, columns * MARGIN)
    axes.set_ylim(len(still.tables), 0)
    axes.set_axis_off()


def draw_block(axes: Axes, column: int, row: int, end: int, block: int, sharers: int, is_copied: bool) -> None:
    edge, width = (COPIED, 2.0) if is_copied else ("#33414e", 0.7)
    size = (0.9, end - row - 0.1)
    axes.add_patch(Rectangle((column + 0.05, row + 0.05), *size, facecolor=shade(sharers), edgecolor=edge, lw=width))
    color = "white" if sharers > 4 else "#1d2733"
    axes.text(column + 0.5, (row + end) / 2, str(block), ha="center", va="center", fontsize=7.5, color=color)


def draw_memory(axes: Axes, seen: list[Still], steps: int, highest: float) -> None:
    curves = [("contiguous", "#b04a3a", ":"), ("copies", "#b04a3a", "-"), ("used", "#2f6fae", "-")]
    names = {"contiguous": "contiguous reserve", "copies": "a copy per branch", "used": "cowbeam"}
    least = highest * 0.09  # apart, so that names do not lie on each other
    above = float("inf")
    for key, color, style in curves:
        sizes = [still.memory[key] / 2**20 for still in seen]
        axes.plot(range(1, len(seen) + 1), sizes, color=color, linestyle=style, lw=1.6)
        above = min(sizes[-1], above - least)
        axes.text(steps * 1.02, above, f"{names[key]} {sizes[-1]:.0f} MiB", fontsize=7.5, color=color, va="center")
    axes.set_xlim(0, steps * MARGIN)
    axes.set_ylim(0, highest * 1.1)
    axes.set_xticks(range(0, steps + 1, 20))
    axes.set_ylabel("KV, MiB", fontsize=7.5)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a trace that the demo exported (the demo's own recording)")
    parser.add_argument("--out", type=Path, default=FILM)
    parser.add_argument("--every", type=int, default=3, help="steps from picture to picture (3)")
    options = parser.parse_args()
    recorded = json.loads(options.trace.read_text(encoding="utf-8")) if options.trace else recorded_run()
    start, film = recorded["records"][0], list(stills(recorded["records"]))
    columns = max(len(table) for still in film for table in still.tables)
    highest = max(still.memory["contiguous"] for still in film) / 2**20
    pictures = []
    for step in range(1, len(film) + 1, options.every):
        canvas = FigureCanvasAgg(Figure(figsize=(9.2, 4.6), dpi=92))
        # Fixed, or a longer word would move everything from one picture to the next.
        canvas.figure.subplots_adjust(left=0.06, right=0.995, bottom=0.06, top=0.94, hspace=0.06)
        tables, memory = canvas.figure.subplots(2, 1, height_ratios=[1.7, 1])
        draw_tables(tables, film[step - 1], columns)
        what = f"{start['mode']}, {start['width']} branches, step {step}"
        tables.set_title(f"{what}: a shape is a block of memory; orange was copied just now", loc="left", fontsize=9)
        draw_memory(memory, film[:step], len(film), highest)
        canvas.draw()
        size = canvas.get_width_height()
        pictures.append(Image.frombytes("RGBA", size, bytes(canvas.buffer_rgba())).convert("RGB"))
    palette = pictures[len(pictures) // 2].quantize(48)
    flat = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    options.out.parent.mkdir(exist_ok=True)
    pause = [1000 // FRAMES_A_SECOND] * (len(flat) - 1) + [2500]
    flat[0].save(options.out, save_all=True, append_images=flat[1:], duration=pause, loop=0, optimize=True)
    print(f"{options.out}: {len(flat)} pictures, {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
