"""What cannot be used is refused in one sentence that names it, before work starts, and leaves nothing behind."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from cowbeam.decoder import AsyncDecoder, BeamSearchParams, Decoder, SamplingParams, detach
from fakes import FAMILIES, make_model, tiny_model

PROMPT = [5, 9, 2, 33]
GOOD = BeamSearchParams(num_beams=3, max_new_tokens=6, eos_token_id=[])
HOSTILE = "\x00\x1b[31m<script>alert(1)</script>" + "A" * 100_000


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(tiny_model("llama"), num_blocks=64)


@pytest.fixture
def untouched(decoder: Decoder) -> Iterator[None]:
    """No forward pass runs, no block stays held, and the next request works."""
    with mock.patch.object(decoder.model, "forward", side_effect=AssertionError("a forward pass ran")):
        yield
    assert_works(decoder)


def assert_works(decoder: Decoder) -> None:
    decoder.check_integrity()
    assert decoder.num_free_blocks == decoder.num_blocks
    result = decoder.generate(PROMPT, GOOD)
    assert len(result.completions[0].token_ids) == 6
    assert decoder.num_free_blocks == decoder.num_blocks


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "the prompt is empty"),
        ([[1], []], "the prompt is empty"),
        ([[1], ()], "the prompt is empty"),
        ("some text", "a prompt as text needs a tokenizer"),
        (None, "a prompt must be text or a list of token ids, got NoneType"),
        (7, "a prompt must be text or a list of token ids, got int"),
        (b"ab", "a prompt must be text or a list of token ids, got b'ab'"),
        ([[1], b"ab"], "a prompt must be text or a list of token ids, got b'ab'"),
        ({1: 2}, "a prompt must be text or a list of token ids, got dict"),
        (torch.tensor([1, 2]), "a prompt must be text or a list of token ids, got Tensor"),
        ([[1, 2], 3], "a prompt must be text or a list of token ids, got 3"),
        ([67], "prompt token 0 is 67; the model knows ids 0 to 66"),
        ([3, -1], "prompt token 1 is -1; the model knows ids 0 to 66"),
        ([2**70], f"prompt token 0 is {2**70}; the model knows ids 0 to 66"),
        ([1, 2.0], "a prompt must be text or a list of token ids, its item 1 is 2.0"),
        ([True], "a prompt must be text or a list of token ids, its item 0 is True"),
        ([1, "2"], "a prompt must be text or a list of token ids, its item 1 is '2'"),
        ([1, None], "a prompt must be text or a list of token ids, its item 1 is None"),
        ([torch.tensor([1, 2])], r"a prompt must be text or a list of token ids, its item 0 is tensor\(\[1, 2\]\)"),
        ([{"role": "user"}], "a prompt must be text or a list of token ids, its item 0 is {'role': 'user'}"),
        ([[1], [2, HOSTILE]], r".* a list of token ids, its item 1 is '\\x00\\x1b\[31m\.\.\.A{13}'$"),
    ],
)
@pytest.mark.usefixtures("untouched")
def test_prompts(decoder: Decoder, prompts: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        decoder.generate(prompts, GOOD)


@pytest.mark.usefixtures("untouched")
def test_one_bad_prompt_of_several_stops_all_before_work_starts(decoder: Decoder) -> None:
    with pytest.raises(ValueError, match="prompt token 2 is 99"):
        decoder.generate([PROMPT, [1, 2, 99], PROMPT], GOOD)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"num_beams": 4}, "params must be BeamSearchParams or SamplingParams, got dict"),
        (0, "params must be BeamSearchParams or SamplingParams, got int"),
        (HOSTILE, "params must be BeamSearchParams or SamplingParams, got str"),
        ([GOOD, GOOD, GOOD], "2 prompts but 3 params"),
        ([], "2 prompts but 0 params"),
        ([GOOD, 7], "params must be BeamSearchParams or SamplingParams, got int"),
        (BeamSearchParams(max_new_tokens=637), "a prompt of 4 tokens and max_new_tokens=637 exceed the model's 640"),
        (
            BeamSearchParams(num_beams=100, max_new_tokens=20),
            "a prompt of 4 tokens with 100 branches and max_new_tokens=20 may need 200 blocks of 16 tokens, "
            "but the pool has 64",
        ),
        (BeamSearchParams(num_beams=10**30), "a prompt of 4 tokens with 1" + "0" * 30 + " branches"),
        (SamplingParams(num_return_sequences=65, max_new_tokens=9), "a prompt of 4 tokens with 65 branches"),
    ],
)
@pytest.mark.usefixtures("untouched")
def test_params_that_do_not_fit(decoder: Decoder, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        decoder.generate([PROMPT, PROMPT], params)


VAST = {
    "diversity_penalty": {"num_beams": 4, "num_beam_groups": 2},
    "temperature": {"do_sample": True, "seed": 1},
    "repetition_penalty": {},
    "no_repeat_ngram_size": {},
    "top_k": {"do_sample": True, "seed": 1},
    "logprobs": {},
    "sequence_bias": {},
    "length_penalty": {"max_new_tokens": 1},
    "eos_token_id": {},
}


@pytest.mark.parametrize("number", [2**62, 2**63, 2**64, 10**30, 10**38, 10**39])
@pytest.mark.parametrize("name", VAST)
def test_a_vast_number_is_refused_or_harms_nobody(decoder: Decoder, name: str, number: int) -> None:
    """torch takes integers of 64 bits: one of more failed the turn, and with it all that was in flight."""
    settings = {"max_new_tokens": 3, **VAST[name], name: {(5,): number} if name == "sequence_bias" else number}
    neighbour = decoder.add_request(PROMPT, GOOD)
    with suppress(ValueError):
        run = decoder.add_request(PROMPT, BeamSearchParams(**settings))
        while not run.is_over:
            decoder.step()
        completions = run.result.completions if run.result else []
        assert run.error is None or isinstance(run.error, ValueError)
        assert all(math.isfinite(completion.score) for completion in completions)
    while not neighbour.is_over:
        decoder.step()
    assert neighbour.result is not None
    assert_works(decoder)


@pytest.mark.usefixtures("untouched")
def test_a_stream_refuses_at_the_call(decoder: Decoder) -> None:
    for call, message in (
        (lambda: decoder.stream([]), "stream takes one prompt, got a list of 0"),
        (lambda: decoder.stream([PROMPT, PROMPT]), "stream takes one prompt, got a list of 2"),
        (lambda: decoder.stream([99]), "prompt token 0 is 99"),
        (lambda: decoder.stream(PROMPT, BeamSearchParams(num_beams=10**6)), "may need"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_largest_request_that_fits_runs() -> None:
    """Admission counts the shared prompt once (TensorRT-LLM PR #16802): 8 full blocks + 4 × 1 fill the pool."""
    decoder = Decoder(tiny_model("llama"), block_size=16, num_blocks=12)
    prompt = [1 + i % 60 for i in range(128)]
    decoder.generate(prompt, BeamSearchParams(num_beams=4, max_new_tokens=16, eos_token_id=[]))
    with pytest.raises(ValueError, match="may need 16 blocks of 16 tokens, but the pool has 12"):
        decoder.generate(prompt, BeamSearchParams(num_beams=4, max_new_tokens=17))
    decoder.generate([prompt] * 3, BeamSearchParams(num_beams=4, max_new_tokens=16, eos_token_id=[]))
    whole = Decoder(tiny_model("llama"), num_blocks=64)
    result = whole.generate([1] * 600, BeamSearchParams(num_beams=1, max_new_tokens=40, eos_token_id=[]))
    assert len(result.completions[0].token_ids) == 40


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"block_size": 3}, "block_size must be a power of two, got 3"),
        ({"block_size": 0}, "block_size must be a positive integer, got 0"),
        ({"block_size": True}, "block_size must be a positive integer, got True"),
        ({"block_size": 16.0}, "block_size must be a positive integer, got 16.0"),
        ({"block_size": None}, "block_size must be a positive integer, got None"),
        ({"num_blocks": 0}, "num_blocks must be a positive integer, got 0"),
        ({"num_blocks": "many"}, "num_blocks must be a positive integer, got 'many'"),
        ({"memory_fraction": 1.5}, "memory_fraction must be a number above 0 and at most 1, got 1.5"),
        ({"memory_fraction": "all"}, "memory_fraction must be a number above 0 and at most 1, got 'all'"),
        ({"memory_fraction": float("nan")}, "memory_fraction must be a number above 0 and at most 1, got nan"),
        ({"kv_memory": "2GB"}, "kv_memory must be a positive integer, got '2GB'"),
        ({"memory_fraction": True}, "memory_fraction must be a number above 0 and at most 1, got True"),
        ({"num_blocks": 2**70}, r"1180591620717411303424 blocks of 16 tokens take [\d,]+ bytes, too many here"),
        ({"num_blocks": 8, "kv_memory": 2**20}, "num_blocks=8 or kv_memory=1048576 sets the pool's size, not both"),
        ({"kv_memory": 10}, "kv_memory=10: 10 bytes hold no block: one of 16 tokens takes 4096"),
        ({"max_rows": 0}, "max_rows must be a positive integer, got 0"),
        ({"max_rows": 64.0}, "max_rows must be a positive integer, got 64.0"),
        ({"max_rows": None}, "max_rows must be a positive integer, got None"),
        ({"attention": "flash"}, 'attention must be "auto", "triton" or "torch", got \'flash\''),
        ({"attention": "triton", "block_size": 4}, 'attention="triton" needs a block_size of 8 to 32768, got 4'),
        (
            {"attention": "triton", "block_size": 65536},
            'attention="triton" needs a block_size of 8 to 32768, got 65536',
        ),
    ],
)
def test_knobs(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Decoder(tiny_model("llama"), **knobs)


def test_arguments_of_another_type(decoder: Decoder) -> None:
    """An unknown ``watch`` watched nothing without a word; the others were TypeErrors."""
    with pytest.raises(ValueError, match=r'^watch must be "frames", "tokens" or None, got \'frame\'$'):
        decoder.add_request(PROMPT, GOOD, watch="frame")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^generate_many takes an iterable of prompts, got 7$"):
        decoder.generate_many(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^name_or_path must be a hub name or a path, got 7$"):
        Decoder.from_pretrained(7)  # type: ignore[arg-type]


def test_objects_of_another_type(decoder: Decoder) -> None:
    with pytest.raises(ValueError, match=r"^abort takes what add_request returned, got None$"):
        decoder.abort(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^AsyncDecoder takes a Decoder, got 'x'$"):
        AsyncDecoder("x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^detach takes a transformers model, got 'x'$"):
        detach("x")  # type: ignore[arg-type]
    for nothing in (None, {"num_beams": 8}):
        with pytest.raises(ValueError, match=r"^from_generation_config takes a GenerationConfig, got"):
            BeamSearchParams.from_generation_config(nothing)


def test_a_model_that_was_cast_meanwhile() -> None:
    """It was a RuntimeError of index_copy_, in the middle of a turn."""
    model = make_model("llama", FAMILIES["llama"])
    decoder = Decoder(model, num_blocks=64)
    model.double()
    with pytest.raises(ValueError, match=r"^the model is torch.float64 now, and was torch.float32: make"):
        decoder.generate(PROMPT, GOOD)
    model.float()
    decoder.generate(PROMPT, GOOD)


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match='attention="triton" needs a CUDA device; the model is on cpu'):
        Decoder(tiny_model("llama"), attention="triton")


def random_model(model_type: str, **config: Any) -> Any:
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](vocab_size=67, **config)).eval()


