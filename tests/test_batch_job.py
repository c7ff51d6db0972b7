"""``cowbeam batch``: every line once, whatever happens in between."""

import dataclasses
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from cowbeam.decoder.batch_job import BatchJob, LineDefaults
from cowbeam.decoder.cli import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, main
from cowbeam.decoder.params import BeamSearchParams, SamplingParams
from cowbeam.decoder.results_file import ResultsFile
from fakes import tiny_decoder
from test_cli import save_model

COMMAND = [sys.executable, "-m", "cowbeam.decoder.cli", "batch"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def write(path, lines):
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


def some_lines(count):
    """Every kind of line; with a seed, since a fresh one is drawn otherwise."""
    kinds = [
        {"prompt": "the quick"},
        {"token_ids": [5, 6, 7], "params": {"num_beams": 1, "max_new_tokens": 9}},
        {"prompt": "lazy dog", "params": {"sample": True, "num_return_sequences": 2, "seed": 3}},
        {"prompt": "", "id": "empty"},
    ]
    return [{"id": f"é{n}", **kinds[n % 4]} if n % 3 else {**kinds[n % 3]} for n in range(count)]


def run(model_path, prompts, out, *arguments):
    return main(["batch", str(prompts), "--out", str(out), "--model", model_path, "--num-beams", "3", *arguments])


def results(path):
    """By line number, without what no two runs share: times, and the last digits that depend on who ran beside."""
    found = {}
    for line in path.read_bytes().splitlines():
        record = json.loads(line)
        assert record["line"] not in found, "a line is there twice"
        tokens = [c["token_ids"] for c in record.get("completions", [])]
        found[record["line"]] = (record.get("id"), record.get("error"), record.get("seed"), tokens)
    return found


def test_a_result_has_the_keys_of_json_and_its_line(model_path, tmp_path, capsys):
    prompts = write(tmp_path / "p.jsonl", [{"prompt": "the fox"}, b"", {"id": 7, "token_ids": [4, 5]}])
    assert run(model_path, prompts, tmp_path / "r.jsonl", "--max-new-tokens", "4") == 0
    records = {r["line"]: r for r in map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())}
    assert set(records[1]) == {"line", "prompt_token_ids", "completions", "stats", "seed"}
    assert (records[3]["id"], records[3]["prompt_token_ids"]) == (7, [4, 5])
    captured = capsys.readouterr()
    assert "2 of 2 lines done, 0 with an error" in captured.out
    assert "2 finished, 0 failed, 0 aborted" in captured.out
    assert "2 of 2 prompts" in captured.err
    assert "\x1b" not in captured.out + captured.err


def test_a_result_is_written_with_all_that_it_holds(tmp_path):
    result = tiny_decoder("llama").generate([4, 5, 6], BeamSearchParams(num_beams=2, max_new_tokens=3, logprobs=2))
    with ResultsFile(tmp_path / "r.jsonl") as file:
        file.append(1, "a", vars(result))
    want = json.dumps({"line": 1, "id": "a", **dataclasses.asdict(result)})
    assert (tmp_path / "r.jsonl").read_text() == want + "\n"


@pytest.mark.parametrize(("options", "share"), [([], "59%"), (["--no-prefix-reuse"], "0%")])
def test_prefix_reuse_is_a_switch(model_path, tmp_path, capsys, options, share):
    """Three prompts of 9 tokens in blocks of 4: two blocks of each but the first are taken over."""
    prompts = write(tmp_path / "p.jsonl", [{"token_ids": [5, 6, 7, 8, 9, 10, 11, 12, last]} for last in (1, 2, 3)])
    out = tmp_path / "r.jsonl"
    assert run(model_path, prompts, out, "--max-new-tokens", "4", "--block-size", "4", *options) == 0
    assert f"{share} of the prompts taken over from earlier ones" in capsys.readouterr().out


