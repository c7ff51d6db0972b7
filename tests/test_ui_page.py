"""The demo as a visitor sees it: a real browser on a real decoder with the default model."""

import json

import pytest
from PIL import Image
from playwright.sync_api import expect

from ui_server import SCOPE, Visitor

pytestmark = pytest.mark.browser


def test_first_paint_is_a_recorded_run_that_can_be_walked_through(visitor):
    """No click is needed to see something, and every step of it obeys the invariant."""
    assert int(visitor.data("tail")) > 60
    assert visitor.data("playing") == "1"
    visitor.press("Pause")
    visitor.press("First step")
    assert visitor.data("step") == "1"
    visitor.press("Next copy-on-write")
    step = int(visitor.data("step"))
    assert visitor.eval("cowbeam.pane.store.stats[cowbeam.clock.t - 1].cow") > 0
    visitor.page.get_by_role("slider", name="Decode step").focus()
    visitor.page.keyboard.press("Shift+ArrowRight")
    assert int(visitor.data("step")) == step + 10
    assert visitor.breaches() == []
    assert visitor.data("stats") == "ok", "the page's own counts are DecodeStats'"


def test_a_run_of_ones_own_live_scrubbed_checked_exported_and_read_again(visitor, demo, tmp_path):
    page = visitor.page
    page.fill("#prompt textarea", "List three birds.")
    visitor.set_number("max_new_tokens", 24)
    visitor.set_number("width", 4)
    visitor.eval(
        """() => { window.seen = []; new MutationObserver(() => {
          const { pane, root } = cowbeam; seen.push([root.classList.contains('stale'), pane.store.last]); })
            .observe(cowbeam.root, { attributes: true, attributeFilter: ['class'] }); }"""
    )
    visitor.generate()
    visitor.wait_for_step(6)
    assert [step > 0 for is_stale, step in visitor.eval("seen") if not is_stale] == [True], "not the last run's picture"
    assert [True, 0] in visitor.eval("seen"), "while the prompt is computed"
    page.get_by_role("slider", name="Decode step").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    visitor.wait_for_step(20)
    assert visitor.data("step") == "2", "a cursor that was moved must not follow the run"
    page.keyboard.press("End")
    visitor.wait_until_done()
    assert visitor.data("invariant") == "ok"
    assert visitor.breaches() == []
    assert visitor.data("stats") == "ok"
    visitor.press("compare with transformers")
    page.wait_for_function("() => document.querySelector('[data-o=check]').textContent.startsWith('same tokens')")
    with page.expect_download() as download:
        visitor.press("Export")
    saved = tmp_path / "trace.json"
    download.value.save_as(saved)
    records = json.loads(saved.read_text())["records"]
    assert [records[0]["type"], records[-1]["type"]] == ["start", "end"]
    assert demo[1].engine.decoders.num_live_blocks == 0
    kept = visitor.eval("[JSON.stringify({ ...localStorage, ...sessionStorage }), document.cookie].join()")
    assert "birds" not in kept, "nothing of a run is kept in the browser"


def test_a_trace_from_a_file_says_what_works_on_it(visitor, tmp_path):
    """There is no decoder behind it: a visitor was told to press Generate, which runs the form and not this trace."""
    page, note = visitor.page, "[data-o=note]"
    saved, broken = tmp_path / "trace.json", tmp_path / "broken.json"
    saved.write_text(json.dumps({"records": visitor.eval("cowbeam.pane.store.records()")}))
    broken.write_text("{")
    page.set_input_files("[data-o=file]", broken)
    page.wait_for_selector("text=this file is no JSON")
    page.set_input_files("[data-o=file]", saved)
    page.wait_for_selector(f"{SCOPE}[data-run=imported-1]")
    assert page.inner_text(note).startswith("Opened trace.json: replay, addresses, memory and export work")
    assert visitor.breaches() == []
    visitor.press("compare with transformers")
    assert "this trace came from a file" in page.inner_text(note)
    visitor.press("What if?")
    assert "there is no decoder behind it to ask" in page.inner_text("[data-o=lessontext]")
    page.locator("[data-o=lessonbody]").get_by_role("button", name="run its settings here").click()
    page.wait_for_function("() => cowbeam.pane.store.start.settings.width === 8 && !cowbeam.pane.isImported")
    page.click("#stop")
    visitor.wait_until_done()


