"""Lines handed out to workers: each once, enough of them to fill a step, and not more, so that nobody idles at the end.

No decoder runs here: a worker is a queue of lines, of which the first that fit its rows get a token a tick.
"""

import random

import pytest

from cowbeam.decoder.hand_out import BUNDLES_AT_ONCE, HandOut, Numbered
from cowbeam.decoder.params import SamplingParams


class Worker:
    """Decodes lines in the order of their coming, as many at once as ``max_rows`` hold."""

    def __init__(self, max_rows):
        self.max_rows = max_rows
        self.left = {}  # ticks, by the line's number
        self.bundles = []
        self.rows = []  # of each tick
        self.done = []

    def take(self, bundle):
        self.bundles.append(bundle)
        self.left |= {line.number: line.params.max_new_tokens for line in bundle.lines}

    def tick(self):
        """A token for those that run; returns the bundles that are done with it."""
        rows = 0
        for line in [line for bundle in self.bundles for line in bundle.lines if line.number in self.left]:
            if rows and rows + line.params.width > self.max_rows:
                break
            rows += line.params.width
            self.left[line.number] -= 1
            if not self.left[line.number]:
                del self.left[line.number]
                self.done.append(line.number)
        self.rows.append(rows)
        over = [bundle for bundle in self.bundles if not any(line.number in self.left for line in bundle.lines)]
        self.bundles = [bundle for bundle in self.bundles if bundle not in over]
        return over


def lines_of(widths, lengths):
    """How many tokens a line takes is what nobody knows who hands it out."""
    for number, (width, length) in enumerate(zip(widths, lengths, strict=True)):
        yield Numbered(number, [1], SamplingParams(num_return_sequences=width, max_new_tokens=length))


def run(lines, workers, *, asleep=()):
    """Until those who are not asleep have nothing left."""
    hand_out = HandOut(lines, len(workers), workers[0].max_rows)
    awake = [worker for worker in workers if worker not in asleep]
    while True:
        while (bundle := hand_out.next_bundle()) is not None:
            workers[bundle.worker].take(bundle)
            assert len(workers[bundle.worker].bundles) <= BUNDLES_AT_ONCE, "a thread waits for each"
        if not any(worker.left for worker in awake):
            return
        for worker in awake:
            for bundle in worker.tick():
                hand_out.take_back(bundle)


@pytest.mark.parametrize("seed", range(20))
def test_each_line_once_whatever_their_widths(seed):
    draw = random.Random(seed)
    count, max_rows = draw.randint(0, 400), draw.choice([1, 7, 64, 512])
    widths = [draw.choice([1, 1, 2, 5, 64, 700]) for _ in range(count)]
    workers = [Worker(max_rows) for _ in range(draw.randint(1, 5))]
    run(lines_of(widths, [draw.randint(1, 9) for _ in widths]), workers)
    assert sorted(number for worker in workers for number in worker.done) == list(range(count))


@pytest.mark.parametrize("width", [1, 8, 64])
def test_steps_are_full_until_the_lines_run_out(width):
    """Lines of one branch once went out by 256 a worker, eight together: half of a step's rows, and a fifth of them
    where some lines end much earlier than others.
    """
    draw = random.Random(width)
    workers = [Worker(512), Worker(512)]
    count = 20_000 // width
    lengths = [max(1, min(300, round(draw.expovariate(1 / 40)))) for _ in range(count)]
    run(lines_of([width] * count, lengths), workers)
    for worker in workers:
        filled = worker.rows[: len(worker.rows) // 2]
        assert sum(filled) / len(filled) > 0.95 * 512
    first, second = (len(worker.rows) - worker.rows.count(0) for worker in workers)
    assert abs(first - second) <= 300, "the longest line"


def test_of_two_equal_workers_each_does_half():
    """What a second GPU adds is lost where one of them has lines left and the other none."""
    workers = [Worker(512), Worker(512)]
    run(lines_of([8] * 3072, [16] * 3072), workers)
    first, second = ([rows for rows in worker.rows if rows] for worker in workers)
    assert len(first) == len(second) == 3072 / 2 / (512 / 8) * 16


@pytest.mark.parametrize("width", [1, 8, 64])
def test_who_is_away_keeps_two_batches_from_the_others(width):
    """A killed worker loads the model for a minute. Wide lines once went out by 256 a worker whatever their width."""
    away, other = Worker(512), Worker(512)
    run(lines_of([width] * 2000, [3] * 2000), [away, other], asleep=[away])
    assert len(away.left) * width <= 2 * 512 + width
    assert len(other.done) == 2000 - len(away.left)
