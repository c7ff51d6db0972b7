"""Stop strings: found at the right token whatever the tokenizer, cut off the text, and transformers' own decision."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from cowbeam.decoder import AsyncDecoder, BeamSearchParams, Decoder, DecodeResult, SamplingParams
from cowbeam.decoder.endings import Endings
from cowbeam.decoder.group import Request
from cowbeam.decoder.stop_strings import StopStrings
from cowbeam.decoder.strategy import Continuation
from cowbeam.decoder.text_stream import TokenTexts
from fakes import FAMILIES, VOCABULARY, random_beam_settings, random_prompt, tiny_model
from text import piece_tokenizer, tiny_tokenizer, word_tokenizer

TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "bytes": lambda: tiny_tokenizer(300),
    "pieces": piece_tokenizer,
    "words": word_tokenizer,
}
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def make_stops(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> StopStrings:
    return StopStrings(
        tuple(strings),
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
    )


def random_ids(rng: random.Random, tokenizer: PreTrainedTokenizerBase, count: int) -> list[int]:
    """Tokens that make words, characters of several tokens, and special tokens; ``count`` or a few more."""
    units = [[token_id] for token_id in range(len(tokenizer))]
    if "<0xE6>" in tokenizer.get_vocab():
        # Bytes in their order only: of a run with a broken character this decoder takes back all that it gave.
        ascii_bytes = [token_id for byte in (10, 32, 65) for token_id in [tokenizer.convert_tokens_to_ids(hexed(byte))]]
        units = [[i] for i in (*range(3), *ascii_bytes, *range(259, len(tokenizer)))]
        units += [[tokenizer.convert_tokens_to_ids(hexed(byte)) for byte in char.encode()] for char in "日🙂ß"]
    common = rng.sample(units, 6) + units[-15:]
    ids: list[int] = []
    while len(ids) < count:
        ids += rng.choice(common if rng.random() < 0.8 else units)
    return ids


def hexed(byte: int) -> str:
    return f"<0x{byte:02X}>"


def random_stops(rng: random.Random, text: str) -> list[str]:
    """Parts of a text, so that they occur, and some that nearly do."""
    stops = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        start = rng.randrange(max(1, len(text)))
        part = text[start : start + rng.choice([1, 2, 3, 5, 9])]
        part += rng.choice(["", "", "", "!", "s"])
        if part and UNFINISHED not in part:
            stops.append(part)
    return stops or ["fox"]


def first_found(stops: StopStrings, prompt: list[int], generated: list[int]) -> tuple[int, str, int] | None:
    """By whole texts: after how many tokens, which one, and its excess."""
    for count in range(1, len(generated) + 1):
        before = stops.write_all(prompt + generated[: count - 1]).rstrip(UNFINISHED)
        text = stops.write_all(prompt + generated[:count])
        matches = [
            (begin, -len(stop), stop)
            for stop in stops.strings
            for begin in range(len(text))
            if text.startswith(stop, begin) and begin + len(stop) > len(before)
        ]
        if matches:
            begin, _, stop = min(matches)
            return count, stop, len(text) - begin
    return None


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_found_at_the_token_that_completes_it(kind: str) -> None:
    """A window of a few tokens sees what the whole text shows: starts and ends within tokens, prompts, specials."""
    tokenizer = TOKENIZERS[kind]()
    found_in_prompt = spanning = ended = 0
    for seed in range(250):
        rng = random.Random(seed)
        prompt, generated = random_ids(rng, tokenizer, rng.randint(1, 40)), random_ids(rng, tokenizer, 40)
        stops = make_stops(tokenizer, random_stops(rng, str(tokenizer.decode(prompt[-3:] + generated))))
        endings = Endings(frozenset(), len(generated), stops, prompt)
        wanted = first_found(stops, prompt, generated)
        for count, token_id in enumerate(generated, 1):
            ending = endings.of(0, token_id, count)
            if ending is not None:
                break
            endings.follow([Continuation(0, token_id, 0.0)])
        assert ending is not None
        if wanted is None:
            assert ending.finish_reason == "length", (seed, stops.strings, ending)
            continue
        assert (count, ending.stop_reason, ending.excess) == wanted, (seed, stops.strings)
        ended += 1
        own = stops.write_all(generated[:count])
        found_in_prompt += ending.excess > len(own)
        spanning += ending.excess > len(stops.write_all(generated[count - 1 : count]))
    assert min(ended, spanning) > 20, "the settings try something"
    assert found_in_prompt


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_the_text_ends_in_front_of_it(kind: str) -> None:
    """Without special tokens in it, the text is simply cut; a special token that is cut through is not shown."""
    tokenizer = TOKENIZERS[kind]()
    cut = 0
    for seed in range(250):
        rng = random.Random(seed)
        generated = random_ids(rng, tokenizer, 20)
        stops = make_stops(tokenizer, random_stops(rng, str(tokenizer.decode(generated))))
        found = first_found(stops, [], generated)
        if found is None:
            continue
        token_ids, excess = generated[: found[0]], found[2]
        shown, everything = stops.text_before(token_ids, excess), stops.write_all(token_ids)
        if stops.write(token_ids) == everything:
            assert shown == everything[: len(everything) - excess], (seed, stops.strings)
            cut += 1
        assert stops.write(token_ids).startswith(shown)
    assert cut > 20


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_a_stream_never_shows_what_is_cut(kind: str) -> None:
    """The pieces add up to the completion's text; what may yet be a stop string is held back, and nothing more."""
    tokenizer = TOKENIZERS[kind]()
    stopped = delayed = 0
    for seed in range(250):
        rng = random.Random(seed)
        prompt, generated = random_ids(rng, tokenizer, 5), random_ids(rng, tokenizer, 30)
        stops = make_stops(tokenizer, random_stops(rng, str(tokenizer.decode(generated))))
        request = Request(tuple(prompt), SamplingParams(max_new_tokens=len(generated)), frozenset(), 0, stops)
        texts, shown, last = TokenTexts(request, stops.write), "", None
        for count, token_id in enumerate(generated, 1):
            streamed = texts.add(0, token_id, -1.0)
            shown += streamed.text
            last = streamed.finish_reason
            if last:
                break
            whole = stops.write(generated[:count])
            if whole.endswith(UNFINISHED):
                continue
            delayed += len(whole) - len(shown)
            assert whole.startswith(shown)
            assert len(whole) - len(shown) <= 12 * max(map(len, stops.strings)), "long past what may be a stop string"
        token_ids = generated[:count]
        found = first_found(stops, prompt, generated)
        assert last == ("stop" if found else "length")
        wanted = stops.text_before(token_ids, found[2]) if found else stops.write(token_ids)
        assert shown == wanted, (seed, stops.strings)
        stopped += found is not None
    assert stopped > 20
    assert delayed