def test_keys_do_what_buttons_do(visitor):
    visitor.page.locator(SCOPE).focus()
    press, at = visitor.page.keyboard.press, lambda: int(visitor.data("step"))
    press("Home")
    assert at() == 1
    press("c")
    first = at()
    press("c")
    assert at() > first
    press("Shift+C")
    assert at() == first
    press("ArrowRight")
    press("Shift+ArrowRight")
    assert at() == first + 11
    for key, button in [("f", "fit"), ("l", "log")]:
        press(key)
        assert visitor.page.locator(f"[data-b={button}]").first.get_attribute("aria-pressed") == "true"
    for key, lesson in [("m", "budget"), ("w", "whatif"), ("t", "tour")]:
        press(key)
        visitor.page.wait_for_selector(f"{SCOPE}[data-lesson={lesson}]")
    press("Escape")
    assert visitor.data("lesson") is None
    panel = visitor.eval("cowbeam.palette.get('panel')")
    press("d")
    visitor.page.wait_for_function("dark => cowbeam.palette.get('panel') !== dark", arg=panel)
    press("d")
    press(" ")
    assert visitor.data("playing") == "1"
    press("End")
    assert at() == visitor.eval("cowbeam.pane.store.lastWithBranches")
    visitor.page.focus("#prompt textarea")
    press("Home")
    assert at() > 1, "keys in a text field are the field's"


def test_all_that_can_be_reached_has_a_name(visitor):
    """For a screen reader: every control, and every canvas, which is nothing but a picture to it."""
    visitor.press("What if?")
    cdp = visitor.context.new_cdp_session(visitor.page)
    scope = cdp.send("DOM.querySelector", {"nodeId": cdp.send("DOM.getDocument")["root"]["nodeId"], "selector": SCOPE})
    nodes = cdp.send("Accessibility.queryAXTree", {"nodeId": scope["nodeId"]})["nodes"]
    roles = ("button", "combobox", "slider", "spinbutton", "image", "region", "list")
    named = [(node["role"]["value"], node.get("name", {}).get("value")) for node in nodes if not node["ignored"]]
    named = [(role, name) for role, name in named if role in roles]
    assert [pair for pair in named if not pair[1]] == []
    for role, least in [("button", 20), ("combobox", 7), ("slider", 1), ("spinbutton", 1), ("image", 5)]:
        assert sum(pair[0] == role for pair in named) >= least, role


def test_the_view_is_saved_as_a_picture_and_the_settings_as_a_link(visitor, tmp_path):
    visitor.eval("cowbeam.clock.go(40)")
    with visitor.page.expect_download() as download:
        visitor.press("PNG")
    saved = tmp_path / download.value.suggested_filename
    download.value.save_as(saved)
    assert saved.name == "cowbeam-step-40.png"
    with Image.open(saved) as picture:
        assert picture.width > 2000
        assert len(set(picture.convert("RGB").resize((200, 200)).getdata())) > 500, "it is not blank"
    visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visitor.press("Link")
    visitor.page.wait_for_selector("text=a link to these settings is in the clipboard")
    link = visitor.eval("navigator.clipboard.readText()")
    assert "max_new_tokens=96" in link
    again = Visitor(visitor.context.browser, link)
    expect(again.page.locator("#max_new_tokens input[type=number]")).to_have_value("96")
    again.close()


def test_a_lost_message_is_fetched_again(visitor):
    """Messages can be merged or dropped on their way: steps number themselves, so the gap is seen."""
    visitor.set_number("max_new_tokens", 12)
    visitor.set_number("width", 3)
    visitor.eval(
        """() => { const { feed } = cowbeam, receive = feed.receive.bind(feed); let n = 0;
          const isLost = message => message.frames.some(frame => frame.type === 'step') && ++n === 2;
          feed.receive = message => { if (!isLost(message)) receive(message); }; }"""
    )
    visitor.generate()
    visitor.wait_until_done()
    visitor.page.wait_for_selector(f"{SCOPE}[data-fetched]")
    assert visitor.eval("cowbeam.pane.store.frames.every((frame, i) => frame.t === i + 1)")
    assert visitor.breaches() == []


