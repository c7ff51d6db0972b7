"""Beam search is transformers' beam search: token ids, chosen parents, scores and log-probs, whatever the settings."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from cowbeam.decoder import BeamSearchParams, Completion, Decoder, DecodeResult
from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.candidates import CandidateSource
from cowbeam.decoder.group import Group, KVBytes, Request
from fakes import BLOCK_SIZES, FAMILIES, make_model, random_beam_settings, random_prompt, tiny_decoder, tiny_model
from oracles import Expected, best_of_all, last_logits, transformers_generate

CHUNKS, SETTINGS_A_CHUNK = 8, 40
# Sums of float32 log-probs; transformers' own batched and single runs differ by as much.
TOLERANCE = 1e-4
PENALIZES_PADS = Version(transformers.__version__) < Version("5.24")


@dataclass(frozen=True)
class Case:
    """One random setting; `str` of it is all that a failure needs to be run again."""

    seed: int
    family: str
    block_size: int
    prompts: list[list[int]]
    settings: dict[str, Any]

    @classmethod
    def draw(cls, seed: int) -> "Case":
        rng = random.Random(seed)
        families = sorted(FAMILIES)
        prompts = [random_prompt(rng) for _ in range(rng.choice([1, 1, 2, 3]))]
        return cls(seed, families[seed % len(families)], rng.choice(BLOCK_SIZES), prompts, random_beam_settings(rng))

    def expected(self, dtype: torch.dtype) -> list[list[Expected]]:
        model = tiny_model(self.family, dtype)
        if self.settings["no_repeat_ngram_size"] or (PENALIZES_PADS and self.settings["repetition_penalty"] != 1):
            # In a left-padded batch transformers counts the pads as well: that is the batch's doing.
            return [transformers_generate(model, [prompt], self.settings)[0] for prompt in self.prompts]
        return transformers_generate(model, self.prompts, self.settings)

    def results(self, dtype: torch.dtype) -> list[DecodeResult]:
        decoder = tiny_decoder(self.family, self.block_size, dtype)
        results = decoder.generate(self.prompts, BeamSearchParams(**self.settings))
        decoder.check_integrity()
        assert decoder.num_free_blocks == decoder.num_blocks, f"blocks are left behind: {self}"
        return results

    def check(self) -> list[DecodeResult]:
        """Compare; a difference in float32 counts only if it stands in float64 (rounding may swap near ties)."""
        results = self.results(torch.float32)
        if differences(self.expected(torch.float32), results, self.settings):
            results = self.results(torch.float64)
            found = differences(self.expected(torch.float64), results, self.settings)
            assert not found, f"{found}\nin {self}"
        return results


def differences(
    expected: Sequence[Sequence[Expected]], results: Sequence[DecodeResult], settings: dict[str, Any]
) -> list[str]:
    found = []
    for prompt, (wanted, result) in enumerate(zip(expected, results, strict=True)):
        assert len(wanted) == len(result.completions), f"prompt {prompt}: {len(result.completions)} completions"
        for want, got in zip(wanted, result.completions, strict=True):
            found += [f"prompt {prompt}, completion {got.index}: {line}" for line in _differences(want, got, settings)]
    return found


def _differences(want: Expected, got: Completion, settings: dict[str, Any]) -> list[str]:
    found = []
    if tuple(want.token_ids) != got.token_ids:
        return [f"tokens {got.token_ids}, transformers {want.token_ids}"]
    if settings["num_beams"] > 1 and tuple(want.beams) != got.beams:
        found.append(f"parents {got.beams}, transformers {want.beams}")
    if want.score is not None and not abs(want.score - got.score) <= TOLERANCE * max(1.0, abs(want.score)):
        found.append(f"score {got.score}, transformers {want.score}")
    if not all(abs(a - b) <= TOLERANCE for a, b in zip(want.logprobs, got.logprobs, strict=True)):
        found.append(f"logprobs {got.logprobs}, transformers {want.logprobs}")
    return found


def numbers_of(results: Sequence[DecodeResult], settings: dict[str, Any]) -> None:
    """What a completion says of itself can be recomputed from its own log-probs."""
    eos_ids = settings["eos_token_id"]
    for completion in (completion for result in results for completion in result.completions):
        length = len(completion.token_ids)
        assert length == len(completion.logprobs) == len(completion.beams)
        assert sum(completion.logprobs) == pytest.approx(completion.cumulative_logprob, abs=1e-5)
        score = completion.cumulative_logprob / length ** settings["length_penalty"]
        assert completion.score == pytest.approx(score, rel=1e-5)
        ended = completion.token_ids[-1] in eos_ids
        assert completion.finish_reason == ("eos" if ended else "length")
        assert completion.stop_reason == (completion.token_ids[-1] if ended else None)
        assert not set(completion.token_ids[:-1]) & set(eos_ids), "nothing follows an EOS"
        assert ended or length == settings["max_new_tokens"]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_beams_equal_transformers(chunk: int) -> None:
    """CHUNKS × SETTINGS_A_CHUNK random settings over all families, single prompts and left-padded batches."""
    moved = forked = searched = 0
    for seed in range(chunk * SETTINGS_A_CHUNK, (chunk + 1) * SETTINGS_A_CHUNK):
        case = Case.draw(seed)
        results = case.check()
        numbers_of(results, case.settings)
        if case.settings["num_beams"] > 1 and case.settings["max_new_tokens"] > 3:
            searched += 1
            forked += any(result.stats.cow_copies for result in results)
            moved += any(
                beam != rank
                for result in results
                for rank, completion in enumerate(result.completions)
                for beam in completion.beams[1:]
            )
    # A search in which no beam ever overtakes another proves nothing of the kind.
    assert moved > 0.8 * searched, f"only {moved} of {searched} searches reordered their beams"
    assert forked > 0.5 * searched, f"only {forked} of {searched} searches copied a block"


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(8, 48))
def test_beams_equal_transformers_at_length(chunk: int) -> None:
    for seed in range(chunk * 60, (chunk + 1) * 60):
        numbers_of(Case.draw(seed).check(), Case.draw(seed).settings)


def test_greedy_takes_the_greatest_logit() -> None:
    """As in transformers: logits that differ can have one float32 log-prob, and by it the lower id would win."""
    logits = torch.zeros(1, 64)
    logits[0, 5] = 1e-9
    group = Group(Request((1,), BeamSearchParams(num_beams=1), frozenset(), seed=None), BlockPool(8, 4), KVBytes(1, ()))
    group.plant()
    source = CandidateSource(group, torch.device("cpu"))
    ((_, _, token),) = source.propose(logits, torch.zeros(1, dtype=torch.long), torch.zeros(1))[0].T.tolist()
    assert token == 5


SMALL_VOCABULARIES = (4, 5, 7, 11)


@pytest.mark.parametrize("vocabulary", SMALL_VOCABULARIES)
def test_more_beams_than_candidates(vocabulary: int) -> None:
    """``num_beams`` above the vocabulary (issue list B13, B14): the surplus ranks are hopeless until tokens suffice.

    They once filled the places of finished sequences, so that ``early_stopping=True`` ended the search before the
    best was found. Where transformers itself returns masked rows (score below −1e8), they rank behind all others and
    ties among them may fall either way: only the others are compared.
    """
    model = make_model("llama", {**FAMILIES["llama"], "vocab_size": vocabulary})
    decoder = Decoder(model, block_size=4, num_blocks=1024)
    for seed in range(40):
        rng = random.Random(seed)
        num_beams = rng.choice([vocabulary - 1, vocabulary + 1, 2 * vocabulary, 20])
        settings = random_beam_settings(rng) | {
            "num_beams": num_beams,
            "num_return_sequences": rng.randint(1, num_beams),
            "eos_token_id": rng.sample(range(vocabulary), rng.choice([0, 1, 2])),
            "no_repeat_ngram_size": 0,
        }
        prompt = [rng.randrange(1, vocabulary) for _ in range(rng.randint(1, 9))]
        (wanted,) = transformers_generate(model, [prompt], settings)
        result = decoder.generate(prompt, BeamSearchParams(**settings))
        decoder.check_integrity()
        real = [want for want in wanted if want.score is None or want.score > -1e8]
        for want, got in zip(real, result.completions, strict=False):
            assert not _differences(want, got, settings), f"seed {seed}: {prompt} {settings}"
        assert len(real) <= len(result.completions) <= len(wanted), f"seed {seed}: {prompt} {settings}"


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("eos_ids", [(), (2,), (0, 3)])
def test_wide_search_finds_the_best_of_all(length_penalty: float, eos_ids: tuple[int, ...]) -> None:
    """Brute force over all sequences of a tiny vocabulary (transformers PR #20901 stopped too early or too late)."""
    vocabulary, length = 4, 4
    model = make_model("llama", {**FAMILIES["llama"], "vocab_size": vocabulary}, seed=5)
    prompt = [1, 3, 2]
    known: dict[tuple[int, ...], list[float]] = {}

    def next_logprobs(tokens: tuple[int, ...]) -> list[float]:
        if tokens not in known:
            known[tokens] = torch.log_softmax(last_logits(model, [*prompt, *tokens]), -1).tolist()
        return known[tokens]

    ranked = best_of_all(
        next_logprobs, max_new_tokens=length, eos_ids=frozenset(eos_ids), length_penalty=length_penalty
    )
    params = BeamSearchParams(
        num_beams=vocabulary ** (length - 1),
        num_return_sequences=5,
        max_new_tokens=length,
        early_stopping="never",
        length_penalty=length_penalty,
        eos_token_id=list(eos_ids),
    )
    result = Decoder(model, block_size=4, num_blocks=512).generate(prompt, params)
    assert [c.token_ids for c in result.completions] == [tokens for _, tokens in ranked[:5]]
    assert [c.score for c in result.completions] == pytest.approx([score for score, _ in ranked[:5]], abs=TOLERANCE)
