"""Text and calls that mean harm: they are shown, or refused in one sentence, and nothing of them runs."""

import json
import socket

import httpx
import pytest
from gradio_client import Client

from cowbeam.ui.app import DEFAULT_PORT, check_address, parse
from cowbeam.ui.engine_thread import EngineThread
from cowbeam.ui.session import Sessions
from ui_server import SCOPE, HostileTokenizer, Visitor, running_demo, tiny_decoders

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def hostile_demo():
    """The demo over a random model whose tokens are hostile text."""
    with running_demo(Sessions(EngineThread(tiny_decoders(HostileTokenizer())))) as running:
        yield running


def test_hostile_text_is_shown_and_never_run(visitor):
    """Gradio evaluates `${…}` in what it takes for a template, and innerHTML runs event handlers."""
    hostile = (
        "<img src=x onerror=window.__p=1> ${window.__p=2} {{constructor}} `+(window.__p=3)+` </script>"
        "<script>window.__p=4</script> \"' \u202eevil\u200b " + "\N{COW FACE}" * 40
    )
    visitor.page.fill("#prompt textarea", hostile)
    visitor.set_number("max_new_tokens", 4)
    visitor.set_number("width", 2)
    visitor.generate()
    visitor.wait_until_done()
    assert visitor.eval("window.__p") is None
    assert visitor.eval("cowbeam.pane.store.start.prompt") == hostile
    visitor.eval("cowbeam.pane.select(0, 60, true)")
    assert visitor.eval("document.querySelectorAll('.kv img, .kv script').length") == 0


def test_hostile_tokens_are_shown_and_never_run(hostile_demo, browser, tmp_path):
    """What a model says is as little to be trusted as what a visitor says: panels, titles, lessons, pictures, files."""
    visitor = Visitor(browser, hostile_demo[0])
    page = visitor.page
    settings = {"prompt": "abcdefghij" * 3, "width": 4, "max_new_tokens": 40, "block_size": 4}
    visitor.eval("settings => cowbeam.trigger('rerun', settings)", settings)
    page.wait_for_function("() => cowbeam.pane.shownRun !== 'example' && cowbeam.pane.store.end")
    words = set(visitor.eval("cowbeam.pane.store.nodes.map(node => node.text)"))
    assert len(words) > 10, "the model says them"
    visitor.eval("cowbeam.clock.go(20)")
    page.locator("[data-testid=branch-0]").hover()
    page.locator("canvas[data-c=tree]").first.hover(position={"x": 120, "y": 100})
    page.locator(".kv-table summary").click()
    visitor.press("What if?")
    page.get_by_test_id("corrupt").click()
    page.get_by_test_id("integrity").wait_for()
    with page.expect_download() as download:
        visitor.press("Export")
    saved = tmp_path / "<img src=x onerror=window.__p=6>.json"
    download.value.save_as(saved)
    with page.expect_download():
        visitor.press("PNG")
    page.set_input_files("[data-o=file]", saved)
    page.wait_for_selector(f"{SCOPE}[data-run=imported-1]")
    assert visitor.eval("window.__p") is None
    assert visitor.eval("document.querySelectorAll('.kv img, .kv script, .kv a, .kv b b').length") == 0
    shown = page.inner_text("[data-testid=branch-0] .text")
    assert not set(shown) & set("\u202e\u200b\x00\x1b"), "what would hide text is shown by its number"
    assert visitor.eval("document.documentElement.scrollWidth <= innerWidth")
    assert visitor.breaches() == []
    visitor.close()


def test_numbers_typed_out_of_range_end_in_a_sentence(visitor):
    """A slider has a field beside it that takes anything: it is brought into range, or the run is refused."""
    visitor.set_number("width", 99999)
    assert visitor.page.input_value("#width input[type=number]") == "16"
    visitor.set_number("width", 2.5)
    visitor.page.click("#generate")
    visitor.page.wait_for_selector("text=“Branches” must be a whole number, got 2.5")