def test_a_bad_line_is_one_error_record(model_path, tmp_path):
    deep = b"[" * 100_000
    bad = {
        2: (b'{"prompt": "x"', "the line is no JSON"),
        3: (b'{"prompt": "\xff"}', "no UTF-8"),
        4: ([1, 2], "a line is an object"),
        5: ({"text": "x"}, "'text' is none of id, prompt, token_ids, params"),
        6: ({"prompt": "x", "token_ids": [1]}, "either a prompt or token_ids"),
        7: ({"prompt": 5}, "prompt must be text, got 5"),
        8: ({"token_ids": [999]}, "prompt token 0 is 999"),
        9: ({"prompt": "x", "params": {"num_beams": 0}}, "num_beams must be an integer of at least 1"),
        10: ({"prompt": "x", "params": {"beams": 2}}, "beam search has no parameter 'beams'"),
        11: ({"prompt": "x", "params": [2]}, "params must be an object"),
        12: ({"prompt": "x", "id": 1.5}, "id must be text or an integer"),
        13: ({"prompt": "x", "id": "a"}, 'id "a" is that of line 1'),
        14: ({"prompt": "\ud800", "id": "\ud801"}, "no text in UTF-8"),
        15: (deep, "RecursionError"),
        16: ({"prompt": "the dog " * 100_000}, "exceed the model's 640 positions"),
        17: (b'{"prompt": "x", "params": {"seed": ' + b"9" * 5000 + b"}}", "the line is no JSON"),
    }
    good = {"prompt": "the fox", "id": "a"}
    prompts = write(tmp_path / "p.jsonl", [good, *(line for line, _ in bad.values()), {"prompt": "日本 🦊 the"}])
    out = tmp_path / "r.jsonl"
    for _ in range(2):  # going on with a job that is done changes nothing
        assert run(model_path, prompts, out, "--max-new-tokens", "4") == EXIT_FAILED
        found = results(out)
        assert set(found) == set(range(1, 19))
        for number, (_, sentence) in bad.items():
            assert sentence in found[number][1], number
        assert found[1][1] is found[18][1] is None
    assert found[14][0] == "\ud801"


@pytest.mark.parametrize("others", [[{"prompt": "a"}], [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 2}]])
def test_results_of_other_prompts_are_not_gone_on_with(model_path, tmp_path, capsys, others):
    """They passed for results of these: "2 of 1 lines done"."""
    out = tmp_path / "r.jsonl"
    longer = [*others, {**others[-1], "id": 3}] if "id" in others[0] else others * 2
    run(model_path, write(tmp_path / "p.jsonl", longer), out, "--max-new-tokens", "2")
    before = out.read_bytes()
    capsys.readouterr()
    assert run(model_path, write(tmp_path / "q.jsonl", others), out, "--max-new-tokens", "2") == EXIT_BAD_INPUT
    assert f"results of other prompts than the {len(others)} lines of" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_a_job_that_is_done_says_that_nothing_was_left(model_path, tmp_path, capsys):
    """With other options, too: its lines are not done again, and that must not pass for their results."""
    prompts = write(tmp_path / "p.jsonl", [{"prompt": "the fox"}])
    out = tmp_path / "r.jsonl"
    for new_tokens, said in (("4", "this run: 1 lines"), ("8", "nothing was left to do")):
        capsys.readouterr()
        run(model_path, prompts, out, "--max-new-tokens", new_tokens)
        assert said in capsys.readouterr().out
    assert len(results(out)) == 1


def test_options_hold_for_lines_that_say_nothing_else():
    defaults = LineDefaults({"num_beams": 3, "max_new_tokens": 5})
    assert defaults.params({}) == BeamSearchParams(num_beams=3, max_new_tokens=5)
    assert defaults.params({"num_beams": 2}) == BeamSearchParams(num_beams=2, max_new_tokens=5)
    assert defaults.params({"sample": True, "seed": 1}) == SamplingParams(seed=1)
    assert LineDefaults({"top_k": 3}, sample=True).params({}) == SamplingParams(top_k=3)


