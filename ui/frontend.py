"""The browser's half, read from ``static/``: one script, one template, two style sheets, one recorded run.

The script puts the template and its style sheet in place, once. Handed to Gradio as ``html_template`` and
``css_template`` they would be compiled, evaluated and, the sheet, parsed again with every message of a run, and the
whole document styled anew. Nor is the script itself Gradio's to hold: as ``js_on_load`` it would be copied, 160
kilobytes of it, with every message; the page's head has it (first_script.py). No text of a model or a visitor ever
enters them.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from cowbeam.ui.run import to_json

# In this order: a file uses only what comes before it, and `scope.js` mounts the component.
SCRIPTS = (
    "store.js",
    "trace_file.js",
    "canvas.js",
    "clock.js",
    "pool.js",
    "tables.js",
    "tree.js",
    "memory.js",
    "timeline.js",
    "text_panels.js",
    "inspector.js",
    "pane.js",
    "picture.js",
    "files.js",
    "badges.js",
    "tour.js",
    "budget.js",
    "what_if.js",
    "lessons.js",
    "feed.js",
    "scope.js",
)
# Gradio's ``js_on_load``, in which it looks for the names of events.
MOUNT = 'mountCowbeam(element, { props, watch, server, trigger });  // triggers "rerun"'


def read_static(name: str) -> str:
    """A file of ``static/``."""
    return (files("cowbeam.ui") / "static" / name).read_text(encoding="utf-8")


def script(**constants: Any) -> str:
    """All scripts as one function: no name of theirs becomes global but ``window.cowbeam`` and ``mountCowbeam``.

    ``constants`` are what Python knows and the scripts use, by name.
    """
    constants = {"TEMPLATE": read_static("scope.html"), "STYLE": read_static("scope.css"), **constants}
    given = [f"const {name} = {to_json(value)};" for name, value in constants.items()]
    body = "\n".join([*given, *map(read_static, SCRIPTS)])
    return f"window.mountCowbeam = (host, gradio) => {{\n{body}\nmountScope(host, gradio);\n}};"


@cache
def recorded_run() -> dict[str, Any]:
    """``{records, note}``: what a visitor sees before anything has run (``scripts/record_trace.py`` records it)."""
    recorded: dict[str, Any] = json.loads(read_static("recorded_run.json"))
    return recorded