def test_programs_get_results_or_one_clear_sentence(demo, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # or the client itself asks the hub
    client = Client(demo[0], verbose=False)
    result = client.predict("Say hello.", "beam search", 2, 6, api_name="/generate")
    assert len(result["completions"]) == 2
    memory = client.predict("Say hello.", "parallel sampling", 3, 6, api_name="/summary")
    assert memory["unique"] <= memory["used"] <= memory["contiguous"]
    endpoints = client.view_api(return_format="dict")["named_endpoints"]
    assert sorted(endpoints) == ["/generate", "/summary"]
    for arguments, sentence in [
        (("",), "prompt is empty"),
        (("x" * 10_000_000,), "prompt has 10,000,000 characters"),
        (("a", "search"), "mode must be one of"),
        (("a", "greedy", "many"), "width must be a number"),
        (("a", "greedy", 1, 10**9), "max_new_tokens must be a number from 2 to 512"),
    ]:
        with pytest.raises(Exception, match=sentence):
            client.predict(*arguments, api_name="/summary")


def call(url, event_data):
    """Gradio's own protocol, without a page: what the page asks for a lesson's run, with any data."""
    api = url + "gradio_api/"
    with httpx.Client(timeout=60) as client:
        events = client.get(url + "config").json()["dependencies"]
        rerun = next(event["id"] for event in events if event["api_name"] == "rerun")
        asked = {"data": [], "fn_index": rerun, "session_hash": "hostile", "event_data": event_data}
        client.post(api + "queue/join", json=asked).raise_for_status()
        with client.stream("GET", api + "queue/data?session_hash=hostile") as stream:
            for line in stream.iter_lines():
                answer = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
                if answer.get("msg") == "process_generating":
                    return json.loads(answer["output"]["data"][0])["frames"][0]
    raise AssertionError("no answer")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (None, "settings must be an object, got None"),
        ("x", "settings must be an object, got 'x'"),
        ([], "one or two searches run side by side, not 0"),
        ([{"prompt": "a"}] * 99, "one or two searches run side by side, not 99"),
        ({"prompt": "x" * 10_000_000}, "has 10,000,000 characters; at most 20,000 are taken"),
        ({"prompt": "a", "width": 1e308}, "must be a number from 1 to 16"),
        ({"prompt": "a", "__class__": 1}, "there is no setting '__class__'"),
        ({"prompt": {"a": ["b"]}}, "must be text"),
    ],
)
def test_hostile_events_get_a_sentence(hostile_demo, data, sentence):
    record = call(hostile_demo[0], data)
    assert record["reason"] == "error"
    assert sentence in record["message"]
    assert len(record["message"]) < 300


@pytest.mark.parametrize("name", ["fetch_records", "check", "what_if", "__class__", "open"])
@pytest.mark.parametrize("data", [None, [], {"run": "guess", "from": 0}, {"run": 10**30}, "x" * 100_000])
def test_hostile_questions_get_a_sentence(hostile_demo, name, data):
    """The functions that the page calls are open to anybody who reaches the port."""
    url = hostile_demo[0]
    components = httpx.get(url + "config").json()["components"]
    view = next(component["id"] for component in components if component["props"].get("elem_id") == "view")
    asked = {"data": data, "component_id": view, "fn_name": name, "session_hash": "hostile"}
    answer = httpx.post(url + "gradio_api/component_server", json=asked)
    if name in ("__class__", "open"):
        assert answer.status_code == 404
    else:
        assert set(answer.json()) == {"error"}
        assert len(answer.json()["error"]) < 300


def test_only_this_machine_can_reach_it_unless_told_otherwise(hostile_demo):
    options = parse([])
    assert (options.host, options.port, options.share) == ("127.0.0.1", DEFAULT_PORT, False)
    asked = parse(["--host", "0.0.0.0", "--port", "7", "--share"])
    assert (asked.host, asked.port, asked.share) == ("0.0.0.0", 7, True)
    port = int(hostile_demo[0].rstrip("/").rsplit(":", 1)[1])
    with socket.socket() as elsewhere, pytest.raises(ConnectionRefusedError):
        elsewhere.connect(("127.0.0.2", port))


@pytest.mark.parametrize("port", [-1, 0, 65536, 99999])
def test_a_port_that_is_none(port):
    """Said before a model is loaded: it was a traceback behind that."""
    with pytest.raises(ValueError, match=f"^--port must be from 1 to 65535, got {port}$"):
        check_address("127.0.0.1", port)


@pytest.mark.parametrize("error", [socket.gaierror(-2, "unknown"), UnicodeError("label too long")])
def test_a_host_that_is_none(monkeypatch, error):
    def unknown(*_):
        raise error

    check_address("127.0.0.1", 7860)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError, match=r"^--host 'a\.b' is no address or name that this machine knows$"):
        check_address("a.b", 7860)
