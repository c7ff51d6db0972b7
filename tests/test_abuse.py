"""What came of trying to break a decoder: each of these once gave wrong tokens, the wrong error, or lost a request."""

import gc
import threading
import time

import pytest
import torch

from cowbeam.decoder import BeamSearchParams, BranchScorer, Decoder, SamplingParams
from fakes import FAMILIES, VOCABULARY, assert_unused, make_model, token_ids
from oracles import transformers_generate
from test_exact_beams import differences

PROMPT = [5, 6, 7, 8, 9, 10, 11]
BEAMS = BeamSearchParams(num_beams=3, max_new_tokens=6, eos_token_id=[])
SETTINGS = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 10, "length_penalty": 1.0, "eos_token_id": []}


def make_decoder(family="llama", **config):
    return Decoder(make_model(family, {**FAMILIES[family], **config}), block_size=4, num_blocks=256)


class Spelling:
    """As much of a tokenizer as results need; fails on demand."""

    chat_template = None
    is_broken = False

    def decode(self, token_ids, **_):
        if self.is_broken:
            raise UnicodeError("no text")
        return " ".join(map(str, token_ids))


@pytest.mark.parametrize("family", ["llama", "olmo2", "gpt_neox"])
def test_a_window_that_the_model_never_uses_is_none(family):
    """A config may carry `sliding_window` that the model's code ignores; taken for real, it cuts the context.

    Held against transformers without a cache: its cache believes the config and crops.
    """
    model = make_model(family, FAMILIES[family])
    model.config.sliding_window = 6
    with Decoder(model, block_size=4, num_blocks=256) as decoder:
        results = decoder.generate([PROMPT * 3], BeamSearchParams(**SETTINGS))
    expected = transformers_generate(model, [PROMPT * 3], {**SETTINGS, "use_cache": False})
    assert not differences(expected, results, SETTINGS)


def test_long_rope_is_decoded_up_to_its_original_length():
    """Past it the factors change for a whole forward pass, so that a neighbour would change the answer."""
    factors = [1.0] * 4
    rope = {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    }
    model = make_model(
        "phi3", {**FAMILIES["phi3"], "rope_parameters": rope, "original_max_position_embeddings": 32}, seed=1
    )
    with Decoder(model, block_size=4, num_blocks=256) as decoder:
        with pytest.raises(ValueError, match="exceed the model's 32 positions"):
            decoder.generate([1] * 30, BEAMS)
        results = decoder.generate([PROMPT], BeamSearchParams(**SETTINGS))
    assert not differences(transformers_generate(model, [PROMPT], SETTINGS), results, SETTINGS)


SHARING = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "head_dim": 8,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
GEMMA_3N = {
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.0] * 4,
    "intermediate_size": [48] * 4,
}


@pytest.mark.parametrize(("family", "more"), [("gemma3n_text", GEMMA_3N), ("gemma4_text", {"global_head_dim": 8})])
@pytest.mark.parametrize("block_size", [4, 16])
def test_layers_that_share_kv(family, more, block_size):
    """Their last layers attend to K/V of earlier ones; they were refused for a cache layer that stands for that."""
    model = make_model(family, {**SHARING, **more})
    prompts = [PROMPT * 3, PROMPT[:2]]
    with Decoder(model, block_size=block_size, num_blocks=256) as decoder:
        results = decoder.generate(prompts, BeamSearchParams(**SETTINGS))
    expected = [transformers_generate(model, [prompt], SETTINGS)[0] for prompt in prompts]
    assert not differences(expected, results, SETTINGS)


def test_a_stream_collected_in_the_middle_of_a_turn_harms_nobody():
    """A dropped stream in a reference cycle is closed by the collector, which may run inside another's turn."""
    decoder = make_decoder()
    alone = token_ids(decoder.generate(PROMPT, BEAMS))
    stream = decoder.stream(PROMPT, BEAMS)
    next(stream)
    cycle = [stream]
    cycle.append(cycle)
    del stream, cycle
    forward = decoder.model.forward

    def collecting(*args, **kwargs):
        gc.collect()
        return forward(*args, **kwargs)

    decoder.model.forward = collecting
    assert token_ids(decoder.generate(PROMPT, BEAMS)) == alone
    decoder.check_integrity()
    assert decoder.num_free_blocks == decoder.num_blocks


