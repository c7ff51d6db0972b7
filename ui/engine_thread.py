"""The one thread that decodes. Visitors' runs wait for it in order of arrival."""

import logging
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

from cowbeam.decoder import DecodeResult
from cowbeam.decoder.trace import VERSION, Record, TraceWriter, end_record
from cowbeam.ui.decoders import Decoders
from cowbeam.ui.run import Run

logger = logging.getLogger("cowbeam")

T = TypeVar("T")

Search = Callable[[Decoders, Run], Iterator[Record]]  # the records of a run, as they come


class EngineThread:
    """Everything that touches the model runs here, one after the other, so no lock is needed and nothing overlaps.

    ``search`` gives a run's records; a benchmark may replay recorded ones.
    """

    def __init__(self, decoders: Decoders, search: Search | None = None) -> None:
        self.decoders = decoders
        self._search = search or search_records
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cowbeam-engine")
        self._waiting: list[Run] = []  # the first one runs

    def start(self, run: Run) -> None:
        """Queue a run; its records tell how it goes."""
        self._waiting.append(run)
        self._thread.submit(self._decode, run)

    def ask(self, question: Callable[[Decoders], T]) -> "Future[T]":
        """Queue anything else that needs the model."""
        return self._thread.submit(question, self.decoders)

    @property
    def num_waiting(self) -> int:
        """Runs that wait, the one that runs included."""
        return len(self._waiting)

    def ahead_of(self, run: Run) -> int:
        """Runs that come first: 0 for the one that runs, and for one that is over."""
        waiting = list(self._waiting)
        return waiting.index(run) if run in waiting else 0

    def close(self) -> None:
        """Stop what runs, forget what waits, give the pools back."""
        for run in list(self._waiting):
            run.stop.set()
        self._thread.shutdown(wait=True)
        self.decoders.close()

    def _decode(self, run: Run) -> None:
        try:
            for record in self._search(self.decoders, run):
                run.append(record)
        except ValueError as error:
            run.fail(str(error))
        except Exception:  # the visitor learns that it failed, the log why; the next run must not suffer
            logger.exception("a run of the demo failed")
            run.fail("the decoder failed; the server's log says how")
        finally:
            self._waiting.remove(run)
            run.finish()


def search_records(decoders: Decoders, run: Run) -> Iterator[Record]:
    """All records of ``run``; a step whose stop flag is set is the last. Raises ValueError for what cannot run."""
    if run.stop.is_set():
        yield end_record(None, "stopped")
        return
    settings = run.settings
    token_ids = decoders.token_ids(settings)
    decoder = decoders.of(settings, token_ids)
    frames = decoder.stream(token_ids, settings.params())
    yield start_record(decoders, run, token_ids)
    writer = TraceWriter(settings.branches)
    begun = before = time.perf_counter()
    with closing(frames):  # type: ignore[type-var]  # a generator
        for number, frame in enumerate(frames, 1):
            now = time.perf_counter()
            yield {**writer.step(frame), "ms": round((now - before) * 1e3, 2)}
            run.result = frame.result
            if run.stop.is_set():
                break
            if settings.pace and frame.result is None:
                run.stop.wait(max(0.0, begun + number / settings.pace - time.perf_counter()))
            before = time.perf_counter()
    yield end_record(run.result, "stopped")


def start_record(decoders: Decoders, run: Run, token_ids: list[int]) -> Record:
    """The facts of a search: settings, pool, model."""
    settings = run.settings
    decoder = decoders.of(settings, token_ids)
    model, layout = decoder.model, decoder.kv_layout
    return {
        "type": "start",
        "v": VERSION,
        "mode": settings.mode,
        "width": settings.branches,
        "num_blocks": decoder.num_blocks,
        "block_size": settings.block_size,
        "prompt": settings.prompt,
        "prompt_len": len(token_ids),
        "prompt_tokens": [decoders.token_text(token_id) for token_id in token_ids],
        "max_len": len(token_ids) + settings.max_new_tokens,
        "bytes_per_token": layout.per_token,
        "steps": settings.max_new_tokens,
        "layout": layout._asdict(),
        "model": model_name(str(model.config.name_or_path or type(model).__name__)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "settings": settings.as_values(),
    }


def model_name(name_or_path: str) -> str:
    """The last part: a path of the server's is nobody's business, nor is a checksum at its end."""
    return re.sub(r"-[0-9a-f]{8}$", "", name_or_path.rstrip("/").rsplit("/", 1)[-1])


def decode_again(decoders: Decoders, run: Run) -> DecodeResult:
    """The same search once more, unwatched."""
    token_ids = decoders.token_ids(run.settings)
    return decoders.of(run.settings, token_ids).generate(token_ids, run.settings.params())
