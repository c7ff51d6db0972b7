"""The trace must replay to exactly the frames it was written from."""

import json

import pytest

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams
from cowbeam.decoder.trace import TraceWriter, end_record
from fakes import tiny_model

PROMPT = [5, 6, 7, 8, 9, 10, 11]
SETTINGS = [
    BeamSearchParams(num_beams=5, max_new_tokens=12, eos_token_id=[]),
    BeamSearchParams(num_beams=4, num_return_sequences=3, max_new_tokens=12),
    BeamSearchParams(num_beams=1, max_new_tokens=9),
    SamplingParams(num_return_sequences=6, max_new_tokens=12, seed=3, eos_token_id=list(range(40))),
]


@pytest.fixture(scope="module")
def decoder():
    with Decoder(tiny_model("llama"), block_size=4, num_blocks=1024) as decoder:
        yield decoder


@pytest.mark.parametrize("params", SETTINGS)
def test_replay_gives_back_every_frame(decoder, params):
    """A viewer that applies the deltas sees the tables, sharers, texts and lineages that the engine had."""
    writer = TraceWriter(params.width)
    tables = {place: [] for place in range(params.width)}
    sharers, parent_of, path = {}, {}, {}
    for frame in decoder.stream(PROMPT, params):
        record = json.loads(json.dumps(writer.step(frame)))
        for place, keep, tail in record["tabs"]:
            tables[place] = tables[place][:keep] + tail
        sharers.update(record["ref"])
        for node, parent, *_ in record["nodes"]:
            parent_of[node] = parent
            path[node] = [*path.get(parent, []), node]
        ranked = sorted((rank, place) for place, rank in enumerate(record["rank"]) if rank is not None)
        assert [tables[place] for _, place in ranked] == [list(branch.block_table) for branch in frame.branches]
        assert {block: count for block, count in sharers.items() if count} == dict(frame.sharers)
        for (_, place), branch in zip(ranked, frame.branches, strict=True):
            assert record["len"][place] == branch.num_tokens
            assert len(path[record["live"][place]]) == frame.step, "a node for each generated token"
            assert record["scores"][place] == pytest.approx(branch.cumulative_logprob)
        held = [block for table in tables.values() for block in table]
        assert {block: held.count(block) for block in held} == dict(frame.sharers), "sharers are table entries"


@pytest.mark.parametrize("params", SETTINGS)
def test_events_account_for_every_block(decoder, params):
    """Allocated and copied blocks minus freed ones are the live ones, at every step: nothing happens unrecorded."""
    live = set()
    for frame in decoder.stream(PROMPT, params):
        for event in frame.events:
            if event.kind in ("allocate", "cow"):
                assert event.block not in live
                live.add(event.block)
            elif event.kind == "free":
                live.remove(event.block)
        assert live == set(frame.sharers)
        assert frame.live_blocks == len(live)
    assert not live


def test_places_are_kept_by_first_children(decoder):
    """A branch that goes on stays on its line of the picture, or the picture would jump at every step."""
    params = BeamSearchParams(num_beams=5, max_new_tokens=12, eos_token_id=[])
    writer, before = TraceWriter(5), {}
    for frame in decoder.stream(PROMPT, params):
        writer.step(frame)
        places = {branch.branch_id: writer._places[branch.branch_id] for branch in frame.branches}
        assert len(set(places.values())) == len(places)
        for branch_id, place in places.items():
            assert before.get(branch_id, place) == place
        before = places


def test_the_last_record_says_how_it_ended(decoder):
    *_, last = decoder.stream(PROMPT, BeamSearchParams(num_beams=2, max_new_tokens=3))
    record = end_record(last.result)
    assert record["type"] == "end"
    assert record["reason"] in ("eos", "length")
    json.dumps(record)
    assert record["stats"]["steps"] == 3
    assert end_record(None) == {"type": "end", "best": None, "reason": "aborted", "stats": None}


class ByteTokenizer:
    """Every id is one byte; most are parts of one character of four bytes, so tokens end inside characters."""

    def decode(self, token_ids, **_):
        return bytes(b"\xf0\x9f\x90\xae"[i % 4] if i % 6 else 97 for i in token_ids).decode(errors="replace")


@pytest.mark.parametrize("params", SETTINGS)
def test_texts_along_a_path_are_the_text(params):
    """Decoding token by token turned every character of several tokens into replacement characters."""
    writer, texts, finished = TraceWriter(params.width), {-1: ""}, []
    with Decoder(tiny_model("llama"), ByteTokenizer(), block_size=4, num_blocks=256) as decoder:
        for frame in decoder.stream(PROMPT, params):
            record = writer.step(frame)
            for node, parent, text, *_ in record["nodes"]:
                texts[node] = texts[parent] + text
            finished = record.get("finished", finished)
            for rank, branch in enumerate(frame.branches):
                node = record["live"][record["rank"].index(rank)]
                assert texts[node] == branch.text.rstrip("\N{REPLACEMENT CHARACTER}")
            for end, (*_, node) in zip(frame.finished, finished, strict=True):
                assert texts[node] == end.text.rstrip("\N{REPLACEMENT CHARACTER}")
    assert len(finished) == len(frame.result.completions)


@pytest.mark.parametrize("params", SETTINGS)
def test_ends_hang_on_the_branch_they_continued(decoder, params):
    """A finished sequence's log-prob is its parent node's plus its own: it is drawn on the right branch."""
    writer, cumulative, ends = TraceWriter(params.width), {-1: 0.0}, 0
    for frame in decoder.stream(PROMPT, params):
        record = writer.step(frame)
        for node, parent, _, logprob, total in record["nodes"]:
            cumulative[node] = total
            assert total == pytest.approx(cumulative[parent] + logprob, abs=1e-4)
        ends += sum(event[0] == "finish" for event in record["ev"])
    assert ends >= len(frame.result.completions)
