"""Runs without a browser: one engine thread, a queue in order of arrival, nothing left behind."""

import json
import random
import threading
import time

import pytest

from cowbeam.ui.answers import server_functions
from cowbeam.ui.decoders import load_decoders
from cowbeam.ui.engine_thread import EngineThread
from cowbeam.ui.run import Run, to_json
from cowbeam.ui.session import MAX_KEPT_RUNS, MAX_WAITING_RUNS, Sessions, refusal
from cowbeam.ui.settings import Settings
from ui_server import tiny_decoders


@pytest.fixture
def sessions():
    sessions = Sessions(EngineThread(tiny_decoders()))
    yield sessions
    assert sessions.ask(lambda decoders: decoders.num_live_blocks).result(30) == 0, "blocks were left behind"
    sessions.close()


def settings(**changes):
    return Settings.from_values({"prompt": "abc", "width": 3, "max_new_tokens": 8, "chat": False, **changes})


def records_of(messages):
    return [record for message in messages for record in json.loads(message)["frames"]]


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.005)


def test_a_run_is_start_steps_end(sessions):
    (run,) = sessions.start("me", [settings()])
    records = [record for record in records_of(sessions.messages([run])) if record["type"] != "queued"]
    assert [record["type"] for record in records] == ["start", *["step"] * (len(records) - 2), "end"]
    assert records[-1]["stats"]["steps"] == len(records) - 2
    assert [record["t"] for record in records[1:-1]] == list(range(1, len(records) - 1))


def test_runs_wait_in_order_and_are_told_how_many_are_ahead(sessions):
    runs = [sessions.start(f"visitor {i}", [settings(max_new_tokens=500, pace=60)])[0] for i in range(3)]
    wait_for(lambda: runs[0].lines_from(0))
    assert [sessions.engine.ahead_of(run) for run in runs] == [0, 1, 2]
    assert json.loads(next(sessions.messages([runs[2]])))["frames"] == [{"type": "queued", "ahead": 2}]
    runs[0].stop.set()
    wait_for(lambda: runs[1].lines_from(0))
    assert runs[0].is_over
    assert sessions.engine.ahead_of(runs[2]) == 1
    runs[1].stop.set()


def test_no_two_searches_overlap(sessions):
    """Gradio's own cancel frees a queue place before the worker has stopped: two jobs then shared the GPU."""
    running, most = 0, 0
    lock = threading.Lock()
    decode = sessions.engine.decoders.of

    def counted(*arguments):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        try:
            time.sleep(0.01)
            return decode(*arguments)
        finally:
            with lock:
                running -= 1

    sessions.engine.decoders.of = counted
    runs = [sessions.start(f"v{i}", [settings()])[0] for i in range(6)]
    for run in runs:
        assert run.wait_until_over(30)
    assert most == 1


def test_stop_ends_within_a_step(sessions):
    (run,) = sessions.start("me", [settings(max_new_tokens=500, pace=20)])
    wait_for(lambda: len(run.lines_from(0)) > 3)
    sessions.stop("me")
    before = len(run.lines_from(0))
    assert run.wait_until_over(5)
    assert json.loads(run.lines_from(0)[-1])["reason"] == "stopped"
    assert len(run.lines_from(0)) <= before + 3, "at most the step under way, one more, and the end"


@pytest.mark.parametrize("how", ["close", "forget", "start again"])
def test_a_visitor_who_goes_frees_everything(sessions, how):
    (run,) = sessions.start("me", [settings(max_new_tokens=500, pace=60)])
    messages = sessions.messages([run])
    while len(run.lines_from(0)) < 3:
        next(messages)
    if how == "close":
        messages.close()
    elif how == "forget":
        sessions.forget("me")
    else:
        sessions.start("me", [settings()])
    assert run.wait_until_over(5)


def test_what_cannot_run_ends_with_the_reason(sessions):
    (run,) = sessions.start("me", [settings(num_blocks=2, max_new_tokens=100)])
    end = records_of(sessions.messages([run]))[-1]
    assert end["reason"] == "error"
    assert "the pool has 2" in end["message"]
    (run,) = sessions.start("me", [settings()])
    assert run.wait_until_over(30)
    assert run.result is not None, "the next run does not suffer"


def test_a_fault_in_the_decoder_is_one_run_s_fault(sessions, caplog):
    decoders = sessions.engine.decoders
    decoders.token_ids, healthy = lambda _: 1 / 0, decoders.token_ids
    (run,) = sessions.start("me", [settings()])
    assert run.wait_until_over(30)
    assert run.failure == "the decoder failed; the server's log says how"
    assert "ZeroDivisionError" in caplog.text
    decoders.token_ids = healthy