UNUSABLE: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: T5ForConditionalGeneration(T5Config(vocab_size=67, d_model=32, d_kv=8, d_ff=32, num_layers=1)).eval(),
        "T5ForConditionalGeneration is an encoder-decoder",
    ),
    (
        lambda: random_model("rwkv", hidden_size=32, num_hidden_layers=2),
        "RwkvForCausalLM cannot be decoded over KV blocks: it takes no cache",
    ),
    (  # keeps states in its modules, where no cache sees them
        lambda: random_model(
            "recurrent_gemma", hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4
        ),
        "RecurrentGemmaForCausalLM cannot be decoded over KV blocks: its paged logits differ from its own by",
    ),
    (
        lambda: random_model(
            "minimax", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8
        ),
        "MiniMaxForCausalLM cannot be decoded over KV blocks: a trial step says MiniMax uses cache of its own",
    ),
    (lambda: tiny_model("llama").model, "LlamaModel has no language-model head"),
    (lambda: make_model("llama", FAMILIES["llama"]).train(), "LlamaForCausalLM is in training mode"),
    (lambda: None, "model must be a loaded transformers model, got NoneType"),
    (lambda: "gpt2", "model must be a loaded transformers model, got str"),
    (lambda: torch.nn.Linear(2, 2), "model must be a loaded transformers model, got Linear"),
]


