"""`attach`: the same call gives the same answer, and transformers' own where cowbeam has none."""

import copy
import functools
import logging
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from cowbeam.decoder import attach, custom_generate, detach
from cowbeam.decoder.kv_cache import KVCache
from cowbeam.decoder.paged_rows import PagedRows
from cowbeam.decoder.step_graph import StepGraphs
from fakes import BLOCK_SIZES, DEVICE, FAMILIES, VOCABULARY, make_model, random_prompt, tiny_model
from text import tiny_tokenizer

CHUNKS, SETTINGS_A_CHUNK = 6, 30
BEAMS = {"num_beams": 3, "max_new_tokens": 6, "pad_token_id": 0}
TOLERANCE = 1e-4  # of sums of float32 log-probs


@pytest.fixture(autouse=True)
def _integrity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step leaves the pool's invariants as they should be."""
    step = PagedRows.step

    def checked(self: PagedRows, tokens: Tensor) -> Tensor:
        logits = step(self, tokens)
        self.check_integrity()
        return logits

    monkeypatch.setattr(PagedRows, "step", checked)


@pytest.fixture(autouse=True)
def _draws_fail_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, drawing from what is no distribution ends the process, transformers' own call as well."""
    if DEVICE == "cpu":
        return
    multinomial = torch.multinomial

    def checked(probabilities: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not bool((probabilities.isfinite() & (probabilities >= 0)).all()):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        if not bool((probabilities.sum(-1) > 0).all()):
            raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
        return multinomial(probabilities, *args, **kwargs)

    monkeypatch.setattr(torch, "multinomial", checked)


@contextmanager
def heard() -> Iterator[list[logging.LogRecord]]:
    """What cowbeam says inside the body."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("cowbeam")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def warnings_of(records: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


def decoded_by_cowbeam(records: list[logging.LogRecord]) -> bool:
    return any(record.getMessage().startswith("generate:") for record in records)


def own_generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' answer, attached or not."""
    return type(model).generate(model, *args, **kwargs)


@functools.cache
def attached(family: str, block_size: int, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return attach(copy.deepcopy(tiny_model(family, dtype)), block_size=block_size)


class FollowsHistory(LogitsProcessor):
    """A user's: looks at the whole history, so a branch with another's history gets other scores."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        weights = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)
        favoured = (input_ids * weights).sum(1) % VOCABULARY
        return scores.scatter_add(1, favoured[:, None], torch.full_like(scores[:, :1], 1.5))


class StopsBySum(StoppingCriteria):
    """A user's: ends a branch whose last two tokens add up to a multiple of nine."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, -2:].sum(1) % 9 == 0


def allowed_tokens(batch_id: int, input_ids: Tensor) -> list[int]:
    return [token for token in range(VOCABULARY) if (token + batch_id + int(input_ids[-1])) % 3]


def random_processors(rng: random.Random) -> dict[str, Any]:
    """Settings of processors, a few at a time."""
    tokens = functools.partial(rng.sample, range(1, VOCABULARY))
    possible: dict[str, Callable[[], Any]] = {
        "repetition_penalty": lambda: rng.choice([1.3, 0.8]),
        "no_repeat_ngram_size": lambda: rng.choice([1, 2, 3]),
        "min_new_tokens": lambda: rng.randint(1, 5),
        "bad_words_ids": lambda: [tokens(1), tokens(2), tokens(3)],
        "sequence_bias": lambda: [[tokens(1), 2.0], [tokens(2), -3.0]],
        "suppress_tokens": lambda: tokens(4),
        "begin_suppress_tokens": lambda: tokens(9),
        "forced_bos_token_id": lambda: tokens(1)[0],
        "forced_eos_token_id": lambda: tokens(1)[0],
        "encoder_repetition_penalty": lambda: rng.choice([1.3, 0.8]),
        "encoder_no_repeat_ngram_size": lambda: rng.choice([1, 2]),
        "min_length": lambda: rng.randint(3, 20),
        "stop_strings": lambda: rng.sample(["e", "th", " br", "n f", "fox", "s"], 2),
        "exponential_decay_length_penalty": lambda: (2, 1.2),
        "renormalize_logits": lambda: True,
        "remove_invalid_values": lambda: True,
        "guidance_scale": lambda: 1.4,
        "watermarking_config": lambda: WatermarkingConfig(bias=1.5, seeding_scheme="lefthash"),
        "prefix_allowed_tokens_fn": lambda: allowed_tokens,
        "logits_processor": lambda: LogitsProcessorList([FollowsHistory()]),
        "stopping_criteria": lambda: StoppingCriteriaList([StopsBySum()]),
    }
    chosen = rng.sample(sorted(possible), rng.choice([0, 1, 1, 2, 3, 4]))
    call = {name: possible[name]() for name in chosen}
    return call | ({"tokenizer": tiny_tokenizer(VOCABULARY)} if "stop_strings" in call else {})


def random_warpers(rng: random.Random) -> dict[str, Any]:
    possible: dict[str, Any] = {
        "temperature": rng.choice([0.6, 1.7]),
        "top_k": rng.choice([0, 1, 5, 20]),
        "top_p": rng.choice([0.9, 0.4]),
        "min_p": rng.choice([0.02, 0.2]),
        "typical_p": 0.8,
        "top_h": 0.5,
        "epsilon_cutoff": 0.01,
        "eta_cutoff": 0.01,
    }
    return {name: possible[name] for name in rng.sample(sorted(possible), rng.choice([0, 1, 2, 3]))}


def random_call(rng: random.Random) -> dict[str, Any]:
    """Keyword arguments of ``generate``: beams, sampled beams, samples or greedy search."""
    kind = rng.choice(["beams", "beams", "beams", "sampled beams", "samples", "greedy"])
    num_beams = rng.choice([2, 3, 4, 6]) if "beams" in kind else 1
    each = rng.randint(1, num_beams) if num_beams > 1 else rng.choice([1, 2, 5]) if kind == "samples" else 1
    call: dict[str, Any] = {
        "num_beams": num_beams,
        "num_return_sequences": each,
        "do_sample": kind in ("sampled beams", "samples"),
        "max_new_tokens": rng.randint(1, 12),
        "eos_token_id": sorted(rng.sample(range(1, VOCABULARY), rng.choice([0, 1, 2, 3, 6, 15]))) or None,
        "pad_token_id": rng.choice([0, 0, 3]),
        "return_dict_in_generate": rng.random() < 0.7,
        "output_scores": rng.random() < 0.7,
        "output_logits": rng.random() < 0.3,
        **random_processors(rng),
    }
    if num_beams > 1:
        call["length_penalty"] = rng.choice([1.0, 0.0, -1.0, 0.5, 2.0])
        call["early_stopping"] = rng.choice([False, True, "never"])
    return call | (random_warpers(rng) if call["do_sample"] else {})


def padded(prompts: list[list[int]], pad: int = 0) -> dict[str, Tensor]:
    width = max(map(len, prompts))
    token_ids = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {
        "input_ids": torch.tensor(token_ids, device=DEVICE),
        "attention_mask": torch.tensor(mask, device=DEVICE),
    }


@dataclass(frozen=True)
class Case:
    """One random call; its seed is all that a failure needs to be run again."""

    seed: int
    family: str
    block_size: int
    inputs: dict[str, Tensor]
    call: dict[str, Any]

    @classmethod
    def draw(cls, seed: int) -> "Case":
        rng = random.Random(seed)
        prompts = [random_prompt(rng) for _ in range(rng.choice([1, 1, 2, 3]))]
        families = sorted(FAMILIES)
        return cls(seed, families[seed % len(families)], rng.choice(BLOCK_SIZES), padded(prompts), random_call(rng))

    def run(self, generate: Callable[..., Any], dtype: torch.dtype) -> Any:
        """``generate`` of the model; the error, if it raises one."""
        model = attached(self.family, self.block_size, dtype)  # its weights may be drawn here
        torch.manual_seed(self.seed)
        try:
            return generate(model, **self.inputs, **copy.deepcopy(self.call))
        except (ValueError, RuntimeError) as error:
            return error

    def difference(self, dtype: torch.dtype) -> str | None:
        wanted = self.run(own_generate, dtype)
        with heard() as records:
            got = self.run(lambda model, **kwargs: model.generate(**kwargs), dtype)
        assert not warnings_of(records), f"{warnings_of(records)} in {self}"
        if isinstance(wanted, Exception):
            return None if (type(got), str(got)) == (type(wanted), str(wanted)) else f"{got!r}, wanted {wanted!r}"
        assert decoded_by_cowbeam(records), f"{got!r} {self}"
        return difference(wanted, got)

    def check(self) -> None:
        """A difference in float32 counts only if it stands in float64 (rounding may swap near ties)."""
        if self.difference(torch.float32) is not None:
            found = self.difference(torch.float64)
            assert found is None, f"{found}\nin {self}"


def difference(wanted: Any, got: Any) -> str | None:
    if isinstance(wanted, Tensor):
        return None if torch.equal(wanted, got) else f"{got.tolist()}, wanted {wanted.tolist()}"
    assert type(wanted) is type(got)
    names = [name for name in wanted if name not in ("cache", "past_key_values")]
    assert names == list(got), f"{list(got)}, wanted {names}"
    for name in names:
        pairs = (
            [(wanted[name], got[name])]
            if isinstance(wanted[name], Tensor)
            else list(zip(wanted[name], got[name], strict=True))
        )
        for want, have in pairs:
            same = torch.equal(want, have) if not want.is_floating_point() else close(want, have)
            if not same:
                return f"{name}: {have.tolist()}, wanted {want.tolist()}"
    return None


def close(wanted: Tensor, got: Tensor) -> bool:
    return torch.allclose(wanted, got, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_attached_is_transformers(chunk: int) -> None:
    """Tokens, beam indices, scores, logits and errors of random calls, random numbers included."""
    for seed in range(chunk * SETTINGS_A_CHUNK, (chunk + 1) * SETTINGS_A_CHUNK):
        Case.draw(seed).check()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Unfeasible length constraints")
@pytest.mark.parametrize("chunk", range(6, 40))
def test_attached_is_transformers_at_length(chunk: int) -> None:
    for seed in range(chunk * SETTINGS_A_CHUNK, (chunk + 1) * SETTINGS_A_CHUNK):
        Case.draw(seed).check()


def test_transition_scores() -> None:
    """transformers' own recomputation of the scores works on what is returned."""
    model = attached("llama", 4)
    inputs = padded([random_prompt(random.Random(seed)) for seed in range(3)])
    settings = {
        "num_beams": 4,
        "num_return_sequences": 3,
        "max_new_tokens": 9,
        "eos_token_id": [5, 9],
        "pad_token_id": 0,
    }
    out: Any = model.generate(
        **inputs, **settings, length_penalty=0.7, return_dict_in_generate=True, output_scores=True
    )
    transitions = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    lengths = (out.beam_indices >= 0).sum(-1)
    torch.testing.assert_close(transitions.sum(-1) / lengths**0.7, out.sequences_scores, atol=TOLERANCE, rtol=0)
    assert "cache" not in out, "its blocks are free for the next call"


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


def test_streamer() -> None:
    """The custom_generate hook keeps it from the loop, so that nobody ends it and an iterator over it waits forever."""
    model = attached("llama", 4)
    inputs = padded([[3, 1, 4, 1, 5]])
    wanted, got = Collector(), Collector()
    own_generate(model, **inputs, max_new_tokens=5, do_sample=False, streamer=wanted)
    with heard() as records:
        model.generate(**inputs, max_new_tokens=5, do_sample=False, streamer=got)  # type: ignore[operator]
    assert got.heard == wanted.heard
    assert got.heard[-1] == "end"
    assert decoded_by_cowbeam(records)
    with pytest.raises(ValueError, match="`streamer` cannot be used with beam search"):
        model.generate(**inputs, max_new_tokens=5, num_beams=2, streamer=got)  # type: ignore[operator]


def test_text() -> None:
    """Stop strings, which need the tokenizer; a pipeline; max_time."""
    tokenizer = tiny_tokenizer(VOCABULARY)
    model: Any = attach(copy.deepcopy(tiny_model("llama")), block_size=4)
    inputs = tokenizer(
        ["the fox", "the quick brown dog"], return_tensors="pt", padding=True, return_token_type_ids=False
    )
    chosen = own_generate(model, **inputs, max_new_tokens=8, num_beams=3, pad_token_id=0)
    word = tokenizer.decode(chosen[0, -3])
    settings = {"max_new_tokens": 8, "pad_token_id": 0, "stop_strings": [word], "tokenizer": tokenizer}
    for more in ({"num_beams": 3}, {"do_sample": False}):
        with heard() as records:
            got = model.generate(**inputs, **settings, **more)
        assert decoded_by_cowbeam(records)
        assert torch.equal(own_generate(model, **inputs, **settings, **more), got)
    short = model.generate(**inputs, max_new_tokens=500, max_time=1e-9, do_sample=False, pad_token_id=0)
    assert short.shape[1] == inputs["input_ids"].shape[1] + 1

    def write() -> Any:
        settings = GenerationConfig(num_beams=3, max_new_tokens=8, do_sample=False, pad_token_id=0)
        return pipeline("text-generation", model=model, tokenizer=tokenizer)("the fox", generation_config=settings)

    with heard() as records:
        written = write()
    assert decoded_by_cowbeam(records)
    detach(model)
    assert written == write()


@pytest.mark.parametrize("call", [{"do_sample": False}, {"do_sample": True, "stop_strings": ["he q", "ox"]}])
def test_text_streamers(call: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """One that prints, and one that another thread reads: both get the text of the call, and end."""
    tokenizer = tiny_tokenizer(VOCABULARY)
    model: Any = attach(copy.deepcopy(tiny_model("llama")), block_size=4)
    inputs = tokenizer(["the fox"], return_tensors="pt", return_token_type_ids=False).to(DEVICE)
    call = {"max_new_tokens": 20, "pad_token_id": 0, "tokenizer": tokenizer, **call}

    def run(generate: Callable[..., Any], streamer: BaseStreamer) -> list[int]:
        torch.manual_seed(3)
        return generate(**inputs, **call, streamer=streamer)[0, inputs["input_ids"].shape[1] :].tolist()

    printed = []
    for generate in (functools.partial(own_generate, model), model.generate):
        tokens = run(generate, TextStreamer(tokenizer, skip_prompt=True))
        printed.append((tokens, capsys.readouterr().out))
    assert printed[0] == printed[1]
    assert printed[1][1] == tokenizer.decode(printed[1][0]) + "\n"
    read = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    thread = threading.Thread(target=run, args=(model.generate, read))
    thread.start()
    assert "".join(read) == tokenizer.decode(printed[1][0])
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_pipeline() -> None:
    """Samples and beams of several texts at once, as they come without cowbeam."""
    tokenizer = tiny_tokenizer(VOCABULARY)
    model: Any = attach(copy.deepcopy(tiny_model("qwen2")), block_size=4)
    calls: list[dict[str, Any]] = [
        {"do_sample": True, "num_return_sequences": 3, "temperature": 0.8},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
    ]

    def write(call: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=2)
        return pipe(["the fox", "a box of dogs"], max_new_tokens=8, pad_token_id=0, **call)

    got = []
    for call in calls:
        with heard() as records:
            got.append(write(call))
        assert decoded_by_cowbeam(records)
        assert not warnings_of(records)
    detach(model)
    assert got == [write(call) for call in calls]


FALLBACKS: dict[str, tuple[dict[str, Any], str]] = {
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
    "hidden states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 2, "num_beams": 1}, "prompt lookup"),
    "chunks": ({"prefill_chunk_size": 2}, "prefill_chunk_size=2"),
    "a given cache": ({"past_key_values": DynamicCache}, "a given cache"),
    "right padding": ({"attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1]])}, "a 0 behind a token"),
    "nothing but padding": ({"attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])}, "a 0 behind a token"),
    "positions": ({"position_ids": torch.tensor([[3, 4, 5, 6]] * 2)}, "position_ids"),
    "token types": ({"token_type_ids": torch.tensor([[1, 1, 2, 2]] * 2)}, "token_type_ids"),
    "embeddings": ({"inputs_embeds": torch.ones(2, 4, 32), "input_ids": None}, "inputs_embeds"),
}


@pytest.mark.parametrize("name", sorted(FALLBACKS))
def test_fallback(name: str) -> None:
    """What cowbeam cannot do is transformers' answer, with one warning that says why, and only one."""
    changes, reason = FALLBACKS[name]
    model: Any = attach(copy.deepcopy(tiny_model("gpt2")), block_size=4)

    def run(generate: Callable[..., Any]) -> Any:
        call = {"input_ids": torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]]), "num_beams": 2, "max_new_tokens": 4}
        call |= {"pad_token_id": 0} | changes
        call = {key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in call.items()}
        if name == "prompt lookup":
            call["input_ids"] = call["input_ids"][:1]
        if name == "a given cache":
            call["past_key_values"] = DynamicCache(config=model.config)
        return generate(**{key: value for key, value in call.items() if value is not None})

    with heard() as records:
        got = run(model.generate)
        run(model.generate)
    (warning,) = warnings_of(records)
    assert reason in warning
    assert not decoded_by_cowbeam(records)
    wanted = run(functools.partial(own_generate, model))
    assert torch.equal(*(out if isinstance(out, Tensor) else out.sequences for out in (wanted, got)))


@pytest.mark.parametrize("kind", ["static", "hybrid"])
@pytest.mark.filterwarnings("ignore")
def test_caches_of_fixed_size(kind: str) -> None:
    """Gemma's checkpoints ask for one in their generation config; blocks take its place."""
    model: Any = attached("gemma2", 4)
    inputs = padded([[3, 1, 4, 1, 5], [9, 2]])
    for call in (BEAMS, BEAMS | {"num_beams": 1}):
        with heard() as records:
            got = model.generate(**inputs, **call, cache_implementation=kind)
        assert decoded_by_cowbeam(records)
        assert torch.equal(own_generate(model, **inputs, **call), got)


def test_accelerate() -> None:
    """Hooks that lie on the instance, as `device_map` sets them."""
    model: Any = attach(dispatch_model(copy.deepcopy(tiny_model("llama")), {"": DEVICE}))
    inputs = padded([[3, 1, 4, 1, 5], [9, 2]])
    with heard() as records:
        got = model.generate(**inputs, **BEAMS)
    assert decoded_by_cowbeam(records)
    assert torch.equal(own_generate(model, **inputs, **BEAMS), got)


def test_an_assistant_model() -> None:
    model: Any = attach(copy.deepcopy(tiny_model("llama")))
    inputs, assistant = padded([[3, 1, 4, 1, 5]]), make_model("llama", FAMILIES["llama"], seed=1)
    with heard() as records:
        got = model.generate(**inputs, max_new_tokens=6, assistant_model=assistant, do_sample=False)
    (warning,) = warnings_of(records)
    assert "assistant models" in warning
    assert torch.equal(own_generate(model, **inputs, max_new_tokens=6, do_sample=False), got)


def test_models_that_cowbeam_cannot_decode() -> None:
    """They are attached all the same, and told about once: at `attach`."""
    t5 = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    recurrent = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    for model, reason in (
        (AutoModelForSeq2SeqLM.from_config(t5).eval(), "encoder-decoder"),
        (make_model("recurrent_gemma", recurrent), "its paged logits differ from its own"),
    ):
        with heard() as records:
            attach(model)
            got = model.generate(torch.tensor([[3, 1, 4]]), num_beams=2, max_new_tokens=5)
        *levels, warning = warnings_of(records)  # 5.17 has it seem decodable: then each level is tried
        assert len(levels) == len(set(levels)) <= 1
        assert reason in warning
        assert torch.equal(own_generate(model, torch.tensor([[3, 1, 4]]), num_beams=2, max_new_tokens=5), got)


def test_training_mode() -> None:
    """A trainer that generates in the middle of training: transformers decodes; in eval mode cowbeam does."""
    model: Any = copy.deepcopy(tiny_model("llama")).train()
    inputs = padded([[3, 1, 4, 1, 5]])
    with heard() as records:
        attach(model)
        assert not records
        model.generate(**inputs, max_new_tokens=3, do_sample=False)
        assert "training mode" in warnings_of(records)[0]
        assert not decoded_by_cowbeam(records)
        model.eval().generate(**inputs, max_new_tokens=3, do_sample=False)
    assert decoded_by_cowbeam(records)


def test_copies() -> None:
    """A copy decodes with its own weights; what is saved or pickled knows nothing of cowbeam."""
    inputs = padded([[3, 1, 4, 1, 5], [9, 2]])
    model: Any = attach(copy.deepcopy(tiny_model("llama")))
    before = model.generate(**inputs, **BEAMS)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_input_embeddings().weight.mul_(-1.5)
    with heard() as records:
        assert torch.equal(own_generate(twin, **inputs, **BEAMS), twin.generate(**inputs, **BEAMS))
    assert decoded_by_cowbeam(records)
    assert not torch.equal(before, twin.generate(**inputs, **BEAMS))
    assert torch.equal(before, model.generate(**inputs, **BEAMS))
    detach(model)
    with heard() as records:
        twin.generate(**inputs, **BEAMS)
        assert decoded_by_cowbeam(records)
    pickled = pickle.loads(pickle.dumps(twin))
    assert torch.equal(twin.generate(**inputs, **BEAMS), pickled.generate(**inputs, **BEAMS))


def test_saved(tmp_path: Path) -> None:
    inputs = padded([[3, 1, 4, 1, 5], [9, 2]])
    model: Any = attach(copy.deepcopy(tiny_model("llama")))
    model.save_pretrained(tmp_path)
    assert "cowbeam" not in "".join(path.read_text() for path in tmp_path.glob("*.json"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.generate(**inputs, **BEAMS), loaded.generate(**inputs, **BEAMS))


def test_detach() -> None:
    """Nothing is left; to attach or detach twice is no harm."""
    model: Any = copy.deepcopy(tiny_model("llama"))
    before, implementation = set(model.__dict__), model.config._attn_implementation
    attach(attach(model)).generate(**padded([[3, 1, 4]]), **BEAMS)
    assert model.config._attn_implementation == implementation
    detach(model)
    detach(model)
    assert set(model.__dict__) == before
    assert model.generate.__func__ is type(model).generate


def test_wrong_arguments() -> None:
    """Of attach: a sentence. Of generate: transformers' own error. Of a call that fails: nothing is left."""
    model: Any = copy.deepcopy(tiny_model("llama"))
    with pytest.raises(ValueError, match="model must be a loaded transformers model, got Linear"):
        attach(torch.nn.Linear(2, 2))  # type: ignore[type-var]
    with pytest.raises(ValueError, match="LlamaModel has no generate"):
        attach(model.model)
    with pytest.raises(ValueError, match="block_size must be a power of two, got 12"):
        attach(model, block_size=12)
    with pytest.raises(ValueError, match="attention must be"):
        attach(model, attention="flash")  # type: ignore[arg-type]
    model.generate = functools.partial(own_generate, model)
    with pytest.raises(ValueError, match="has a generate of its own"):
        attach(model)
    del model.generate
    attach(model)
    inputs = padded([[3, 1, 4, 1, 5], [9, 2]])
    for wrong in ({"num_beam": 3}, {"num_beams": 2, "num_return_sequences": 3}, {"stop_strings": ["a"]}):
        with pytest.raises(ValueError) as wanted:
            own_generate(model, **inputs, max_new_tokens=3, **wrong)
        with pytest.raises(ValueError) as got:
            model.generate(**inputs, max_new_tokens=3, **wrong)
        assert str(got.value) == str(wanted.value)

    def fail(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > 7:
            raise KeyError("a user's mistake")
        return scores

    with pytest.raises(KeyError, match="a user's mistake"):
        model.generate(**inputs, **BEAMS, logits_processor=[fail])
    assert torch.equal(own_generate(model, **inputs, **BEAMS), model.generate(**inputs, **BEAMS))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_any_type(dtype: torch.dtype) -> None:
    """A float mask gave lengths that were no integers."""
    model, inputs = attached("llama", 4), padded([[3, 1, 4, 1, 5], [9, 2]])
    wanted = own_generate(model, **inputs, **BEAMS)
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    assert torch.equal(model.generate(**inputs, **BEAMS), wanted)  # type: ignore[operator]


def test_autocast_is_left_to_transformers() -> None:
    """Half of a step ran in bfloat16 and half in float32, over blocks of float32."""
    model: Any = attach(copy.deepcopy(tiny_model("llama")), block_size=4)
    inputs = padded([[3, 1, 4, 1, 5], [9, 2]])
    with heard() as records, torch.autocast(DEVICE, torch.bfloat16):
        got = model.generate(**inputs, **BEAMS, return_dict_in_generate=True, output_logits=True)
        wanted = own_generate(model, **inputs, **BEAMS, return_dict_in_generate=True, output_logits=True)
    (warning,) = warnings_of(records)
    assert "autocast" in warning
    assert all(map(torch.equal, got.logits, wanted.logits))


@pytest.mark.parametrize("where", ["everywhere", "at the end"])
def test_hooks_of_the_users(where: str) -> None:
    """Activations steered in a layer. Prompts packed into one row have one end only, where transformers sees as many
    as there are prompts."""
    model: Any = attach(copy.deepcopy(tiny_model("llama")), block_size=4)
    direction = torch.randn(32, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def steer(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        steered = output.clone()
        steered[:, slice(None) if where == "everywhere" else -1] += direction
        return steered

    inputs = padded([[3, 1, 4, 1, 5], [9, 2], [9, 2, 6, 5]])
    call = {**BEAMS, "return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(**inputs, **call)
    model.model.layers[0].register_forward_hook(steer)
    with heard() as records:
        got = model.generate(**inputs, **call)
    assert decoded_by_cowbeam(records)
    assert difference(own_generate(model, **inputs, **call), got) is None
    assert difference(plain, got) is not None


def test_a_compiled_models_wrapper() -> None:
    """``torch.compile(model)`` offers the model's own ``generate``: that is what is attached."""
    model = copy.deepcopy(tiny_model("llama"))
    inputs = padded([[3, 1, 4, 1, 5], [9, 2]])
    compiled: Any = attach(torch.compile(model, backend="eager"), block_size=4)  # type: ignore[type-var]
    with heard() as records:
        got = compiled.generate(**inputs, **BEAMS)
    assert decoded_by_cowbeam(records)
    assert torch.equal(own_generate(model, **inputs, **BEAMS), got)
    detach(compiled)
    assert "generate" not in model.__dict__


@pytest.mark.filterwarnings("ignore")
def test_threads_whose_calls_are_left_to_transformers() -> None:
    """Their forward passes ran in the middle of another thread's step, with cowbeam's attention in the model."""
    model: Any = attach(copy.deepcopy(tiny_model("qwen2")), block_size=4)
    inputs = padded([[3, 1, 4, 1, 5] * 9, [9, 2]])
    common = {**BEAMS, "max_new_tokens": 25}
    calls: list[dict[str, Any]] = [common, common | {"use_cache": False}, common | {"prefill_chunk_size": 7}]
    wanted = [own_generate(model, **inputs, **call) for call in calls]
    wrong: list[Any] = []

    def run(number: int) -> None:
        try:
            for _ in range(3):
                assert torch.equal(model.generate(**inputs, **calls[number]), wanted[number])
        except (AssertionError, RuntimeError, ValueError) as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_calls_within_and_beside_a_call() -> None:
    """A processor that asks the same model; threads: each call has memory of its own, and none waits for another."""
    model: Any = attached("qwen2", 4)
    inputs, other = padded([[3, 1, 4, 1, 5], [9, 2]]), padded([[7, 7, 8]])
    wanted, wanted_of_other = own_generate(model, **inputs, **BEAMS), own_generate(model, **other, **BEAMS)

    def asks(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert torch.equal(model.generate(**other, **BEAMS), wanted_of_other)
        return scores

    assert torch.equal(model.generate(**inputs, **BEAMS, logits_processor=[asks]), wanted)
    answers: list[Tensor] = []
    threads = [threading.Thread(target=lambda: answers.append(model.generate(**inputs, **BEAMS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4
    assert all(torch.equal(answer, wanted) for answer in answers)


def test_weights_and_dtype_that_change_between_calls() -> None:
    model: Any = attach(copy.deepcopy(tiny_model("llama")), block_size=4)
    inputs = padded([[3, 1, 4, 1, 5], [9, 2]])
    before = model.generate(**inputs, **BEAMS)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(-1.5)
    changed = model.generate(**inputs, **BEAMS)
    assert not torch.equal(before, changed)
    assert torch.equal(own_generate(model, **inputs, **BEAMS), changed)
    with heard() as records:
        doubled = model.double().generate(**inputs, **BEAMS)
    assert decoded_by_cowbeam(records)
    assert torch.equal(own_generate(model, **inputs, **BEAMS), doubled)


def test_a_model_that_grows() -> None:
    """A copied layer has a config of its own: it went on to attend in its owner's way, over its newest token alone."""
    model: Any = attach(copy.deepcopy(tiny_model("llama")), block_size=4)
    inputs = padded([[3, 1, 4, 1, 5], [9, 2]])
    model.generate(**inputs, **BEAMS)
    grown = copy.deepcopy(model.model.layers[0])
    grown.self_attn.layer_idx = len(model.model.layers)
    model.model.layers.append(grown)
    model.config.num_hidden_layers += 1
    call = {**BEAMS, "return_dict_in_generate": True, "output_logits": True}
    with heard() as records:
        got = model.generate(**inputs, **call)
    assert decoded_by_cowbeam(records)
    assert difference(own_generate(model, **inputs, **call), got) is None


def test_custom_generate() -> None:
    """For one call, of a model that is attached or not."""
    model: Any = copy.deepcopy(tiny_model("llama"))
    inputs = padded([[3, 1, 4, 1, 5], [9, 2]])
    settings: list[dict[str, Any]] = [BEAMS, {"do_sample": True, "num_return_sequences": 3, "pad_token_id": 0}]
    for prepare in (detach, attach):
        prepare(model)
        for call in settings:
            torch.manual_seed(0)
            wanted = own_generate(model, **inputs, **call)
            torch.manual_seed(0)
            with heard() as records:
                got = model.generate(**inputs, **call, custom_generate=custom_generate)
            assert torch.equal(wanted, got)
            assert decoded_by_cowbeam(records)
            assert not warnings_of(records)


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is kept once and the pool is no larger than the worst case; ended samples are not computed further."""
    model: Any = attach(copy.deepcopy(tiny_model("llama")), block_size=16)
    rows, tokens, pools = [], [], []
    step, make = StepGraphs.decode, KVCache.__init__
    monkeypatch.setattr(
        StepGraphs, "decode", lambda self, inputs: tokens.append(len(inputs.slots)) or step(self, inputs)
    )
    monkeypatch.setattr(
        KVCache, "__init__", lambda self, shapes, blocks, size: pools.append(blocks) or make(self, shapes, blocks, size)
    )
    close = PagedRows.close
    monkeypatch.setattr(PagedRows, "close", lambda self: rows.append(self) or close(self))
    prompt = random_prompt(random.Random(0), 500, 500)
    model.generate(**padded([prompt]), num_beams=50, max_new_tokens=64, pad_token_id=0)
    assert rows.pop().peak_blocks * 16 <= 1.2 * (500 + 50 * 64)
    assert pools == [500 // 16 + 50 * -(-(500 % 16 + 64) // 16)]
    tokens.clear()
    torch.manual_seed(1)
    eos = list(range(1, VOCABULARY, 4))
    out = model.generate(
        **padded([prompt[:9], prompt[:5]]),
        do_sample=True,
        num_return_sequences=8,
        max_new_tokens=20,
        eos_token_id=eos,
        pad_token_id=0,
    )
    lengths = [(row != 0).sum() for row in out[:, 9:]]
    assert sum(tokens) <= sum(lengths), "a sample that has ended is computed no further"


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than the worst case may do; where not even a part of it is there, transformers tries its luck."""
    model: Any = attach(copy.deepcopy(tiny_model("llama")), block_size=4)
    inputs = padded([[3, 1, 4, 1, 5], [9, 2]])
    make, limit = KVCache.__init__, [0]

    def scarce(self: KVCache, shapes: Any, num_blocks: int, block_size: int) -> None:
        if num_blocks > limit[0]:
            raise torch.OutOfMemoryError("scarce")
        make(self, shapes, num_blocks, block_size)

    monkeypatch.setattr(KVCache, "__init__", scarce)
    wanted = own_generate(model, **inputs, **BEAMS)
    for blocks, complaint in ((16, None), (0, "there is no memory")):
        limit[0] = blocks
        with heard() as records:
            assert torch.equal(model.generate(**inputs, **BEAMS), wanted)
        assert [complaint in text for text in warnings_of(records)] == ([True] if complaint else [])
        assert decoded_by_cowbeam(records) == (complaint is None)
    limit[0] = 4
    with pytest.raises(torch.OutOfMemoryError, match="the KV pool of 4 blocks of 4 tokens is full"):
        model.generate(**inputs, **BEAMS)
