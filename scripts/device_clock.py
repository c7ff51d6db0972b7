"""How long a device works for a decoder, and on what."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from cowbeam.decoder.choice_graph import ChoiceGraphs
from cowbeam.decoder.lookahead import Lookahead
from cowbeam.decoder.model_adapter import ModelAdapter
from cowbeam.decoder.step_graph import StepGraphs

# Each gives the device one piece of work, and none calls another of them.
_WORK: list[tuple[type, str, str]] = [
    (ModelAdapter, "compute", "prefill"),
    (StepGraphs, "decode_again", "step"),
    (ChoiceGraphs, "choose", "choice"),
    (Lookahead, "land", "choice"),
]


@dataclass
class DeviceClock:
    """Spans of device work by kind: from when the device comes to it until it is done with it.

    On CUDA between two events on the stream. What is launched kernel by kernel (prefill, choices that are not captured)
    holds the device's waits for these launches; a captured step holds none. Between spans the device waits for the
    host, or copies a step's few inputs. On a CPU a span is the call.
    """

    on_cuda: bool
    _spans: dict[str, list[tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(list))

    @contextmanager
    def running(self) -> Iterator[None]:
        """What any decoder of this process does inside is counted."""
        with ExitStack() as stack:
            for owner, name, kind in _WORK:
                stack.enter_context(mock.patch.object(owner, name, self._timed(getattr(owner, name), kind)))
            yield

    def _timed(self, method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self._now()
            result = method(*args, **kwargs)
            self._spans[kind].append((start, self._now()))
            return result

        return timed

    def _now(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, dict[str, float]]:
        """By kind: how many spans, and their sum."""
        if self.on_cuda:
            torch.cuda.synchronize()
        return {
            kind: {"spans": len(spans), "seconds": sum(self._length(*span) for span in spans)}
            for kind, spans in self._spans.items()
        }

    def _length(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1e3 if self.on_cuda else end - start


def kernel_seconds(action: Callable[[], Any], most: int = 15) -> tuple[float, list[tuple[str, int, float]]]:
    """Seconds in which any kernel or copy runs during ``action``; name, number and seconds of the longest.

    By CUPTI's activity records, which slow the host down: not for a run whose wall time counts.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        action()
        torch.cuda.synchronize()
    intervals: list[tuple[int, int]] = []
    by_name: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profiler.profiler.kineto_results.events():  # the raw records: as trees of objects they take minutes
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            intervals.append((event.start_ns(), event.start_ns() + event.duration_ns()))
            by_name[event.name()][0] += 1
            by_name[event.name()][1] += event.duration_ns() / 1e9
    ranked = sorted(by_name.items(), key=lambda item: -item[1][1])[:most]
    return _union(intervals) / 1e9, [(name, int(number), seconds) for name, (number, seconds) in ranked]


def _union(intervals: list[tuple[int, int]]) -> int:
    covered = end = 0
    for start, stop in sorted(intervals):
        covered += max(0, stop - max(start, end))
        end = max(end, stop)
    return covered