@pytest.mark.parametrize(("make", "message"), UNUSABLE)
def test_models_that_cannot_be_decoded(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Decoder(make())


@pytest.mark.parametrize("name", ["/no/such/model", "", HOSTILE])
def test_unknown_models(name: str) -> None:
    with pytest.raises(ValueError, match=r"^the model '.* cannot be loaded: ") as refusal:
        Decoder.from_pretrained(name)
    assert len(str(refusal.value)) < 600
    assert str(refusal.value).isprintable(), "control characters reach the terminal"


def test_a_folder_without_a_model(tmp_path: Any) -> None:
    """transformers' own first line was: "Couldn't instantiate the backend tokenizer from one of:"."""
    with pytest.raises(ValueError, match=r"^the model '.*' cannot be loaded: the folder holds no config.json$"):
        Decoder.from_pretrained(tmp_path)


@pytest.mark.parametrize("device", ["quantum", "cuda:99", "mps:7", "cpu:cpu", "", 99, [], HOSTILE])
def test_devices_that_are_not_here(device: Any) -> None:
    """Said of the device, before anything is read: it was said of the model once."""
    with pytest.raises(ValueError, match=r"^device=.* cannot be used: ") as refusal:
        Decoder.from_pretrained("no/such-model", device=device)
    assert len(str(refusal.value)) < 600
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("dtype", ["float99", "", b"x", 3, "nn", HOSTILE])
def test_dtypes_that_are_none(dtype: Any) -> None:
    """It was "cannot be loaded: list index out of range" once."""
    with pytest.raises(ValueError, match=r"^dtype=.* is none of torch's$"):
        Decoder.from_pretrained("no/such-model", device="cpu", dtype=dtype)


@pytest.mark.parametrize("tokenizer", [3, "gpt2", object()])
def test_tokenizers_that_are_none(tokenizer: Any) -> None:
    """Said when the decoder is made; it was "'int' object is not callable" at the first prompt."""
    with pytest.raises(ValueError, match=r"^tokenizer must be the model's tokenizer or None, got"):
        Decoder(tiny_model("llama"), tokenizer)


@pytest.mark.parametrize("block_size", [2**21, 2**70])
def test_a_block_is_no_larger_than_a_context(block_size: int) -> None:
    with pytest.raises(ValueError, match=r"^block_size must be at most 1048576, got"):
        Decoder(tiny_model("llama"), block_size=block_size)


def test_bytes_are_no_end_of_sequence() -> None:
    with pytest.raises(ValueError, match="eos_token_id must be"):
        BeamSearchParams(eos_token_id=b"x")


class Breaking:
    """A model that returns unusable logits, or raises, at its ``at``-th forward pass; ``rows`` picks the rows."""

    def __init__(self, family: str = "llama") -> None:
        self.decoder = Decoder(tiny_model(family), block_size=4, num_blocks=128)
        self.calls = 0

    @contextmanager
    def at(self, call: int, spoil: Callable[[Tensor], None]) -> Iterator[None]:
        adapter = self.decoder._engine._adapter  # type: ignore[union-attr]
        original = adapter._forward
        self.calls = 0

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            logits: Tensor = original(*args, **kwargs)
            if self.calls == call:
                with torch.inference_mode():
                    spoil(logits)
            self.calls += 1
            return logits

        with mock.patch.object(adapter, "_forward", forward):
            yield


def fill(value: float, last_token_only: bool = False) -> Callable[[Tensor], None]:
    def spoil(logits: Tensor) -> None:
        logits[..., -1 if last_token_only else slice(None)] = value

    return spoil


def one_row(value: float) -> Callable[[Tensor], None]:
    def spoil(logits: Tensor) -> None:
        logits.view(-1, logits.shape[-1])[-1] = value

    return spoil


ALL_PARAMS = [
    GOOD,
    BeamSearchParams(num_beams=1, max_new_tokens=6, eos_token_id=[]),
    BeamSearchParams(num_beams=3, max_new_tokens=6, do_sample=True, seed=1, eos_token_id=[]),
    SamplingParams(num_return_sequences=3, max_new_tokens=6, seed=1, eos_token_id=[]),
    BeamSearchParams(num_beams=3, max_new_tokens=6, renormalize_logits=True, repetition_penalty=1.2, eos_token_id=[]),
]


@pytest.mark.parametrize("call", [0, 1, 4])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (fill(float("nan")), "the model's logits hold NaN"),
        (fill(float("nan"), last_token_only=True), "the model's logits hold NaN"),
        (one_row(float("nan")), "the model's logits hold NaN"),
        (fill(float("inf"), last_token_only=True), r"the model's logits hold \+inf"),
        (one_row(float("-inf")), "a row of the model's logits has no finite value"),
    ],
)
@pytest.mark.parametrize("params", ALL_PARAMS)
def test_unusable_logits(
    params: BeamSearchParams | SamplingParams, spoil: Callable[[Tensor], None], message: str, call: int
) -> None:
    """At any step, in any row, whatever the strategy: the token at which it happened is named."""
    breaking = Breaking()
    with (
        breaking.at(call, spoil),
        pytest.raises(
            ValueError, match=f"^{message}, at generated token {call + 1} of the prompt of 4 tokens \\[5, 9, 2, 33\\]$"
        ),
    ):
        breaking.decoder.generate(PROMPT, params)
    assert_works(breaking.decoder)


