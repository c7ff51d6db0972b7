"""Whatever arrives from a form, a link or a call is a search the demo runs, or one sentence that names the field."""

import json
import math
import random
import re

import pytest

from cowbeam.decoder import BeamSearchParams, SamplingParams
from cowbeam.ui.examples import EXAMPLES
from cowbeam.ui.form import COMPARISONS, DEFAULTS, comparison_from_link, from_link, searches, searches_again
from cowbeam.ui.settings import LABELS, MODES, Settings, in_form_words


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_asks_the_decoder_for_what_it_says(mode):
    settings = Settings.from_values({"prompt": "a", "mode": mode, "width": 5, "seed": 3, "temperature": 0.7})
    params = settings.params()
    assert isinstance(params, SamplingParams) == (mode == "parallel sampling")
    assert params.width == settings.branches == (1 if mode == "greedy" else 5)
    if isinstance(params, BeamSearchParams):
        assert params.do_sample == (mode == "beam sampling")
    drawn = mode in ("parallel sampling", "beam sampling")
    assert (params.temperature, params.seed) == ((0.7, 3) if drawn else (1.0, None)), "unused settings stay out"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompt": " \n"}, "prompt is empty"),
        ({"prompt": 7}, "prompt must be text, got 7"),
        ({"prompt": "x" * 20_001}, "prompt has 20,001 characters; at most 20,000"),
        ({"mode": "beam"}, "mode must be one of beam search"),
        ({"mode": ["greedy"]}, "mode must be one of"),
        ({"width": 17}, "width must be a number from 1 to 16, got 17"),
        ({"width": 2.5}, "width must be a whole number, got 2.5"),
        ({"width": True}, "width must be a number"),
        ({"width": "8"}, "width must be a number"),
        ({"width": math.nan}, "width must be a number"),
        ({"max_new_tokens": 10**400}, "max_new_tokens must be a number"),
        ({"block_size": 3}, "block_size must be one of 1, 2, 4"),
        ({"block_size": 16.0}, "block_size must be one of"),
        ({"num_blocks": 4097}, "num_blocks must be a number from 0 to 4096"),
        ({"temperature": 0}, "temperature must be a number from 0.05"),
        ({"temperature": math.inf}, "temperature must be a number"),
        ({"early_stopping": True}, "early_stopping must be one of"),
        ({"chat": 1}, "chat must be true or false"),
        ({"seed": -1}, "seed must be a number"),
        ({"mode": "beam sampling", "width": 1}, "width must be at least 2 for beam sampling"),
        ({"nonsense": 1}, "there is no setting 'nonsense'"),
    ],
)
def test_unusable_values_are_named(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        Settings.from_values({"prompt": "a", **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"width": 17}, "“Branches” must be a number from 1 to 16, got 17"),
        ({"num_blocks": 9999}, "“Blocks in the pool” must be a number from 0 to 4096, got 9999"),
        ({"mode": "num_blocks=3"}, "“Decoding” must be one of .* got 'num_blocks=3'"),
        ({"seed": "width=2"}, "“Seed” must be a number .* got 'width=2'"),
    ],
)
def test_the_page_refuses_in_the_words_of_its_form(changes, sentence):
    """A visitor was told of num_blocks, which the form calls “Blocks in the pool”; what they wrote stays as it is."""
    with pytest.raises(ValueError, match=next(iter(changes))) as refused:
        Settings.from_values({"prompt": "a", **changes})
    assert re.fullmatch(sentence, in_form_words(str(refused.value)))


def test_refusals_of_the_decoder_are_in_the_forms_words_too():
    sentence = "a prompt of 9 tokens and max_new_tokens=512 exceed the model's 64 positions"
    assert in_form_words(sentence) == "a prompt of 9 tokens and “New tokens” 512 exceed the model's 64 positions"
    assert LABELS.keys() == {*DEFAULTS.as_values(), "compare"}


@pytest.mark.parametrize("values", [None, [], "prompt", 3, {}])
def test_what_is_no_set_of_settings_is_refused(values):
    with pytest.raises(ValueError, match=r"settings must be an object|prompt is missing"):
        Settings.from_values(values)


def test_random_rubbish_never_raises_anything_else():
    """Half of the values are usable: rubbish must not hide behind other rubbish."""
    rng = random.Random(0)
    rubbish = [None, True, -1, 0, 1, 7, 2**70, 0.5, math.nan, math.inf, "", "8", "never", [], {}, [1], {"a": 1}]
    sentences = []
    for _ in range(2000):
        values = {"prompt": "a", **{n: rng.choice(rubbish) for n in rng.sample(list(DEFAULTS.as_values()), 3)}}
        try:
            Settings.from_values(values).params()
        except ValueError as error:
            sentences.append(str(error))
    assert 1000 < len(sentences) < 2000
    assert all(len(sentence) < 400 and "\n" not in sentence for sentence in sentences)


def test_settings_survive_json_and_links():
    """A trace and a link carry them; a link carries text only."""
    settings = Settings.from_values(
        {"prompt": "a & b ?", "mode": "greedy", "chat": False, "temperature": 0.7, "seed": 5}
    )
    assert Settings.from_values(json.loads(json.dumps(settings.as_values()))) == settings
    query = {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in settings.as_values().items()
    }
    assert from_link(query) == settings.as_values()


@pytest.mark.parametrize(
    "query", [{"width": "many"}, {"mode": "x"}, {"prompt": ""}, {"chat": "maybe"}, {"seed": "1e3"}]
)
def test_a_broken_link_is_refused(query):
    with pytest.raises(ValueError, match=next(iter(query))):
        from_link(query)


def test_a_link_may_hold_other_names():
    assert from_link({"__theme": "dark", "width": "3"})["width"] == 3


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_comparisons_differ_in_what_they_name(comparison):
    first, *second = searches(DEFAULTS.as_values(), comparison)
    assert first == DEFAULTS
    changed = {k: v for s in second for k, v in s.as_values().items() if v != first.as_values()[k]}
    assert changed == {k: v for k, v in COMPARISONS[comparison].items() if v != first.as_values()[k]}


def test_a_link_may_name_a_comparison():
    assert [comparison_from_link({"compare": name}) for name in COMPARISONS] == list(COMPARISONS)
    assert comparison_from_link({"width": "3"}) == "nothing"
    with pytest.raises(ValueError, match="compare must be one of nothing, parallel sampling") as refused:
        comparison_from_link({"compare": "x" * 10**6})
    assert in_form_words(str(refused.value)).startswith("“Compare on one clock with” must be")
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("data", [None, 3, "x", [], [{}] * 3, [{"prompt": "a"}, 3], {"prompt": "a", "runs": 9}])
def test_the_page_may_ask_for_one_or_two_searches(data):
    """What a lesson or a file runs again comes from the browser, so from anybody."""
    with pytest.raises(ValueError, match=r"one or two searches|settings must be|prompt is missing|no setting"):
        searches_again(data)
    one = {"prompt": "a", "width": 3}
    assert searches_again([one, {**one, "block_size": 4}])[1].block_size == 4
    assert searches_again(one) == searches_again([one])


def test_examples_are_searches():
    for example in EXAMPLES:
        Settings.from_values({**DEFAULTS.as_values(), **example.values})
