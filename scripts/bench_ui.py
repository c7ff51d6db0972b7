"""How fast the demo draws, and what it costs the decoder: python scripts/bench_ui.py

Two measurements, both in headless Chromium on the real page.

drawing   16 beams × 256 steps of the default model in a pool of 4,096 blocks, decoded once, then streamed to the page
          at 20 steps a second: time to draw a frame, tasks of the browser's main thread over 50 ms (from Chromium's
          own trace), jumps of the cursor to random steps. Correct first: the page's invariant at every step.
cost      500 steps of 8 beams, with the demo attached and a browser watching, against `Decoder.generate` alone, in
          turn, in the same thread, after a short search of each that is not counted. A machine's speed drifts: each
          watched search is held against the mean of the two alone before and after it, and the median of the rounds
          is told beside every one of them. How many pictures were drawn is told too: a page that draws nothing costs
          nothing; and what a search takes before there is a server or a page.
"""

import argparse
import dataclasses
import itertools
import json
import socket
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bench_header import print_header
from playwright.sync_api import Page, sync_playwright

from cowbeam.ui.app import build_app, launch
from cowbeam.ui.decoders import Decoders, load_decoders
from cowbeam.ui.engine_thread import EngineThread, search_records
from cowbeam.ui.run import Run
from cowbeam.ui.session import Sessions
from cowbeam.ui.settings import Settings

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
PROMPT = "Tell a long story about a lighthouse keeper who finds a letter in a bottle."
DRAWN = Settings(prompt=PROMPT, width=16, block_size=4, max_new_tokens=256, num_blocks=4096)
COSTED = Settings(prompt=PROMPT, width=8, block_size=16, max_new_tokens=500, length_penalty=4, early_stopping="never")
STEPS_A_SECOND = 20
JUMPS = 200
LONG_TASK_MS = 50

JUMP = """async jumps => {
  const { clock, pane } = cowbeam, times = [];
  for (let i = 0; i < jumps; i++) {
    const t = 1 + Math.floor(Math.random() * pane.store.last), begun = performance.now();
    clock.go(t);
    for (const shown of cowbeam.shown) shown.draw();
    times.push(performance.now() - begun);
    await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  }
  return times;
}"""
BREACHES = """() => { const { store } = cowbeam.pane; let n = 0;
  for (let t = 1; t <= store.last; t++) if (store.check(store.at(t))) n++; return n; }"""


