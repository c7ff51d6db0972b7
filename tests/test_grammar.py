"""Grammars: every branch is somewhere of its own in it, and what ends by an EOS id fits it as a whole."""

import functools
import json
import random
import re
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from cowbeam.decoder import BeamSearchParams, BranchScorer, Completion, Decoder, Grammar, SamplingParams
from cowbeam.decoder.grammar_states import GrammarStates, Reader
from cowbeam.decoder.params import Params
from fakes import FAMILIES, make_model
from text import json_tokenizer

EOS, END = 2, 3
COLOUR = {"enum": ["red", "green", "reddish"]}
NODE = {
    "type": "object",
    "properties": {
        "name": COLOUR,
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
    },
    "required": ["name", "size", "tags", "next"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "recursive": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "list": {"type": "array", "items": {"anyOf": [COLOUR, {"type": "string", "maxLength": 3}]}, "maxItems": 3},
    "flat": {**NODE, "properties": {**NODE["properties"], "next": {"type": "null"}}},  # type: ignore[dict-item]
}


@functools.cache
def decoder_of(family: str) -> Decoder:
    tokenizer = json_tokenizer()
    model = make_model(family, {**FAMILIES[family], "vocab_size": len(tokenizer) + 6})  # more ids than tokens
    return Decoder(model, tokenizer, block_size=4, num_blocks=1024)


def is_node(value: Any, *, flat: bool) -> bool:
    return (
        isinstance(value, dict)
        and list(value) == ["name", "size", "tags", "next"]
        and value["name"] in COLOUR["enum"]
        and type(value["size"]) is int
        and 0 <= value["size"] <= 99
        and len(value["tags"]) <= 2
        and all(type(tag) is bool for tag in value["tags"])
        and (value["next"] is None or (not flat and is_node(value["next"], flat=False)))
    )


def is_valid(name: str, text: str) -> bool:
    value = json.loads(text)
    if name == "list":
        return len(value) <= 3 and all(isinstance(x, str) and (x in COLOUR["enum"] or len(x) <= 3) for x in value)
    return is_node(value, flat=name == "flat")


def random_params(rng: random.Random, grammar: Grammar) -> Params:
    """Beams, sampled and diverse ones, samples; with penalties that fight the grammar."""
    fields: dict[str, Any] = {
        "max_new_tokens": rng.choice([20, 60, 90]),
        "eos_token_id": rng.choice([[EOS], [EOS, END]]),
        "repetition_penalty": rng.choice([1.0, 1.2]),
        "renormalize_logits": rng.random() < 0.3,
        "grammar": grammar,
    }
    width = rng.choice([1, 2, 4, 6])
    kind = rng.choice(["beams", "beams", "diverse", "sampled beams", "samples"])
    if kind == "samples":
        return SamplingParams(num_return_sequences=width, seed=rng.randrange(99), **fields)
    if kind == "diverse":
        return BeamSearchParams(num_beams=4, num_beam_groups=2, diversity_penalty=0.5, num_return_sequences=4, **fields)
    sampled = {"do_sample": True, "seed": rng.randrange(99)} if kind == "sampled beams" and width > 1 else {}
    return BeamSearchParams(num_beams=width, num_return_sequences=width, **sampled, **fields)


def test_what_ends_by_an_eos_is_valid() -> None:
    """B7, B8 (vLLM #34782; xgrammar #681, outlines #539): no grammar for beams, or one state for all of them.

    The model knows no JSON at all: every character is the grammar's doing. Several requests run together.
    """
    ended = cut = shared = 0
    for seed in range(24):
        rng = random.Random(seed)
        decoder, names = decoder_of(sorted(FAMILIES)[seed % 3]), rng.choices(sorted(SCHEMAS), k=2)
        params = [random_params(rng, Grammar.json_schema(SCHEMAS[name])) for name in names]
        prompts = [rng.choices(range(4, 300), k=5) for _ in params]
        for name, result in zip(names, decoder.generate(prompts, params), strict=True):
            for completion in result.completions:
                if completion.finish_reason == "eos":
                    ended += 1
                    assert is_valid(name, completion.text), completion.text
                else:
                    cut += 1
                    assert begins_right(completion.text)
            texts = [completion.text for completion in result.completions]
            shared += (
                len(texts) > 1 and len(set(texts)) == len(texts) and len({text[:12] for text in texts}) < len(texts)
            )
        decoder.check_integrity()
        assert decoder.num_free_blocks == decoder.num_blocks
    assert ended >= 20
    assert cut
    assert shared, "beams that fork in the middle of a value"


def begins_right(text: str) -> bool:
    """Cut off by max_new_tokens, but no sign of it is out of place."""
    return re.match(r'[\[{]("|$)|\[\]', text) is not None


def test_two_beams_of_one_beginning() -> None:
    """xgrammar #681's own case: `city "."` with cities of one first token; both come out, whole and different."""
    rules = 'root ::= city "."\ncity ::= "San Francisco" | "San Diego" | "Santa Fe"'
    params = BeamSearchParams(
        num_beams=3, num_return_sequences=3, max_new_tokens=30, eos_token_id=EOS, grammar=Grammar.ebnf(rules)
    )
    completions = decoder_of("llama").generate([7, 8], params).completions
    assert {c.text for c in completions} == {"San Francisco.", "San Diego.", "Santa Fe."}


def test_fewer_texts_than_beams() -> None:
    """Only two texts exist: beams that the grammar has no token for fill places and are not returned."""
    params = BeamSearchParams(
        num_beams=5, num_return_sequences=5, max_new_tokens=9, eos_token_id=EOS, grammar={"regex": "yes|no"}
    )
    assert sorted(c.text for c in decoder_of("llama").generate([7, 8], params).completions) == ["no", "yes"]


def test_a_single_path_costs_its_probability() -> None:
    """Scores are the model's own: forbidden tokens are not renormalized away, unless that is asked for."""
    plain: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 9, "eos_token_id": EOS, "grammar": Grammar.regex("yes")}
    (one,) = decoder_of("llama").generate([7, 8], BeamSearchParams(**plain, logprobs=0)).completions
    assert one.token_logprobs is not None
    assert one.logprobs == pytest.approx([token.logprob for token in one.token_logprobs], abs=1e-4)
    renormalized = BeamSearchParams(**plain, renormalize_logits=True)
    (sure,) = decoder_of("llama").generate([7, 8], renormalized).completions
    assert sure.score > one.score


