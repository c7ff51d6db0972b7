"""What the page and programs may ask beside a stream: missing records, checks, what-ifs, and the API.

Anybody who reaches the port may call these with any arguments: each answer is either right or one clear sentence.
"""

import dataclasses
import secrets
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from reprlib import repr as shown
from typing import Any

import gradio as gr

from cowbeam.decoder import DecodeResult
from cowbeam.decoder.what_if import Position, WhatIf, corrupt_entry
from cowbeam.ui.decoders import Decoders, load_decoders
from cowbeam.ui.engine_thread import EngineThread
from cowbeam.ui.frontend import recorded_run
from cowbeam.ui.run import Run
from cowbeam.ui.session import Sessions
from cowbeam.ui.settings import MAX_NEW_TOKENS, MAX_WIDTH, Settings

# A question waits for the runs before it; nobody waits for ever.
PATIENCE_SECONDS = 300.0

Answer = dict[str, Any]


def open_sessions(model: str | None = None, *, device: str | None = None, dtype: str | None = None) -> Sessions:
    """Load the model and start the engine thread. Raises ValueError or FileNotFoundError, in one sentence."""
    sessions = Sessions(EngineThread(load_decoders(model, device=device, dtype=dtype)))
    sessions.keep_recorded(Settings.from_values(recorded_run()["records"][0]["settings"]))
    return sessions


def server_functions(sessions: Sessions) -> list[Callable[[Any], Answer]]:
    """The functions that the component's script calls by name."""

    def fetch_records(request: Any) -> Answer:
        """``{run, from}`` → ``{lines}``: the JSON of every record from that number on."""
        return _answer(lambda: {"lines": sessions.find(_get(request, "run")).lines_from(_integer(request, "from"))})

    def example(_request: Any) -> Answer:
        """The recorded run."""
        return recorded_run()

    def check(request: Any) -> Answer:
        """``{run}`` → ``{ok, sentence, cache_bytes}``."""
        return _answer(
            lambda: dataclasses.asdict(sessions.check(sessions.find(_get(request, "run"))).result(PATIENCE_SECONDS))
        )

    def what_if(request: Any) -> Answer:
        """``{run, step, rank, column, other_rank, other_column}`` → the fields of ``WhatIf``."""
        return _answer(lambda: dataclasses.asdict(_what_if(sessions, request)))

    return [fetch_records, example, check, what_if]


def api_functions(sessions: Sessions) -> list[Callable[..., Answer]]:
    """Endpoints for ``gradio_client``."""

    def generate(
        prompt: str,
        mode: str = "beam search",
        width: int = 8,
        max_new_tokens: int = 64,
        block_size: int = 8,
        length_penalty: float = 1.0,
        early_stopping: str = "false",
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> dict[str, Any]:
        """Decode a prompt; the completions, best first (samples by index), and what they cost."""
        values = {name: value for name, value in locals().items() if name != "sessions"}
        result = _run_to_end(sessions, values)
        completions = [dataclasses.asdict(completion) for completion in result.completions]
        return {"completions": completions, "stats": dataclasses.asdict(result.stats), "seed": result.seed}

    def summary(
        prompt: str, mode: str = "beam search", width: int = 8, max_new_tokens: int = 64, block_size: int = 8
    ) -> dict[str, Any]:
        """Decode a prompt; only the memory it took, beside its baselines, in bytes."""
        values = {name: value for name, value in locals().items() if name != "sessions"}
        stats = _run_to_end(sessions, values).stats
        counts = {"peak_blocks": stats.peak_blocks, "block_size": stats.block_size, "cow_copies": stats.cow_copies}
        return {**dataclasses.asdict(stats.peak_memory), **counts, "steps": stats.steps}

    return [generate, summary]


def _run_to_end(sessions: Sessions, values: dict[str, Any]) -> DecodeResult:
    visitor = f"api-{secrets.token_hex(8)}"
    try:
        (run,) = sessions.start(visitor, [Settings.from_values(values)])
    except ValueError as error:
        raise gr.Error(str(error), print_exception=False) from error
    try:
        run.wait_until_over(PATIENCE_SECONDS)
    finally:
        sessions.forget(visitor)
    if run.result is None:
        raise gr.Error(run.failure or "the run did not end in time", print_exception=False)
    return run.result


def _answer(work: Callable[[], Answer]) -> Answer:
    """What ``work`` gives, or ``{error}`` with a sentence."""
    try:
        return work()
    except ValueError as error:
        return {"error": str(error)}
    except FutureTimeoutError:
        return {"error": "other runs take too long; please ask again later"}


def _what_if(sessions: Sessions, request: Any) -> WhatIf:
    run: Run = sessions.find(_get(request, "run"))
    step, rank, column = (_integer(request, name) for name in ("step", "rank", "column"))
    other = Position(_integer(request, "other_rank"), _integer(request, "other_column"))
    settings = run.settings_to_repeat

    def ask(decoders: Decoders) -> WhatIf:
        token_ids = decoders.token_ids(settings)
        decoder = decoders.of(settings, token_ids)
        entry = Position(rank, column)
        return corrupt_entry(decoder, token_ids, settings.params(), step=step, entry=entry, other=other)

    if step > MAX_NEW_TOKENS or rank >= MAX_WIDTH:
        raise ValueError(f"there is no step {step} with a branch of rank {rank}")
    return sessions.ask(ask).result(PATIENCE_SECONDS)


def _get(request: Any, name: str) -> Any:
    if not isinstance(request, dict) or name not in request:
        raise ValueError(f"the request must be an object with {name}, got {shown(request)}")
    return request[name]


def _integer(request: Any, name: str) -> int:
    value = _get(request, name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"{name} must be a whole number from 0, got {shown(value)}")
    return value
