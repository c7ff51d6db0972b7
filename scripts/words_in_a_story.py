"""A story that must hold eight words: plain samples, and samples re-ranked on the way by the words they hold so far.

Both draw as many samples of as many tokens, and both are judged by their best one. `python scripts/words_in_a_story.py`

Of 20 stories (--stories 20) of SmolLM2-135M-Instruct in float32 on a CPU the best of 16 plain samples held 5.00 words
on average, of 16 scored ones 6.85: more in 14 stories, fewer in 3.
"""

import argparse
import json
import random
import re
from collections.abc import Sequence

from cowbeam.decoder import BranchScorer, BranchView, Decoder, SamplingParams

WORDS = "apple boat bridge candle castle clock coat crown dog dragon feather flute garden ghost hat horse island king "
WORDS += (
    "ladder lamp lion map mirror moon mountain owl piano pirate queen river robot rose shell ship snow storm sword "
)
WORDS += "tiger tower train tree violin whale wizard wolf"


def num_held(text: str, words: Sequence[str]) -> int:
    return sum(bool(re.search(rf"\b{word}s?\b", text.lower())) for word in words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("stories", 10), ("samples", 16), ("tokens", 64), ("every", 8), ("keep", 4), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    held: dict[str, list[int]] = {"plain": [], "scored": []}
    with Decoder.from_pretrained() as decoder:
        for story in range(options.seed, options.seed + options.stories):
            words = random.Random(story).sample(WORDS.split(), 8)

            def score(branches: Sequence[BranchView], words: Sequence[str] = words) -> list[float]:
                return [num_held(b.text, words) + b.cumulative_logprob / len(b.token_ids) / 100 for b in branches]

            request = [{"role": "user", "content": f"Tell a very short story with the words {', '.join(words)}."}]
            prompt = decoder.tokenizer.apply_chat_template(request, add_generation_prompt=True, return_dict=False)
            scorer = BranchScorer(score=score, every=options.every, keep=options.keep)
            for name, branch_scorer in (("plain", None), ("scored", scorer)):
                fields = {"num_return_sequences": options.samples, "max_new_tokens": options.tokens, "seed": story}
                result = decoder.generate(prompt, SamplingParams(**fields, branch_scorer=branch_scorer))
                held[name].append(max(num_held(completion.text, words) for completion in result.completions))
    better = sum(b > a for a, b in zip(held["plain"], held["scored"], strict=True))
    worse = sum(b < a for a, b in zip(held["plain"], held["scored"], strict=True))
    means = {name: sum(counts) / len(counts) for name, counts in held.items()}
    print(
        json.dumps({**vars(options), "words held by the best": held, "mean": means, "better": better, "worse": worse})
    )


if __name__ == "__main__":
    main()
