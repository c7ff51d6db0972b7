"""Candidates of many groups at once: each group's are those it finds alone, by one call for all groups of a kind."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams, flight
from cowbeam.decoder.params import Params
from fakes import DEVICE, FAMILIES, make_model, token_ids

KINDS: list[Params] = [
    BeamSearchParams(num_beams=4, num_return_sequences=4, max_new_tokens=12, eos_token_id=[]),
    BeamSearchParams(num_beams=3, num_return_sequences=3, max_new_tokens=9, eos_token_id=[7, 11]),
    SamplingParams(num_return_sequences=3, max_new_tokens=11, eos_token_id=list(range(5, 25)), seed=3),
    SamplingParams(num_return_sequences=2, max_new_tokens=12, eos_token_id=[], seed=2**63 + 5),
    BeamSearchParams(num_beams=1, max_new_tokens=10, eos_token_id=[9]),
    SamplingParams(num_return_sequences=2, max_new_tokens=12, eos_token_id=[], seed=1, temperature=0.7),  # processed
]


def decoder_of(model: Any, looks_ahead: bool) -> Decoder:
    decoder = Decoder(model, block_size=4, num_blocks=600, prefix_reuse=False)
    decoder._engine._looks_ahead = looks_ahead  # type: ignore[union-attr]
    return decoder


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_groups_of_all_kinds_beside_each_other_are_as_alone(looks_ahead: bool) -> None:
    model = make_model("llama", FAMILIES["llama"]).to(DEVICE)
    params = [kind for kind in KINDS for _ in range(3)]
    params = params[::2] + params[1::2]  # members of a kind do not lie side by side
    prompts = [[3 + number, 1, 4, number % 5 + 1] for number in range(len(params))]
    alone = decoder_of(model, looks_ahead)
    wanted = [alone.generate(prompt, of_one) for prompt, of_one in zip(prompts, params, strict=True)]
    together = decoder_of(model, looks_ahead).generate(prompts, params)
    assert [token_ids(result) for result in together] == [token_ids(result) for result in wanted]


@pytest.mark.parametrize("kind", [0, 3, 4])
def test_launches_do_not_grow_with_the_number_of_groups(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 requests of 8 samples took 64 chains of launches a step: a tenth of its time on an H200."""
    calls: Counter[str] = Counter()
    propose = flight._propose

    def counted(of_flight: flight.Flight, cohort: flight.Cohort) -> Any:
        calls["cohorts"] += 1
        calls["groups"] += len(cohort.members)
        return propose(of_flight, cohort)

    monkeypatch.setattr(flight, "_propose", counted)
    decoder = decoder_of(make_model("llama", FAMILIES["llama"]).to(DEVICE), looks_ahead=False)
    params = replace(KINDS[kind], eos_token_id=[])
    decoder.generate([[number, 1, 2] for number in range(1, 11)], params)
    steps = params.max_new_tokens
    assert calls["groups"] == 10 * steps
    first = 10 if kind == 0 else 1  # beams of a first choice stand on one row: each group by itself
    assert calls["cohorts"] == first + steps - 1
