"""``cowbeam-ui``: a page on which a real model decodes and its KV blocks are seen.

Gradio draws the form and carries messages; the picture is one ``gr.HTML`` component whose script keeps the whole trace
in the browser. Nothing asks an outside host, nothing of a run is kept in the browser.
"""

import os

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before gradio is imported

import argparse
import socket
import sys
from collections.abc import Iterator
from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from cowbeam.ui import answers
from cowbeam.ui.examples import EXAMPLES
from cowbeam.ui.first_script import FirstScript
from cowbeam.ui.form import (
    COMPARISONS,
    DEFAULTS,
    Form,
    build_form,
    comparison_from_link,
    from_link,
    searches,
    searches_again,
)
from cowbeam.ui.frontend import MOUNT, read_static, script
from cowbeam.ui.session import Sessions, refusal
from cowbeam.ui.settings import in_form_words
from cowbeam.ui.theme import theme

DEFAULT_PORT = 7860

# Seconds after which the server looks again whether a visitor pressed something.
QUEUE_SLEEP = 0.05

# On a narrow page prompt, Generate and the picture come first. Gradio does not draw what is folded from the start.
FOLD_SETTINGS = """() => {
  if (matchMedia('(max-width: 900px)').matches) document.querySelector('#settings > .label-wrap.open')?.click();
}"""


def build_app(sessions: Sessions) -> gr.Blocks:
    """The page over one shared decoder."""
    with gr.Blocks(title="cowbeam", fill_width=True, analytics_enabled=False) as app, gr.Row(elem_id="shell"):
        with gr.Column(scale=0, min_width=296, elem_id="side"):
            gr.HTML(
                "<h1>cowbeam</h1><p>The KV blocks of a search, while the model searches.</p>",
                padding=False,
                elem_id="brand",
            )
            form = build_form()
            with form.ideas:
                _add_examples(form.controls)
        with gr.Column(scale=1, elem_id="stage"):
            view = gr.HTML(
                value="",
                html_template="",  # the script brings its own (frontend.py)
                js_on_load=MOUNT,
                apply_default_css=False,
                server_functions=answers.server_functions(sessions),
                padding=False,
                elem_id="view",
            )
        _connect(app, form, view, sessions)
        for function in answers.api_functions(sessions):
            gr.api(function, api_name=function.__name__, concurrency_limit=4, concurrency_id="api")
    return app


def _add_examples(controls: dict[str, Any]) -> None:
    rows = [[{**DEFAULTS.as_values(), **example.values}[name] for name in controls] for example in EXAMPLES]
    gr.Examples(
        rows,
        list(controls.values()),
        example_labels=[example.label for example in EXAMPLES],
        label="Prompts that show an idea",
        elem_id="examples",
    )


def _connect(app: gr.Blocks, form: Form, view: gr.HTML, sessions: Sessions) -> None:
    """The events. Streams are limited by our own queue; Gradio's would free a place before the decoder is done."""
    stream = {"show_progress": "hidden", "concurrency_limit": 32, "concurrency_id": "runs", "api_visibility": "private"}
    # Gradio tells every component that ever showed an event's progress of each message of a run: let it be one.
    quick = {"queue": False, "api_visibility": "private", "show_progress": "hidden", "show_progress_on": view}

    def stream_form(given: dict[Any, Any], request: gr.Request) -> Iterator[str]:
        yield from stream_runs(sessions, request, lambda: searches(form.values(given), given[form.compare]))

    def rerun(event: gr.EventData, request: gr.Request) -> Iterator[str]:
        yield from stream_runs(sessions, request, lambda: searches_again(event._data))

    def stop(request: gr.Request) -> None:
        sessions.stop(str(request.session_hash))

    def forget(request: gr.Request) -> None:
        sessions.forget(str(request.session_hash))

    def show_groups(mode: str) -> tuple[Any, Any, Any]:
        is_wide, is_beams, draws = mode != "greedy", mode != "parallel sampling", mode.endswith("sampling")
        return gr.update(visible=is_wide), gr.update(visible=is_beams), gr.update(visible=draws)

    def follow_link(request: gr.Request) -> list[Any]:
        query = dict(request.query_params)
        unchanged = [gr.skip()] * (len(form.controls) + 1)
        if not query:
            return unchanged
        try:
            values, comparison = from_link(query), comparison_from_link(query)
        except ValueError as error:
            gr.Warning(f"This link cannot be used: {in_form_words(str(error))}")
            return unchanged
        return [*(values[name] for name in form.controls), comparison]

    form.generate.click(stream_form, {*form.controls.values(), form.compare}, view, trigger_mode="multiple", **stream)
    view.rerun(rerun, None, view, trigger_mode="multiple", **stream)
    form.stop.click(stop, None, None, **quick)
    mode, width, prompt = (form.controls[name] for name in ("mode", "width", "prompt"))
    mode.change(show_groups, mode, [width, form.beams, form.draws], **quick)
    prompt.change(None, prompt, None, js="prompt => window.cowbeam?.idea(prompt)", api_visibility="private")
    # Through the queue: a warning of an event outside it has no way to the page.
    app.load(follow_link, None, [*form.controls.values(), form.compare], **{**quick, "queue": True})
    app.load(None, None, None, js=FOLD_SETTINGS, api_visibility="private")
    app.unload(forget)


