"""The page on screens of every width: nothing cut, nothing wider than the screen, the form first on a phone."""

import pytest

from ui_server import Visitor

pytestmark = pytest.mark.browser

WIDTHS = [360, 430, 768, 1024, 1280, 1400, 1920]

CUT = """() => {
  const texts = '.tile, .tile *, .foot, .foot *, .chain span, .facts, .facts *, header *, .btns, .badge';
  return [...document.querySelectorAll(texts)]
    .filter(e => e.offsetParent && e.clientWidth && e.scrollWidth > e.clientWidth && !e.closest('select'))
    .map(e => `${e.className} ${e.dataset.o ?? ''}: ${e.textContent.slice(0, 40)}`); }"""

# What stands beside each other must not reach into each other; nor may anything leave the panel it is in.
LEAVES = """() => {
  const panels = ['.panel', '.tile', '.kv-time', '.kv-top'];
  return [...document.querySelectorAll(panels.map(panel => `${panel} *`))].filter(e => {
    const box = e.getBoundingClientRect(), panel = e.parentElement.closest(panels).getBoundingClientRect();
    const isOut = box.right > panel.right + .5 || box.left < panel.left - .5;
    return isOut && e.offsetParent && !e.closest('ol.branches, ol.log');
  }).map(e => `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`); }"""

SCROLLERS = """() => [...document.querySelectorAll('body, body *')].filter(e =>
  /auto|scroll/.test(getComputedStyle(e).overflowY) && e.scrollHeight > e.clientHeight + 4 && !e.matches('ol, textarea')
).map(e => e.className)"""

LONG_TEXTS = {
    "used": "4,096", "usedof": "of 4,096", "usedsub": "1,023 MiB · peak 4,096", "copiessub": "1,023 MiB with copies",
    "cows": "12,345", "cowsnow": "16 now", "cowssub": "1,023 MiB carried over", "atoken": "“antidisestablish…”",
    "atokensub": "b15, position 19,999 (prompt)",
}  # fmt: skip
TEXTS = ["ink", "muted", "accent", "cow", "free", "fork", "gold", "bad", "dead"]
SCALE, INKS = [f"share{i}" for i in range(6)], [f"ink{i}" for i in range(6)]
PUT = "texts => { for (const [name, text] of Object.entries(texts)) cowbeam.pane.output(name).textContent = text; }"


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_no_text_is_cut_at_any_width(demo, browser, scheme):
    """Tiles and the pool's legend ended in "…" on laptops of 1280 to 1400 pixels."""
    visitor = Visitor(browser, demo[0], color_scheme=scheme, reduced_motion="reduce")
    for width in WIDTHS:
        visitor.page.set_viewport_size({"width": width, "height": 900})
        for step in (1, 62, 96):
            visitor.eval("t => cowbeam.clock.go(t)", step)
            assert visitor.eval(CUT) == [], f"{width} px, step {step}"
            assert visitor.eval(LEAVES) == [], f"{width} px, step {step}"
        assert visitor.eval("document.documentElement.scrollWidth <= innerWidth"), f"{width} px"
    visitor.close()


def test_long_numbers_are_not_cut(visitor):
    """A pool of thousands of blocks, gibibytes of copies: text that wraps, not text that ends."""
    for width in WIDTHS:
        visitor.page.set_viewport_size({"width": width, "height": 900})
        visitor.eval("cowbeam.clock.go(62)")
        visitor.eval(PUT, LONG_TEXTS)
        assert visitor.eval(CUT) == [], f"{width} px"


def luminance(colour):
    """Relative luminance of ``#rrggbb`` (WCAG 2.2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    """WCAG's ratio of two colours."""
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_small_text_can_be_read(demo, browser, scheme):
    """4.5 : 1 for every colour that text has; the scale of sharing is monotone, so it is read without colours too."""
    visitor = Visitor(browser, demo[0], color_scheme=scheme)
    get = {
        name: visitor.eval("n => cowbeam.palette.get(n)", name) for name in (*TEXTS, *SCALE, *INKS, "panel", "ground")
    }
    for name in TEXTS:
        assert min(contrast(get[name], get["panel"]), contrast(get[name], get["ground"])) >= 4.5, name
    for ink, share in zip(INKS, SCALE, strict=True):
        assert contrast(get[ink], get[share]) >= 4.5, share
    steps = [luminance(get[share]) for share in SCALE]
    assert steps == sorted(steps, reverse=scheme == "light")
    visitor.close()


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_a_phone_shows_the_form_first_and_scrolls_as_one_page(demo, browser, scheme):
    """Generate lay four screens down, below the picture."""
    size = {"width": 390, "height": 844}
    phone = {"is_mobile": True, "has_touch": True, "color_scheme": scheme, "reduced_motion": "reduce"}
    visitor = Visitor(browser, demo[0], viewport=size, **phone)
    page = visitor.page
    prompt, generate, settings = (page.locator(q).bounding_box() for q in ("#prompt", "#generate", "#settings"))
    picture = page.locator(".kv").bounding_box()
    assert prompt["y"] < generate["y"] < settings["y"] < picture["y"] < size["height"], "and the picture is in sight"
    assert not page.locator("#mode").is_visible(), "the settings are folded"
    page.click("#settings > .label-wrap")
    page.locator("#mode").wait_for()
    page.click("#settings > .label-wrap")
    assert visitor.eval(SCROLLERS) == [], "one page scrolls, nothing inside it"
    swipe(visitor, page.viewport_size["height"] - 100)
    assert visitor.eval("scrollY") > 100
    visitor.eval("scrollTo(0, 0)")
    page.click("#settings > .label-wrap")
    visitor.set_number("max_new_tokens", 4)
    page.click("#settings > .label-wrap")
    visitor.generate()
    visitor.wait_until_done()
    assert abs(page.locator(".kv").bounding_box()["y"]) < 50, "Generate shows the run"
    assert visitor.eval("cowbeam.pane.store.start.steps") == 4, "folded settings count too"
    assert visitor.eval("document.documentElement.scrollWidth <= innerWidth")
    visitor.close()


def swipe(visitor, start):
    """A finger that goes up from ``start``."""
    touch = visitor.context.new_cdp_session(visitor.page)
    for kind, y in [("touchStart", start), *(("touchMove", start - 20 * i) for i in range(1, 16)), ("touchEnd", None)]:
        points = [] if y is None else [{"x": 195, "y": y}]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        visitor.page.wait_for_timeout(16)
    visitor.page.wait_for_timeout(300)


def test_reduced_motion_draws_a_step_once(demo, browser):
    visitor = Visitor(browser, demo[0], reduced_motion="reduce")
    assert visitor.data("playing") == "0"
    visitor.page.wait_for_timeout(300)
    before = visitor.eval("cowbeam.drawn")
    visitor.eval("cowbeam.clock.go(40)")
    visitor.page.wait_for_timeout(500)
    assert visitor.eval("cowbeam.drawn") - before <= 2
    visitor.close()


def test_a_page_on_which_nothing_moves_asks_for_no_frames(visitor):
    """Gradio's loader left a loop of sixty frames a second behind, on the cores that decode."""
    visitor.eval("cowbeam.clock.pause()")
    asked = """async () => {
      const frame = () => { const id = requestAnimationFrame(() => {}); cancelAnimationFrame(id); return id; };
      const before = frame();
      await new Promise(done => setTimeout(done, 500));
      return frame() - before - 1;
    }"""
    seen = []
    while len(seen) < 20 and 0 not in seen:  # Gradio's own controls glide into place for some seconds
        seen.append(visitor.eval(asked))
    assert seen[-1] == 0, seen


def test_a_model_on_a_gpu_leaves_the_page_more_time_for_pictures(visitor):
    """Gaps between pictures of 8 ms each, in ms."""
    visitor.eval("cowbeam.clock.pause()")
    gaps = visitor.eval("""() => ['cpu', 'cuda'].map(device => {
      cowbeam.pane.store.start.device = device;
      for (let i = 0; i < 20; i++) { cowbeam.drawnAt = performance.now() - 8; cowbeam.takeTime(); }
      return cowbeam.gap; })""")
    assert gaps[0] > 200
    assert gaps[1] < 60


def test_live_pictures_are_few_and_a_pause_shows_all_of_its_step(visitor):
    """The page draws beside the model; what it left out while steps passed belongs to the step at which one stops."""
    visitor.set_number("max_new_tokens", 120)
    visitor.generate()
    visitor.wait_for_step(2)
    drawn, begun = visitor.eval("[cowbeam.drawn, performance.now()]")
    visitor.wait_for_step(40)
    drawn_now, now = visitor.eval("[cowbeam.drawn, performance.now()]")
    assert 2 <= drawn_now - drawn <= 3 + (now - begun) / 33
    position = "+document.querySelector('[data-o=atokensub]').textContent.split('position ')[1]"
    wanted = "cowbeam.pane.state.len[cowbeam.pane.store.best(cowbeam.pane.state)] - 1"
    visitor.press("Pause")
    assert visitor.eval(f"[{position}, cowbeam.pane.isPassing]") == [visitor.eval(wanted), False]
    score = "+document.querySelector('[data-testid=branch-0] .score').textContent"
    best = "Math.max(...cowbeam.pane.state.scores.filter(score => score !== null))"
    visitor.page.wait_for_function(f"Math.abs({score} - {best}) < .006", timeout=2000)  # out of view: a little later
    visitor.press("live")
    visitor.page.click("#stop")
    visitor.wait_until_done()
    assert visitor.eval(position) == visitor.eval(wanted)
