"""The benchmark of batch jobs on Ray: its last line is JSON; a line that is missing, or other than asked for, shows."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
CASE = "12x2-samples@9+5"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return importlib.import_module("bench_ray")


@pytest.mark.parametrize("workers", [["0"], pytest.param(["1", "2"], marks=pytest.mark.long)])
def test_the_last_line_is_json(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, workers: list[str]):
    options = ["--shape", "tiny", "--device", "cpu", "--case", CASE, "--warm-up", "3", "--workers", *workers]
    monkeypatch.setattr(sys, "argv", ["bench_ray.py", *options])
    assert script.main() == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["workers"] for row in last["rows"]] == [int(number) for number in workers]
    assert (last["same_tokens"], last["equal"]) == (1.0, True)
    for row in last["rows"]:
        assert 0 < row["busy"] <= 1
        assert row["tokens_per_second"] == pytest.approx(12 * 2 * 5 / row["job_seconds"])
        assert row["whole_lines_per_second"] < row["lines_per_second"]


def write(path: Path, lines: dict[int, list[int]]) -> None:
    records = [
        {"line": number, "id": f"p{number - 1}", "completions": [{"token_ids": tokens}]}
        for number, tokens in lines.items()
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_results_of_two_runs_are_compared_line_by_line(script: Any, tmp_path: Path):
    load = script.Load.parse("4x1-samples@9+2")
    whole = {number: [number, 7] for number in (1, 2, 3, 4)}
    write(tmp_path / "out1.jsonl", whole)
    write(tmp_path / "out2.jsonl", dict(reversed(whole.items())))
    assert script.compare(tmp_path, load, [1, 2]) == 1, "lines come in any order"
    write(tmp_path / "out2.jsonl", whole | {3: [3, 8]})
    assert script.compare(tmp_path, load, [1, 2]) == 3 / 4
    for bad, sentence in ((whole | {3: [3]}, "line 3 is short"), ({1: [1, 7]}, "lines are missing")):
        write(tmp_path / "out2.jsonl", bad)
        with pytest.raises(AssertionError, match=sentence):
            script.compare(tmp_path, load, [1, 2])
