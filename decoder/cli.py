"""The command line: ``cowbeam "prompt" --num-beams 8``, ``cowbeam batch`` and ``cowbeam fetch-model``."""

import argparse
import dataclasses
import io
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cowbeam.decoder import report
from cowbeam.decoder.options import (
    DECODER_OPTIONS,
    Parser,
    add_model_options,
    add_search_options,
    chat_token_ids,
    make_params,
)
from cowbeam.decoder.outputs import DecodeResult
from cowbeam.decoder.params import Params

if TYPE_CHECKING:
    from cowbeam.decoder.decoder import Decoder
    from cowbeam.decoder.ray_batch import RayDecoders
    from cowbeam.decoder.request_maker import Prompt

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # as shells report a program ended by Ctrl-C

_SHOW_CURSOR = "\x1b[?25h"


def _version() -> str:
    try:
        return metadata.version("cowbeam")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="cowbeam",
        description="Beam search and parallel sampling of a language model over copy-on-write KV blocks.",
        epilog="`cowbeam batch --help`: files of prompts. `cowbeam fetch-model` fetches the default model once.",
        argument_default=argparse.SUPPRESS,  # what is not given keeps the parameters' own default
        allow_abbrev=False,
    )
    parser.add_argument("prompts", nargs="+", metavar="prompt", help="text to continue; several are decoded together")
    add_search_options(parser.add_argument_group("search (names and meaning as in transformers)"))
    add_model_options(parser.add_argument_group("model and memory"))
    parser.add_argument("--version", action="version", version=f"cowbeam {_version()}")
    parser.add_argument("--json", action="store_true", default=False, help="print a list of results for programs")
    return parser


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


def _quiet_libraries() -> None:
    from huggingface_hub.utils.logging import set_verbosity_error
    from transformers.utils import logging

    # It tells of every attempt to reach a hub that is out of reach.
    set_verbosity_error()  # type: ignore[no-untyped-call]
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
    knobs = {name: options.pop(name) for name in DECODER_OPTIONS if name in options}
    params = make_params(options, sample=sample)
    if "" in prompts and not chat:
        raise ValueError("the prompt is empty: it has no tokens")
    view = report.Progress()
    decoder = _load(name, knobs)
    with decoder:
        sent = [chat_token_ids(decoder, prompt) for prompt in prompts] if chat else prompts
        results = _decode(decoder, sent, params, view)
    if as_json:
        print(json.dumps([dataclasses.asdict(result) for result in results]))
    else:
        report.print_results(prompts, results, params)


def _load(name: str | None, knobs: dict[str, Any]) -> "Decoder":
    with report.Progress().waiting("loading the model"):
        with _interrupts_held_back():  # raised inside a library's start-up, one can end the process without a word
            from cowbeam.decoder.decoder import Decoder  # here: torch and transformers take seconds

            _quiet_libraries()
        return Decoder.from_pretrained(name, **knobs)


def _start_workers(address: str, num_workers: int | None, name: str | None, knobs: dict[str, Any]) -> "RayDecoders":
    with report.Progress().waiting("starting the workers"):
        with _interrupts_held_back():
            from cowbeam.decoder.ray_batch import RayDecoders

            _quiet_libraries()
        return RayDecoders(address, num_workers, name, knobs)


def _batch_parser() -> Parser:
    parser = Parser(
        prog="cowbeam batch",
        description='Decode a file of prompts. A line is {"prompt": "text"} or {"token_ids": [1, 2]}, and may have an '
        '"id" and "params": {"num_beams": 8} (with "sample": true for samples), which go before these options.',
        epilog="Results are appended as they finish, each with the number of its line. Stopped in whatever way, the "
        "same command goes on where it was. Lines that cannot be decoded have an error as their result; take these out "
        "of the results, and the same command tries them again. The exit code is 1 where there are any.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("prompts", metavar="prompts.jsonl", type=Path)
    parser.add_argument("--out", metavar="results.jsonl", type=Path, required=True)
    add_search_options(parser.add_argument_group("search (names and meaning as in transformers)"))
    add_model_options(parser.add_argument_group("model and memory"))
    several = parser.add_argument_group("several decoders (needs the library Ray: pip install 'cowbeam[ray]')")
    several.add_argument(
        "--ray", nargs="?", const="local", metavar="ADDRESS",
        help="on a running cluster (auto: find it); without ADDRESS, behind the files, on this machine alone",
    )  # fmt: skip
    several.add_argument(
        "--ray-workers", type=int, metavar="N", help="decoders (one a GPU; without GPUs one a machine)"
    )
    return parser


def run_batch(arguments: Sequence[str]) -> int:
    """``cowbeam batch`` with these arguments; returns the exit code. Raises ValueError for what cannot be done."""
    from cowbeam.decoder.batch_job import BatchJob, LineDefaults
    from cowbeam.decoder.garbage import old_objects_left_alone

    options = vars(_batch_parser().parse_args(arguments))
    prompts, out, name, chat, sample = (options.pop(k) for k in ("prompts", "out", "model", "chat", "sample"))
    knobs = {name: options.pop(name) for name in DECODER_OPTIONS if name in options}
    ray, num_workers = options.pop("ray", None), options.pop("ray_workers", None)
    if num_workers is not None and (ray is None or num_workers < 1):
        raise ValueError(f"--ray-workers {num_workers} needs --ray and at least one worker")
    make_params(options, sample=sample)  # an option that cannot be used is said before the model is loaded
    with BatchJob(prompts, out, LineDefaults(options, sample=sample, chat=chat)) as job:
        loaded = _load(name, knobs) if ray is None else _start_workers(ray, num_workers, name, knobs)
        with loaded as decoder, old_objects_left_alone():
            job.run(decoder)
        print(job.summary())
        return EXIT_FAILED if job.num_failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``cowbeam``; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character still shows the rest
    try:
        if arguments[:1] == ["fetch-model"]:
            from cowbeam.decoder.default_model import main as fetch_model

            if arguments[1:] in (["-h"], ["--help"]):
                print("usage: cowbeam fetch-model\n\nFetch the model that is taken when none is named.")
                return 0
            if arguments[1:]:
                raise ValueError(f"fetch-model takes no arguments, got {' '.join(arguments[1:])!r}")
            return fetch_model()
        if arguments[:1] == ["batch"]:
            return run_batch(arguments[1:])
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