@contextmanager
def open_page(engine: EngineThread) -> Iterator[tuple[Page, Sessions, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sessions = Sessions(engine)
    app = build_app(sessions)
    launch(app, host="127.0.0.1", port=port, block=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        page = browser.new_page(viewport={"width": 1560, "height": 1120}, color_scheme="dark")
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("[data-testid=scope][data-run=example]")
        page.evaluate("cowbeam.clock.pause()")
        yield page, sessions, browser
        browser.close()
    app.close(verbose=False)


def start(page: Page, settings: Settings) -> None:
    """Let the page ask for the run itself, as its lessons do."""
    before = page.get_attribute("[data-testid=scope]", "data-run")
    page.evaluate("settings => cowbeam.trigger('rerun', settings)", settings.as_values())
    page.wait_for_function(
        "before => cowbeam.root.dataset.run !== before && +cowbeam.root.dataset.tail >= 1", arg=before
    )


def wait_until_done(page: Page) -> None:
    page.wait_for_selector("[data-testid=scope][data-done]", timeout=600_000)


def main_thread_tasks(trace: Path) -> list[float]:
    """Milliseconds of each task of the page's main thread, from Chromium's trace."""
    events = json.loads(trace.read_text())["traceEvents"]
    names = (e for e in events if e.get("name") == "thread_name" and e["args"]["name"] == "CrRendererMain")
    threads = {(e["pid"], e["tid"]) for e in names}
    tasks = (e for e in events if e.get("name", "").endswith("RunTask") and (e["pid"], e["tid"]) in threads)
    return [e.get("dur", 0) / 1e3 for e in tasks]


def measure_drawing(decoders: Decoders) -> dict[str, Any]:
    with ThreadPoolExecutor(max_workers=1) as recorder:
        records = recorder.submit(lambda: list(search_records(decoders, Run(DRAWN)))).result()

    def replay(_decoders: Decoders, run: Run) -> Iterator[dict[str, Any]]:
        begun = time.perf_counter()
        for number, record in enumerate(records):
            time.sleep(max(0.0, begun + number / STEPS_A_SECOND - time.perf_counter()))
            if run.stop.is_set():
                return
            yield record

    trace = Path(__file__).with_name("bench_ui_trace.json")
    engine = EngineThread(decoders, replay)
    with open_page(engine) as (page, _, browser):
        start(page, DRAWN)
        page.evaluate("Object.assign(cowbeam, { drawn: 0, drawMs: 0, slowest: 0 })")
        browser.start_tracing(page=page, path=trace, categories=["disabled-by-default-lighthouse"])
        wait_until_done(page)
        browser.stop_tracing()
        drawn, total, slowest = page.evaluate("[cowbeam.drawn, cowbeam.drawMs, cowbeam.slowest]")
        tasks = main_thread_tasks(trace)
        assert len(tasks) > 200, "the trace holds the main thread's tasks"
        jumps = sorted(page.evaluate(JUMP, JUMPS))
        result = {
            "steps": len(records) - 2,
            "breaches": page.evaluate(BREACHES),
            "frames": drawn,
            "draw_mean_ms": round(total / drawn, 2),
            "draw_slowest_ms": round(slowest, 1),
            "tasks": len(tasks),
            "longest_task_ms": round(max(tasks), 1),
            "tasks_over_50_ms": sum(t > LONG_TASK_MS for t in tasks),
            "jump_median_ms": round(statistics.median(jumps), 2),
            "jump_p95_ms": round(jumps[int(JUMPS * 0.95)], 2),
        }
    trace.unlink()
    return result


def generate(decoders: Decoders, settings: Settings) -> float:
    """Milliseconds a step of the search that nobody watches."""
    token_ids = decoders.token_ids(settings)
    decoder = decoders.of(COSTED, token_ids)
    begun = time.perf_counter()
    steps = decoder.generate(token_ids, settings.params()).stats.steps
    return (time.perf_counter() - begun) / steps * 1e3


def watch(page: Page, sessions: Sessions, settings: Settings) -> float:
    """Milliseconds a step of the same search with the page watching it."""
    page.evaluate("delete cowbeam.root.dataset.done")
    start(page, settings)
    run = sessions.find(page.get_attribute("[data-testid=scope]", "data-run"))
    run.wait_until_over(600)  # here: asking the page twice a second whether it is done is work that no visitor makes
    wait_until_done(page)
    assert run.result is not None, "the watched run finished"
    assert run.result.stats.steps == page.evaluate("cowbeam.pane.store.last"), "and it is the one on the page"
    return run.result.stats.seconds / run.result.stats.steps * 1e3


def measure_cost(decoders: Decoders, rounds: int) -> dict[str, Any]:
    attached: list[float] = []
    pictures: list[float] = []
    engine = EngineThread(decoders)

    def measure_alone(settings: Settings = COSTED) -> float:
        return engine.ask(lambda decoders: generate(decoders, settings)).result()

    warm_up = dataclasses.replace(COSTED, max_new_tokens=20)
    measure_alone(warm_up)
    without_page = measure_alone()
    with open_page(engine) as (page, sessions, _):
        watch(page, sessions, warm_up)
        alone = [measure_alone()]
        for _ in range(rounds):
            page.evaluate("cowbeam.drawn = 0")
            attached.append(watch(page, sessions, COSTED))
            seconds = attached[-1] * page.evaluate("cowbeam.pane.store.last") / 1e3
            pictures.append(page.evaluate("cowbeam.drawn") / seconds)
            assert page.evaluate(BREACHES) == 0
            alone.append(measure_alone())
    beside = [statistics.mean(pair) for pair in itertools.pairwise(alone)]
    each = [watched / unwatched - 1 for watched, unwatched in zip(attached, beside, strict=True)]
    return {
        "steps": COSTED.max_new_tokens,
        "torch_threads": torch.get_num_threads(),
        "without_page_ms": round(without_page, 2),
        "alone_ms": [round(t, 2) for t in alone],
        "attached_ms": [round(t, 2) for t in attached],
        "pictures_a_second": [round(p, 1) for p in pictures],
        "more_each": [round(more, 3) for more in each],
        "more": round(statistics.median(each), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["drawing", "cost", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=3, help="of `cost` (3)")
    options = parser.parse_args()
    results: dict[str, Any] = dict(print_header("the demo: drawing, and what it costs the decoder"))
    decoders = load_decoders()
    if options.what != "cost":
        results["drawing"] = measure_drawing(decoders)
        print("drawing", results["drawing"], flush=True)
    if options.what != "drawing":
        results["cost"] = measure_cost(decoders, options.rounds)
        print("cost   ", results["cost"], flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
