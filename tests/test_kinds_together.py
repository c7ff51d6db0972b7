"""All kinds of search beside each other in a pool too small for them: preempted and resumed, nothing differs."""

import pytest

from cowbeam.decoder import BeamSearchParams, BranchScorer, Decoder, Grammar, SamplingParams
from cowbeam.decoder.params import Params
from fakes import FAMILIES, make_model
from text import json_tokenizer

EOS = 2
KINDS: dict[str, Params] = {
    "stop strings": BeamSearchParams(num_beams=4, max_new_tokens=40, eos_token_id=[], stop_strings=["a", "red"]),
    "log-probs": SamplingParams(num_return_sequences=4, max_new_tokens=40, eos_token_id=[], seed=1, logprobs=2),
    "processors": BeamSearchParams(
        num_beams=4, max_new_tokens=40, eos_token_id=[], logits_processors=[lambda ids, x: x - 0.1 * (ids.shape[1] % 3)]
    ),
    "diverse": BeamSearchParams(
        num_beams=6, num_beam_groups=3, diversity_penalty=0.7, max_new_tokens=40, eos_token_id=list(range(20, 60))
    ),
    "scored": SamplingParams(
        num_return_sequences=6,
        max_new_tokens=40,
        eos_token_id=[],
        seed=2,
        branch_scorer=BranchScorer(score=lambda bs: [float(sum(b.token_ids) % 11) for b in bs], every=4, keep=2),
    ),
    "grammar": BeamSearchParams(
        num_beams=4, max_new_tokens=40, eos_token_id=EOS, grammar=Grammar.regex("(red|green|[a-z]{2,9}){9,}")
    ),
    "best of": SamplingParams(best_of=5, max_new_tokens=40, eos_token_id=[], seed=3),
}


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_preempted_searches_of_all_kinds_go_on_as_they_were(looks_ahead: bool) -> None:
    """Where a branch is in its stop strings and in its grammar, its log-probs and its scorer's turns survive."""
    tokenizer = json_tokenizer()
    model = make_model("llama", {**FAMILIES["llama"], "vocab_size": len(tokenizer)})
    prompts = [[10 + number, 20, 30, 40 + number] for number in range(len(KINDS))]
    roomy = Decoder(model, tokenizer, block_size=4, num_blocks=2048)
    wanted = [roomy.generate(prompt, params) for prompt, params in zip(prompts, KINDS.values(), strict=True)]
    tight = Decoder(model, tokenizer, block_size=4, num_blocks=90)
    tight._engine._looks_ahead = looks_ahead  # type: ignore[union-attr]
    got = tight.generate(prompts, list(KINDS.values()))
    assert sum(result.stats.preemptions for result in got) > 0, "the pool is tight"
    for name, want, have in zip(KINDS, wanted, got, strict=True):
        assert [c.token_ids for c in have.completions] == [c.token_ids for c in want.completions], name
        assert [c.text for c in have.completions] == [c.text for c in want.completions], name
        for one, other in zip(want.completions, have.completions, strict=True):
            assert (one.token_logprobs is None) == (other.token_logprobs is None)
    tight.check_integrity()
