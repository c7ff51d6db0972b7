"""A user's script before and after the one line: `scripts/attach_before_after.py` on a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fakes import VOCABULARY, tiny_model
from text import tiny_tokenizer

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "attach_before_after.py"


@pytest.mark.long
def test_same_output_in_fewer_slots(tmp_path: Path) -> None:
    """Prompt and new tokens fill whole blocks, so the slots are those that are needed, at most."""
    tiny_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer(VOCABULARY).save_pretrained(tmp_path)
    options = ["--model", str(tmp_path), "--beams", "6", "--prompt", "48", "--new-tokens", "32"]
    run = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True)
    assert not run.returncode, run.stdout + run.stderr
    said = json.loads(run.stdout.splitlines()[-1])
    assert said["same_output"]
    assert said["after"]["slots"] <= 48 + 6 * 32
    assert said["after"]["kv_bytes"] < said["before"]["kv_bytes"]