def stream_runs(sessions: Sessions, request: gr.Request, wanted: Any) -> Iterator[str]:
    """Messages of one visitor's runs; what cannot run is one message that says why."""
    try:
        runs = sessions.start(str(request.session_hash), wanted())
    except ValueError as error:
        yield refusal(str(error))
        return
    yield from sessions.messages(runs)


def launch(app: gr.Blocks, *, host: str, port: int, share: bool = False, block: bool = True) -> None:
    """Serve. Off are: the run history that Gradio keeps in the browser, its monitoring dashboard, its analytics."""
    app.queue(max_size=64)
    _let_the_queue_sleep(app)
    app.launch(
        server_name=host,
        server_port=port,
        share=share,
        theme=theme(),
        css=read_static("shell.css"),
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        footer_links=["api"],
        app_kwargs={"middleware": [Middleware(FirstScript, script=_head_script())]},
        show_error=True,
        quiet=True,
        prevent_thread_lock=not block,
    )


def _head_script() -> str:
    ideas = {example.values["prompt"]: example.shows for example in EXAMPLES}
    return read_static("frames.js") + script(COMPARISONS=COMPARISONS, IDEAS=ideas)


def _let_the_queue_sleep(app: gr.Blocks) -> None:
    """Gradio looks a thousand times a second whether an event waits, and the decoder computes on the same cores."""
    app._queue.sleep_when_free = QUEUE_SLEEP
    app._queue.progress_update_sleep_when_free = 1.0  # no event here tells its progress


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options of ``cowbeam-ui``."""
    parser = argparse.ArgumentParser(
        prog="cowbeam-ui", description="The live demo: watch the blocks while a model searches."
    )
    parser.add_argument("--model", help="hub name or path (SmolLM2-135M-Instruct)")
    parser.add_argument("--device", help="cuda, cpu, … (CUDA if there is one)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (only this machine)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"port to listen on ({DEFAULT_PORT})")
    parser.add_argument("--share", action="store_true", help="a public link through a tunnel of Gradio's")
    return parser.parse_args(arguments)


def check_address(host: str, port: int) -> None:
    """Raises ValueError for what nobody can listen on, before a model is loaded."""
    if not 1 <= port <= 65535:
        raise ValueError(f"--port must be from 1 to 65535, got {port}")
    try:
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError):
        raise ValueError(f"--host {host!r:.200} is no address or name that this machine knows") from None


def main() -> int:
    """Entry point of ``cowbeam-ui``."""
    options = parse(sys.argv[1:])
    try:
        check_address(options.host, options.port)
        sessions = answers.open_sessions(options.model, device=options.device, dtype=options.dtype)
    except (ValueError, FileNotFoundError) as error:
        print(f"cowbeam-ui: {error}", file=sys.stderr)
        return 2
    app = build_app(sessions)
    print(f"cowbeam-ui: http://{options.host}:{options.port}", flush=True)
    try:
        launch(app, host=options.host, port=options.port, share=options.share)
    except OSError as error:
        print(f"cowbeam-ui: {error}", file=sys.stderr)
        return 1
    finally:
        sessions.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
