"""Requests to measure memory with: lengths like two published traces, prompts of real English.

The PagedAttention paper (Kwon et al., SOSP 2023, figure 11) gives the mean input and output lengths of its requests in
tokens of OPT. The data sets are not fetched; lengths are drawn from the distribution on 1, 2, … that has this mean and
no other parameter, the geometric one, and drawn anew while their sum exceeds the paper's 2048 positions.
"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

LONGEST = 2048


class RequestLengths(NamedTuple):
    """Tokens of one request."""

    prompt: int
    generated: int


MEAN_LENGTHS = {"alpaca": (19.31, 58.45), "sharegpt": (161.31, 337.99)}

# Blocks saved by sharing in the paper's figure 15 (OPT-13B), per cent, for 2, 4 and 6 branches.
PAPER_SAVINGS = {
    ("alpaca", "sampling"): (6.1, 9.8),
    ("alpaca", "beams"): (37.6, 55.2),
    ("sharegpt", "sampling"): (16.2, 30.5),
    ("sharegpt", "beams"): (44.3, 66.3),
}

SENTENCES = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Explain in simple words how a bicycle stays upright while it is moving.",
    "My landlord has raised the rent twice this year and I do not know what to do about it.",
    "Compare the climate of the coast with the climate of the mountains.",
    "Here is the function I wrote yesterday; it fails whenever the list is empty.",
    "Please translate the following paragraph into plain English for a young reader.",
    "The meeting was moved to Thursday because the new figures had not arrived.",
    "Suggest three names for a small bakery that opens before sunrise.",
    "What are the main causes of the decline of bees, and what can gardeners do?",
    "In the second chapter the author describes the harbour in winter.",
    "I have eggs, flour, two apples and half a lemon in the kitchen.",
    "Summarise the argument of the article and name its weakest point.",
    "Our daughter is nine and asks why the moon follows the car.",
    "The experiment was repeated at four temperatures, and the results were averaged.",
    "Give me a plan for learning to swim as an adult within three months.",
    "He had never seen the sea before, and now it was all around him.",
    "List the advantages and the drawbacks of working from home.",
    "The train leaves at seven, but the first bus only comes at half past six.",
    "Describe the water cycle and draw the reader's attention to evaporation.",
    "Which of these two sentences sounds more polite, and why?",
    "The committee could not agree on the colour of the new library door.",
    "Write an email to a customer whose order was lost in the post.",
    "A farmer has twelve sheep, sells five of them and buys nine more.",
    "Tell me about the history of the printing press in two paragraphs.",
    "When the power came back, every clock in the house showed a different time.",
    "How should I prepare the soil before I plant tomatoes?",
)


def draw_lengths(trace: str, number: int, seed: int = 0) -> list[RequestLengths]:
    """``number`` requests with the mean lengths of ``trace`` ("alpaca" or "sharegpt")."""
    mean_prompt, mean_generated = MEAN_LENGTHS[trace]
    generator = np.random.default_rng(seed)
    drawn: list[RequestLengths] = []
    while len(drawn) < number:
        prompt, generated = generator.geometric([1 / mean_prompt, 1 / mean_generated])
        if prompt + generated <= LONGEST:
            drawn.append(RequestLengths(int(prompt), int(generated)))
    return drawn


def make_prompt(tokenize: Callable[[str], Sequence[int]], num_tokens: int, seed: int) -> list[int]:
    """The first ``num_tokens`` tokens of the sentences above in an order of their own."""
    generator = random.Random(seed)
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        shuffled = generator.sample(SENTENCES, len(SENTENCES))
        token_ids += tokenize(" ".join(shuffled) + " ")
    return token_ids[:num_tokens]
