"""What the command line shows: the search as it runs, the completions, the memory it took."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cowbeam.decoder.frames import Frame
from cowbeam.decoder.outputs import DecodeResult
from cowbeam.decoder.params import BeamSearchParams, Params

_MAX_BRANCHES_SHOWN = 16


def printable(text: str) -> Text:
    """Text of a user or a model for the terminal: no markup, no control characters."""
    return Text("".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text))


def in_bytes(count: int) -> str:
    """``1536`` as ``1.5 KiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


class Progress:
    """Live progress on a terminal's standard error; silent where that is no terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A spinner while the body runs, which tells what cowbeam logs meanwhile."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status(f"{what} …") as status, _logged(lambda text: status.update(f"{text} …")):
            yield

    @contextmanager
    def watching(self, max_new_tokens: int) -> Iterator[Callable[[Frame], None]]:
        """Gives a function that shows a frame; the display is gone when the body ends."""
        if not self._console.is_terminal:
            yield lambda _frame: None
            return
        with Live(console=self._console, transient=True, refresh_per_second=10) as live:
            yield lambda frame: live.update(_frame_table(frame, max_new_tokens))


@contextmanager
def _logged(show: Callable[[str], None]) -> Iterator[None]:
    """Show what is logged as information inside the body. No handler: one of ours would keep warnings from stderr."""

    def look(record: logging.LogRecord) -> bool:
        if record.levelno == logging.INFO:
            show(record.getMessage())
        return True

    logger = logging.getLogger("cowbeam")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addFilter(look)
    try:
        yield
    finally:
        logger.removeFilter(look)
        logger.setLevel(level)


def _frame_table(frame: Frame, max_new_tokens: int) -> Table:
    memory = frame.memory
    title = (
        f"token {frame.step} of {max_new_tokens} · {len(frame.branches)} branches · {frame.live_blocks} blocks "
        f"({in_bytes(memory.used)}; a copy a branch: {in_bytes(memory.copied)})"
    )
    table = Table(title=title, title_justify="left", box=None, show_header=False, expand=True)
    table.add_column(justify="right", width=8)
    table.add_column(no_wrap=True, overflow="crop", ratio=1)
    for branch in frame.branches[:_MAX_BRANCHES_SHOWN]:
        newest = branch.text.replace("\n", " ")[-200:]
        table.add_row(f"{branch.cumulative_logprob:.2f}", printable(newest))
    return table


def print_results(prompts: Sequence[str], results: Sequence[DecodeResult], params: Params) -> None:
    """The completions with their scores, then the memory table of each prompt."""
    console = Console()
    for prompt, result in zip(prompts, results, strict=True):
        if len(prompts) > 1:
            console.print(Text("prompt: ", style="bold") + printable(prompt))
        console.print(_completions_table(result, params))
        console.print(_memory_table(result))


def _completions_table(result: DecodeResult, params: Params) -> Table:
    count = len(result.completions)
    if isinstance(params, BeamSearchParams):
        title = f"the best {count} of {params.num_beams} beams" if params.num_beams > 1 else "greedy search"
    else:
        title = f"{count} sample{'s' if count > 1 else ''}"
    seed = "" if result.seed is None else f" (seed {result.seed})"
    table = Table(title=title + seed, title_justify="left", show_lines=True)
    table.add_column("#", justify="right")
    table.add_column("score", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("ended by")
    table.add_column("text", ratio=1, overflow="fold")
    for c in result.completions:
        table.add_row(str(c.index), f"{c.score:.4f}", str(len(c.token_ids)), c.finish_reason, printable(c.text.strip()))
    return table


def _memory_table(result: DecodeResult) -> Table:
    stats, memory = result.stats, result.stats.peak_memory
    before = f", {stats.reused_tokens} of them before" if stats.reused_tokens else ""
    title = (
        f"KV memory at the peak: {stats.peak_blocks} blocks of {stats.block_size} tokens; prompt of "
        f"{len(result.prompt_token_ids)} tokens computed once{before}; {stats.steps} steps, "
        f"{stats.cow_copies} copy-on-writes, {stats.seconds:.1f} s ({stats.attention})"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("kept by")
    table.add_column("bytes", justify="right")
    table.add_column("× cowbeam", justify="right")
    rows = [
        ("unique tokens", memory.unique),
        ("cowbeam, shared blocks", memory.used),
        ("a copy a branch, as transformers keeps", memory.copied),
        ("contiguous, every branch reserves its maximum", memory.contiguous),
    ]
    for name, size in rows:
        style = "bold" if size == memory.used and name.startswith("cowbeam") else ""
        table.add_row(name, in_bytes(size), f"{size / max(memory.used, 1):.2f}", style=style)
    return table