def compared(visitor, steps=16):
    """Four beams against four samples, started from the form."""
    visitor.set_number("max_new_tokens", steps)
    visitor.set_number("width", 4)
    visitor.choose("Compare on one clock with", "parallel sampling")
    visitor.generate()


def shown_modes(visitor):
    return visitor.eval("cowbeam.shown.map(pane => pane.store.start.mode)")


def test_two_searches_on_one_clock_linked_saved_and_read_again(visitor, tmp_path):
    """A link led to the first search alone, and a file held nothing of the second."""
    both = ["beam search", "parallel sampling"]
    compared(visitor)
    visitor.wait_until_done()
    assert shown_modes(visitor) == both
    visitor.eval("cowbeam.clock.go(9)")
    assert visitor.eval("cowbeam.shown.map(pane => pane.state.t)") == [9, 9]
    assert "Up to this step the first search has held" in visitor.page.inner_text("[data-o=versus]")
    with visitor.page.expect_download() as download:
        visitor.press("Export")
    download.value.save_as(tmp_path / "comparison.json")
    link = visitor.eval("cowbeam.files.link")
    visitor.page.set_input_files("[data-o=file]", tmp_path / "comparison.json")
    visitor.page.wait_for_selector(f"{SCOPE}[data-run=imported-1]")
    assert shown_modes(visitor) == both
    assert visitor.eval("cowbeam.stores.map(store => [store.last, store.breach])") == [[16, None]] * 2
    assert visitor.eval("cowbeam.files.link") == link
    visitor.eval(
        "records => cowbeam.feed.open([{ run: 'imported-2', records }])", visitor.eval("cowbeam.stores[0].records()")
    )
    assert shown_modes(visitor) == both[:1], "and one search after two"
    again = Visitor(visitor.context.browser, link)
    expect(again.page.get_by_label("Compare on one clock with", exact=True)).to_have_value("parallel sampling")
    again.close()


def test_generate_again_leaves_the_run_before(visitor, demo):
    """An impatient visitor presses three times: the last run is shown, the others are stopped and not waited for."""
    visitor.set_number("max_new_tokens", 150)
    visitor.choose("Compare on one clock with", "parallel sampling")
    visitor.generate()
    visitor.wait_for_step(2)
    visitor.set_number("max_new_tokens", 9)
    visitor.choose("Compare on one clock with", "nothing")
    visitor.page.click("#generate")
    visitor.page.wait_for_timeout(100)
    visitor.page.click("#generate")
    visitor.page.wait_for_function("() => cowbeam.pane.store.start.steps === 9 && cowbeam.root.dataset.done")
    assert visitor.eval("cowbeam.shown.length") == 1
    assert visitor.breaches() == []
    assert demo[1].ask(lambda decoders: decoders.num_live_blocks).result(30) == 0


def test_the_address_of_a_token_is_shown_pinned_and_found_by_keyboard(visitor):
    """Token → logical block → table entry → slot → byte offset, in the recorded run; a pin outlives the step."""
    visitor.eval("cowbeam.clock.go(40)")
    pane = visitor.page.locator(".pane").first
    pane.get_by_label("Branch of the token").select_option("2")
    pane.get_by_label("Position of the token").fill("21")
    size, head_dim, item, heads = 8, 64, 4, 3
    block = visitor.eval("cowbeam.pane.state.tabs[2][2]")
    shown = [pane.locator(f"[data-o={name}]").inner_text() for name in ("alogical", "atable", "aslot", "abytes")]
    key = block * 2 * heads * size * head_dim * item + 5 * head_dim * item
    assert shown == ["2, 5", f"[2] → {block}", str(block * size + 5), f"K {key:,}"]
    visitor.press("Next step")
    assert pane.locator("[data-o=atokensub]").inner_text().startswith("b2, position 21")
    pane.locator("[data-b=unpin]").click()
    assert pane.locator("[data-b=unpin]").get_attribute("aria-pressed") == "false"
    box = pane.locator("canvas[data-c=tables]").bounding_box()
    visitor.page.mouse.move(box["x"] + 60, box["y"] + 100)
    assert pane.locator("[data-o=atable]").inner_text().startswith("[0] → ")
    assert pane.locator("[data-b=unpin]").inner_text() == "pin"