def test_each_step_parses_one_token_a_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """B7 (vLLM PR #36285): compiled anew and replayed at each step, so that steps grew with the length.

    Counted: as many tokens taken as rows, as many forks as a step's further children.
    """
    calls: Counter[str] = Counter()
    steps: list[tuple[int, int]] = []
    follow = GrammarStates.follow

    def counted(self: GrammarStates, parents: Any, token_ids: Any) -> None:
        made = len(parents) - (len(set(parents)) if steps else 1)
        calls.clear()
        follow(self, parents, token_ids)
        assert calls == Counter(fork=made, goes_on=len(parents))
        steps.append((len(parents), made))

    for name in ("fork", "goes_on", "move"):
        monkeypatch.setattr(Reader, name, counting(name, getattr(Reader, name), calls))
    monkeypatch.setattr(GrammarStates, "follow", counted)
    params = SamplingParams(
        num_return_sequences=3,
        max_new_tokens=90,  # forks, since copying so short a text costs less than reading a part of it again
        eos_token_id=EOS,
        seed=0,
        grammar=Grammar.regex("[a-z]{60,}[0-9]"),
        branch_scorer=BranchScorer(score=lambda b: [float(one.token_ids[-1] % 7) for one in b], every=4, keep=2),
    )
    decoder_of("llama").generate([7, 8], params)
    assert sum(forks for _, forks in steps[1:]) > 3
    assert all(1 <= rows <= 3 for rows, _ in steps)


def counting(name: str, method: Any, calls: Counter[str]) -> Any:
    def counted(self: Reader, *arguments: Any) -> Any:
        calls[name] += 1
        return method(self, *arguments)

    return counted


def test_with_steps_in_flight_and_beside_others() -> None:
    """The device cannot foresee what the host's grammar allows: nothing differs."""
    decoder = decoder_of("qwen2")
    params: list[Params] = [
        BeamSearchParams(
            num_beams=4, max_new_tokens=60, eos_token_id=EOS, grammar=Grammar.json_schema(SCHEMAS["flat"])
        ),
        BeamSearchParams(num_beams=3, max_new_tokens=12, eos_token_id=EOS),
        SamplingParams(num_return_sequences=3, seed=4, eos_token_id=EOS, grammar=Grammar.json_schema(SCHEMAS["list"])),
    ]

    def run() -> list[list[tuple[int, ...]]]:
        return [[c.token_ids for c in result.completions] for result in decoder.generate([[7, 8, 9]] * 3, params)]

    wanted = run()
    decoder._engine._looks_ahead = True  # type: ignore[union-attr]
    try:
        assert run() == wanted
    finally:
        decoder._engine._looks_ahead = False  # type: ignore[union-attr]


