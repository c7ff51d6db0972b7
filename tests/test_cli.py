"""The command line, on a tiny saved model with a real tokenizer."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cowbeam.decoder.cli import EXIT_BAD_INPUT, EXIT_INTERRUPTED, main
from cowbeam.decoder.report import in_bytes, printable
from fakes import tiny_model

COMMAND = [sys.executable, "-m", "cowbeam.decoder.cli"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def save_model(path):
    """A tiny model with a tokenizer, as a folder."""
    model = tiny_model("llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=model.config.vocab_size,
        special_tokens=special,
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyzĠ"),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog " * 3], trainer)
    model.save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(path)
    return str(path)


def run(model_path, capsys, *arguments):
    code = main(["--model", model_path, *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_is_a_list_of_results_with_the_attributes_of_the_api(model_path, capsys):
    arguments = [
        "the quick",
        "over",
        "--num-beams",
        "3",
        "--num-return-sequences",
        "2",
        "--max-new-tokens",
        "5",
        "--json",
    ]
    code, out, _ = run(model_path, capsys, *arguments)
    results = json.loads(out)
    assert code == 0
    assert len(results) == 2
    for result in results:
        assert set(result) == {"prompt_token_ids", "completions", "stats", "seed"}
        assert len(result["completions"]) == 2
        assert result["stats"]["prefill_tokens"] == len(result["prompt_token_ids"])
        for completion in result["completions"]:
            assert sum(completion["logprobs"]) == pytest.approx(completion["cumulative_logprob"], abs=1e-5)
            assert completion["finish_reason"] in ("eos", "length")


def test_tables_when_piped_are_plain(model_path, capsys):
    code, out, err = run(model_path, capsys, "the fox", "--num-beams", "4", "--max-new-tokens", "6")
    assert code == 0
    assert "KV memory at the peak" in out
    assert "a copy a branch, as transformers keeps" in out
    assert "\x1b" not in out + err


def test_a_prompt_is_as_long_when_it_was_computed_before(model_path, capsys):
    prompt = "the fox and the dog and the fox and the dog and the fox and the dog"
    _, out, _ = run(model_path, capsys, prompt, prompt, "--block-size", "1", "--max-new-tokens", "2")
    lengths = re.findall(r"prompt of (\d+) tokens computed once(, \d+ of them before)?;", " ".join(out.split()))
    assert len(lengths) == 2
    assert lengths[0][0] == lengths[1][0]
    assert [bool(before) for _, before in lengths] == [False, True]


def test_settings_of_draws_at_which_nothing_changes_go_with_beams(model_path, capsys):
    neutral = ("--temperature", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0")
    assert run(model_path, capsys, "the fox", "--max-new-tokens", "2", *neutral)[0] == 0


def test_the_model_is_fetched_by_a_command_with_a_help(capsys):
    assert main(["fetch-model", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: cowbeam fetch-model")


def test_samples_take_a_seed_and_name_it(model_path, capsys):
    arguments = [
        "the fox",
        "--sample",
        "--num-return-sequences",
        "3",
        "--seed",
        "11",
        "--max-new-tokens",
        "4",
        "--json",
    ]
    _, first, _ = run(model_path, capsys, *arguments)
    _, second, _ = run(model_path, capsys, *arguments)
    tokens = [[c["token_ids"] for c in json.loads(out)[0]["completions"]] for out in (first, second)]
    assert tokens[0] == tokens[1]
    assert json.loads(first)[0]["seed"] == 11


@pytest.mark.parametrize(
    ("options", "reused"),
    [([], [0, 2]), (["--prefix-reuse"], [0, 2]), (["--no-prefix-reuse"], [0, 0]), (["--max-rows", "1"], [0, 2])],
)
def test_prefix_reuse_is_a_switch(model_path, capsys, options, reused):
    """The second of two equal prompts takes over the first one's full blocks, unless that is switched off."""
    arguments = ["the quick brown", "the quick brown", "--num-beams", "1", "--block-size", "2", "--json", *options]
    code, out, _ = run(model_path, capsys, *arguments, "--max-new-tokens", "3")
    first, second = json.loads(out)
    assert code == 0
    assert len(first["prompt_token_ids"]) == 3
    assert [result["stats"]["reused_tokens"] for result in (first, second)] == reused
    assert first["completions"][0]["token_ids"] == second["completions"][0]["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["x", "--num-beams", "0"], "num_beams must be an integer of at least 1, got 0"),
        (["x", "--num-beams", "2", "--num-return-sequences", "3"], "num_return_sequences=3 exceeds num_beams=2"),
        (["x", "--num-beams", "two"], "argument --num-beams: invalid int value: 'two'"),
        (["x", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["x", "--early-stopping", "sometimes"], "'sometimes' is not true, false or never"),
        (["x", "--kv-memory", "lots"], "'lots' is no number of bytes"),
        (["x", "--sample", "--num-beams", "2"], "--num-beams does not go with --sample"),
        (["x", "--temperature", "0.5"], "--temperature is for --sample, or for beams that draw (--do-sample)"),
        (["x", "--chat"], "the model has no chat template"),
        (["x", "--max-rows", "0"], "max_rows must be a positive integer, got 0"),
        (["x", "--max-rows", "lots"], "argument --max-rows: invalid int value: 'lots'"),
        (["x", "--no-prefix-reuse=off"], "--no-prefix-reuse: ignored explicit argument 'off'"),
        (["x", "--block-size", "12"], "block_size must be a power of two, got 12"),
        (["x", "--max-new-tokens", "100000"], "max_new_tokens=100000 exceed the model's"),
        (["x", "--num-blocks", "2", "--max-new-tokens", "60"], "but the pool has 2"),
        ([""], "the prompt is empty"),
        ([], "the following arguments are required: prompt"),
        (["fetch-model-too", "--eos-token-id", "-4"], "eos_token_id must be an integer of at least 0, got -4"),
    ],
)
def test_bad_input_is_one_sentence_and_a_code(model_path, capsys, arguments, sentence):
    code, out, err = run(model_path, capsys, *arguments)
    assert code == EXIT_BAD_INPUT
    assert sentence in err
    assert err.count("\n") == 1, "one sentence"
    assert not out


