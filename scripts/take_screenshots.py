"""Takes the pictures under docs/ from the real page: python scripts/take_screenshots.py [name …]

Each mode in dark and light, the comparison, the lessons, a phone. Needs chromium; the runs are real.
"""

import argparse
import io
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from cowbeam.ui.answers import open_sessions
from cowbeam.ui.app import build_app, launch
from cowbeam.ui.examples import EXAMPLES

DOCS = Path(__file__).resolve().parent.parent / "docs"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
DESKTOP, PHONE = {"width": 1560, "height": 1120}, {"width": 400, "height": 860}
STILL_AT = 62  # the step of the recorded run that is shown


def run(page: Page, label: str, step: int) -> None:
    """An example of the form, run for real, at a step."""
    values = next(example.values for example in EXAMPLES if example.label == label)
    page.get_by_text(label, exact=True).click()
    page.wait_for_function("p => document.querySelector('#prompt textarea').value === p", arg=values["prompt"])
    page.wait_for_timeout(500)  # the other controls follow
    page.click("#generate")
    page.wait_for_function("() => cowbeam.root.dataset.run !== 'example' && cowbeam.root.dataset.done")
    page.evaluate("t => cowbeam.clock.go(Math.min(t, cowbeam.pane.store.lastWithBranches))", step)


def compare(page: Page) -> None:
    page.get_by_label("Compare on one clock with", exact=True).click()
    page.get_by_role("option", name="parallel sampling", exact=True).click()
    page.fill("#max_new_tokens input[type=number]", "40")
    page.click("#generate")
    page.wait_for_function("() => cowbeam.root.dataset.run !== 'example' && cowbeam.root.dataset.done")


def recorded(page: Page) -> None:
    page.evaluate("t => cowbeam.clock.go(t)", STILL_AT)


def tour(page: Page) -> None:
    page.click("[data-b=tour]")
    page.wait_for_selector("[data-caption='1']")
    page.click("[data-b=lessonnext]")


def budget(page: Page) -> None:
    recorded(page)
    page.click("[data-b=budget]")


def what_if(page: Page) -> None:
    recorded(page)
    page.click("[data-b=whatif]")
    page.get_by_test_id("corrupt").click()
    page.wait_for_selector("[data-testid=integrity]", timeout=120_000)


Picture = tuple[Callable[[Page], None], dict[str, int], tuple[str, ...]]
BOTH = ("dark", "light")
PICTURES: dict[str, Picture] = {
    "beam-search": (recorded, DESKTOP, BOTH),
    "sixteen-beams": (lambda page: run(page, "Many short beams", 40), DESKTOP, BOTH),
    "long-prompt": (lambda page: run(page, "A long shared prompt", 40), DESKTOP, BOTH),
    "parallel-sampling": (lambda page: run(page, "Samples that part at once", 24), DESKTOP, BOTH),
    "greedy": (lambda page: run(page, "One greedy branch", 30), DESKTOP, BOTH),
    "beam-sampling": (lambda page: run(page, "Beam sampling", 40), DESKTOP, BOTH),
    "comparison": (compare, DESKTOP, BOTH),
    "tour": (tour, DESKTOP, BOTH),
    "out-of-memory": (budget, DESKTOP, BOTH),
    "what-if": (what_if, DESKTOP, BOTH),
    "phone": (recorded, PHONE, BOTH),
}


@contextmanager
def running_page() -> Iterator[tuple[Any, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sessions = open_sessions()
    app = build_app(sessions)
    launch(app, host="127.0.0.1", port=port, block=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        yield browser, f"http://127.0.0.1:{port}/"
        browser.close()
    app.close(verbose=False)
    sessions.close()


def take(browser: Any, url: str, name: str) -> None:
    prepare, size, schemes = PICTURES[name]
    for scheme in schemes:
        page = browser.new_page(viewport=size, color_scheme=scheme, reduced_motion="reduce")
        page.set_default_timeout(120_000)
        page.goto(url)
        page.wait_for_selector("[data-testid=scope][data-run=example]")
        prepare(page)
        page.wait_for_timeout(500)
        shot = Image.open(io.BytesIO(page.screenshot(full_page=True)))
        target = DOCS / f"{name}-{scheme}.png"
        shot.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
            target, optimize=True
        )
        print(f"{target.name}: {shot.size[0]} × {shot.size[1]}, {target.stat().st_size:,} bytes", flush=True)
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(PICTURES), metavar="name", help=", ".join(PICTURES))
    DOCS.mkdir(exist_ok=True)
    names = parser.parse_args().names
    with running_page() as (browser, url):
        for name in names:
            take(browser, url, name)


if __name__ == "__main__":
    main()