def test_late_readers_get_everything(sessions):
    (run,) = sessions.start("me", [settings()])
    assert run.wait_until_over(30)
    fetch = {f.__name__: f for f in server_functions(sessions)}["fetch_records"]
    lines = fetch({"run": run.id, "from": 0})["lines"]
    assert lines == run.lines_from(0)
    assert fetch({"run": run.id, "from": 4})["lines"] == lines[4:]


def test_kept_runs_and_the_queue_are_bounded(sessions):
    runs = [sessions.start(f"v{i}", [settings(max_new_tokens=2)])[0] for i in range(MAX_KEPT_RUNS)]
    for run in runs:
        assert run.wait_until_over(30)
    sessions.start("one more", [settings(max_new_tokens=500, pace=60)])
    with pytest.raises(ValueError, match="not known here any more"):
        sessions.find(runs[0].id)
    for i in range(MAX_WAITING_RUNS - 1):
        sessions.start(f"w{i}", [settings(max_new_tokens=2)])
    with pytest.raises(ValueError, match="too many runs are waiting"):
        sessions.start("too many", [settings()])
    sessions.stop("one more")


@pytest.mark.parametrize(
    "request_",
    [
        None,
        3,
        "x",
        [],
        {},
        {"run": None},
        {"run": {"a": 1}, "from": 0},
        {"run": "guess", "from": 0},
        {"run": "x" * 10**6},
    ],
)
@pytest.mark.parametrize("name", ["fetch_records", "check", "what_if"])
def test_hostile_calls_get_a_sentence(sessions, name, request_):
    answer = {f.__name__: f for f in server_functions(sessions)}[name](request_)
    assert set(answer) == {"error"}
    assert len(answer["error"]) < 300


@pytest.mark.parametrize(
    "changes", [{"step": -1}, {"step": 10**9}, {"rank": "0"}, {"column": 1.5}, {"other_rank": True}, {"step": 99}]
)
def test_a_what_if_that_is_none_gets_a_sentence(sessions, changes):
    (run,) = sessions.start("me", [settings()])
    assert run.wait_until_over(30)
    what_if = {f.__name__: f for f in server_functions(sessions)}["what_if"]
    good = {"run": run.id, "step": 3, "rank": 0, "column": 0, "other_rank": 0, "other_column": 1}
    assert len(what_if({**good, "step": 7, "column": 1, "other_column": 0})["tokens"]) == 3
    assert set(what_if({**good, **changes})) == {"error"}


def test_a_drawn_seed_is_kept_for_questions(sessions):
    """A what-if runs the search again: with a fresh seed it would answer about another one."""
    (run,) = sessions.start("me", [settings(mode="parallel sampling")])
    assert run.wait_until_over(30)
    assert run.settings_to_repeat.seed == run.result.seed


def test_random_starts_stops_and_departures_leave_nothing(sessions):
    rng = random.Random(1)
    streams = []
    for _ in range(60):
        visitor = f"v{rng.randrange(4)}"
        match rng.randrange(4):
            case 0:
                mode = rng.choice(["beam search", "parallel sampling", "greedy"])
                searches = [settings(mode=mode, max_new_tokens=rng.randint(2, 60))] * rng.choice([1, 2])
                streams.append(sessions.messages(sessions.start(visitor, searches)))
            case 1:
                sessions.stop(visitor)
            case 2:
                sessions.forget(visitor)
            case _ if streams:
                next(rng.choice(streams), None)
        if len(streams) > 5:
            streams.pop(rng.randrange(len(streams))).close()
        time.sleep(rng.random() * 0.01)
    for stream in streams:
        stream.close()
    wait_for(lambda: sessions.engine.num_waiting == 0)


def test_messages_hold_no_markup():
    """Gradio warns at every `<script` in a string it sends, and a template would run it."""
    assert "<" not in to_json({"text": "<script>alert(1)</script>"})
    assert json.loads(to_json({"text": "<b>"})) == {"text": "<b>"}
    assert json.loads(refusal("no"))["frames"][0]["message"] == "no"


def test_run_ids_cannot_be_guessed():
    ids = {Run(settings()).id for _ in range(1000)}
    assert len(ids) == 1000
    assert min(map(len, ids)) >= 16


def test_the_model_is_loaded_in_a_thread_that_ends(monkeypatch):
    """OpenMP's workers of a thread that lives on would put those of the engine thread to sleep at every operator."""
    loaders = []

    def load(*_arguments, **_options):
        loaders.append(threading.current_thread())
        return tiny_decoders().first

    monkeypatch.setattr("cowbeam.ui.decoders.Decoder.from_pretrained", load)
    decoders = load_decoders()
    (loader,) = loaders
    assert loader is not threading.current_thread()
    assert not loader.is_alive()
    decoders.close()
