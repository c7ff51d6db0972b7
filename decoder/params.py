"""What a user may ask for. Field names are those of transformers' ``GenerationConfig``."""

import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as shown  # abbreviates: a user's value may be of any length
from typing import Any, Literal, Self

EarlyStopping = bool | Literal["never"]

MAX_STOP_STRING = 1000  # characters: as many of a branch's text are looked at for every candidate

# Fields of a GenerationConfig that change which tokens come out and that cowbeam does not have. Set to anything but
# their neutral value they must not be dropped silently.
_UNSUPPORTED = {
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "diversity_penalty": 0.0,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "max_time": None,
    "min_length": 0,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "prompt_lookup_num_tokens": None,
    "remove_invalid_values": False,
    "sequence_bias": None,
    "suppress_tokens": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}


def _check_integer(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer of at least {minimum}, got {shown(value)}")


def _check_number(name: str, value: object, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """``low <= value <= high`` (``low < value`` with ``above``) and finite."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not number or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        bounds = [f"{'above' if above else 'at least'} {low:g}"] if low > -math.inf else []
        bounds += [f"at most {high:g}"] if high < math.inf else []
        bound = f" {' and '.join(bounds)}" if bounds else ""
        raise ValueError(f"{name} must be a finite number{bound}, got {shown(value)}")


@dataclass(frozen=True, kw_only=True)
class _Params:
    max_new_tokens: int = 64
    min_new_tokens: int = 0
    num_return_sequences: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    renormalize_logits: bool = False
    eos_token_id: int | Sequence[int] | None = None
    stop_strings: str | Sequence[str] | None = None
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_integer("max_new_tokens", self.max_new_tokens, 1)
        _check_integer("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}")
        _check_integer("num_return_sequences", self.num_return_sequences, 1)
        _check_number("temperature", self.temperature, 0, above=True)
        _check_integer("top_k", self.top_k, 0)
        _check_number("top_p", self.top_p, 0, 1, above=True)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("repetition_penalty", self.repetition_penalty, 0, above=True)
        _check_integer("no_repeat_ngram_size", self.no_repeat_ngram_size, 0)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0)
        if not isinstance(self.renormalize_logits, bool):
            raise ValueError(f"renormalize_logits must be True or False, got {shown(self.renormalize_logits)}")
        if self.seed is not None and (
            isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64
        ):
            raise ValueError(f"seed must be an integer from 0 to 2**64 - 1, got {shown(self.seed)}")
        self._freeze_eos()
        self._freeze_stop_strings()

    def _freeze_stop_strings(self) -> None:
        given = [self.stop_strings] if isinstance(self.stop_strings, str) else self.stop_strings or ()
        if isinstance(given, bytes) or not isinstance(given, Sequence):
            raise ValueError(f"stop_strings must be text or a list of texts, got {shown(given)}")
        for stop in given:
            if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_STRING:
                raise ValueError(f"stop_strings must be texts of 1 to {MAX_STOP_STRING} characters, got {shown(stop)}")
            if "\N{REPLACEMENT CHARACTER}" in stop:
                raise ValueError(f"stop_strings: {shown(stop)} holds what stands for a part of a character")
        object.__setattr__(self, "stop_strings", tuple(dict.fromkeys(given)) or None)

    def _freeze_eos(self) -> None:
        if self.eos_token_id is None:
            return
        given = [self.eos_token_id] if isinstance(self.eos_token_id, int) else self.eos_token_id
        try:
            ids = tuple(int(i) if hasattr(i, "__index__") and not isinstance(i, bool) else i for i in given)
        except TypeError:
            raise ValueError(f"eos_token_id must be token ids, got {shown(self.eos_token_id)}") from None
        for token_id in ids:
            _check_integer("eos_token_id", token_id, 0)
            if token_id >= 2**63:
                raise ValueError(f"eos_token_id must be token ids, got {shown(token_id)}")
        object.__setattr__(self, "eos_token_id", tuple(dict.fromkeys(ids)))

    @classmethod
    def from_generation_config(cls, generation_config: Any, **changes: Any) -> Self:
        """The same settings as a ``GenerationConfig``; ``changes`` override single fields.

        Raises ValueError for a setting that would change the result and that cowbeam does not have.
        """
        for name, neutral in _UNSUPPORTED.items():
            value = getattr(generation_config, name, None)
            if value is not None and value != neutral and name not in changes:
                raise ValueError(f"{name}={value!r} of the generation config is not supported")
        if getattr(generation_config, "max_new_tokens", None) is None and "max_new_tokens" not in changes:
            limit = getattr(generation_config, "max_length", None)
            if limit is not None and limit != 20:  # transformers' default
                raise ValueError(f"max_length={shown(limit)} counts the prompt too: give max_new_tokens")
        fields = {field.name: getattr(generation_config, field.name, None) for field in dataclasses.fields(cls)}
        if not getattr(generation_config, "do_sample", False):
            for name in ("temperature", "top_k", "top_p", "min_p"):
                fields[name] = None
        if "num_beams" in fields:
            fields["num_beams"] = fields["num_beams"] or 1  # as transformers takes it
        elif (getattr(generation_config, "num_beams", None) or 1) > 1:
            raise ValueError(
                f"num_beams={generation_config.num_beams} of the generation config is for BeamSearchParams"
            )
        return cls(**{name: value for name, value in fields.items() if value is not None} | changes)


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams(_Params):
    """Beam search with transformers' semantics; ``num_beams=1`` is greedy search, ``do_sample`` beam sampling.

    Args:
        num_beams: live beams a step.
        num_return_sequences: completions returned, best first; at most ``num_beams``. Where fewer sequences exist (a
            tiny vocabulary, few allowed tokens), fewer come back: transformers fills up with empty rows.
        max_new_tokens: generated tokens at most, the EOS included.
        min_new_tokens: no EOS before so many tokens.
        length_penalty: a hypothesis scores ``cumulative_logprob / len(token_ids) ** length_penalty``.
        early_stopping: True stops at ``num_beams`` hypotheses; False when the best live beam cannot beat them at
            its present length; "never" only when it cannot at any length.
        do_sample: draw the candidates instead of taking the best; only then temperature, top_k, top_p, min_p apply.
        repetition_penalty, no_repeat_ngram_size, renormalize_logits: as in transformers.
        eos_token_id: one id or several; None means the model's own, an empty list none.
        stop_strings: a beam whose text completes one of them is finished, as by an EOS id. The match may begin in the
            prompt and in the middle of a token, and must end in a generated one; special tokens count as written. The
            completion's text ends in front of it, its tokens and log-probs are whole; ``finish_reason`` is "stop".
        logprobs: give each completion ``token_logprobs``: the plain model's log-prob of each token, before penalties,
            temperature and the like, and so many of the likeliest tokens beside it; 0: none beside it. (``logprobs`` of
            a completion are of the processed distribution, those that make its score, and always there.)
        seed: of the draws; None draws a fresh one, which the result names.

    Raises:
        ValueError: names the field and the value.
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    do_sample: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_integer("num_beams", self.num_beams, 1)
        if self.num_return_sequences > self.num_beams:
            raise ValueError(f"num_return_sequences={self.num_return_sequences} exceeds num_beams={self.num_beams}")
        _check_number("length_penalty", self.length_penalty, -math.inf)
        # Scores are float32: the divisor must be one of its positive numbers.
        if abs(self.length_penalty) * math.log2(self.max_new_tokens) > 126:
            raise ValueError(
                f"length_penalty={self.length_penalty!r} is out of range: max_new_tokens={self.max_new_tokens} to this "
                "power is no float32"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f'early_stopping must be True, False or "never", got {shown(self.early_stopping)}')
        if not isinstance(self.do_sample, bool):
            raise ValueError(f"do_sample must be True or False, got {shown(self.do_sample)}")
        if self.do_sample and self.num_beams == 1:
            raise ValueError("do_sample=True with num_beams=1 is plain sampling: use SamplingParams")
        if not self.do_sample:
            for name, neutral in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
                if getattr(self, name) != neutral:
                    raise ValueError(f"{name}={getattr(self, name)!r} has no effect without do_sample=True")

    @property
    def width(self) -> int:
        """Branches at most."""
        return self.num_beams


@dataclass(frozen=True, kw_only=True)
class SamplingParams(_Params):
    """Parallel sampling: ``num_return_sequences`` independent samples of one prompt.

    Args:
        num_return_sequences: samples, returned by index.
        max_new_tokens, min_new_tokens, eos_token_id, stop_strings, logprobs: as in BeamSearchParams.
        temperature, top_k (0: all), top_p, min_p, repetition_penalty, no_repeat_ngram_size: as in transformers.
        seed: sample i's stream depends on (seed, i) alone; None draws a fresh seed, which the result names.

    Raises:
        ValueError: names the field and the value.
    """

    @property
    def width(self) -> int:
        """Branches at most."""
        return self.num_return_sequences


Params = BeamSearchParams | SamplingParams
