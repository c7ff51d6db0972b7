"""The command line: ``cowbeam "prompt" --num-beams 8`` and ``cowbeam fetch-model``."""

import argparse
import dataclasses
import io
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any, NoReturn

from cowbeam.decoder import report
from cowbeam.decoder.outputs import DecodeResult
from cowbeam.decoder.params import BeamSearchParams, EarlyStopping, Params, SamplingParams

if TYPE_CHECKING:
    from cowbeam.decoder.decoder import Decoder, Prompt

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # as shells report a program ended by Ctrl-C

_EARLY_STOPPING: dict[str, EarlyStopping] = {"true": True, "false": False, "never": "never"}
_SHOW_CURSOR = "\x1b[?25h"
_BYTES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence, without argparse's usage."""
        raise ValueError(message)


def _version() -> str:
    try:
        return metadata.version("cowbeam")
    except metadata.PackageNotFoundError:
        return "(not installed)"


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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="cowbeam",
        description="Beam search and parallel sampling of a language model over copy-on-write KV blocks.",
        epilog="`cowbeam fetch-model` fetches the default model once.",
        argument_default=argparse.SUPPRESS,  # what is not given keeps the parameters' own default
        allow_abbrev=False,
    )
    parser.add_argument("prompts", nargs="+", metavar="prompt", help="text to continue; several are decoded together")
    _add_search_options(parser.add_argument_group("search (names and meaning as in transformers)"))
    _add_model_options(parser.add_argument_group("model and memory"))
    parser.add_argument("--version", action="version", version=f"cowbeam {_version()}")
    parser.add_argument("--json", action="store_true", default=False, help="print a list of results for programs")
    return parser


_NUMBERS: list[tuple[str, int | float | None, str]] = [
    ("num-beams", BeamSearchParams.num_beams, "live beams; 1 is greedy search"),
    ("num-return-sequences", BeamSearchParams.num_return_sequences, "completions to return"),
    ("max-new-tokens", BeamSearchParams.max_new_tokens, "generated tokens at most"),
    ("min-new-tokens", BeamSearchParams.min_new_tokens, "no end before so many"),
    ("length-penalty", BeamSearchParams.length_penalty, "score = sum of log-probs / length ** this"),
    ("temperature", SamplingParams.temperature, "flattens (above 1) or sharpens the draws"),
    ("top-k", SamplingParams.top_k, "draw from the k likeliest only; 0: from all"),
    ("top-p", SamplingParams.top_p, "draw from the likeliest with this probability together"),
    ("min-p", SamplingParams.min_p, "drop tokens below this share of the likeliest one's"),
    ("repetition-penalty", SamplingParams.repetition_penalty, "above 1: repeat less"),
    ("no-repeat-ngram-size", SamplingParams.no_repeat_ngram_size, "no run of so many tokens twice; 0: off"),
    ("seed", None, "of the draws; a fresh one is shown with the result"),
]


def _add_search_options(group: argparse._ArgumentGroup) -> None:
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


def _add_model_options(group: argparse._ArgumentGroup) -> None:
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
    group.add_argument("--kv-memory", type=_num_bytes, metavar="SIZE", help="bytes of the pool on a CPU (2G)")


_DECODER_OPTIONS = ("device", "dtype", "attention", "compile", "block_size", "num_blocks", "kv_memory")


def _params(options: dict[str, Any], *, sample: bool) -> Params:
    kind: type[BeamSearchParams] | type[SamplingParams] = SamplingParams if sample else BeamSearchParams
    names = {field.name for field in dataclasses.fields(kind)}
    for name in options:
        if name not in names:
            raise ValueError(f"--{name.replace('_', '-')} does not go with {'--sample' if sample else 'beam search'}")
    return kind(**options)


def _chat_token_ids(decoder: "Decoder", prompt: str) -> list[int]:
    tokenizer = decoder.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError("--chat: the model has no chat template")
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def _decode(decoder: "Decoder", prompts: "list[Prompt]", params: Params, view: report.Progress) -> list[DecodeResult]:
    """One prompt is watched as it decodes; several run together behind a spinner."""
    if len(prompts) > 1:
        with view.waiting(f"decoding {len(prompts)} prompts"):
            return decoder.generate(prompts, params)
    with view.watching(params.max_new_tokens) as show:
        for frame in decoder.stream(prompts[0], params):
            show(frame)
    assert frame.result is not None, "the last frame holds the result"
    return [frame.result]


def _quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Ctrl-C inside the body takes effect at its end."""
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        raise KeyboardInterrupt


def run(arguments: Sequence[str]) -> None:
    """The command with these arguments. Raises ValueError for what cannot be done."""
    options = vars(_parser().parse_args(arguments))
    prompts, name, chat, as_json, sample = (options.pop(k) for k in ("prompts", "model", "chat", "json", "sample"))
    knobs = {name: options.pop(name) for name in _DECODER_OPTIONS if name in options}
    params = _params(options, sample=sample)
    if "" in prompts and not chat:
        raise ValueError("the prompt is empty: it has no tokens")
    view = report.Progress()
    with view.waiting("loading the model"):
        with _interrupts_held_back():  # raised inside a library's start-up, one can end the process without a word
            from cowbeam.decoder.decoder import Decoder  # here: torch and transformers take seconds

            _quiet_transformers()
        decoder = Decoder.from_pretrained(name, **knobs)
    with decoder:
        sent = [_chat_token_ids(decoder, prompt) for prompt in prompts] if chat else prompts
        results = _decode(decoder, sent, params, view)
    if as_json:
        print(json.dumps([dataclasses.asdict(result) for result in results]))
    else:
        report.print_results(prompts, results, params)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``cowbeam``; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character still shows the rest
    try:
        if arguments[:1] == ["fetch-model"]:
            from cowbeam.decoder.default_model import main as fetch_model

            if arguments[1:]:
                raise ValueError(f"fetch-model takes no arguments, got {' '.join(arguments[1:])!r}")
            return fetch_model()
        run(arguments)
    except (ValueError, FileNotFoundError) as error:
        print(f"cowbeam: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            sys.stderr.write(_SHOW_CURSOR)  # whatever was drawn when it came
        print("cowbeam: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # whoever read the output is gone: nothing is left to say, at exit either
        return 0
    except OSError as error:
        print(f"cowbeam: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
