"""What the page does not do while a model computes on the same cores: each of these once cost the decoder time."""

import pytest

pytestmark = pytest.mark.browser

WATCH = """() => {
  const watched = window.watched = { branches: 0 };
  new MutationObserver(changes => { watched.branches += changes.length; })
    .observe(cowbeam.pane.output('branches'), { subtree: true, childList: true, characterData: true });
}"""
SHOWN = "Number(document.querySelector('[data-testid=branch-0] .score').textContent)"
BEST = "Math.max(...cowbeam.pane.state.scores.filter(score => score !== null))"
SIZES = """() => cowbeam.surfaces.every(({ element }) => {
  const { width, height } = element.getBoundingClientRect();
  const isAsLarge = (pixels, size) => pixels === Math.round(size * devicePixelRatio);
  return !width || isAsLarge(element.width, width) && isAsLarge(element.height, height); })"""
DONE = "!cowbeam.pane.state.live.some(node => node !== null)"


def test_what_is_not_in_view_waits_until_it_is(visitor):
    """Of the branches two pixels were in view, and every picture laid all of them out."""
    visitor.set_number("max_new_tokens", 200)
    visitor.generate()
    visitor.wait_for_step(2)
    height = int(visitor.eval("cowbeam.pane.output('branches').getBoundingClientRect().top")) + 2
    visitor.page.set_viewport_size({"width": 1560, "height": height})
    visitor.page.wait_for_function("!cowbeam.pane.inView.has('branches') && cowbeam.pane.inView.has('tree')")
    visitor.eval(WATCH)
    step = int(visitor.data("tail"))
    visitor.wait_for_step(step + 40)
    assert visitor.eval("cowbeam.pane.isLive"), "the run is too short for this test"
    assert visitor.eval("watched.branches") == 0
    visitor.eval("cowbeam.pane.output('branches').scrollIntoView()")
    visitor.page.wait_for_function(f"watched.branches > 0 && Math.abs({SHOWN} - {BEST}) < .006")
    visitor.page.click("#stop")
    visitor.wait_until_done()
    visitor.page.wait_for_function(f"Math.abs({SHOWN} - {BEST}) < .006 || {DONE}")


def test_no_message_copies_the_script(visitor):
    """Gradio clones a component's properties with every message: the script was one of them."""
    visitor.eval("""() => {
      const clone = structuredClone; window.longest = 0;
      window.structuredClone = (value, ...rest) => {
        if (typeof value === 'string') window.longest = Math.max(window.longest, value.length);
        return clone(value, ...rest);
      };
    }""")
    visitor.set_number("max_new_tokens", 12)
    visitor.generate()
    visitor.wait_until_done()
    assert visitor.eval("longest") < 50_000


def test_canvases_follow_their_own_size_and_no_other(visitor):
    """A line more above the picture made every canvas forget what it had drawn."""
    visitor.eval("cowbeam.clock.pause()")
    visitor.page.wait_for_timeout(1500)  # what had moved has come to rest
    drawn = visitor.eval("cowbeam.drawn")
    visitor.eval("cowbeam.note('a sentence that was not there')")
    visitor.page.wait_for_timeout(400)
    assert visitor.eval("cowbeam.drawn") == drawn
    for width in (1300, 700, 1560):
        visitor.page.set_viewport_size({"width": width, "height": 1120})
        visitor.page.wait_for_function(SIZES)
        assert visitor.eval("cowbeam.drawn") > drawn
        drawn = visitor.eval("cowbeam.drawn")
