"""Beams and diverse beams beside those of transformers' older scorer (4.49), in an environment of its own.

    python -m venv old && old/bin/pip install torch "transformers==4.49.0"
    python scripts/compare_group_beams.py --old old/bin/python

This script makes tiny models and settings; the old Python runs its half (``--answer``); then cowbeam answers too, and
tokens and scores are compared. Exits with 1 on a difference. Pad tokens of finished groups, which later groups avoid
there, are forbidden for all.
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VOCABULARY, PAD = 67, 0
FAMILIES = ("gpt2", "llama", "mistral")


def random_settings(rng: random.Random) -> dict[str, Any]:
    groups, size = rng.choice([1, 2, 2, 3, 4]), rng.choice([1, 2, 3])
    size += groups == size == 1  # one beam is no search
    return {
        "num_beams": groups * size,
        "num_beam_groups": groups,
        "diversity_penalty": rng.choice([0.1, 0.5, 1.0, 3.0]) if groups > 1 else 0.0,
        "num_return_sequences": rng.randint(1, groups * size),
        "max_new_tokens": rng.randint(2, 12),
        "length_penalty": rng.choice([1.0, 0.0, -1.0, 0.5, 2.0]),
        "early_stopping": rng.choice([False, True, "never"]),
        "eos_token_id": rng.sample(range(1, VOCABULARY), 1),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.4]),
        "min_new_tokens": rng.choice([0, 0, 2]),
        "bad_words_ids": [[PAD]],
    }


def make_models(folder: Path) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **heads}
    sizes = {"gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4}, "llama": small, "mistral": small}
    torch.manual_seed(0)
    for family in FAMILIES:
        ids = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": PAD}
        config = CONFIG_MAPPING[family](**ids, **sizes[family], max_position_embeddings=128)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.3)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder / family)


def answer(folder: Path) -> None:
    """In the old environment: its own ``generate``."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    models = {family: AutoModelForCausalLM.from_pretrained(folder / family).eval() for family in FAMILIES}
    answers = []
    for case in json.loads((folder / "cases.json").read_text()):
        config = GenerationConfig(**case["settings"], pad_token_id=PAD, do_sample=False)
        ids = torch.tensor([case["prompt"]])
        more = {"attention_mask": torch.ones_like(ids), "return_dict_in_generate": True, "output_scores": True}
        out = models[case["family"]].generate(ids, generation_config=config, **more)
        rows = out.sequences[:, ids.shape[1] :].tolist()
        answers.append([[row, float(score)] for row, score in zip(rows, out.sequences_scores, strict=True)])
    (folder / "answers.json").write_text(json.dumps(answers))


def compare(folder: Path) -> int:
    from transformers import AutoModelForCausalLM

    from cowbeam.decoder import BeamSearchParams, Decoder

    decoders = {
        family: Decoder(AutoModelForCausalLM.from_pretrained(folder / family).eval(), block_size=4, num_blocks=512)
        for family in FAMILIES
    }
    differences = 0
    cases = json.loads((folder / "cases.json").read_text())
    for case, wanted in zip(cases, json.loads((folder / "answers.json").read_text()), strict=True):
        got = decoders[case["family"]].generate(case["prompt"], BeamSearchParams(**case["settings"]))
        pairs = [([*c.token_ids], c.score) for c in got.completions]
        wanted = [([token for token in row if token != PAD], score) for row, score in wanted]
        if [tokens for tokens, _ in pairs] != [tokens for tokens, _ in wanted] or any(
            # A sum in float32 that length_penalty -1 multiplies by its length, to some 200, is no finer than this.
            abs(a[1] - b[1]) > max(1e-4, 1e-6 * abs(b[1]))
            for a, b in zip(pairs, wanted, strict=True)
        ):
            differences += 1
            print(f"{case}\n  cowbeam {pairs}\n  wanted  {wanted}")
    print(json.dumps({"settings": len(cases), "differences": differences}))
    return 1 if differences else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", metavar="COMMAND", help="a Python that has transformers 4.49")
    parser.add_argument("--settings", type=int, default=200)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        answer(options.answer)
        return 0
    if not options.old:
        parser.error("--old is needed")
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), random.Random(0)
        make_models(folder)
        cases = [
            {
                "family": FAMILIES[number % len(FAMILIES)],
                "prompt": [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 20))],
                "settings": random_settings(rng),
            }
            for number in range(options.settings)
        ]
        (folder / "cases.json").write_text(json.dumps(cases))
        command = [*shlex.split(options.old), __file__, "--answer", str(folder)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONSAFEPATH": "1"})
        return compare(folder)


if __name__ == "__main__":
    sys.exit(main())
