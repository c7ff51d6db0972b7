"""Where the default model is looked for, and the model itself."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cowbeam.decoder import default_model
from cowbeam.decoder.default_model import DEFAULT_MODEL, SMOLLM2_WHEEL, cache_folder, resolve_default_model
from cowbeam.decoder.gguf_wheel import MODEL_FILES, ModelFetchError


@pytest.fixture
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No model anywhere, and the hub declared offline; returns our cache folder."""
    monkeypatch.setenv("COWBEAM_CACHE", str(tmp_path / "cowbeam"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "cowbeam"


def make_files(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in MODEL_FILES:
        (folder / name).write_text("{}")


def make_hub_snapshot(hub: Path) -> Path:
    repository = hub / f"models--{DEFAULT_MODEL.replace('/', '--')}"
    make_files(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    return repository / "snapshots" / "abc"


@pytest.mark.usefixtures("empty_machine")
def test_absent_is_one_sentence_naming_the_command() -> None:
    with pytest.raises(FileNotFoundError, match=r"^[^\n]*run `cowbeam fetch-model` once\.$"):
        resolve_default_model()


def test_our_folder_comes_before_the_hub_cache(empty_machine: Path, tmp_path: Path) -> None:
    """Results must not change because another program put the unquantised model into the hub's cache."""
    snapshot = make_hub_snapshot(tmp_path / "hub")
    assert resolve_default_model() == str(snapshot)
    folder = SMOLLM2_WHEEL.model_folder(empty_machine)
    make_files(folder)
    assert resolve_default_model() == str(folder)


def test_a_half_filled_hub_cache_does_not_count(empty_machine: Path, tmp_path: Path) -> None:
    """An interrupted hub download leaves config.json without weights."""
    (make_hub_snapshot(tmp_path / "hub") / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        resolve_default_model()


def test_a_silent_network_is_given_up_soon(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall that drops packets, or a resolver that never answers, must not hang the program."""
    test_over = threading.Event()

    def silent(_url: str, **_: object) -> None:
        test_over.wait(60)
        raise TimeoutError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", silent)
    monkeypatch.setattr(default_model, "HUB_PROBE_SECONDS", 0.2)
    started = time.monotonic()
    with pytest.raises(FileNotFoundError, match="fetch-model"):
        resolve_default_model()
    assert time.monotonic() - started < 30
    test_over.set()


def test_offline_asks_nobody(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url, **_: asked.append(url))
    with pytest.raises(FileNotFoundError):
        resolve_default_model()
    assert asked == []


def test_a_hub_that_answers_gives_the_name(empty_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Metadata:
        location = "somewhere"

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda _url, **_: Metadata())
    assert resolve_default_model() == DEFAULT_MODEL


@pytest.mark.parametrize("error", [ModelFetchError("no index"), PermissionError("no place")])
def test_main_fails_with_one_sentence(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(progress: object) -> None:
        raise error

    monkeypatch.setattr(default_model, "fetch_default_model", fail)
    assert default_model.main() == 1
    assert capsys.readouterr().err == f"{error}\n"


def test_importing_loads_no_tensors() -> None:
    """`cowbeam fetch-model` and `--help` should not wait seconds for torch."""
    program = "import sys, cowbeam.decoder.default_model; print({'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert run.stdout == "set()\n"


def test_the_real_model_knows_paris_and_is_exact() -> None:
    """The weights survive download and conversion: chat template, left padding, EOS, float32, and a right answer.

    Needs the fetched model (scripts/test.sh fetches it) and fails without.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = SMOLLM2_WHEEL.model_folder(cache_folder())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype is torch.float32
    assert tokenizer.padding_side == "left"
    # Q4_1 weights are no bfloat16 numbers; were they stored as such, this would say so.
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert not torch.equal(weight, weight.bfloat16().float())

    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"
