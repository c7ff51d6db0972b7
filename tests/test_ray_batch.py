"""``cowbeam batch --ray``: the lines of one process, by several, one of which may be killed."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import psutil
import pytest

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams
from cowbeam.decoder.cli import EXIT_BAD_INPUT, EXIT_FAILED, main
from cowbeam.decoder.counters import total
from cowbeam.decoder.hand_out import Numbered
from cowbeam.decoder.ray_batch import _place
from cowbeam.decoder.ray_worker import RayWorker
from fakes import assert_unused, tiny_model, token_ids
from test_batch_job import long_lines, model_path, results, run, some_lines, write  # noqa: F401  # a fixture
from test_many_prompts import failing_on

TWO = ("--ray", "--ray-workers", "2")


class Killer(threading.Thread):
    """Kills a worker of this process's cluster once the results have ``count`` lines; looks for one in its place."""

    def __init__(self, out, count):
        super().__init__(daemon=True)
        self.out, self.count = out, count
        self.over = threading.Event()
        self.lines_before = None
        self.has_replaced = False

    def run(self):
        while not self.out.exists() or self.out.read_bytes().count(b"\n") < self.count:
            if self.over.wait(0.002):
                return
        before = workers()
        before[0].kill()
        self.lines_before = self.out.read_bytes().count(b"\n")
        while not self.over.wait(0.1):
            self.has_replaced |= bool(set(workers()) - set(before))


def workers():
    found = psutil.Process().children(recursive=True)
    return [child for child in found if any("RayWorker" in word for word in cmdline(child))]


def cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:  # it has just ended
        return []


def run_and_kill(model_path, prompts, out, count):  # noqa: F811
    killer = Killer(out, count)
    killer.start()
    code = run(model_path, prompts, out, *TWO)
    killer.over.set()
    killer.join()
    assert killer.lines_before is not None, "a worker was killed"
    assert killer.has_replaced, "while it had lines to decode"
    return code, killer.lines_before


def test_two_workers_and_a_kill_make_the_lines_of_one_process(model_path, tmp_path):  # noqa: F811
    """Of the lines that a killed worker had, none may be lost and none may be there twice; bad ones are one error."""
    bad = [b'{"prompt": "x"', {"token_ids": [999]}, {"prompt": "the dog " * 10_000}]
    prompts = write(tmp_path / "p.jsonl", [*bad, *some_lines(16), *long_lines(140)[116:]])
    whole, out = tmp_path / "whole.jsonl", tmp_path / "r.jsonl"
    assert run(model_path, prompts, whole) == EXIT_FAILED
    code, lines_before = run_and_kill(model_path, prompts, out, count=12)
    assert code == EXIT_FAILED
    assert lines_before < 43, "it was killed in the middle"
    assert results(out) == results(whole)
    kept = out.read_bytes().splitlines(keepends=True)[:20]
    out.write_bytes(b"".join(kept) + b'{"line": 9')
    assert run(model_path, prompts, out) == EXIT_FAILED, "another run, with Ray or not, goes on where it was"
    assert results(out) == results(whole)


@pytest.mark.long
def test_five_hundred_prompts(model_path, tmp_path):  # noqa: F811
    prompts = write(tmp_path / "p.jsonl", [*some_lines(440), *long_lines(140)[80:]])
    whole, out, killed = (tmp_path / name for name in ("whole.jsonl", "r.jsonl", "killed.jsonl"))
    assert run(model_path, prompts, whole) == run(model_path, prompts, out, *TWO) == EXIT_FAILED  # empty prompts
    assert len(results(whole)) == 500
    assert results(out) == results(whole)
    _, lines_before = run_and_kill(model_path, prompts, killed, count=200)
    assert lines_before < 500
    assert results(killed) == results(whole)


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ray", "127.0.0.1:1"], "no cluster at '127.0.0.1:1'"),
        (["--ray", "--ray-workers", "1", "--model", "/no/such"], "a worker could not start: ValueError: the model"),
        (["--ray", "--ray-workers", "9999"], "do not fit on a machine"),
    ],
)
def test_what_a_cluster_cannot_do_is_one_sentence(model_path, tmp_path, capsys, arguments, sentence):  # noqa: F811
    prompts = write(tmp_path / "p.jsonl", [{"prompt": "x"}])
    assert run(model_path, prompts, tmp_path / "r", *arguments) == EXIT_BAD_INPUT
    err = capsys.readouterr().err.strip().splitlines()
    assert sentence in err[-1]


