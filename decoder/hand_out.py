"""Which worker gets the next lines of a batch job, and how many at once.

A worker has enough in flight to fill the rows of its steps and as many more that wait: places are taken at once where
lines end. It has no more than that, so that at the end, and while a killed worker starts anew, the others get the rest.
Lines go out in bundles of few rows, since the places of a bundle's early lines are given again only with its last.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cowbeam.decoder.params import Params

if TYPE_CHECKING:
    from cowbeam.decoder.request_maker import Prompt

# Rows in flight at a worker, as a multiple of those of its steps.
BATCHES_AT_ONCE = 2
# Bundles in flight at a worker, at most: as many of its threads wait for their lines.
BUNDLES_AT_ONCE = 256


class Numbered(NamedTuple):
    """A line under the number that its outcome has as its index."""

    number: int
    prompt: "Prompt"
    params: Params


class Bundle(NamedTuple):
    """Lines that ``worker`` is handed together, and does again together if it is killed."""

    worker: int
    lines: Sequence[Numbered]
    rows: int


class HandOut:
    """Takes ``lines`` as workers have room for them. Counts what is in flight at each of ``num_workers``.

    ``max_rows``: branches that a worker decodes together.
    """

    def __init__(self, lines: Iterator[Numbered], num_workers: int, max_rows: int) -> None:
        self._lines = lines
        self._in_flight = [0] * num_workers  # rows
        self._most = BATCHES_AT_ONCE * max_rows
        self._bundle_rows = -(-self._most // BUNDLES_AT_ONCE)

    def next_bundle(self) -> Bundle | None:
        """For the worker with the least to do; None while all have enough, or if no lines are left."""
        least = min(self._in_flight)
        if least >= self._most:
            return None
        lines: list[Numbered] = []
        rows = 0
        while rows < self._bundle_rows and (line := next(self._lines, None)) is not None:
            lines.append(line)
            rows += line.params.width
        if not lines:
            return None
        worker = self._in_flight.index(least)
        self._in_flight[worker] += rows
        return Bundle(worker, lines, rows)

    def take_back(self, bundle: Bundle) -> None:
        """All of its lines are done."""
        self._in_flight[bundle.worker] -= bundle.rows
