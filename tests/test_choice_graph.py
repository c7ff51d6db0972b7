"""Which choices are captured, and what becomes of a capture that fails."""

from types import SimpleNamespace
from unittest import mock

import pytest

from cowbeam.decoder import choice_graph
from cowbeam.decoder.choice_graph import MAX_CAPTURED, SIGHTINGS, ChoiceGraphs, _Choices


def test_what_is_only_passed_through_is_not_captured():
    """64 samples that end one by one pass through 63 widths; each capture costs as much as some dozen steps."""
    choices = _Choices()
    assert not any(choices.is_worth_it(width) for width in range(64) for _ in range(SIGHTINGS - 1))
    assert choices.is_worth_it(5)


def test_the_least_recently_used_is_let_go():
    choices = _Choices()
    for signature in range(MAX_CAPTURED):
        choices.keep(signature, signature)
    assert choices.find(0) == 0
    choices.keep("new", "new")
    assert choices.find(1) is None
    assert (choices.find(0), choices.find("new")) == (0, "new")


def test_sightings_do_not_grow_without_end():
    choices = _Choices()
    for signature in range(10 * choice_graph.MAX_SIGNATURES):
        choices.is_worth_it(signature)
    assert len(choices._sightings) <= choice_graph.MAX_SIGNATURES + 1


class Failing:
    def __init__(self, *_):
        pass

    def capture(self, *_):
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_capture_that_fails_costs_nothing_but_time(caplog):
    """It was once kept, and every later step of the kind replayed what had never been captured."""

    class Step:
        pass

    step = Step()
    graphs = ChoiceGraphs(SimpleNamespace(step=step, inputs=None, memory="lent"), block_size=4, scratch_block=9)
    source = SimpleNamespace(signature=lambda width: ("beams", width))
    flight = SimpleNamespace(sources=[source], rows=[[0, 1]], is_whole=True)
    with (
        mock.patch.object(choice_graph, "_CapturedChoice", Failing),
        mock.patch.object(graphs, "_look_ahead", return_value="ahead") as look_ahead,
    ):
        for _ in range(SIGHTINGS + 3):
            assert graphs.choose(flight, [1, 2]) == "ahead"
    assert look_ahead.call_count == SIGHTINGS + 3
    assert len([r for r in caplog.records if "choices go on without CUDA graphs" in r.message]) == 1


@pytest.fixture(autouse=True)
def _warnings_are_seen(caplog):
    caplog.set_level("WARNING", logger="cowbeam")
