"""What a visitor may ask for. All of it arrives from outside (a form, a link, a call), so all of it is checked here."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shown  # abbreviates: a visitor's value may be of any length
from typing import Any, Literal, Self, get_args

from cowbeam.decoder import BeamSearchParams, SamplingParams
from cowbeam.decoder.params import EarlyStopping, Params

Mode = Literal["beam search", "parallel sampling", "greedy", "beam sampling"]
MODES: tuple[Mode, ...] = get_args(Mode)

MAX_PROMPT_CHARACTERS = 20_000
MAX_WIDTH = 16
MAX_NEW_TOKENS = 512
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64)
MAX_BLOCKS = 4096
MAX_PACE = 60.0

# What the form calls them.
LABELS = {
    "prompt": "Prompt",
    "mode": "Decoding",
    "width": "Branches",
    "block_size": "Block size",
    "max_new_tokens": "New tokens",
    "length_penalty": "Length penalty",
    "early_stopping": "Early stopping",
    "no_repeat_ngram_size": "No n-gram twice",
    "temperature": "Temperature",
    "top_p": "Top-p",
    "top_k": "Top-k",
    "seed": "Seed",
    "num_blocks": "Blocks in the pool",
    "pace": "Steps a second at most",
    "chat": "Chat template",
    "compare": "Compare on one clock with",
}

_EARLY_STOPPING: dict[str, EarlyStopping] = {"true": True, "false": False, "never": "never"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One search as the form describes it; ``from_values`` is the way in.

    ``width`` is the number of beams or samples. ``num_blocks`` 0 lets the demo choose a pool that fits. ``seed`` None
    draws one. ``pace`` is steps a second at most, 0 for as fast as it can.
    """

    prompt: str
    mode: Mode = "beam search"
    chat: bool = True
    width: int = 8
    block_size: int = 8
    max_new_tokens: int = 64
    length_penalty: float = 1.0
    early_stopping: str = "false"
    no_repeat_ngram_size: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    num_blocks: int = 0
    pace: float = 0.0

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """Raises ValueError, naming field and value, for anything that is not a search the demo runs."""
        if not isinstance(values, Mapping):
            raise ValueError(f"settings must be an object, got {shown(values)}")
        names = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(shown(name) for name in values if name not in names)
        if unknown:
            raise ValueError(f"there is no setting {unknown[0]}")
        if "prompt" not in values:
            raise ValueError("the prompt is missing")
        settings = cls(**{name: _CHECKS[name](name, value) for name, value in values.items()})
        if settings.mode == "beam sampling" and settings.width == 1:
            raise ValueError("width must be at least 2 for beam sampling: one branch is parallel sampling")
        settings.params()  # the decoder's own rules
        return settings

    @property
    def branches(self) -> int:
        """Branches at most."""
        return 1 if self.mode == "greedy" else self.width

    @property
    def draws(self) -> bool:
        """Tokens are drawn, so the seed matters."""
        return self.mode in ("parallel sampling", "beam sampling")

    def params(self) -> Params:
        """What the decoder is asked for; settings that the mode does not use stay out. Raises ValueError."""
        common: dict[str, Any] = {"num_return_sequences": self.branches, "max_new_tokens": self.max_new_tokens}
        draws: dict[str, Any] = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
        beams: dict[str, Any] = {
            "num_beams": self.branches,
            "length_penalty": self.length_penalty,
            "early_stopping": _EARLY_STOPPING[self.early_stopping],
        }
        match self.mode:
            case "parallel sampling":
                return SamplingParams(**common, **draws, seed=self.seed)
            case "beam sampling":
                return BeamSearchParams(**common, **draws, **beams, do_sample=True, seed=self.seed)
            case _:
                return BeamSearchParams(**common, **beams, no_repeat_ngram_size=self.no_repeat_ngram_size)

    def as_values(self) -> dict[str, Any]:
        """The other way: plain values, for traces and links."""
        return dataclasses.asdict(self)


def in_form_words(sentence: str) -> str:
    """A refusal for whoever reads the form: a name at the beginning, or before "=" and a number, is a setting's."""

    def label(match: re.Match[str]) -> str:
        return f"“{LABELS[match[1]]}” " if match[1] in LABELS else match[0]

    return re.sub(r"(?:^|(?<= ))([a-z_]+)=(?=\d)", label, re.sub(r"^([a-z_]+) ", label, sentence))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {shown(value)}")
    if len(value) > MAX_PROMPT_CHARACTERS:
        raise ValueError(f"{name} has {len(value):,} characters; at most {MAX_PROMPT_CHARACTERS:,} are taken")
    if not value.strip():
        raise ValueError(f"{name} is empty: write something to continue")
    return value


def _choice(*choices: str) -> Any:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")
        return value

    return check


def _integer(low: int, high: int) -> Any:
    def check(name: str, value: Any) -> int:
        number = _number(low, high)(name, value)
        if number != int(number):
            raise ValueError(f"{name} must be a whole number, got {shown(value)}")
        return int(number)

    return check


def _number(low: float, high: float) -> Any:
    def check(name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (isinstance(value, float) and not math.isfinite(value)) or not low <= value <= high:
            raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {shown(value)}")
        return float(value) if isinstance(value, float) else value

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {shown(value)}")
    return value


def _block_size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in BLOCK_SIZES:
        raise ValueError(f"{name} must be one of {', '.join(map(str, BLOCK_SIZES))}, got {shown(value)}")
    return value


def _seed(name: str, value: Any) -> int | None:
    # 2**53: what a browser's number holds exactly.
    seed: int | None = None if value is None else _integer(0, 2**53)(name, value)
    return seed


_CHECKS: dict[str, Any] = {
    "prompt": _text,
    "mode": _choice(*MODES),
    "chat": _flag,
    "width": _integer(1, MAX_WIDTH),
    "block_size": _block_size,
    "max_new_tokens": _integer(2, MAX_NEW_TOKENS),
    "length_penalty": _number(-2, 4),
    "early_stopping": _choice(*_EARLY_STOPPING),
    "no_repeat_ngram_size": _integer(0, 16),
    "temperature": _number(0.05, 5),
    "top_k": _integer(0, 1_000_000),
    "top_p": _number(0.01, 1),
    "seed": _seed,
    "num_blocks": _integer(0, MAX_BLOCKS),
    "pace": _number(0, MAX_PACE),
}