def make_decoder(family: str, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(tiny_model(family, dtype), tiny_tokenizer(VOCABULARY), block_size=4, num_blocks=256)


def words_of(decoder: Decoder, prompt: list[int], settings: dict[str, Any], rng: random.Random) -> list[str]:
    """Stop strings that the search meets: parts of what it finds without them."""
    free = decoder.generate(prompt, BeamSearchParams(**settings))
    text = decoder.tokenizer.decode(list(rng.choice(free.completions).token_ids))  # type: ignore[union-attr]
    known = set(decoder.tokenizer.get_vocab())  # type: ignore[union-attr]
    return [stop for stop in random_stops(rng, str(text)) if stop[-1] in known] or [
        "the"
    ]  # transformers refuses others


def difference_to_transformers(
    decoder: Decoder, prompt: list[int], settings: dict[str, Any], result: DecodeResult
) -> str | None:
    own = settings | {"eos_token_id": settings["eos_token_id"] or None, "pad_token_id": 0}
    scores = {"return_dict_in_generate": True, "output_scores": True}
    ids = torch.tensor([prompt], device=decoder.model.device)
    out = decoder.model.generate(ids, **own, **scores, tokenizer=decoder.tokenizer)  # type: ignore[operator]
    for number, completion in enumerate(result.completions):
        row = out.sequences[number, len(prompt) :].tolist()
        if settings["num_beams"] > 1:
            row = row[: int((out.beam_indices[number] >= 0).sum())]
            if completion.score != pytest.approx(float(out.sequences_scores[number]), abs=1e-4):
                return f"score {completion.score}, wanted {out.sequences_scores[number]}"
        if list(completion.token_ids) != row:
            return f"tokens {completion.token_ids}, wanted {row}"
    return None


def test_beams_end_where_transformers_ends_them() -> None:
    """B1, B2 (vLLM #9253, #22696; transformers #34843): stop strings had no effect with beams.

    Tokens, order and scores, over beams and greedy search. A difference in float32 counts if it stands in float64.
    """
    stopped = 0
    for seed in range(80):
        rng = random.Random(seed)
        family = sorted(FAMILIES)[seed % len(FAMILIES)]
        decoder, prompt, settings = make_decoder(family), random_prompt(rng), random_beam_settings(rng)
        settings["stop_strings"] = words_of(decoder, prompt, settings, rng)
        result = decoder.generate(prompt, BeamSearchParams(**settings))
        if difference_to_transformers(decoder, prompt, settings, result):
            decoder = make_decoder(family, torch.float64)
            result = decoder.generate(prompt, BeamSearchParams(**settings))
            assert difference_to_transformers(decoder, prompt, settings, result) is None, (seed, settings)
        check_texts(decoder, prompt, result, settings["stop_strings"])
        stopped += sum(completion.finish_reason == "stop" for completion in result.completions)
        assert decoder.num_free_blocks == decoder.num_blocks
    assert stopped > 40


def check_texts(decoder: Decoder, prompt: list[int], result: DecodeResult, strings: list[str]) -> None:
    """Each completion of itself: a stop string in its last token, or none at all."""
    stops = make_stops(decoder.tokenizer, strings)  # type: ignore[arg-type]
    for completion in result.completions:
        ids = list(completion.token_ids)
        assert len(ids) == len(completion.logprobs)
        found = first_found(stops, prompt, ids)
        if completion.finish_reason == "stop":
            assert found is not None
            assert (found[0], found[1]) == (len(ids), completion.stop_reason)
            assert completion.text == stops.text_before(ids, found[2])
            assert not any(stop in completion.text for stop in strings)
        else:
            assert found is None or (found[0] == len(ids) and completion.finish_reason == "eos")
            assert completion.text == stops.write(ids)


def test_samples_are_the_same_up_to_their_stop_strings() -> None:
    """A stop string ends its own sample and changes no draw of the others; the same with steps in flight."""
    ended = 0
    for seed in range(20):
        rng = random.Random(seed)
        decoder, prompt = make_decoder(rng.choice(sorted(FAMILIES))), random_prompt(rng)
        fields = {"num_return_sequences": 5, "max_new_tokens": 16, "seed": seed, "eos_token_id": [5]}
        free = decoder.generate(prompt, SamplingParams(**fields))
        strings = random_stops(rng, str(decoder.tokenizer.decode(list(free.completions[0].token_ids))))  # type: ignore[union-attr]
        stops = make_stops(decoder.tokenizer, strings)  # type: ignore[arg-type]
        for looks_ahead in (False, True):
            decoder._engine._looks_ahead = looks_ahead  # type: ignore[union-attr]
            result = decoder.generate(prompt, SamplingParams(**fields, stop_strings=strings))
            check_texts(decoder, prompt, result, strings)
            for whole, completion in zip(free.completions, result.completions, strict=True):
                found = first_found(stops, prompt, list(whole.token_ids))
                length = found[0] if found else len(whole.token_ids)
                assert completion.token_ids == whole.token_ids[:length]
                ended += completion.finish_reason == "stop"
    assert ended > 20


def test_beams_with_steps_in_flight() -> None:
    """The device cannot see which beam completes a stop string: such a request is not foreseen, and nothing differs."""
    for seed in range(12):
        rng = random.Random(seed)
        decoder, prompt = make_decoder("llama"), random_prompt(rng)
        settings = random_beam_settings(rng) | {"max_new_tokens": 14}
        settings["stop_strings"] = words_of(decoder, prompt, settings, rng)
        params = [BeamSearchParams(**settings), BeamSearchParams(num_beams=3, max_new_tokens=20, eos_token_id=[])]
        wanted = [r.completions for r in decoder.generate([prompt] * 2, params)]
        decoder._engine._looks_ahead = True  # type: ignore[union-attr]
        assert [r.completions for r in decoder.generate([prompt] * 2, params)] == wanted


async def _streamed(decoder: Decoder, prompt: list[int], params: SamplingParams) -> dict[int, str]:
    texts: dict[int, str] = {}
    async with AsyncDecoder(decoder) as decoding:
        async for token in decoding.tokens(prompt, params):
            texts[token.index] = texts.get(token.index, "") + token.text
    return texts


def test_streamed_samples_add_up_to_their_completions() -> None:
    import asyncio

    decoder = make_decoder("llama")
    free = decoder.generate([3, 1, 4], SamplingParams(max_new_tokens=16, seed=3, eos_token_id=[]))
    strings = [free.completions[0].text[5:8], "the"]
    fields = {"num_return_sequences": 4, "max_new_tokens": 16, "eos_token_id": [], "stop_strings": strings}
    params = SamplingParams(**fields, seed=3)
    wanted = {c.index: c.text for c in decoder.generate([3, 1, 4], params).completions}
    assert asyncio.run(_streamed(decoder, [3, 1, 4], params)) == wanted


def test_frames_show_finished_beams_without_it() -> None:
    decoder = make_decoder("llama")
    fields: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 16, "eos_token_id": []}
    stop = decoder.generate([3, 1, 4], BeamSearchParams(**fields)).completions[0].text[4:7]
    frames = list(decoder.stream([3, 1, 4], BeamSearchParams(**fields, stop_strings=stop)))
    finished = [beam for frame in frames for beam in frame.finished if beam.finish_reason == "stop"]
    assert finished
    assert not any(stop in beam.text for beam in finished)
    assert frames[-1].result is not None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "stop_strings must be texts of 1 to 1000 characters, got ''"),
        (["a", 3], "stop_strings must be texts of 1 to 1000 characters, got 3"),
        ("x" * 1001, "stop_strings must be texts of 1 to 1000 characters, got 'xxx"),
        (b"a", "stop_strings must be text or a list of texts, got b'a'"),
        (7, "stop_strings must be text or a list of texts, got 7"),
        ("a\N{REPLACEMENT CHARACTER}", "stop_strings: "),
    ],
)
def test_unusable_values_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        SamplingParams(stop_strings=value)


