"""The form: Gradio's own controls, one per setting, and what a link or a comparison makes of them."""

import dataclasses
from collections.abc import Mapping
from reprlib import repr as shown
from typing import Any

import gradio as gr

from cowbeam.ui.settings import (
    BLOCK_SIZES,
    LABELS,
    MAX_NEW_TOKENS,
    MAX_PACE,
    MAX_PROMPT_CHARACTERS,
    MAX_WIDTH,
    MODES,
    Settings,
)

DEFAULTS = Settings(prompt="Tell a short story about a lighthouse keeper who finds a letter in a bottle.")

# What the second run of a comparison changes.
COMPARISONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "parallel sampling": {"mode": "parallel sampling"},
    "beam search": {"mode": "beam search"},
    "blocks of 4": {"block_size": 4},
    "blocks of 64": {"block_size": 64},
}

_HELP = {
    "width": "Beams that are kept, or samples that are drawn.",
    "block_size": "Small blocks waste less, large ones need fewer table entries.",
    "pace": "0 is as fast as it can.",
    "chat": "Send the prompt as a message, where the model has a template.",
    "num_blocks": "A request is taken only if its worst case fits.",
}


@dataclasses.dataclass
class Form:
    """The controls by the name of their setting, a place for examples, and the groups that only some modes use."""

    controls: dict[str, Any]
    ideas: Any
    compare: Any
    beams: Any
    draws: Any
    generate: Any
    stop: Any

    def values(self, given: Mapping[Any, Any]) -> dict[str, Any]:
        """Gradio's ``{component: value}`` as ``{setting: value}``."""
        return {name: given[control] for name, control in self.controls.items()}


def build_form() -> Form:
    """Inside a ``gr.Blocks`` context."""
    d, c = DEFAULTS, {}
    c["prompt"] = gr.Textbox(
        d.prompt, label=LABELS["prompt"], lines=4, max_lines=9, max_length=MAX_PROMPT_CHARACTERS, elem_id="prompt"
    )
    with gr.Row():
        generate = gr.Button("Generate", variant="primary", elem_id="generate", min_width=90)
        stop = gr.Button("Stop", elem_id="stop", min_width=60)
    ideas = gr.Column(elem_id="ideas")  # filled when all controls are there
    with gr.Accordion("Settings", open=True, elem_id="settings"):
        compare, beams, draws = _settings_controls(c)
    return Form(c, ideas, compare, beams, draws, generate, stop)


def _settings_controls(c: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A narrow page folds them (app.py), so that the picture is not below them; a wide one hides the fold's title."""
    d = DEFAULTS
    c["mode"] = gr.Dropdown(list(MODES), value=d.mode, label=LABELS["mode"], elem_id="mode")
    c["width"] = gr.Slider(1, MAX_WIDTH, d.width, step=1, label=LABELS["width"], info=_HELP["width"], elem_id="width")
    c["block_size"] = gr.Dropdown(
        [(f"{n} tokens", n) for n in BLOCK_SIZES],
        value=d.block_size,
        label=LABELS["block_size"],
        info=_HELP["block_size"],
        elem_id="block_size",
    )
    c["max_new_tokens"] = gr.Slider(
        2, MAX_NEW_TOKENS, d.max_new_tokens, step=1, label=LABELS["max_new_tokens"], elem_id="max_new_tokens"
    )
    compare = gr.Dropdown(list(COMPARISONS), value="nothing", label=LABELS["compare"], elem_id="compare")
    with gr.Accordion("Beam settings", open=False, elem_id="beams") as beams:
        _beam_controls(c)
    with gr.Accordion("Sampling settings", open=False, visible=False, elem_id="draws") as draws:
        _draw_controls(c)
    with gr.Accordion("Pool and pace", open=False, elem_id="pool"):
        _pool_controls(c)
    return compare, beams, draws


def _beam_controls(c: dict[str, Any]) -> None:
    d = DEFAULTS
    c["length_penalty"] = gr.Slider(
        -2, 4, d.length_penalty, step=0.1, label=LABELS["length_penalty"], info="Above 1 favours long answers."
    )
    c["early_stopping"] = gr.Dropdown(
        ["false", "true", "never"], value=d.early_stopping, label=LABELS["early_stopping"]
    )
    c["no_repeat_ngram_size"] = gr.Slider(
        0,
        16,
        d.no_repeat_ngram_size,
        step=1,
        label=LABELS["no_repeat_ngram_size"],
        info="0 allows repetition; not for beam sampling.",
    )


def _draw_controls(c: dict[str, Any]) -> None:
    d = DEFAULTS
    c["temperature"] = gr.Slider(0.05, 5, d.temperature, step=0.05, label=LABELS["temperature"], elem_id="temperature")
    c["top_p"] = gr.Slider(0.01, 1, d.top_p, step=0.01, label=LABELS["top_p"])
    c["top_k"] = gr.Number(d.top_k, label=LABELS["top_k"], precision=0, minimum=0, info="0 draws from all tokens.")
    c["seed"] = gr.Number(d.seed, label=LABELS["seed"], precision=0, minimum=0, info="Empty draws one.", elem_id="seed")


def _pool_controls(c: dict[str, Any]) -> None:
    d = DEFAULTS
    sizes = [("as many as surely fit", 0), *((str(2**n), 2**n) for n in range(5, 13))]
    c["num_blocks"] = gr.Dropdown(
        sizes, value=d.num_blocks, label=LABELS["num_blocks"], info=_HELP["num_blocks"], elem_id="num_blocks",
        allow_custom_value=False,
    )  # fmt: skip
    c["pace"] = gr.Slider(0, MAX_PACE, d.pace, step=1, label=LABELS["pace"], info=_HELP["pace"], elem_id="pace")
    c["chat"] = gr.Checkbox(d.chat, label=LABELS["chat"], info=_HELP["chat"], elem_id="chat")


def searches(values: Mapping[str, Any], comparison: Any) -> list[Settings]:
    """One or two searches. Raises ValueError, naming what cannot be used."""
    changes = COMPARISONS[_comparison(comparison)]
    first = Settings.from_values(values)
    return [first, Settings.from_values({**values, **changes})] if changes else [first]


def searches_again(data: Any) -> list[Settings]:
    """What the page asks for without the form: one set of values, or a list of one or two. Raises ValueError."""
    given = data if isinstance(data, list) else [data]
    if not 1 <= len(given) <= 2:
        raise ValueError(f"one or two searches run side by side, not {len(given):,}")
    return [Settings.from_values(values) for values in given]


def _comparison(name: Any) -> str:
    if not isinstance(name, str) or name not in COMPARISONS:
        raise ValueError(f"compare must be one of {', '.join(COMPARISONS)}, got {shown(name)}")
    return name


def comparison_from_link(query: Mapping[str, str]) -> str:
    """The comparison that a link names. Raises ValueError."""
    return _comparison(query.get("compare", "nothing"))


def from_link(query: Mapping[str, str]) -> dict[str, Any]:
    """The settings that a link names, as values of the form; others keep their defaults. Raises ValueError."""
    values = DEFAULTS.as_values()
    for name, text in query.items():
        if name in values:
            values[name] = _parsed(name, text)
    return Settings.from_values(values).as_values()


def _parsed(name: str, text: str) -> Any:
    default = getattr(DEFAULTS, name)
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        return {"true": True, "false": False}.get(text, text)
    try:
        return float(text) if isinstance(default, float) else int(text)
    except ValueError:
        return text
