"""Options that the commands share: how to search, which model, how much memory."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from cowbeam.decoder.params import OF_DRAWS, BeamSearchParams, EarlyStopping, Params, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_EARLY_STOPPING: dict[str, EarlyStopping] = {"true": True, "false": False, "never": "never"}
_BYTES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


class Parser(argparse.ArgumentParser):
    """Raises ValueError instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        """One sentence, without argparse's usage."""
        raise ValueError(message)


def _num_bytes(text: str) -> int:
    """``512M``, ``2GiB``, ``1000000`` as a number of bytes."""
    digits = text.lower().removesuffix("b").removesuffix("i")
    unit = digits[-1:] if digits[-1:].isalpha() else ""
    try:
        return int(float(digits.removesuffix(unit)) * _BYTES[unit])
    except (KeyError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes (such as 512M or 2G)") from None


def _early_stopping(text: str) -> EarlyStopping:
    if text.lower() not in _EARLY_STOPPING:
        raise argparse.ArgumentTypeError(f"{text!r} is not true, false or never")
    return _EARLY_STOPPING[text.lower()]


_NUMBERS: list[tuple[str, int | float | None, str]] = [
    ("num-beams", BeamSearchParams.num_beams, "live beams; 1 is greedy search"),
    ("num-return-sequences", BeamSearchParams.num_return_sequences, "completions to return"),
    ("max-new-tokens", BeamSearchParams.max_new_tokens, "generated tokens at most"),
    ("min-new-tokens", BeamSearchParams.min_new_tokens, "no end before so many"),
    ("length-penalty", BeamSearchParams.length_penalty, "score = sum of log-probs / length ** this"),
    ("num-beam-groups", BeamSearchParams.num_beam_groups, "diverse beams: groups that avoid each other's tokens"),
    ("diversity-penalty", BeamSearchParams.diversity_penalty, "what a token loses if an earlier group chose it"),
    ("temperature", SamplingParams.temperature, "flattens (above 1) or sharpens the draws"),
    ("top-k", SamplingParams.top_k, "draw from the k likeliest only; 0: from all"),
    ("top-p", SamplingParams.top_p, "draw from the likeliest with this probability together"),
    ("min-p", SamplingParams.min_p, "drop tokens below this share of the likeliest one's"),
    ("repetition-penalty", SamplingParams.repetition_penalty, "above 1: repeat less"),
    ("no-repeat-ngram-size", SamplingParams.no_repeat_ngram_size, "no run of so many tokens twice; 0: off"),
    ("best-of", None, "draw so many samples, return those with the best mean log-prob"),
    ("logprobs", None, "in JSON: the plain model's log-probs, and so many likeliest tokens beside each"),
    ("seed", None, "of the draws; a fresh one is in the result"),
]


def add_search_options(group: argparse._ArgumentGroup) -> None:
    """``--num-beams`` and so on, by the names of the parameters' fields."""
    group.add_argument("--sample", action="store_true", default=False, help="parallel sampling instead of beam search")
    group.add_argument("--do-sample", action="store_true", help="beam sampling: draw the beams' candidates")
    for name, default, help_text in _NUMBERS:
        kind = int if default is None else type(default)
        shown = "" if default is None else f" ({default})"
        group.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "X", help=help_text + shown)
    group.add_argument("--early-stopping", type=_early_stopping, metavar="WHEN", help="true, false or never (false)")
    group.add_argument(
        "--eos-token-id", type=int, action="append", metavar="ID", help="may be given several times (the model's)"
    )
    group.add_argument(
        "--stop-strings", action="append", metavar="TEXT", help="end in front of this text; may be given several times"
    )


def add_model_options(group: argparse._ArgumentGroup) -> None:
    """``--model``, ``--device``, ``--num-blocks`` and so on."""
    group.add_argument("--model", default=None, metavar="NAME", help="hub name or path (SmolLM2-135M-Instruct)")
    group.add_argument("--chat", action="store_true", default=False, help="apply the model's chat template")
    group.add_argument("--device", metavar="DEVICE", help="cuda, cpu, … (CUDA if there is one)")
    group.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    group.add_argument("--attention", choices=["auto", "triton", "torch"])
    group.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile the layers first (on CUDA; --no-compile: start at once)",
    )
    group.add_argument("--block-size", type=int, metavar="N", help="tokens a block (16)")
    group.add_argument("--num-blocks", type=int, metavar="N", help="blocks of the pool (what memory holds)")
    group.add_argument("--max-rows", type=int, metavar="N", help="branches that decode together at most (512)")
    group.add_argument(
        "--prefix-reuse",
        action=argparse.BooleanOptionalAction,
        help="take over what was computed for an earlier prompt that begins alike (--no-prefix-reuse: compute it anew)",
    )
    group.add_argument(
        "--swap-memory", type=_num_bytes, metavar="SIZE", help="bytes on the host for preempted requests (4G on CUDA)"
    )
    group.add_argument(
        "--kv-memory", type=_num_bytes, metavar="SIZE", help="bytes of the pool (on a CPU 2G; on a GPU what is left)"
    )


DECODER_OPTIONS = (
    "device",
    "dtype",
    "attention",
    "compile",
    "block_size",
    "num_blocks",
    "max_rows",
    "prefix_reuse",
    "kv_memory",
    "swap_memory",
)


def make_params(options: dict[str, Any], *, sample: bool) -> Params:
    """The parameters that the command's options ask for. Raises ValueError for one that does not go with them."""
    kind: type[BeamSearchParams] | type[SamplingParams] = SamplingParams if sample else BeamSearchParams
    names = {field.name for field in dataclasses.fields(kind)}
    for name, value in options.items():
        if name not in names:
            raise ValueError(f"--{name.replace('_', '-')} does not go with {'--sample' if sample else 'beam search'}")
        if value != OF_DRAWS.get(name, value) and not sample and not options.get("do_sample"):
            raise ValueError(f"--{name.replace('_', '-')} is for --sample, or for beams that draw (--do-sample)")
    return kind(**options)


class HasTokenizer(Protocol):
    """A decoder, as far as a chat needs one."""

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The model's."""


def chat_token_ids(decoder: HasTokenizer, prompt: str) -> list[int]:
    """The prompt as a user's turn in the model's chat. Raises ValueError without a chat template."""
    tokenizer = decoder.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError("--chat: the model has no chat template")
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids
