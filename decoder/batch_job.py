"""``cowbeam batch``: a file of prompts to a file of results, in as many runs as it takes."""

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from cowbeam.decoder.counters import Counters
from cowbeam.decoder.job_progress import JobProgress, in_time
from cowbeam.decoder.options import HasTokenizer, chat_token_ids
from cowbeam.decoder.outputs import Outcome
from cowbeam.decoder.params import BeamSearchParams, Params, SamplingParams
from cowbeam.decoder.results_file import LineId, ResultsFile

if TYPE_CHECKING:
    from cowbeam.decoder.request_maker import Prompt

_KEYS = {"id", "prompt", "token_ids", "params"}


class PairDecoder(HasTokenizer, Protocol):
    """What a job needs of a decoder, or of many (`RayDecoders`)."""

    def generate_pairs(self, pairs: Iterable[tuple["Prompt", Params]]) -> Iterator[Outcome]:
        """As `Decoder.generate_pairs`."""

    def counters(self) -> Counters:
        """What was done so far."""


class BatchLine(NamedTuple):
    """A line that can be tried: what to continue, and how."""

    number: int
    line_id: LineId | None
    prompt: "Prompt"
    params: Params


@dataclass(frozen=True)
class LineDefaults:
    """What holds for lines that say nothing else: ``options`` are fields of the parameters.

    A line that asks for the other kind of search (samples instead of beams) takes none of ``options``.
    """

    options: dict[str, Any]
    sample: bool = False
    chat: bool = False

    def params(self, given: Any) -> Params:
        """The parameters of a line with these ``params``. Raises ValueError naming the field."""
        if not isinstance(given, dict):
            raise ValueError(f"params must be an object, got {json.dumps(given)[:100]}")
        sample = given.get("sample", self.sample)
        if not isinstance(sample, bool):
            raise ValueError(f"sample must be true or false, got {json.dumps(sample)[:100]}")
        kind: type[Params] = SamplingParams if sample else BeamSearchParams
        fields = {**(self.options if sample == self.sample else {}), **given}
        fields.pop("sample", None)
        unknown = fields.keys() - {field.name for field in dataclasses.fields(kind)}
        if unknown:
            raise ValueError(f"{'samples have' if sample else 'beam search has'} no parameter {min(unknown)!r:.100}")
        return kind(**fields)


