"""A long search takes no more of the GPU's memory at its end than soon after its begin."""

import pytest
import torch

from cowbeam.decoder import BeamSearchParams, Decoder, SamplingParams
from cowbeam.decoder.params import Params
from fakes import FAMILIES, make_model

STEPS = 1000
SETTLED = 200  # steps: by then graphs are captured
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096}


@pytest.mark.cuda
@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(num_beams=8, max_new_tokens=STEPS + 1, eos_token_id=[]),
        SamplingParams(num_return_sequences=8, max_new_tokens=STEPS + 1, seed=1, eos_token_id=[]),
    ],
    ids=["beams", "samples"],
)
def test_a_thousand_steps_take_no_more_memory(params: Params) -> None:
    """2,100 to 3,101 tokens: the bucket of block-table columns stays the same, so no graph is captured on the way."""
    model = make_model("llama", FAMILIES["llama"] | WIDE, scale=0.1).to("cuda", torch.float16)
    decoder = Decoder(model, num_blocks=4096)
    run = decoder.add_request([3, 1, 4, 1, 5, 9, 2] * 300, params)
    allocated, reserved = [], []
    while not run.is_over:
        decoder.step()
        allocated.append(torch.cuda.memory_allocated())
        reserved.append(torch.cuda.memory_reserved())
    assert len(allocated) >= STEPS
    assert max(allocated[SETTLED:]) - allocated[SETTLED] <= 1 << 20, "more is allocated with every step"
    assert max(reserved[SETTLED:]) == reserved[SETTLED]
    assert decoder.num_free_blocks == decoder.num_blocks
