"""Prompts that each show one idea, with the settings that show it best."""

from typing import Any, NamedTuple

_REPORT = (
    "The harbour of the old town was built in four stages. The first quay was laid in 1782 by the fishermen "
    "themselves, out of stones that the river had left behind; it held eleven boats and silted up every spring. "
    "In 1831 the council paid for a breakwater, a lighthouse of nineteen metres and two cranes that were turned "
    "by oxen. Trade grew fast: wool and salt went out, coal and oranges came in, and the population doubled "
    "within twenty years. The storm of November 1875 took the lighthouse and half of the breakwater. An engineer "
    "from the capital, Marta Lindqvist, drew the third harbour on a single sheet of paper, with a lock gate that "
    "let the tide clean the basin; it is still in use. The railway arrived in 1904 and the ferries in 1926. The "
    "fourth stage, a container terminal, was planned three times and never built, since the bay is too shallow "
    "for modern ships. Today the harbour lives on ferries, on sailors in summer and on a small yard that repairs "
    "wooden boats for owners from all over the continent."
)


class Example(NamedTuple):
    """A label, what it shows, and what it sets; other settings keep the form's defaults."""

    label: str
    shows: str
    values: dict[str, Any]


EXAMPLES = [
    Example(
        "A long shared prompt",
        "The prompt's blocks are one tall bar: stored once for eight beams.",
        {
            "prompt": f"{_REPORT}\n\nSummarize the history of the harbour in two sentences.",
            "mode": "beam search",
            "width": 8,
            "block_size": 16,
            "max_new_tokens": 64,
        },
    ),
    Example(
        "Many short beams",
        "Sixteen beams and blocks of four: watch forks, copies and prunes at every step.",
        {"prompt": "Name a colour and say why you like it.", "width": 16, "block_size": 4, "max_new_tokens": 48},
    ),
    Example(
        "Samples that part at once",
        "Hot samples share the prompt and nothing else: the plain grid beside beam search's tall shapes.",
        {
            "prompt": "Write the first line of a story about a lighthouse.",
            "mode": "parallel sampling",
            "width": 8,
            "temperature": 1.0,
            "seed": 7,
            "max_new_tokens": 48,
        },
    ),
    Example(
        "One greedy branch",
        "Nothing to share: a single row, never a copy.",
        {"prompt": "Why is the sky blue?", "mode": "greedy", "max_new_tokens": 48},
    ),
    Example(
        "Beam sampling",
        "Beams whose candidates are drawn: they part more than beams, agree more than samples.",
        {
            "prompt": "Describe a city that floats on the sea.",
            "mode": "beam sampling",
            "width": 8,
            "temperature": 1.2,
            "top_p": 0.95,
            "seed": 3,
        },
    ),
]