def test_cut_anywhere_it_goes_on_to_the_same_lines(model_path, tmp_path):
    """A kill in the middle of a write leaves a torn line; it is dropped and done again, and no other is."""
    prompts = write(tmp_path / "p.jsonl", some_lines(24))
    whole = tmp_path / "whole.jsonl"
    run(model_path, prompts, whole, "--max-new-tokens", "8")
    want, data = results(whole), whole.read_bytes()
    assert len(want) == 24
    rng = random.Random(0)
    for size in [0, 1, 9, len(data) - 1, *(rng.randrange(len(data)) for _ in range(5))]:
        out = tmp_path / f"{size}.jsonl"
        out.write_bytes(data[:size])
        run(model_path, prompts, out, "--max-new-tokens", "8")
        assert results(out) == want, size
        kept = data[: data.rfind(b"\n", 0, size) + 1]
        assert out.read_bytes().startswith(kept), "what is whole stays as it is"


def start(model_path, prompts, out):
    command = [*COMMAND, str(prompts), "--out", str(out), "--model", model_path, "--num-beams", "3"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)


def wait_for_lines(process, out, count):
    deadline = time.monotonic() + 90
    while not out.exists() or out.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def long_lines(count):
    return [{"id": n, "token_ids": [1 + n % 60, 2], "params": {"max_new_tokens": 20 + n}} for n in range(count)]


