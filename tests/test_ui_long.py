"""The demo over many runs and rough handling: a real browser, a real decoder, the default model."""

import random
import time

import pytest

from cowbeam.ui.settings import MODES
from ui_server import SCOPE, Visitor

pytestmark = [pytest.mark.browser, pytest.mark.long]


def random_settings(rng):
    return {
        "prompt": rng.choice(["Name a bird.", "Why is the sky blue?", "Write a haiku about rain.", "Count to ten."]),
        "mode": rng.choice(MODES),
        "width": rng.randint(2, 9),
        "block_size": rng.choice([1, 2, 4, 8, 16, 64]),
        "max_new_tokens": rng.randint(2, 40),
        "temperature": rng.choice([0.7, 1.0, 1.5]),
        "early_stopping": rng.choice(["false", "true", "never"]),
        "chat": rng.random() < 0.7,
        "seed": rng.randrange(1000),
    }


def run(visitor, settings):
    """Let the page ask for a run with these settings."""
    before = visitor.data("run")
    visitor.eval("settings => cowbeam.trigger('rerun', settings)", settings)
    visitor.page.wait_for_function(f"b => document.querySelector('{SCOPE}').dataset.run !== b", arg=before)
    visitor.wait_until_done()


@pytest.mark.parametrize("seed", range(20))
def test_random_runs_obey_the_invariant_and_equal_the_stats(visitor, demo, seed):
    """Sharers are table entries at every step; copies, peak and steps on the page are those of DecodeStats."""
    run(visitor, random_settings(random.Random(seed)))
    assert visitor.breaches() == []
    assert visitor.data("stats") == "ok"
    result = demo[1].find(visitor.data("run")).result
    shown = visitor.eval("cowbeam.pane.store.stats.at(-1)")
    assert (shown["cowTotal"], shown["peak"]) == (result.stats.cow_copies, result.stats.peak_blocks)
    assert visitor.eval("cowbeam.pane.store.last") == result.stats.steps
    assert_tiles_are(visitor, result.stats)
    texts = [completion.text.rstrip("\N{REPLACEMENT CHARACTER}") for completion in result.completions]
    ends = visitor.eval(
        "() => { const { store } = cowbeam.pane;"
        " return store.at(store.last).finished.map(end => store.text(store.path(end[4]))); }"
    )
    assert [text.rstrip("\N{REPLACEMENT CHARACTER}") for text in ends] == texts


def assert_tiles_are(visitor, stats):
    """What is written on the page, not what its script holds."""
    text = lambda name: visitor.page.locator(f"[data-o={name}]").first.inner_text()  # noqa: E731
    visitor.eval("cowbeam.clock.go(cowbeam.clock.last)")
    assert [text("step"), text("cows")] == [str(stats.steps), f"{stats.cow_copies:,}"]
    assert text("usedsub").endswith(f"peak {stats.peak_blocks:,}")
    assert f"prompt of {stats.prefill_tokens:,} token" in text("facts")
    visitor.eval(
        "peak => cowbeam.clock.go(1 + cowbeam.pane.store.stats.findIndex(s => s.used === peak))", stats.peak_blocks
    )
    assert text("used") == f"{stats.peak_blocks:,}"
    assert (
        visitor.eval("cowbeam.pane.frame.mem.used")
        == stats.peak_memory.used
        == stats.peak_blocks * stats.bytes_per_block
    )


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_is_what_transformers_gives(visitor, mode):
    run(
        visitor,
        {"prompt": "Name a river.", "mode": mode, "width": 4, "max_new_tokens": 12, "seed": 5, "temperature": 0.9},
    )
    visitor.press("compare with transformers")
    visitor.page.wait_for_function("() => document.querySelector('[data-o=check]').classList.contains('good')")


def test_random_starts_stops_reloads_and_closed_tabs_leave_every_block_free(demo, browser):
    url, sessions = demo
    rng, visitors = random.Random(3), []
    for _ in range(50):
        if not visitors or (len(visitors) < 3 and rng.random() < 0.3):
            visitors.append(Visitor(browser, url))
        visitor = rng.choice(visitors)
        match rng.choice(["start", "start", "stop", "reload", "close", "wait"]):
            case "start":
                visitor.page.click("#generate")
            case "stop":
                visitor.page.click("#stop")
            case "reload":
                visitor.reload()
            case "close":
                visitors.remove(visitor)
                visitor.close()
            case "wait":
                visitor.page.wait_for_timeout(rng.randrange(400))
        assert visitor.errors == []
    for visitor in visitors:
        visitor.close()
    deadline = time.monotonic() + 60
    while sessions.engine.num_waiting and time.monotonic() < deadline:
        time.sleep(0.1)  # a click may be heard behind its tab's end: its run begins, and is stopped
    assert sessions.engine.num_waiting == 0
    live = sessions.ask(lambda decoders: (decoders.num_live_blocks, [d.check_integrity() for d in decoders.all]))
    assert live.result(60)[0] == 0


def test_two_thousand_emojis_are_text(visitor):
    run(visitor, {"prompt": "\N{COW FACE}" * 2000, "width": 2, "max_new_tokens": 2})
    assert visitor.eval("cowbeam.pane.store.start.prompt_len") > 2000
    assert visitor.breaches() == []
    assert visitor.eval("document.documentElement.scrollWidth <= innerWidth")


def test_labels_do_not_overlap_at_16_branches(visitor):
    """Every word of the tree, at every tenth step, keeps clear of the others; so do the branches' rows."""
    run(visitor, {"prompt": "Tell me about the sea.", "width": 16, "block_size": 4, "max_new_tokens": 60})
    overlaps = visitor.eval(
        """() => { const found = [], { pane, clock } = cowbeam, { tree, tables } = pane.panels;
          for (let t = 1; t < pane.store.last; t += 10) {
            clock.go(t); for (let i = 0; i < 40; i++) tree.draw(); tables.draw();
            for (const a of tree.labels) for (const b of tree.labels)
              if (a !== b && a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3]) found.push(['tree', t]);
            if (tables.geometry.row < 12) found.push(['rows', t]);
            const live = tree.placed.filter(item => item.alive && !item.children.length && !item.node.finish);
            const tips = live.map(item => item.y).sort((a, b) => a - b);
            for (let i = 1; i < tips.length; i++) if (tips[i] - tips[i - 1] < 11) found.push(['tips', t]);
          } return found; }"""
    )
    assert overlaps == []
