"""The demo in this process, and a real browser on it."""

import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Page, sync_playwright

from cowbeam.decoder import Decoder
from cowbeam.ui.answers import open_sessions
from cowbeam.ui.app import build_app, launch
from cowbeam.ui.decoders import Decoders
from cowbeam.ui.session import Sessions
from fakes import VOCABULARY, tiny_model

SCOPE = "[data-testid=scope]"
CHROMIUM = shutil.which("chromium")
CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


class LetterTokenizer:
    """A token a letter, for models that have no words."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[1 + ord(character) % (VOCABULARY - 1) for character in text])

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(chr(97 + token_id % 26) for token_id in token_ids)


class HostileTokenizer(LetterTokenizer):
    """A model whose words are scripts, markup, templates, and characters that hide or turn round what follows."""

    WORDS = (
        " ${window.__p=1}", "{{constructor}}", "<script>window.__p=2</script>", "<img src=x onerror=window.__p=3>",
        "\"'`", "\u202eevil", "\u200b", "</div></body>", "\\u003cb>", "\N{COW FACE}", "-->", "\x00\x1b[2J", "\n\r\t",
        "%s{0}", "javascript:window.__p=4", "\u0627\u0644", "`+(window.__p=5)+`",
    )  # fmt: skip

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return "".join(self.WORDS[token_id % len(self.WORDS)] for token_id in token_ids)


def tiny_decoders(tokenizer: LetterTokenizer | None = None) -> Decoders:
    """The demo's decoders over a random model: milliseconds a step."""
    return Decoders(Decoder(tiny_model("llama"), tokenizer or LetterTokenizer(), block_size=8, num_blocks=8))


@contextmanager
def no_outside_host() -> Iterator[None]:
    """This process looks up no host but this machine meanwhile: no telemetry, no hub."""
    asked, look_up = set(), socket.getaddrinfo

    def noting(host: Any, *arguments: Any, **options: Any) -> Any:
        asked.add(host.decode() if isinstance(host, bytes) else host)
        return look_up(host, *arguments, **options)

    socket.getaddrinfo = noting
    try:
        yield
    finally:
        socket.getaddrinfo = look_up
    assert asked <= {None, "127.0.0.1", "localhost"}, asked


@contextmanager
def running_demo(sessions: Sessions | None = None) -> Iterator[tuple[str, Sessions]]:
    """The demo, with the default model unless told otherwise; its address and its sessions."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with no_outside_host():
        sessions = sessions or open_sessions(device="cpu")
        app = build_app(sessions)
        launch(app, host="127.0.0.1", port=port, block=False)
        try:
            yield f"http://127.0.0.1:{port}/", sessions
        finally:
            app.close(verbose=False)
            sessions.close()


@contextmanager
def running_browser() -> Iterator[Any]:
    """Chromium, headless."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


class Visitor:
    """One tab. Whatever goes wrong in it, and every outside host it asks, is noted."""

    def __init__(self, browser: Any, url: str, *, wait: bool = True, **context: Any) -> None:
        options = {"viewport": {"width": 1560, "height": 1120}, "color_scheme": "dark", "accept_downloads": True}
        self.url = url
        self.context = browser.new_context(**{**options, **context})
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(90_000)  # a busy machine is slow, not wrong
        self.errors: list[str] = []
        self.outside: list[str] = []
        self.page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self._note_host(request.url))
        self.page.goto(url)
        if wait:
            self.page.wait_for_selector(f"{SCOPE}[data-run=example]")

    def _note_host(self, url: str) -> None:
        host = urlsplit(url).hostname
        if host not in (None, "127.0.0.1"):
            self.outside.append(url)

    def data(self, name: str) -> str | None:
        """One of the state's names on the component's root."""
        return self.page.get_attribute(SCOPE, f"data-{name}")

    def eval(self, script: str, argument: Any = None) -> Any:
        """A script in the page; the component is ``cowbeam``."""
        return self.page.evaluate(script, argument)

    def set_number(self, name: str, value: float) -> None:
        """A slider of the form."""
        self.page.fill(f"#{name} input[type=number]", str(value))
        self.page.keyboard.press("Tab")

    def choose(self, label: str, option: str) -> None:
        """A dropdown of the form."""
        self.page.get_by_label(label, exact=True).click()
        self.page.get_by_role("option", name=option, exact=True).click()

    def generate(self) -> None:
        """Press the button and wait until the new run is known."""
        before = self.data("run")
        self.page.click("#generate")
        self.page.wait_for_function(f"b => document.querySelector('{SCOPE}').dataset.run !== b", arg=before)

    def wait_for_step(self, step: int) -> None:
        """Until so many steps have arrived."""
        self.page.wait_for_function(f"n => +document.querySelector('{SCOPE}').dataset.tail >= n", arg=step)

    def wait_until_done(self) -> None:
        """Until the run is over."""
        self.page.wait_for_selector(f"{SCOPE}[data-done]")

    def press(self, name: str) -> None:
        """A button of the component."""
        self.page.get_by_role("button", name=name, exact=True).first.click()

    def breaches(self) -> list[str]:
        """Steps of the shown trace at which a block's sharers are not its table entries."""
        found: list[str] = self.eval(
            "() => { const { store } = cowbeam.pane, found = []; for (let t = 1; t <= store.last; t++) {"
            " const breach = store.check(store.at(t)); if (breach) found.push(breach); } return found; }"
        )
        return found

    def reload(self) -> None:
        """As by the browser's button. What Gradio says of the stream that it breaks off is not ours."""
        self.page.reload()
        self.page.wait_for_selector(f"{SCOPE}[data-ready]")
        self.page.wait_for_timeout(50)
        noise = ("AbortError: signal is aborted", "Unexpected error Connection errored out")
        self.errors = [error for error in self.errors if not error.startswith(noise)]

    def close(self) -> None:
        """Close the tab, in which nothing may have gone wrong."""
        self.context.close()
        assert self.errors == []
        assert self.outside == [], "nothing may be asked of an outside host"