@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.long)])
def test_killed_again_and_again_it_goes_on_to_the_same_lines(model_path, tmp_path, rounds):
    """At any time, also before the first line of a round: no line is lost, none is there twice."""
    rng = random.Random(rounds)
    prompts, out = write(tmp_path / "p.jsonl", long_lines(80)), tmp_path / "r.jsonl"
    before = b""
    for left in range(rounds, 0, -1):
        process = start(model_path, prompts, out)
        room = (78 - before.count(b"\n")) // left
        wait_for_lines(process, out, before.count(b"\n") + rng.randint(min(1, room), max(1, room // 2)))
        time.sleep(rng.random() * 0.01)
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        kept = before[: before.rfind(b"\n") + 1]
        before = out.read_bytes()
        assert before.startswith(kept), "what is whole stays as it is"
    assert before.count(b"\n") < 80, "it was killed in the middle"
    assert run(model_path, prompts, out) == 0
    whole = tmp_path / "whole.jsonl"
    assert run(model_path, prompts, whole) == 0
    assert results(out) == results(whole)


def test_interrupted_it_goes_on_to_the_same_lines(model_path, tmp_path):
    prompts, out = write(tmp_path / "p.jsonl", long_lines(80)), tmp_path / "r.jsonl"
    process = start(model_path, prompts, out)
    wait_for_lines(process, out, 5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED
    assert b"Traceback" not in err
    before = out.read_bytes()
    assert 5 <= before.count(b"\n") < 80, "it was stopped in the middle"
    assert set(results(out)) <= set(range(1, 81)), "the file is valid as it is"
    assert run(model_path, prompts, out) == 0
    whole = tmp_path / "whole.jsonl"
    assert run(model_path, prompts, whole) == 0
    assert results(out) == results(whole)
    assert out.read_bytes().startswith(before)


def test_lines_added_later_are_done_and_no_other(model_path, tmp_path):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "r.jsonl"
    write(prompts, [{"id": "a", "prompt": "the"}, {"id": "b", "prompt": "fox"}])
    assert run(model_path, prompts, out, "--max-new-tokens", "3") == 0
    before = out.read_bytes()
    write(prompts, [{"id": "c", "prompt": "dog"}, {"id": "a", "prompt": "the"}, {"id": "b", "prompt": "fox"}])
    assert run(model_path, prompts, out, "--max-new-tokens", "3") == 0
    added = out.read_bytes().removeprefix(before)
    assert [json.loads(line)["id"] for line in added.splitlines()] == ["c"]


def test_a_line_that_was_mended_is_done_and_the_file_can_be_gone_on_with(model_path, tmp_path):
    """It failed by its number, and was done by its id: more results than lines, all of them of this file."""
    prompts, out = tmp_path / "p.jsonl", tmp_path / "r.jsonl"
    good, again = {"id": "a", "prompt": "the"}, {"id": "b", "prompt": "fox"}
    write(prompts, [good, good])
    assert run(model_path, prompts, out, "--max-new-tokens", "3") == EXIT_FAILED
    write(prompts, [good, again])
    for _ in range(2):
        assert run(model_path, prompts, out, "--max-new-tokens", "3") == EXIT_FAILED, "the first error is there still"
        records = [json.loads(line) for line in out.read_bytes().splitlines()]
        assert [record.get("id") for record in records] in (["a", None, "b"], [None, "a", "b"])


FOREIGN = [
    b"precious",
    b"precious\n",
    b'{"line": 1}\n[]\n',
    b'{"prompt": "x"}\n',
    b"{}\n",
    b'{"line": 1, "id": [1]}\n',
    b'{"line": 1, "id": {}, "error": "x"}\n',
    b'{"line": ' + b"[" * 10**5 + b"\n",
]


@pytest.mark.parametrize("content", FOREIGN)
def test_a_file_that_holds_no_results_is_left_alone(tmp_path, content):
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is no result of a batch job: name another file"):
        ResultsFile(path)
    assert path.read_bytes() == content


def test_one_job_a_file(tmp_path):
    with ResultsFile(tmp_path / "r") as first:
        first.append(1, None, {"error": "x"})
        with pytest.raises(ValueError, match="another job writes to"):
            ResultsFile(tmp_path / "r")
    with ResultsFile(tmp_path / "r") as again:
        assert again.has(1, None)


def test_a_write_that_takes_a_part_goes_on(tmp_path):
    """A full disk or a signal may make a write shorter than asked."""
    write_all = os.write
    with ResultsFile(tmp_path / "r") as file, mock.patch("os.write", lambda fd, data: write_all(fd, data[:3])):
        file.append(1, "é", {"error": "x"})
    assert json.loads((tmp_path / "r").read_bytes()) == {"line": 1, "id": "é", "error": "x"}


def test_no_id_is_none_also_where_it_is_written_out(tmp_path):
    (tmp_path / "r").write_bytes(b'{"line": 1, "id": null, "error": "x"}\n')
    with ResultsFile(tmp_path / "r") as file:
        assert file.has(1, None)


def test_a_full_disk_is_named(tmp_path, capsys, model_path):
    prompts = write(tmp_path / "p.jsonl", [{"prompt": "the fox"}] * 3)
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("os.write", side_effect=full):
        assert run(model_path, prompts, tmp_path / "r.jsonl") == EXIT_FAILED
    assert f"No space left on device: '{tmp_path / 'r.jsonl'}'" in capsys.readouterr().err
    assert run(model_path, prompts, tmp_path / "r.jsonl") == 0
    assert len(results(tmp_path / "r.jsonl")) == 3


@pytest.mark.parametrize("prompts_are", [True, False])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_can_be_read_but_once_is_refused(tmp_path, make, prompts_are):
    """Prompts from a pipe were counted and then none of them done, with exit code 0; on a named one it hung."""
    make(tmp_path / "odd")
    prompts = write(tmp_path / "p.jsonl", some_lines(3))
    odd, other = tmp_path / "odd", tmp_path / "none"
    with pytest.raises(ValueError, match="odd is no file: prompts are read twice"):
        BatchJob(odd, other, LineDefaults({})) if prompts_are else BatchJob(prompts, odd, LineDefaults({}))
    assert not other.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["p.jsonl", "--out", "/dev/null"], "/dev/null is no file"),
        (["none.jsonl", "--out", "r"], "No such file or directory: 'none.jsonl'"),
        (["p.jsonl", "--out", "p.jsonl"], "holds the prompts: name another file for the results"),
        (["p.jsonl"], "the following arguments are required: --out"),
        (["p.jsonl", "--out", "r", "--num-beams", "0"], "num_beams must be an integer of at least 1, got 0"),
        (["p.jsonl", "--out", "r", "--model", "/no/such"], "the model '/no/such' cannot be loaded"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "p.jsonl", [{"prompt": "x"}])
    assert main(["batch", *arguments]) == EXIT_BAD_INPUT
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1