class BatchJob:
    """Decodes the lines of ``prompts`` that ``out`` does not hold yet. Owns ``out`` while it is open."""

    def __init__(self, prompts: Path, out: Path, defaults: LineDefaults) -> None:
        if out.exists() and prompts.exists() and out.samefile(prompts):
            raise ValueError(f"{out} holds the prompts: name another file for the results")
        for path in (prompts, out):
            if path.exists() and not path.is_file():
                # A pipe gives its lines once, and for ever nothing to who reads back what was written.
                raise ValueError(f"{path} is no file: prompts are read twice, and results are looked at to go on")
        self.num_lines = last = 0
        with prompts.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    self.num_lines, last = self.num_lines + 1, number
        self._prompts = prompts
        self._defaults = defaults
        self._results = ResultsFile(out)
        # Not their sum: a line that failed without an id, was mended and done again by one, is there twice.
        if len(self._results.ids) > self.num_lines or max(self._results.numbers, default=0) > last:
            self._results.close()
            raise ValueError(
                f"{out} has results of other prompts than the {self.num_lines} lines of {prompts}: name another file"
            )
        self._first_line: dict[LineId, int] = {}
        self._num_before = self._results.num_done
        self._num_tokens = 0  # of this run's results
        self._seconds = 0.0
        self._counters: Counters | None = None

    @property
    def num_failed(self) -> int:
        """Lines whose result is an error, in all runs."""
        return self._results.num_failed

    def run(self, decoder: PairDecoder) -> None:
        """Do what is left; each result is written as soon as it is there."""
        if self._defaults.chat:
            chat_token_ids(decoder, "")  # without a template all lines would fail alike
        in_flight: dict[int, BatchLine] = {}  # by index of the prompts that the decoder takes

        def pairs() -> Iterator[tuple["Prompt", Params]]:
            for index, line in enumerate(self._lines(decoder, progress)):
                in_flight[index] = line
                yield line.prompt, line.params

        started = time.perf_counter()
        done, failed = self._results.num_done, self._results.num_failed
        try:
            with JobProgress(self.num_lines, decoder.counters, done=done, failed=failed) as progress:
                for outcome in decoder.generate_pairs(pairs()):
                    line = in_flight.pop(outcome.index)
                    if outcome.result is not None:
                        self._results.append(line.number, line.line_id, vars(outcome.result))
                        self._num_tokens += sum(len(c.token_ids) for c in outcome.result.completions)
                    else:
                        self._results.append(line.number, line.line_id, {"error": sentence_of(outcome.error)})
                    progress.note(failed=outcome.error is not None)
        finally:
            self._seconds = time.perf_counter() - started
            self._counters = decoder.counters()

    def _lines(self, decoder: PairDecoder, progress: JobProgress) -> Iterator[BatchLine]:
        """The lines that are left; those that cannot be read get their error at once."""
        with self._prompts.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                line_id: LineId | None = None
                try:
                    fields = _fields(line)
                    line_id = self._own_id(fields, number)
                    if self._results.has(number, line_id):
                        continue
                    read = self._read(fields, number, line_id, decoder)
                except (ValueError, RecursionError) as error:
                    if not self._results.has(number, line_id):
                        self._results.append(number, line_id, {"error": sentence_of(error)})
                        progress.note(failed=True)
                else:
                    yield read

    def _own_id(self, fields: dict[str, Any], number: int) -> LineId | None:
        line_id = fields.get("id")
        if line_id is None:
            return None
        if isinstance(line_id, bool) or not isinstance(line_id, str | int):
            raise ValueError(f"id must be text or an integer, got {json.dumps(line_id)[:100]}")
        first = self._first_line.setdefault(line_id, number)
        if first != number:
            raise ValueError(f"id {json.dumps(line_id)[:100]} is that of line {first}")
        return line_id

    def _read(self, fields: dict[str, Any], number: int, line_id: LineId | None, decoder: PairDecoder) -> BatchLine:
        unknown = fields.keys() - _KEYS
        if unknown:
            raise ValueError(f"{min(unknown)!r:.100} is none of id, prompt, token_ids, params")
        if ("prompt" in fields) == ("token_ids" in fields):
            raise ValueError("a line has either a prompt or token_ids")
        prompt = fields.get("prompt", fields.get("token_ids"))
        if not isinstance(prompt, str if "prompt" in fields else list):
            wanted = "prompt must be text" if "prompt" in fields else "token_ids must be a list of integers"
            raise ValueError(f"{wanted}, got {json.dumps(prompt)[:100]}")
        if self._defaults.chat and isinstance(prompt, str):
            prompt = chat_token_ids(decoder, prompt)
        return BatchLine(number, line_id, prompt, self._defaults.params(fields.get("params", {})))

    def summary(self) -> str:
        """What was done, in this run and in all."""
        results = self._results
        lines = [f"{results.num_done} of {self.num_lines} lines done, {results.num_failed} with an error"]
        now = results.num_done - self._num_before
        if self._num_before and not now:
            lines.append("nothing was left to do: for other options, name another file for the results")
        elif self._counters is not None:
            c = self._counters
            lines.append(
                f"this run: {now} lines in {in_time(self._seconds)}, {c.prefill_tokens:,} prompt tokens computed, "
                f"{self._num_tokens:,} tokens returned, {self._num_tokens / max(self._seconds, 1e-9):,.0f} a second"
            )
            lines.append(
                f"blocks: {c.live_blocks} live, {c.free_blocks} free ({c.cached_blocks} hold prefixes), "
                f"{c.cow_copies:,} copies on write; {c.hit_rate:.0%} of the prompts taken over from earlier ones"
            )
            lines.append(
                f"requests: {c.finished} finished, {c.failed} failed, {c.aborted} aborted, {c.preemptions} preempted; "
                f"{c.turns:,} turns"
            )
        return "\n".join(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._results.close()


def _fields(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is no UTF-8: {error.reason} at byte {error.start}") from None
    except ValueError as error:
        raise ValueError(f"the line is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError('a line is an object such as {"prompt": "text"}')
    return fields


def sentence_of(error: BaseException | None) -> str:
    """The text of an error record. Users' mistakes say themselves what they are."""
    text = str(error)[:1000]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
