"""The text of a branch that is watched is that of all its tokens, though each frame decodes only what is new."""

import random

import pytest
from transformers import AutoTokenizer

from cowbeam.decoder import Decoder, SamplingParams
from cowbeam.decoder.branch_texts import BranchTexts
from cowbeam.decoder.branches import Token
from cowbeam.decoder.chain import links
from cowbeam.decoder.default_model import fetch_default_model
from fakes import tiny_model

PIECES = [" a", "b", " ", "é", "日", "🙂", "\n", " don't", " .", ",", "  "]


def bytes_as_text(token_ids):
    """Tokens are bytes, parts of characters among them; a space at the beginning of a text is lost."""
    return bytes(token_ids).decode(errors="replace").removeprefix(" ")


def grow(rng, next_ids, decode_text, steps):
    """Branches that fork and end as beams do, one or two tokens a frame."""
    texts, newest = BranchTexts(), [Token(None, next_ids(()), 0.0, 0)]
    for _ in range(steps):
        for _ in range(rng.choice([1, 1, 2])):
            parents = rng.choices(newest, k=4)
            newest = [Token(parent, next_ids([t.token_id for t in links(parent)]), 0.0, 0) for parent in parents]
        wanted = [decode_text([token.token_id for token in links(last)]) for last in newest]
        assert texts.of(newest, decode_text) == wanted


@pytest.mark.parametrize("seed", range(10))
def test_tokens_that_are_parts_of_characters(seed):
    rng = random.Random(seed)
    whole = "".join(rng.choice(PIECES) for _ in range(200)).encode()
    grow(rng, lambda before: whole[len(before)] if rng.random() < 0.95 else 32, bytes_as_text, 40)


@pytest.mark.parametrize("seed", range(4))
def test_the_default_models_tokens(seed):
    """Any of them, special ones and single bytes too, and those of text."""
    tokenizer, rng = AutoTokenizer.from_pretrained(fetch_default_model()), random.Random(seed)
    written = tokenizer("".join(rng.choice(PIECES) for _ in range(300))).input_ids

    def next_id(before):
        return written[len(before)] if rng.random() < 0.8 else rng.randrange(len(tokenizer))

    grow(rng, next_id, lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True), 40)


def test_a_frame_decodes_few_tokens():
    """A step of 8 beams spent a millisecond on the text of 500 tokens that had not changed."""
    decoded = []

    class Tokenizer:
        def decode(self, token_ids, **_):
            decoded.append(len(token_ids))
            return "a" * len(token_ids)

    with Decoder(tiny_model("llama"), Tokenizer(), block_size=4, num_blocks=256) as decoder:
        frames = decoder.stream([5, 6, 7], SamplingParams(num_return_sequences=3, max_new_tokens=60, eos_token_id=[]))
        lengths = [[len(branch.text) for branch in frame.branches] for frame in frames]
    assert lengths[:-1] == [[n] * 3 for n in range(1, 60)]
    assert max(decoded[: 59 * 3 * 3]) <= 3
