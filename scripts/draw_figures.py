"""Draws the README's picture from a real search of the default model.

python scripts/draw_figures.py            # writes scripts/figures/block_tables.svg
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from cowbeam.decoder import BeamSearchParams, Decoder, Frame

FIGURE = Path(__file__).parent / "figures" / "block_tables.svg"
PROMPT = "Describe the sea at night to somebody who has never seen it, in two sentences."
BLOCK_SIZE = 8
SHADES = ["#f2f2ee", "#d6e4f0", "#a9c8e4", "#6a9fd0", "#2f6fae"]  # 1, 2, 3-4, 5-8, 9+ sharers: darker is more


def tree_order(frame: Frame) -> list[int]:
    """Branches so that those which share a block are neighbours."""
    return sorted(range(len(frame.branches)), key=lambda i: frame.branches[i].block_table)


def shade(sharers: int) -> str:
    return SHADES[min((sharers - 1).bit_length(), len(SHADES) - 1)]


def last_words(text: str, most: int) -> str:
    """The last ``most`` characters of ``text`` at most, from the beginning of a word."""
    plain = " ".join(text.split())
    return plain if len(plain) <= most else "…" + plain[-most:].partition(" ")[2]


def draw_tables(axes: Axes, frame: Frame, block_size: int) -> None:
    """One line a branch, one column a logical block; neighbours that hold the same block are one shape."""
    order = tree_order(frame)
    tables = [frame.branches[i].block_table for i in order]
    for column in range(max(map(len, tables))):
        row = 0
        while row < len(tables):
            block = tables[row][column] if column < len(tables[row]) else None
            end = row + 1
            while end < len(tables) and tables[end][column : column + 1] == tables[row][column : column + 1]:
                end += 1
            if block is not None:
                sharers = frame.sharers[block]
                axes.add_patch(
                    Rectangle(
                        (column + 0.04, row + 0.04),
                        0.92,
                        end - row - 0.08,
                        facecolor=shade(sharers),
                        edgecolor="#33414e",
                        lw=0.8,
                    )
                )
                color = "white" if sharers > 4 else "#1d2733"
                axes.text(column + 0.5, (row + end) / 2, str(block), ha="center", va="center", fontsize=8, color=color)
            row = end
    for row, i in enumerate(order):
        text = last_words(frame.branches[i].text, 58)
        axes.text(max(map(len, tables)) + 0.2, row + 0.5, text, va="center", fontsize=7.5, family="DejaVu Sans")
    axes.set_xlim(0, max(map(len, tables)) + 6.2)
    axes.set_ylim(len(tables), 0)
    axes.set_yticks([])
    axes.set_xticks(
        [c + 0.5 for c in range(max(map(len, tables)))], [str(c) for c in range(max(map(len, tables)))], fontsize=7
    )
    axes.tick_params(length=0)
    axes.set_title(
        f"block tables of {len(tables)} beams, {frame.branches[0].num_tokens} tokens each, blocks of {block_size}: "
        "a shape is one block of memory, its height who shares it",
        loc="left", fontsize=9,
    )  # fmt: skip
    for side in axes.spines.values():
        side.set_visible(False)


def draw_memory(axes: Axes, frames: list[Frame]) -> None:
    steps = [frame.step for frame in frames]
    curves = [
        ("contiguous reserve", "contiguous", "#b04a3a", ":"),
        ("a copy a branch (transformers)", "copied", "#b04a3a", "-"),
        ("cowbeam: shared blocks", "used", "#2f6fae", "-"),
        ("unique tokens", "unique", "#2f6fae", ":"),
    ]
    for label, field, color, style in curves:
        sizes = [getattr(frame.memory, field) / 2**20 for frame in frames]
        axes.plot(steps, sizes, color=color, linestyle=style, lw=1.6)
        offset = 7 if field == "contiguous" else 0 if field != "copied" else -3
        axes.annotate(
            f"{label}, {sizes[-1]:.0f} MiB",
            (steps[-1], sizes[-1]),
            xytext=(4, offset),
            textcoords="offset points",
            fontsize=7.5,
            va="center",
        )
    axes.set_xlim(0, steps[-1] * 1.55)
    axes.set_ylim(0)
    axes.set_xlabel("generated tokens", fontsize=8)
    axes.set_ylabel("KV memory, MiB", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FIGURE)
    options = parser.parse_args()
    params = BeamSearchParams(num_beams=8, max_new_tokens=48, no_repeat_ngram_size=3)
    with Decoder.from_pretrained(device="cpu", block_size=BLOCK_SIZE) as decoder:
        messages = [{"role": "user", "content": PROMPT}]
        text = decoder.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        frames = [frame for frame in decoder.stream(text, params) if frame.branches]
    plt.rcParams["svg.hashsalt"] = "cowbeam"  # the same run gives the same file
    figure, (tables, memory) = plt.subplots(2, 1, figsize=(10, 6.4), height_ratios=[1.25, 1], layout="constrained")
    draw_tables(tables, frames[-1], BLOCK_SIZE)
    draw_memory(memory, frames)
    options.out.parent.mkdir(exist_ok=True)
    figure.savefig(options.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