def test_stop_ends_within_a_step_and_a_second_visitor_sees_the_queue(visitor, demo, browser):
    """One decoder for all: the second waits, is told so, and goes on when the first tab is closed."""
    url, sessions = demo
    first = Visitor(browser, url)
    first.set_number("max_new_tokens", 256)
    first.generate()
    first.wait_for_step(3)
    visitor.set_number("max_new_tokens", 200)
    visitor.generate()
    visitor.page.wait_for_selector("text=waiting: 1 run ahead of you")
    first.close()
    visitor.wait_for_step(2)
    visitor.page.click("#stop")
    visitor.wait_until_done()
    assert visitor.page.inner_text("[data-o=note]") == "stopped"
    assert int(visitor.data("tail")) < 100
    assert sessions.engine.ask(lambda decoders: decoders.num_live_blocks).result(30) == 0


def test_lessons(visitor):
    """Six captions at steps of the recorded run; a pool too small; a wrong entry in a real decoder's table."""
    visitor.press("Tour")
    steps = []
    for caption in range(1, 7):
        visitor.page.wait_for_selector(f"{SCOPE}[data-lesson=tour][data-caption='{caption}']")
        steps.append(int(visitor.data("step")))
        visitor.page.click("[data-b=lessonnext]")
    assert steps[0] == 1
    assert len(set(steps)) == 6
    visitor.press("Out of memory")
    slider = visitor.page.get_by_role("slider", name="Blocks in the pool")
    slider.evaluate("(s) => { s.value = s.max; s.dispatchEvent(new Event('input')); }")
    assert visitor.data("budget") == "fits,fits,fits"
    slider.evaluate("(s) => { s.value = 110; s.dispatchEvent(new Event('input')); }")
    assert visitor.data("budget") == "fails,fails,fits"
    slider.evaluate("(s) => { s.value = 40; s.dispatchEvent(new Event('input')); }")
    visitor.page.get_by_test_id("run-budget").click()
    visitor.page.wait_for_selector("text=may need 109 blocks of 8 tokens, but the pool has 40")
    assert visitor.breaches() == [], "what was on screen stays, and can still be asked about"
    visitor.eval("cowbeam.clock.go(20)")
    visitor.press("What if?")
    affected, changed = corrupt(visitor)
    assert 0 < changed <= affected, "the entry that is proposed shows what a wrong one does"
    body = visitor.page.locator("[data-o=lessonbody]")
    body.get_by_label("let entry").select_option("6")
    body.get_by_label("point to block").select_option("0")
    affected, changed = corrupt(visitor)
    assert 1 <= affected < 8
    assert changed == 0
    assert "would still choose the same token" in body.get_by_test_id("summary").inner_text(), "and says so if not"
    assert "holders" in visitor.page.inner_text("[data-testid=integrity]")


def corrupt(visitor):
    """Branches that read through the chosen entry, and those of them whose next token is another then."""
    visitor.page.get_by_test_id("corrupt").click()
    visitor.page.wait_for_selector("[data-testid=corrupt]:disabled")
    visitor.page.wait_for_selector("[data-testid=integrity]")
    return map(int, visitor.data("whatif").split(","))


def test_the_tour_gives_the_visitors_run_back(visitor):
    """It shows the recorded run. A run that went on meanwhile is complete when it comes back."""
    visitor.set_number("max_new_tokens", 30)
    visitor.set_number("width", 3)
    visitor.generate()
    visitor.wait_for_step(4)
    run = visitor.data("run")
    visitor.press("Tour")
    visitor.page.wait_for_selector(f"{SCOPE}[data-lesson=tour]")
    assert visitor.data("run") == "example"
    visitor.page.keyboard.press("Escape")
    visitor.page.wait_for_function("run => cowbeam.pane.shownRun === run && cowbeam.pane.store.end", arg=run)
    assert visitor.eval("cowbeam.pane.store.last") == 30
    assert visitor.breaches() == []


