"""A branch's place in its grammar: right after any forks, and no dearer in a long text than in a short one."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from cowbeam.decoder.grammar import Grammar, GrammarCompiler
from cowbeam.decoder.grammar_states import COPIED_AS_ONE_IS_READ, REACH, GrammarStates, Reader
from text import json_tokenizer

EOS = 2
NESTED = Grammar.ebnf('root ::= item* "."\nitem ::= "a" | "ab" | "[" item ("," item)* "]"')


@dataclass
class Library:
    """A matcher like the library's that takes any token, and counts what it would cost: tokens read, tokens copied."""

    cost: Counter[str] = field(default_factory=Counter)
    read: list[int] = field(default_factory=list)

    def accept_token(self, token_id: int) -> bool:
        self.cost["read"] += 1
        self.read.append(token_id)
        return True

    def is_terminated(self) -> bool:
        return False

    def rollback(self, number: int) -> None:
        self.cost["back"] += number
        assert 0 < number <= len(self.read)
        del self.read[-number:]

    def fork(self) -> "Library":
        self.cost["forks"] += 1
        self.cost["copied"] += len(self.read)
        return Library(self.cost, self.read.copy())


def beams(rng: random.Random, width: int) -> list[int]:
    """Parents as in a beam search: some beams have several children, some none."""
    return [min(rng.randrange(width), rng.randrange(width)) for _ in range(width)]


@pytest.mark.parametrize("width", [2, 8])
def test_a_step_costs_the_same_at_any_length(width: int) -> None:
    """xgrammar copies its history at a fork (161 µs at 25,000 tokens).

    Counted, not timed: of 500 steps behind 20,000 tokens none copies anything, and they read as many tokens as 500
    steps behind 7,000.
    """
    library, rng = Library(), random.Random(width)
    states = GrammarStates(library, 10)
    costs = {}
    for step in range(20_500):
        if step in (7_000, 20_000):
            library.cost.clear()
        states.follow(beams(rng, width), range(width))
        if step in (7_499, 20_499):
            costs[step - 499] = library.cost.copy()
    assert costs[20_000]["forks"] == 0
    assert costs[7_000]["forks"] == 0
    assert costs[20_000]["read"] < 1.3 * costs[7_000]["read"]
    assert costs[20_000]["read"] < 500 * width * 8


def test_two_lineages_that_take_turns() -> None:
    """Beams of two old families: now one has more members, now the other. No common place is near, and yet the
    matchers that one of them leaves are there when it grows again."""
    library = Library()
    states = GrammarStates(library, 10)
    states.follow([0, 0, 0], [1, 2, 3])
    for _ in range(7_000):
        states.follow([0, 1, 2], [1, 2, 3])
    library.cost.clear()
    for _ in range(200):
        states.follow([0, 0, 2], [1, 2, 3])  # ranks 0 and 1 of one family
        states.follow([0, 2, 2], [1, 2, 3])  # ranks 1 and 2 of the other
    assert library.cost["forks"] <= 2
    assert library.cost["read"] < 400 * 3 * 4


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = json_tokenizer()
    return GrammarCompiler(tokenizer, len(tokenizer))


@pytest.mark.parametrize("seed", range(6))
def test_masks_are_those_of_a_fresh_matcher(
    compiler: GrammarCompiler, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random forks, drops, forbidden tokens, EOS and widths, with matchers that are moved: beside each rank, a matcher
    that has read its text from the start."""
    monkeypatch.setattr("cowbeam.decoder.grammar_states.COPIED_AS_ONE_IS_READ", 1 + seed % 3)
    moves: list[int] = []
    move = Reader.move
    monkeypatch.setattr(Reader, "move", lambda self, place, common: moves.append(1) or move(self, place, common))
    rng = random.Random(seed)
    compiled = compiler.compile(NESTED)
    states = compiler.states(compiled, [EOS])
    texts: list[list[int] | None] = [[]]
    dot = json_tokenizer().convert_tokens_to_ids(".")
    for _ in range(60):
        wanted = [masks_of(compiler, compiled, text) for text in texts]
        masks = torch.zeros(len(texts), states.num_words, dtype=torch.int32)
        states.fill_masks(masks)
        assert torch.equal(masks, torch.stack([mask for mask, _ in wanted]))
        width = rng.choice([len(texts), len(texts), rng.randint(1, 6)])
        parents = [rng.randrange(len(texts)) for _ in range(width)]
        parents[0] = rng.choice([rank for rank, (_, allowed) in enumerate(wanted) if set(allowed) - {EOS, dot}])
        tokens = [choose(rng, wanted[parent][1], rank, dot) for rank, parent in enumerate(parents)]
        states.follow(parents, tokens)
        texts = [longer(texts[p], t, wanted[p][1]) for p, t in zip(parents, tokens, strict=True)]
    assert moves


def masks_of(compiler: GrammarCompiler, compiled: Any, text: list[int] | None) -> tuple[torch.Tensor, list[int]]:
    """By a matcher that reads the whole text: what may follow, as bits and as ids."""
    states = compiler.states(compiled, [EOS])
    mask = torch.zeros(1, states.num_words, dtype=torch.int32)
    if text is None:
        return mask[0], []
    for token in text:
        states.follow([0], [token])
    states.fill_masks(mask)
    bits = mask[0, :, None] >> torch.arange(32) & 1
    return mask[0], bits.reshape(-1).nonzero()[:, 0].tolist()


def choose(rng: random.Random, allowed: list[int], rank: int, dot: int) -> int:
    """Mostly what may follow, in rank 0 always and without an end; else anything."""
    going_on = [token for token in allowed if token not in (EOS, dot)]
    if going_on and (rank == 0 or rng.random() < 0.9):
        return rng.choice(going_on)
    return rng.choice([EOS, dot, 5])


def longer(text: list[int] | None, token: int, allowed: list[int]) -> list[int] | None:
    return [*text, token] if text is not None and token in allowed and token != EOS else None


def test_short_texts_are_copied() -> None:
    """A copy of so few tokens costs less than to look for a matcher nearby."""
    library, rng = Library(), random.Random(0)
    states = GrammarStates(library, 10)
    for _ in range(COPIED_AS_ONE_IS_READ - 1):
        states.follow(beams(rng, 4), range(4))
    assert not library.cost["back"]
    assert not states._spare


def test_no_more_matchers_than_twice_the_branches() -> None:
    """Those of dropped branches are given up once they are out of reach, or more than there are branches."""
    states = GrammarStates(Library(), 10)
    states.follow([0] * 6, range(6))
    for _ in range(COPIED_AS_ONE_IS_READ * REACH):
        states.follow(range(6), range(6))
    states.follow([0, 1], [1, 2])
    assert len(states._spare) == 2
    for _ in range(REACH + 1):
        states.follow([0, 1], [1, 2])
    assert not states._spare