def test_a_decoder_without_tokenizer_refuses_them() -> None:
    with pytest.raises(ValueError, match="stop_strings need a tokenizer"):
        Decoder(tiny_model("llama"), num_blocks=16).generate([1], BeamSearchParams(stop_strings="a"))


def test_one_text_is_one_stop_string() -> None:
    """A user's string taken as a list of its letters would end at the first of them."""
    assert BeamSearchParams(stop_strings="six").stop_strings == ("six",)
    assert BeamSearchParams(stop_strings=["a", "b", "a"]).stop_strings == ("a", "b")
    assert BeamSearchParams(stop_strings=[]).stop_strings is None
    assert BeamSearchParams(stop_strings=[]) == BeamSearchParams()


def test_an_eos_goes_before_a_stop_string() -> None:
    tokenizer = tiny_tokenizer(VOCABULARY)
    stops = make_stops(tokenizer, ["</s>"])
    eos = tokenizer.convert_tokens_to_ids("</s>")
    assert Endings(frozenset([eos]), 9, stops, [5]).of(0, eos, 1) == ("eos", eos, 0)
    assert Endings(frozenset(), 9, stops, [5]).of(0, eos, 1) == ("stop", "</s>", 4)
    assert Endings(frozenset(), 1, stops, [5]).of(0, eos, 1) == ("stop", "</s>", 4)
