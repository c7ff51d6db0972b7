"""What a user may ask for. Field names are those of transformers' ``GenerationConfig``."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shown  # abbreviates: a user's value may be of any length
from typing import Any, Literal, Self

from cowbeam.decoder import field_checks
from cowbeam.decoder.branch_scorer import BranchScorer
from cowbeam.decoder.field_checks import check_flag, check_integer, check_number, check_seed
from cowbeam.decoder.grammar import Grammar

EarlyStopping = bool | Literal["never"]
# (input_ids [branches, tokens], scores [branches, vocabulary]) -> scores: transformers' ``LogitsProcessor``, or a
# function like it.
LogitsProcessor = Callable[[Any, Any], Any]

# Fields of a GenerationConfig that change which tokens come out and that cowbeam does not have. Set to anything but
# their neutral value they must not be dropped silently.
_UNSUPPORTED = {
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
    "penalty_alpha": None,
    "prompt_lookup_num_tokens": None,
    "remove_invalid_values": False,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}

# Settings of draws alone, and the values at which they change nothing.
OF_DRAWS: Mapping[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


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
    sequence_bias: Mapping[Sequence[int], float] | Sequence[Any] | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    renormalize_logits: bool = False
    eos_token_id: int | Sequence[int] | None = None
    stop_strings: str | Sequence[str] | None = None
    grammar: Grammar | Mapping[str, Any] | None = None
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        self._keep(**{field.name: field_checks.plain(getattr(self, field.name)) for field in dataclasses.fields(self)})
        check_integer("max_new_tokens", self.max_new_tokens, 1)
        check_integer("min_new_tokens", self.min_new_tokens, 0)
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}")
        check_integer("num_return_sequences", self.num_return_sequences, 1)
        check_number("temperature", self.temperature, 0, above=True)
        check_integer("top_k", self.top_k, 0)
        check_number("top_p", self.top_p, 0, 1, above=True)
        check_number("min_p", self.min_p, 0, 1)
        check_number("repetition_penalty", self.repetition_penalty, 0, above=True)
        check_integer("no_repeat_ngram_size", self.no_repeat_ngram_size, 0)
        if self.logprobs is not None:
            check_integer("logprobs", self.logprobs, 0)
        check_flag("renormalize_logits", self.renormalize_logits)
        check_seed(self.seed)
        self._keep(
            temperature=float(self.temperature),  # transformers' processors take no integers for these
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            repetition_penalty=float(self.repetition_penalty),
            sequence_bias=field_checks.sequence_bias(self.sequence_bias),
            bad_words_ids=field_checks.token_sequences("bad_words_ids", self.bad_words_ids),
            suppress_tokens=field_checks.token_ids("suppress_tokens", self.suppress_tokens),
            begin_suppress_tokens=field_checks.token_ids("begin_suppress_tokens", self.begin_suppress_tokens),
            logits_processors=field_checks.functions("logits_processors", self.logits_processors),
            eos_token_id=field_checks.eos_ids(self.eos_token_id),
            stop_strings=field_checks.stop_strings(self.stop_strings),
            grammar=Grammar.of(self.grammar),
        )

    def _keep(self, **fields: Any) -> None:
        """As they were checked: lists as tuples, numbers as floats."""
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_generation_config(cls, generation_config: Any, **changes: Any) -> Self:
        """The same settings as a ``GenerationConfig``; ``changes`` override single fields.

        Raises ValueError for a setting that would change the result and that cowbeam does not have.
        """
        if generation_config is None or isinstance(generation_config, Mapping):
            raise ValueError(f"from_generation_config takes a GenerationConfig, got {shown(generation_config)}")
        for name, neutral in _UNSUPPORTED.items():
            value = getattr(generation_config, name, None)
            if value is not None and value != neutral and name not in changes:
                raise ValueError(f"{name}={value!r} of the generation config is not supported")
        for name in ("num_beams", "num_beam_groups"):
            if name not in cls.__dataclass_fields__ and (getattr(generation_config, name, None) or 1) > 1:
                value = getattr(generation_config, name)
                raise ValueError(f"{name}={value} of the generation config is for BeamSearchParams")
        if getattr(generation_config, "max_new_tokens", None) is None and "max_new_tokens" not in changes:
            limit = getattr(generation_config, "max_length", None)
            if limit is not None and limit != 20:  # transformers' default
                raise ValueError(f"max_length={shown(limit)} counts the prompt too: give max_new_tokens")
        fields = {field.name: getattr(generation_config, field.name, None) for field in dataclasses.fields(cls)}
        if not getattr(generation_config, "do_sample", False):
            fields |= dict.fromkeys(OF_DRAWS)
        if "num_beams" in fields:
            fields["num_beams"] = fields["num_beams"] or 1  # as transformers takes it
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
        num_beam_groups: diverse beam search: the beams in so many groups of equal size, each of which avoids tokens
            that the groups before it chose in the same step. See ``diverse_beams`` for the formulas.
        diversity_penalty: what a token loses for each beam of an earlier group that chose it.
        do_sample: draw the candidates instead of taking the best; only then temperature, top_k, top_p, min_p apply.
        repetition_penalty, no_repeat_ngram_size, renormalize_logits: as in transformers.
        sequence_bias: added to the scores of the last token of each of these sequences, where the rest of it stands
            before; ``{(token,): bias}`` is a bias of one token, wherever it is.
        bad_words_ids: sequences that are not generated. (One that is an EOS id alone is passed over.)
        suppress_tokens, begin_suppress_tokens: token ids that are not generated; not as the first.
        logits_processors: transformers' or functions of your own, ``(input_ids, scores) -> scores``, called once a step
            behind all penalties and before temperature and the like, as in transformers. ``input_ids`` has a row a
            live branch, in the order of the beams (at the first step one row, since all branches are one), with the
            prompt; ``scores`` of beams are log-probs, of samples logits. One of the same class as a penalty takes its
            place. They must not remember anything from call to call: branches fork, end and change places. An error
            that one raises is the request's; others go on.
        eos_token_id: one id or several; None means the model's own, an empty list none.
        stop_strings: a beam whose text completes one of them is finished, as by an EOS id. The match may begin in the
            prompt and in the middle of a token, and must end in a generated one; special tokens count as written. The
            completion's text ends in front of it, its tokens and log-probs are whole; ``finish_reason`` is "stop".
        grammar: allow only text of this Grammar (or of ``{"json_schema": …}``, ``{"regex": …}``, ``{"ebnf": …}``); what
            ends by an EOS id fits it as a whole. Each branch has its own position in it. Needs the extra
            ``cowbeam[grammar]``.
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
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    do_sample: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("num_beams", self.num_beams, 1)
        if self.num_return_sequences > self.num_beams:
            raise ValueError(f"num_return_sequences={self.num_return_sequences} exceeds num_beams={self.num_beams}")
        check_number("length_penalty", self.length_penalty, -math.inf)
        # Scores are float32: the divisor must be one of its positive numbers.
        if abs(self.length_penalty) * math.log2(self.max_new_tokens) > 126:
            raise ValueError(
                f"length_penalty={self.length_penalty!r} is out of range: max_new_tokens={self.max_new_tokens} to this "
                "power is no float32"
            )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f'early_stopping must be True, False or "never", got {shown(self.early_stopping)}')
        check_flag("do_sample", self.do_sample)
        if self.do_sample and self.num_beams == 1:
            raise ValueError("do_sample=True with num_beams=1 is plain sampling: use SamplingParams")
        self._check_groups()
        if not self.do_sample:
            for name, neutral in OF_DRAWS.items():
                if getattr(self, name) != neutral:
                    raise ValueError(f"{name}={getattr(self, name)!r} has no effect without do_sample=True")

    def _check_groups(self) -> None:
        check_integer("num_beam_groups", self.num_beam_groups, 1)
        check_number("diversity_penalty", self.diversity_penalty, 0)
        self._keep(diversity_penalty=float(self.diversity_penalty))  # torch takes no integer of more than 64 bits
        if self.num_beam_groups == 1:
            if self.diversity_penalty:
                raise ValueError(f"diversity_penalty={self.diversity_penalty!r} has no effect without num_beam_groups")
            return
        if self.num_beams % self.num_beam_groups:
            raise ValueError(f"num_beam_groups={self.num_beam_groups} does not divide num_beams={self.num_beams}")
        if not self.diversity_penalty:
            raise ValueError("diversity_penalty=0 makes all num_beam_groups alike: it must be above 0")
        for name in ("do_sample", "stop_strings"):
            if getattr(self, name):
                raise ValueError(f"{name} does not go with num_beam_groups={self.num_beam_groups}")

    @property
    def width(self) -> int:
        """Branches at most."""
        return self.num_beams


@dataclass(frozen=True, kw_only=True)
class SamplingParams(_Params):
    """Parallel sampling: ``num_return_sequences`` independent samples of one prompt.

    Args:
        num_return_sequences: samples, returned by index.
        max_new_tokens, min_new_tokens, eos_token_id, stop_strings, grammar, logprobs: as in BeamSearchParams.
        temperature, top_k (0: all), top_p, min_p, repetition_penalty, no_repeat_ngram_size: as in transformers.
        sequence_bias, bad_words_ids, suppress_tokens, begin_suppress_tokens, logits_processors: as in BeamSearchParams.
        best_of: draw so many samples, and return ``num_return_sequences`` of them, those with the greatest ``score``
            (the mean of ``logprobs``), best first.
        branch_scorer: a function of yours re-ranks the samples on the way: see BranchScorer. With ``best_of`` it also
            has the last word.
        seed: sample i's stream depends on (seed, i) alone; None draws a fresh seed, which the result names.

    Raises:
        ValueError: names the field and the value.
    """

    best_of: int | None = None
    branch_scorer: BranchScorer | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of is not None:
            check_integer("best_of", self.best_of, 1)
            if self.best_of < self.num_return_sequences:
                raise ValueError(
                    f"best_of={self.best_of} is less than num_return_sequences={self.num_return_sequences}"
                )
        scorer = self.branch_scorer
        if scorer is None:
            return
        if not isinstance(scorer, BranchScorer):
            raise ValueError(f"branch_scorer must be a BranchScorer, got {shown(scorer)}")
        if scorer.keep is not None and scorer.keep > self.width:
            raise ValueError(f"keep={scorer.keep} of the branch_scorer exceeds the {self.width} samples")

    @property
    def width(self) -> int:
        """Branches at most."""
        return self.num_return_sequences if self.best_of is None else self.best_of


Params = BeamSearchParams | SamplingParams
