"""The pictures of bench_memory: a panel for each part that was run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

Rows = list[dict[str, Any]]
OURS, THEIRS, RESERVE, FLOOR = "#1b7f5c", "#c05f15", "#8a8a8a", "#7fb8a4"
MIB = 2**20


def plot(results: dict[str, Rows], path: Path) -> None:
    """Draw the parts in ``results``, at most two abreast, and write the picture to ``path``."""
    mpl.use("Agg")
    columns = min(2, len(results))
    lines = -(-len(results) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(6 * columns, 4.2 * lines), squeeze=False, layout="constrained")
    for spare in axes.flat[len(results) :]:
        spare.remove()
    for axis, (part, rows) in zip(axes.flat[: len(results)], results.items(), strict=True):
        PANELS[part](axis, rows)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _peaks(axis: Axes, rows: Rows) -> None:
    longest = max(row["prompt"] for row in rows)
    shown = [row for row in rows if row["prompt"] == longest]
    lines = (
        ("contiguous", "reserve of the maximum", RESERVE, "--"),
        ("transformers", "transformers, measured", THEIRS, "-"),
        ("cowbeam", "cowbeam", OURS, "-"),
        ("unique", "distinct tokens, the least possible", FLOOR, ":"),
    )
    for name, label, colour, style in lines:
        widths, sizes = [row["beams"] for row in shown], [row[name] / MIB for row in shown]
        axis.plot(widths, sizes, style, color=colour, label=label, marker="o", markersize=3)
    axis.set(title=f"Peak KV memory, prompt of {longest} tokens", xlabel="beams", ylabel="MiB")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.legend(frameon=False)


def _sharing(axis: Axes, rows: Rows) -> None:
    groups = sorted({(row["trace"], row["strategy"]) for row in rows}, key=lambda group: (group[1], group[0]))
    for place, (trace, strategy) in enumerate(groups):
        shown = [row for row in rows if (row["trace"], row["strategy"]) == (trace, strategy)]
        low, high = shown[0]["paper"]
        axis.fill_between([place - 0.4, place + 0.4], 100 * low, 100 * high, color=RESERVE, alpha=0.3, linewidth=0)
        for index, row in enumerate(shown):
            where = place + 0.25 * (index - (len(shown) - 1) / 2)
            axis.bar(where, 100 * row["saved"], width=0.2, color=OURS if strategy == "beams" else FLOOR)
            axis.annotate(str(row["branches"]), (where, 100 * row["saved"]), ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(groups)), [f"{strategy}\n{trace}" for trace, strategy in groups])
    axis.set(title="Blocks saved by sharing, by branches\n(grey: PagedAttention paper, 2 to 6)", ylabel="%")


def _block_sizes(axis: Axes, rows: Rows) -> None:
    places = range(len(rows))
    unused, duplicated = ([100 * row[name] for row in rows] for name in ("unused", "duplicated"))
    axis.bar(places, unused, color=RESERVE, label="never written")
    axis.bar(places, duplicated, bottom=unused, color=FLOOR, label="copied, held twice")
    axis.set_xticks(places, [str(row["block_size"]) for row in rows])
    for place, row in zip(places, rows, strict=True):
        label = f"{row['bytes_copied_per_token'] / 1024:,.0f} KiB"
        axis.annotate(label, (place, unused[place] + duplicated[place]), ha="center", va="bottom", fontsize=8)
    axis.set(
        title="Waste by block size, 8 beams\n(above: bytes copied a token)", xlabel="block size", ylabel="% of slots"
    )
    axis.legend(frameon=False)


def _allocation(axis: Axes, rows: Rows) -> None:
    left = [0.0] * len(rows)
    for name, label, colour in (
        ("used", "tokens", OURS),
        ("reserved", "reserved, empty", THEIRS),
        ("idle", "idle", RESERVE),
    ):
        shares = [100 * row[name] for row in rows]
        axis.barh([row["way"] for row in rows], shares, left=left, color=colour, label=label)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axis.invert_yaxis()
    axis.set(title="Where the memory is, one queue of requests", xlabel="% of slots")
    axis.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.4, -0.13))


PANELS: dict[str, Callable[[Axes, Rows], None]] = {"a": _peaks, "b": _sharing, "c": _block_sizes, "d": _allocation}
