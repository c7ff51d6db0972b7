"""Prompts without number: they are taken from an iterable as there is room, and given back as they finish."""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from reprlib import repr as shown  # abbreviates: a user's value may be of any length
from typing import TYPE_CHECKING, Any

from cowbeam.decoder.group import Request
from cowbeam.decoder.outputs import Outcome
from cowbeam.decoder.params import BeamSearchParams, SamplingParams
from cowbeam.decoder.run import Run, TurnError

if TYPE_CHECKING:
    from cowbeam.decoder.decoder import Decoder

# Requests that wait for a place in the batch, at most: enough for one prefill of short prompts.
MAX_WAITING = 256
# A source that takes longer than this for a prompt (seconds) must not hold up what is in flight: turns get as much.
SLOW_SOURCE = 0.02
# So many requests in succession that fail even alone: the fault is the engine's, not theirs.
MAX_FAULTS = 3


def pairs_of(prompts: Iterable[Any], params: Any) -> Iterator[tuple[Any, Any]]:
    """Each prompt with its params, the same or its own. Raises ValueError as soon as their numbers differ."""
    if params is None or isinstance(params, BeamSearchParams | SamplingParams):
        return ((prompt, params) for prompt in prompts)
    if isinstance(params, str | bytes | Mapping) or not isinstance(params, Iterable):
        raise ValueError(
            f"params must be BeamSearchParams, SamplingParams or one of them a prompt, got {shown(params)}"
        )
    if isinstance(prompts, Sized) and isinstance(params, Sized) and len(prompts) != len(params):
        raise ValueError(f"{len(prompts)} prompts but {len(params)} params")
    return _zipped(prompts, params)


def _zipped(prompts: Iterable[Any], params: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    missing = object()
    for number, (prompt, own) in enumerate(itertools.zip_longest(prompts, params, fillvalue=missing)):
        if prompt is missing or own is missing:
            ended, more = ("prompts", "params") if prompt is missing else ("params", "prompts")
            raise ValueError(f"the {ended} end after {number}, and there are more {more}")
        yield prompt, own


class ManyPrompts:
    """Decodes pairs (prompt, params) together. Owns the runs in flight: all are over or aborted when it ends.

    A source that has nothing to give for now gives None, which counts as an index; it is asked again after a turn, and
    no more once nothing is in flight.
    """

    def __init__(self, decoder: "Decoder", pairs: Iterable[tuple[Any, Any] | None]) -> None:
        self._decoder = decoder
        self._source: Iterator[tuple[int, Any]] = enumerate(pairs)
        self._runs: dict[int, tuple[Request, Run]] = {}  # by index of the prompt
        self._source_error: Exception | None = None
        self._faults = 0
        self._next_take = 0.0  # not before this time

    def outcomes(self) -> Iterator[Outcome]:
        """One for each prompt, as they finish.

        Raises what ``pairs`` raises, when the prompts in front of that are done; and the engine's own faults.
        """
        try:
            yield from self._take()
            while self._runs:
                yield from self._turn()
                if not self._runs or time.perf_counter() >= self._next_take:
                    yield from self._take()
            if self._source_error is not None:
                raise self._source_error
        finally:
            self._abort()

    def _take(self) -> Iterator[Outcome]:
        """Queue prompts until enough wait; those that cannot be decoded are over at once."""
        waiting = sum(not run.has_begun for _, run in self._runs.values())
        while waiting < MAX_WAITING:
            started = time.perf_counter()
            try:
                index, pair = next(self._source, (None, None))
            except Exception as error:  # later: what was taken before is not lost by it
                self._source_error, self._source = error, enumerate(())
                return
            if index is None or pair is None:
                return
            self._decoder.check_ready()
            try:
                request = self._decoder.prepare(*pair)
                self._runs[index] = (request, self._decoder.add_request(request))
            except Exception as error:  # a tokenizer may raise anything, and it is this prompt's alone
                yield Outcome(index, None, _plain(error))
            else:
                waiting += 1
            now = time.perf_counter()
            if self._runs and now - started > SLOW_SOURCE:
                self._next_take = now + (now - started)
                return

    def _turn(self) -> Iterator[Outcome]:
        try:
            self._decoder.step()
        except Exception:  # of a failed turn: whoever had finished in it has a result, the others have errors
            if not all(run.is_over for _, run in self._runs.values()):
                raise
        over = [index for index, (_, run) in self._runs.items() if run.is_over]
        failed = []
        for index in over:
            request, run = self._runs.pop(index)
            if isinstance(run.error, TurnError):
                failed.append((index, request))
            else:
                self._faults = 0
                yield _outcome(index, run)
        yield from self._again(failed)

    def _again(self, failed: list[tuple[int, Request]]) -> Iterator[Outcome]:
        """Of requests whose turn failed, find by halves those that fail alone; the others get their results."""
        half = -(-len(failed) // 2)
        for part in (failed[:half], failed[half:]):
            if part:
                yield from self._together(part)

    def _together(self, part: list[tuple[int, Request]]) -> Iterator[Outcome]:
        for index, request in part:
            self._runs[index] = (request, self._decoder.add_request(request))
        runs = [(index, *self._runs[index]) for index, _ in part]
        fault: BaseException | None = None
        while fault is None and not all(run.is_over for *_, run in runs):
            try:
                self._decoder.step()
            except Exception as error:
                fault = _plain(error)
        if fault is not None and not all(run.is_over for *_, run in runs):
            raise fault
        failed = []
        for index, request, run in runs:
            self._runs.pop(index, None)
            if not isinstance(run.error, TurnError):
                self._faults = 0
                yield _outcome(index, run)
            elif len(part) > 1:
                failed.append((index, request))
            else:
                self._faults += 1
                if self._faults >= MAX_FAULTS:
                    raise run.error
                yield Outcome(index, None, fault or _plain(run.error))
        yield from self._again(failed)

    def _abort(self) -> None:
        for _, run in self._runs.values():
            self._decoder.abort(run)


def _outcome(index: int, run: Run) -> Outcome:
    return Outcome(index, run.result, None if run.error is None else _plain(run.error))


def _plain(error: BaseException) -> BaseException:
    """Without its traceback, whose frames hold tensors; and kept by the million."""
    error.__traceback__ = error.__context__ = None
    if error.__cause__ is not None:
        _plain(error.__cause__)
    return error