def test_unknown_model(capsys):
    code, _, err = run("/no/such/model", capsys, "x")
    assert code == EXIT_BAD_INPUT
    assert "the model '/no/such/model' cannot be loaded" in err
    assert err.count("\n") == 1


def test_a_hub_out_of_reach_is_one_sentence():
    """huggingface_hub told of every attempt: two dozen lines before the one that says what is wrong."""
    program = """
import logging, sys
from unittest import mock
from cowbeam.decoder.cli import main

def unreachable(*_, **__):
    logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
    raise OSError("We couldn't connect to the hub")

import huggingface_hub, transformers
with mock.patch.object(transformers.AutoTokenizer, "from_pretrained", unreachable):
    sys.exit(main(["x", "--model", "no/such-model"]))
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert process.returncode == EXIT_BAD_INPUT
    assert process.stderr == "cowbeam: the model 'no/such-model' cannot be loaded: We couldn't connect to the hub\n"


def test_hostile_text_reaches_the_terminal_as_text():
    """Markup and escape sequences in a prompt or a completion must not run on the user's terminal."""
    assert (
        printable("[red]x[/red]\x1b]0;title\x07").plain
        == "[red]x[/red]\N{REPLACEMENT CHARACTER}]0;title\N{REPLACEMENT CHARACTER}"
    )


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (2**31, "2.0 GiB"), (2**50, "1024.0 TiB")])
def test_bytes_are_readable(count, text):
    assert in_bytes(count) == text


def test_interrupt_leaves_a_clean_terminal(model_path):
    """Ctrl-C in the middle of a live display: code 130, one word, and the cursor is shown again."""
    arguments = ["the fox", "--num-beams", "8", "--max-new-tokens", "240", "--eos-token-id", "96"]
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*COMMAND, "--model", model_path, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    shown = b""
    deadline = time.monotonic() + 60
    while b"of 240" not in shown and time.monotonic() < deadline:
        shown += os.read(master, 65536)
    process.send_signal(signal.SIGINT)
    shown += read_to_end(master)
    assert process.wait(30) == EXIT_INTERRUPTED
    assert b"interrupted" in shown
    assert b"Traceback" not in shown
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l"), "the cursor is shown again"


def read_to_end(descriptor):
    data = b""
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # a pty reports EIO when the other side is closed
            return data
        if not piece:
            return data
        data += piece
