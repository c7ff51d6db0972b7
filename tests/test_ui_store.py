"""The browser's replay of a trace, in a browser, on traces of real searches: what is drawn is what the engine had."""

import itertools
import json
import random
from pathlib import Path

import pytest

from cowbeam.decoder import BeamSearchParams, SamplingParams
from cowbeam.decoder.trace import TraceWriter
from cowbeam.ui.engine_thread import search_records
from cowbeam.ui.frontend import read_static
from cowbeam.ui.run import Run
from cowbeam.ui.settings import Settings
from fakes import random_prompt, tiny_decoder
from ui_server import running_browser, tiny_decoders

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page():
    with running_browser() as browser:
        page = browser.new_page()
        for name in ("store.js", "trace_file.js", "canvas.js", "clock.js", "memory.js"):
            page.add_script_tag(content=read_static(name))
        page.add_script_tag(path=Path(__file__).with_name("ui_replay.js"))
        yield page


def random_search(rng):
    if rng.random() < 0.4:
        params = SamplingParams(
            num_return_sequences=rng.randint(1, 9),
            max_new_tokens=rng.randint(2, 70),
            seed=rng.randrange(99),
            eos_token_id=rng.sample(range(67), rng.choice([0, 2])),
        )
    else:
        params = BeamSearchParams(
            num_beams=rng.randint(1, 9),
            max_new_tokens=rng.randint(2, 70),
            eos_token_id=rng.sample(range(67), rng.choice([0, 1, 5])),
        )
    return rng.choice([1, 4, 16]), random_prompt(rng, 1, 40), params


@pytest.mark.parametrize("seed", range(20))
def test_replay_of_a_random_search(page, seed):
    """Tables, sharers and texts at every step, jumped to in random order; totals are DecodeStats'."""
    block_size, prompt, params = random_search(random.Random(seed))
    decoder = tiny_decoder("llama", block_size)
    writer, records, wanted = TraceWriter(params.width), [], []
    for frame in decoder.stream(prompt, params):
        records.append(json.loads(json.dumps(writer.step(frame))))
        wanted.append(sorted(list(branch.block_table) for branch in frame.branches))
    start = {
        "width": params.width,
        "num_blocks": decoder.num_blocks,
        "block_size": block_size,
        "prompt_len": len(prompt),
        "bytes_per_token": decoder.kv_layout.per_token,
    }
    got = page.evaluate("replay", [start, records])
    assert got["refused"] == 0
    assert got["breaches"] == []
    for t, tables in got["tables"]:
        assert sorted(tables) == wanted[t - 1]
    stats = frame.result.stats
    assert got["cows"] == stats.cow_copies
    if any(wanted):
        assert got["peak"] == stats.peak_blocks


def test_a_breach_is_seen(page):
    """The check must be able to fail, also at a step that is never shown: one sharer too many."""
    breaches = page.evaluate("firstBreach")
    assert breaches == ["block 2: 2 sharers but 1 table entries at step 1"] * 2


def test_a_gap_is_refused_and_changes_nothing(page):
    outcome = page.evaluate("pushAfterGap")
    assert outcome == [False, 0, 0]


@pytest.fixture(scope="module")
def records():
    settings = Settings.from_values({"prompt": "abcdef", "width": 4, "max_new_tokens": 12, "chat": False})
    return list(search_records(tiny_decoders(), Run(settings)))


def parse(page, text):
    """The lists of records of a file, or the sentence that refuses it."""
    return page.evaluate("text => { try { return parseTraces(text); } catch (error) { return error.message; } }", text)


def test_a_saved_trace_is_read_again(page, records):
    saved = json.loads(json.dumps(records))
    assert parse(page, json.dumps({"records": records})) == [saved]
    assert parse(page, json.dumps(records)) == [saved]
    assert parse(page, page.evaluate("traceFile", [saved, saved])) == [saved, saved], "a comparison is two"


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "3", '{"records": 3}', '{"compared": [1]}', "[null]", '[{"type":"step"}]', '["start"]'],
)
def test_files_that_hold_no_trace_get_a_sentence(page, text):
    assert isinstance(parse(page, text), str)


def test_files_that_were_tampered_with_get_a_sentence(page, records):
    """A number from a file becomes an index or a size: replace any one by rubbish, and it is refused or harmless."""
    rng = random.Random(0)
    rubbish = [-1, 1e9, 0.5, None, "x", [], {}, True, 2**53]
    refused = 0
    for _ in range(300):
        broken = json.loads(json.dumps(records))
        target = rng.choice(broken[:-1])
        key = rng.choice([key for key in target if key != "settings"])
        while isinstance(target[key], list | dict) and target[key]:
            target = target[key]
            key = rng.choice(list(target)) if isinstance(target, dict) else rng.randrange(len(target))
        target[key] = rng.choice(rubbish)
        outcome = page.evaluate("readFile", json.dumps(broken))
        refused += outcome != "read"
        assert "undefined" not in outcome
        assert "is not" not in outcome, f"an exception of JavaScript, no sentence: {outcome}"
    assert refused > 150


def test_text_shows_what_it_holds(page):
    """Characters that hide or turn round what stands beside them are shown by their number."""
    shown = page.evaluate("t => visibleText(t)", "a\u202eb\u200bc\n<b>\t\u0000")
    assert shown == "a‹202e›b‹200b›c↵<b>⇥‹0›"
    assert page.evaluate("t => [...shorten(t, 3)].length", "\N{COW FACE}" * 9) == 3
    assert page.evaluate("['', ' ', ' the'].map(tokenLabel)") == ["·", "␣", "the"]


def test_labels_of_the_curves_keep_their_distance(page):
    placed = page.evaluate("spreadLabels", [5, 6, 7, 190])
    assert all(b - a >= 26 for a, b in itertools.pairwise(placed))
    assert placed[0] >= 12
    assert placed[-1] <= 194


def test_steps_that_came_together_are_shown_one_after_the_other(page):
    """A message a second must not show as a picture a second: its steps are shown until the next one is due."""
    assert page.evaluate("livePace", [[0, 1], [100, 10], [1100, 30]]) == [
        [0, 1, 1],  # [time, live step, newest step]
        [50, 1, 1],
        [100, 1, 10],
        [150, 5, 10],
        [200, 10, 10],
        [1000, 10, 10],
        [1100, 10, 30],
        [1600, 20, 30],
        [2100, 30, 30],
        [9000, 30, 30],
    ]
    assert page.evaluate("liveAfter", {"end": True}) == 30, "the end of a run is shown at once"
    assert page.evaluate("liveAfter", {"t": 25}) == 25, "a cursor that is further on does not go back"