def test_a_tokenizer_that_fails_fails_its_own_request():
    decoder = make_decoder()
    decoder.tokenizer = Spelling()
    stream = decoder.stream(PROMPT, SamplingParams(num_return_sequences=2, max_new_tokens=30, eos_token_id=[], seed=1))
    next(stream)
    decoder.tokenizer.is_broken = True
    engine = decoder._engine
    engine._show = print  # the other request's frames need text too: not the matter here
    with pytest.raises(UnicodeError, match="no text"):
        decoder.generate(PROMPT, BEAMS)
    decoder.tokenizer.is_broken = False
    del engine._show
    frames = list(stream)
    assert frames[-1].result is not None
    assert decoder.num_free_blocks == decoder.num_blocks


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_tokenizer_that_fails_in_a_frame_fails_its_own_stream(looks_ahead):
    """A frame's text is made in the middle of a turn; its fault once ended whatever else was running."""
    decoder = make_decoder()
    decoder._engine._looks_ahead = looks_ahead
    decoder.tokenizer = Spelling()
    params = SamplingParams(num_return_sequences=2, max_new_tokens=12, eos_token_id=[], seed=1)
    mine, theirs = decoder.stream(PROMPT, params), decoder.stream(PROMPT, params)
    next(mine), next(theirs)
    make_frame = decoder._engine._decode_text
    calls = []

    def failing_once(token_ids):
        calls.append(token_ids)
        if len(calls) == 1:
            raise UnicodeError("no text")
        return make_frame(token_ids)

    decoder._engine._decode_text = failing_once
    outcomes = []
    for stream in (mine, theirs):
        try:
            outcomes.append(list(stream)[-1].result is not None)
        except UnicodeError as error:
            outcomes.append(str(error))
    assert sorted(map(str, outcomes)) == ["True", "no text"]
    decoder.check_integrity()
    assert decoder.num_free_blocks == decoder.num_blocks


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("kind", ["beams", "samples", "scored"])
def test_a_tokenizer_that_fails_as_a_token_is_chosen_fails_its_own_request(kind, looks_ahead):
    """Stop strings and scorers want text in the middle of a choice; its fault once ended whatever else was running."""
    decoder = make_decoder()
    decoder._engine._looks_ahead = looks_ahead
    decoder.tokenizer = Spelling()
    samples = {"num_return_sequences": 2, "max_new_tokens": 12, "eos_token_id": [], "seed": 1}
    params = {
        "beams": BeamSearchParams(num_beams=3, max_new_tokens=12, eos_token_id=[], stop_strings=["!"]),
        "samples": SamplingParams(**samples, stop_strings=["!"]),
        "scored": SamplingParams(
            **samples, branch_scorer=BranchScorer(score=lambda views: [0.0] * len(views), every=1)
        ),
    }
    others = [BEAMS, SamplingParams(**samples), SamplingParams(**samples)]
    alone = [token_ids(decoder.generate(PROMPT, other)) for other in others]
    runs = [decoder.add_request(PROMPT, other) for other in others[:2]]
    mine = decoder.add_request(PROMPT[:5], params[kind])
    runs.append(decoder.add_request(PROMPT, others[2]))
    for _ in range(4):
        decoder.step()
    decoder.tokenizer.is_broken = True
    ended = decoder.step()
    decoder.tokenizer.is_broken = False
    assert ended == [mine]
    assert isinstance(mine.error, UnicodeError)
    while not all(run.is_over for run in runs):
        decoder.step()
        decoder.check_integrity()
    assert [token_ids(run.result) for run in runs] == alone
    assert_unused(decoder)