def test_without_ray_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    prompts = write(tmp_path / "p.jsonl", [{"prompt": "x"}])
    assert main(["batch", str(prompts), "--out", str(tmp_path / "r"), "--ray"]) == EXIT_BAD_INPUT
    assert capsys.readouterr().err.strip().endswith("pip install 'cowbeam[ray]'")
    assert main(["batch", str(prompts), "--out", str(tmp_path / "r"), "--ray-workers", "2"]) == EXIT_BAD_INPUT
    assert "--ray-workers 2 needs --ray" in capsys.readouterr().err


def test_a_worker_takes_a_gpu_or_its_part_of_the_cpus():
    cpus, gpus = {"CPU": 8.0}, {"CPU": 16.0, "GPU": 2.0}
    assert _place([gpus, cpus], None) == (2, {"num_gpus": 1, "num_cpus": 1})
    assert _place([cpus], None) == (1, {"num_cpus": 8})
    assert _place([cpus, {"CPU": 6.0}], 4) == (4, {"num_cpus": 3})
    assert _place([cpus, cpus], 3) == (3, {"num_cpus": 4}), "two of them on one machine"
    with pytest.raises(ValueError, match=r"--ray-workers 3: the cluster has 2 GPUs"):
        _place([gpus], 3)
    with pytest.raises(ValueError, match=r"--ray-workers 9: 9 of them do not fit"):
        _place([cpus], 9)


@pytest.fixture
def worker():
    decoder = Decoder(tiny_model("llama"), block_size=4, num_blocks=64)
    with mock.patch.object(Decoder, "from_pretrained", return_value=decoder):
        yield RayWorker(None, {})


def numbered(start, count):
    """Of different lengths, samples among them."""
    kinds = [BeamSearchParams(num_beams=3, max_new_tokens=5), SamplingParams(seed=4, max_new_tokens=9)]
    return [Numbered(n, [1 + n % 60, 2, 3][: 1 + n % 3], kinds[n % 2]) for n in range(start, start + count)]


def test_bundles_of_several_threads_go_through_one_batch(worker):
    bundles = [numbered(8 * i, 8) for i in range(6)]
    with ThreadPoolExecutor(6) as threads:
        decoded = list(threads.map(worker.decode, bundles))
    outcomes = {outcome.index: outcome for bundle in decoded for outcome in bundle.outcomes}
    assert [sorted(o.index for o in bundle.outcomes) for bundle in decoded] == [[n.number for n in b] for b in bundles]
    for line in (line for bundle in bundles for line in bundle):
        alone = worker._decoder.generate(line.prompt, line.params)
        assert token_ids(outcomes[line.number].result) == token_ids(alone)
    counters = max((bundle.counters for bundle in decoded), key=lambda counters: counters.turns)
    assert counters.finished == 48
    steps = sum(o.result.stats.steps for o in outcomes.values())
    assert counters.turns < steps / 4, "they run together"
    assert_unused(worker._decoder)


def test_one_line_that_fails_the_turn_is_one_error(worker):
    """It fails the bundles of all threads with it; looked into by each of them, innocent lines would have errors."""
    bad = Numbered(99, [60, 60, 60], BeamSearchParams(num_beams=1, max_new_tokens=3))
    bundles = [numbered(0, 7), [*numbered(10, 3), bad], numbered(20, 7)]
    for _ in range(8):  # the threads meet in other turns each time
        with failing_on(worker._decoder.model, lambda ids: ids.count(60) >= 3), ThreadPoolExecutor(3) as threads:
            decoded = list(threads.map(worker.decode, bundles))
        errors = {outcome.index: outcome.error for bundle in decoded for outcome in bundle.outcomes if outcome.error}
        assert {index: str(error) for index, error in errors.items()} == {99: "ZeroDivisionError: no such forward pass"}
        assert type(errors[99]) is ValueError, "others may not survive the way between processes"


def test_a_fault_of_the_engine_is_raised_and_the_worker_goes_on(worker):
    with failing_on(worker._decoder.model, lambda _: True), pytest.raises(RuntimeError, match="no such forward pass"):
        worker.decode(numbered(0, 8))
    assert len(worker.decode(numbered(0, 8)).outcomes) == 8


def test_counters_of_several_add_up(worker):
    first = worker.decode(numbered(0, 4)).counters
    both = total([first, first])
    assert (both.finished, both.decode_tokens) == (8, 2 * first.decode_tokens)
    assert both.seconds == first.seconds
    assert total([]).decode_tokens_per_second == 0
