"""What Gradio's own controls look like, beside the picture (``static/scope.css``)."""

import gradio as gr


def theme() -> gr.themes.Base:
    """Weights 400 and 700 only: the 600 files that come with Gradio 6.31 hold no Latin letters."""
    return gr.themes.Base(
        primary_hue="sky",
        neutral_hue="slate",
        font=[gr.themes.LocalFont("IBM Plex Sans", weights=(400, 700)), "ui-sans-serif", "system-ui", "sans-serif"],
        font_mono=[gr.themes.LocalFont("IBM Plex Mono", weights=(400, 700)), "ui-monospace", "monospace"],
    ).set(
        body_background_fill="#f4f6f9",
        body_background_fill_dark="#0a0f17",
        background_fill_primary_dark="#111925",
        block_background_fill_dark="#111925",
        border_color_primary_dark="#223045",
        block_title_text_color="#17202e",
        block_title_text_color_dark="#e8eef8",
        block_info_text_color="#566274",
        block_info_text_color_dark="#95a5ba",
        body_text_color_subdued="#566274",
        body_text_color_subdued_dark="#95a5ba",
        input_background_fill_dark="#0d141f",
        button_primary_background_fill="#0072b2",
        button_primary_background_fill_hover="#005e93",
        button_primary_background_fill_dark="#56b4e9",
        button_primary_background_fill_hover_dark="#7cc6f0",
        button_primary_text_color_dark="#0a0f17",
    )