def test_a_stream_collected_in_another_decoders_turn_does_not_lock():
    """Its thread held the switch of the models' attention and waited for a lock whose holder waited for the switch."""
    one, two = make_decoder(), make_decoder()

    class Page:
        pass

    page = Page()
    page.me, page.stream = page, one.stream(PROMPT, BEAMS)
    next(page.stream)
    is_inside = threading.Event()

    def collect(*_):
        if threading.current_thread().name == "two" and not is_inside.is_set():
            is_inside.set()
            time.sleep(0.5)  # the other thread takes its decoder's lock and waits for the switch
            gc.collect()  # as Python may at any allocation

    two.model.register_forward_pre_hook(collect)
    threads = [
        threading.Thread(target=lambda: (is_inside.wait(), one.generate(PROMPT, BEAMS)), daemon=True, name="one"),
        threading.Thread(target=lambda: two.generate(PROMPT, BEAMS), daemon=True, name="two"),
    ]
    gc.disable()
    try:
        del page  # garbage, in a cycle
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    finally:
        gc.enable()
    assert not any(thread.is_alive() for thread in threads), "the two wait for each other"
    for decoder in (one, two):
        decoder.check_integrity()
        assert decoder.num_free_blocks == decoder.num_blocks


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("kind", ["scorer", "processor"])
def test_a_function_that_decodes_in_the_middle_of_a_turn_fails_its_own_request(kind, looks_ahead):
    """It turned the engine in the middle of its turn, which failed all that were in flight by an error of the model's.

    To queue a request, and to look at the counters, is another matter.
    """
    decoder = make_decoder()
    decoder._engine._looks_ahead = looks_ahead
    decoder.tokenizer = Spelling()
    queued = []

    def judge(*_):
        queued.append(decoder.add_request(PROMPT, BEAMS))
        assert decoder.counters().waiting
        decoder.generate(PROMPT, BEAMS)

    functions = {
        "scorer": SamplingParams(
            num_return_sequences=2, branch_scorer=BranchScorer(score=judge, every=2), max_new_tokens=6, seed=1
        ),
        "processor": BeamSearchParams(num_beams=2, max_new_tokens=6, logits_processors=[judge]),
    }
    runs = [decoder.add_request(PROMPT[:3], functions[kind]), decoder.add_request(PROMPT, BEAMS)]
    while not all(run.is_over for run in (*runs, *queued)):
        decoder.step()
    assert "cannot decode with the decoder that calls it" in str(runs[0].error)
    alone = token_ids(decoder.generate(PROMPT, BEAMS))
    assert [token_ids(run.result) for run in (runs[1], *queued)] == [alone, alone]
    assert_unused(decoder)


def test_a_step_in_flight_that_nobody_waits_for_is_forgotten():
    decoder = make_decoder()
    decoder._engine._looks_ahead = True
    stream = decoder.stream(PROMPT, BEAMS)
    for _ in range(3):
        next(stream)
    assert decoder._engine._flight is not None
    stream.close()
    assert decoder._engine._flight is None
    assert token_ids(decoder.generate(PROMPT, BEAMS)) == token_ids(make_decoder().generate(PROMPT, BEAMS))


def test_a_call_of_the_model_from_another_thread_is_told_so():
    """During a step the model attends over blocks; a stranger's call must not read them, nor die without a sentence."""
    decoder = make_decoder()
    told = []
    forward = decoder.model.forward

    def call():
        try:
            forward(input_ids=torch.tensor([PROMPT]))
        except RuntimeError as error:
            told.append(str(error))

    def disturbed(*args, **kwargs):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return forward(*args, **kwargs)

    decoder.model.forward = disturbed
    decoder.generate(PROMPT, BEAMS)
    assert told
    assert all("in the middle of a step of cowbeam in another thread" in sentence for sentence in told)


def test_what_a_long_request_widened_is_given_back():
    """Block tables on the device once stayed as wide as the longest request there ever was."""
    decoder = Decoder(make_model("llama", FAMILIES["llama"]), block_size=1, num_blocks=2048)
    decoder.generate([1] * 500, BEAMS)
    decoder.generate(PROMPT, BEAMS)
    assert decoder._engine._batch.tables.shape[1] <= 32


def test_a_pool_beyond_memory_is_one_sentence():
    model = make_model("llama", FAMILIES["llama"])
    with pytest.raises(ValueError, match=r"100000000000000 blocks of 16 tokens take [\d,]+ bytes, too many here"):
        Decoder(model, num_blocks=10**14)


def test_training_mode_after_construction():
    """Dropout would change the answer without a word."""
    decoder = make_decoder()
    decoder.model.train()
    with pytest.raises(ValueError, match="training mode"):
        decoder.generate(PROMPT, BEAMS)


def test_half_a_surrogate_is_no_text():
    decoder = make_decoder()
    decoder.tokenizer = Spelling()
    with pytest.raises(ValueError, match="no text in UTF-8"):
        decoder.generate("\ud800", BEAMS)


def test_a_large_block_costs_the_self_check_little():
    """It once took a pool for every token of a block: 77 GB at a block size of 4096."""
    Decoder(make_model("llama", FAMILIES["llama"]), block_size=65536, num_blocks=1)