def test_a_processor_that_allows_what_the_grammar_forbids() -> None:
    """The user's word is last; the branch is outside of the grammar then, and has no token to go on with."""

    def insists(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 100] = 0.0
        return scores

    params = BeamSearchParams(
        num_beams=1, max_new_tokens=9, eos_token_id=EOS, grammar=Grammar.regex("yes"), logits_processors=[insists]
    )
    (completion,) = decoder_of("llama").generate([7, 8], params).completions
    assert completion.finish_reason == "length"


MISTAKES: list[tuple[Any, str]] = [
    ({"json_schema": "{"}, "json_schema is no JSON: "),
    ({"json_schema": 3}, "json_schema must be a schema, got 3"),
    ({"regex": ""}, "regex must be text, got ''"),
    ({"xml": "a"}, "grammar must be a Grammar, or a mapping of one of json_schema, regex, ebnf, got {'xml': 'a'}"),
    ("yes|no", "grammar must be a Grammar, or a mapping of one of json_schema, regex, ebnf, got 'yes|no'"),
]


@pytest.mark.parametrize(("value", "message"), MISTAKES)
def test_unusable_values_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        SamplingParams(grammar=value)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.regex("(a"), "grammar: this regex cannot be used"),
        (Grammar.ebnf("root ::= other"), "grammar: this ebnf cannot be used"),
        (Grammar.json_schema({"type": "nothing"}), "grammar: this json_schema cannot be used"),
    ],
)
def test_what_is_no_grammar_is_refused_before_any_work(grammar: Grammar, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}") as refusal:
        decoder_of("llama").generate([7], SamplingParams(grammar=grammar, eos_token_id=EOS))
    assert ".cc:" not in str(refusal.value), "the library's own source says nothing to a user"


def test_what_a_grammar_needs() -> None:
    params = SamplingParams(grammar=Grammar.regex("a"), eos_token_id=[])
    with pytest.raises(ValueError, match="grammar needs an EOS id"):
        decoder_of("llama").generate([7], params)
    bare = Decoder(decoder_of("llama").model, num_blocks=16)
    with pytest.raises(ValueError, match="grammar needs a tokenizer"):
        bare.generate([7], SamplingParams(grammar=Grammar.regex("a"), eos_token_id=EOS))


def test_without_the_library_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(decoder_of("llama").model, json_tokenizer(), num_blocks=16)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ValueError, match=r"grammar needs the library xgrammar \(pip install 'cowbeam\[grammar\]'\)"):
        decoder.generate([7], SamplingParams(grammar=Grammar.regex("a"), eos_token_id=EOS))


def test_any_json() -> None:
    params = SamplingParams(
        num_return_sequences=8, max_new_tokens=40, seed=1, eos_token_id=EOS, grammar=Grammar.json_schema(True)
    )
    completions = decoder_of("llama").generate([7, 8], params).completions
    ended = [c for c in completions if c.finish_reason == "eos"]
    assert ended
    for completion in ended:
        json.loads(completion.text)


@pytest.mark.long
def test_two_hundred_of_the_default_model() -> None:
    """Of 200 JSON outputs of beams all that end by an EOS are valid; asked for in words, too."""
    decoder = Decoder.from_pretrained()
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "country": {"type": "string"}, "population": {"type": "integer"}},
        "required": ["city", "country", "population"],
        "additionalProperties": False,
    }
    found: list[Completion] = []
    cities = "Paris London Rome Madrid Berlin Vienna Prague Oslo Lisbon Athens Cairo Lima Quito Tokyo Delhi Seoul Hanoi"
    cities += " Dublin Warsaw Bern Ottawa Havana Tunis Dakar Accra"
    params = BeamSearchParams(
        num_beams=8, num_return_sequences=8, max_new_tokens=48, grammar=Grammar.json_schema(schema)
    )
    for city in cities.split():
        question = [{"role": "user", "content": f"Describe {city} as JSON with city, country and population."}]
        assert decoder.tokenizer is not None
        prompt = decoder.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
        found += decoder.generate(prompt, params).completions  # type: ignore[arg-type]
    ended = [completion for completion in found if completion.finish_reason == "eos"]
    assert len(found) == 200
    assert len(ended) > 100
    for completion in ended:
        value = json.loads(completion.text)
        assert list(value) == ["city", "country", "population"]
        assert type(value["population"]) is int