def test_only_the_request_with_unusable_logits_fails() -> None:
    """Requests of other callers in the same batch go on, with the tokens they get alone."""
    breaking = Breaking()
    decoder = breaking.decoder
    alone = [token.token_ids for token in decoder.generate([1, 2, 3], GOOD).completions]
    good = decoder.stream([1, 2, 3], GOOD)
    next(good)
    # Its prompt, a step of the other meanwhile, the first step of both: the last row there is its own.
    with breaking.at(2, one_row(float("nan"))), pytest.raises(ValueError, match="hold NaN"):
        decoder.generate(PROMPT, GOOD)
    *_, last = good
    assert last.result is not None
    assert [completion.token_ids for completion in last.result.completions] == alone
    assert_works(decoder)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError("CUDA out of memory"), MemoryError])
@pytest.mark.parametrize("call", [0, 1, 3])
def test_an_interruption_inside_a_forward_pass(call: int, interruption: Any) -> None:
    """It reaches the caller as it is; blocks are free and the next request works (TensorRT-LLM PR #15444)."""
    breaking = Breaking()

    def stop(logits: Tensor) -> None:
        raise interruption

    expected = interruption if isinstance(interruption, type) else type(interruption)
    with breaking.at(call, stop), pytest.raises(expected):
        breaking.decoder.generate([PROMPT, [7, 8]], [GOOD, ALL_PARAMS[3]])
    assert_works(breaking.decoder)
    assert breaking.decoder.model.config._attn_implementation != "cowbeam"