def test_the_tour_gives_both_runs_of_a_comparison_back(visitor):
    """The second run starts while the tour is on screen: nothing of it may be lost."""
    compared(visitor)
    visitor.wait_for_step(4)
    runs = visitor.eval("cowbeam.feed.runs")
    assert len(runs) == 2
    visitor.press("Tour")
    visitor.page.wait_for_selector(f"{SCOPE}[data-lesson=tour]")
    assert visitor.eval("cowbeam.shown.map(pane => pane.shownRun)") == ["example"]
    visitor.page.wait_for_timeout(2000)
    visitor.page.keyboard.press("Escape")
    visitor.page.wait_for_function("() => cowbeam.stores.length === 2 && cowbeam.stores.every(store => store.end)")
    assert visitor.eval("cowbeam.shown.map(pane => pane.shownRun)") == runs
    assert visitor.eval("cowbeam.stores.map(store => [store.last, store.breach])") == [[16, None]] * 2
    assert visitor.data("done") == "1"
    visitor.press("Tour")
    visitor.page.wait_for_selector(f"{SCOPE}[data-lesson=tour]")
    visitor.page.keyboard.press("Escape")
    assert shown_modes(visitor) == ["beam search", "parallel sampling"]


def test_an_example_says_what_it_shows(visitor):
    """When it is chosen, and above its run: what there is to see was written down and shown nowhere."""
    visitor.page.get_by_text("One greedy branch", exact=True).click()
    visitor.page.wait_for_selector("text=Nothing to share: a single row, never a copy. Press Generate.")
    expect(visitor.page.locator("#width")).to_be_hidden()
    visitor.set_number("max_new_tokens", 4)
    visitor.generate()
    visitor.wait_until_done()
    assert visitor.page.inner_text("[data-o=note]") == "Nothing to share: a single row, never a copy."
    assert visitor.eval("cowbeam.pane.store.start.width") == 1
    assert visitor.page.inner_text("[data-o=prompt]") == "“Why is the sky blue?”"


def test_rows_of_the_tree_are_rows_of_the_tables(visitor):
    """The part of the tree in view decided their order: a branch was first here and last there."""
    rows = """t => { const { clock, pane } = cowbeam, { tree, tables } = pane.panels; clock.go(t);
      for (let i = 0; i < 60; i++) tree.draw(); tables.draw();
      const height = place => tree.placed.find(item => item.node.id === pane.state.live[place]).y;
      return [tables.rows, [...tables.rows].sort((a, b) => height(a) - height(b))]; }"""
    for width in (1200, 1560):
        visitor.page.set_viewport_size({"width": width, "height": 900})
        for step in range(2, 96, 7):
            in_tables, in_tree = visitor.eval(rows, step)
            assert in_tables == in_tree, f"step {step} at {width} px"


def test_a_link_fills_the_form(demo, browser):
    visitor = Visitor(browser, demo[0] + "?prompt=Hello&mode=greedy&max_new_tokens=7&width=3")
    expect(visitor.page.locator("#prompt textarea")).to_have_value("Hello")
    expect(visitor.page.locator("#max_new_tokens input[type=number]")).to_have_value("7")
    visitor.generate()
    visitor.wait_until_done()
    link = visitor.eval("cowbeam.files.link")
    assert "prompt=Hello" in link
    assert "mode=greedy" in link
    visitor.close()


def test_a_link_that_cannot_be_used_is_told_of(demo, browser):
    visitor = Visitor(browser, demo[0] + "?prompt=Hello&width=99")
    warning = "This link cannot be used: “Branches” must be a number from 1 to 16, got 99"
    visitor.page.get_by_text(warning).wait_for()
    expect(visitor.page.locator("#width input[type=number]")).to_have_value("8")
    visitor.close()