def test_an_interrupted_turn_is_told_to_every_request_in_it() -> None:
    """One caller's Ctrl-C must not come up as KeyboardInterrupt in the threads of the others."""
    breaking = Breaking()
    other = breaking.decoder.stream([7, 8], GOOD)
    next(other)

    def stop(logits: Tensor) -> None:
        raise KeyboardInterrupt

    with breaking.at(1, stop), pytest.raises(KeyboardInterrupt):
        breaking.decoder.generate(PROMPT, GOOD)
    with pytest.raises(RuntimeError, match="the turn of the engine failed: KeyboardInterrupt") as told:
        list(other)
    assert isinstance(told.value.__cause__, KeyboardInterrupt)
    assert_works(breaking.decoder)


def test_an_interruption_in_the_middle_of_the_model() -> None:
    """Deep inside a layer, where K/V of the step are half written and the attention is switched."""
    decoder = Decoder(tiny_model("llama"), num_blocks=64)
    before = decoder.generate(PROMPT, GOOD).completions
    layer = decoder.model.model.layers[1]
    calls = iter([False, False, True])

    def stop(*_: Any) -> None:
        if next(calls):
            raise KeyboardInterrupt

    hook = layer.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(PROMPT, GOOD)
    hook.remove()
    assert decoder.model.config._attn_implementation != "cowbeam"
    assert_works(decoder)
    assert decoder.generate(PROMPT, GOOD).completions == before


NOTHING_LEFT: dict[str, Any] = {"max_new_tokens": 100, "no_repeat_ngram_size": 1, "eos_token_id": []}


@pytest.mark.parametrize(
    ("params", "fault"),
    [
        (SamplingParams(num_return_sequences=3, seed=1, **NOTHING_LEFT), "allow no token or give NaN"),
        (BeamSearchParams(num_beams=3, **NOTHING_LEFT), "allow no token"),
        (BeamSearchParams(num_beams=1, **NOTHING_LEFT), "allow no token or give NaN"),
    ],
)
def test_settings_that_leave_no_token(params: BeamSearchParams | SamplingParams, fault: str) -> None:
    """Every token was used once and none may come again: said, not answered with an arbitrary token."""
    decoder = Decoder(tiny_model("llama"), num_blocks=64)
    with pytest.raises(ValueError, match=f"^the logits processors {fault}, at generated token 67"):
        decoder.generate([1], params)
    assert_works(decoder)


def test_one_sample_that_is_stuck_is_noticed() -> None:
    """Only the first sample's log-prob was looked at: another without any allowed token got NaN and went on."""
    model = make_model("llama", {**FAMILIES["llama"], "vocab_size": 4})
    decoder = Decoder(model, num_blocks=64)
    params = SamplingParams(num_return_sequences=6, max_new_tokens=40, no_repeat_ngram_size=2, seed=0, eos_token_id=[])
    with pytest.raises(ValueError, match=r"^the logits processors allow no token or give NaN, at generated token"):
        decoder.generate([1, 2], params)
    decoder.check_integrity()
    assert decoder.num_free_blocks == decoder.num_blocks


def test_beams_that_are_stuck_give_what_is_finished() -> None:
    """When no live beam may go on, the finished hypotheses are the answer, as in transformers; they were lost."""
    from oracles import transformers_generate

    model = make_model("llama", {**FAMILIES["llama"], "vocab_size": 4})
    decoder = Decoder(model, num_blocks=64)
    settings = {
        "num_beams": 3,
        "num_return_sequences": 2,
        "max_new_tokens": 40,
        "no_repeat_ngram_size": 2,
        "early_stopping": "never",
        "length_penalty": 2.0,
        "eos_token_id": [1],
    }
    stuck = 0
    for first in range(4):
        prompt = [first, 2, 1, 3, 3]
        (want,) = transformers_generate(model, [prompt], settings)
        got = decoder.generate(prompt, BeamSearchParams(**settings))
        finished = [tuple(w.token_ids) for w in want if w.score is not None and w.score > -1e8]
        assert [completion.token_ids for completion in got.completions] == finished
        stuck += got.stats.steps < 40
    assert stuck
