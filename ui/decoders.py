"""One model, several pools: a decoder per block size and pool size, made when a search first asks for it.

A pool's tensors have the block size in their shape and the number of blocks in their length, and a visitor chooses
both: another choice is another pool. The weights are shared.
"""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cowbeam.decoder import Decoder
from cowbeam.decoder.group import Request
from cowbeam.decoder.scheduler import worst_case_blocks
from cowbeam.ui.settings import MAX_BLOCKS, Settings

# Pools that are kept; each holds its memory until it is closed.
MAX_KEPT = 3
MIN_BLOCKS = 64


def load_decoders(model: str | None = None, *, device: str | None = None, dtype: str | None = None) -> "Decoders":
    """Load the model, in a thread that ends. Raises ValueError or FileNotFoundError.

    OpenMP keeps workers for every thread that ever computed. As soon as they are more than the cores, GNU's puts all
    of them to sleep between two pieces of work instead of letting them wait for the next: a step of 8 beams took 57 ms
    in place of 42. So nothing but the engine thread may have any when it decodes.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="cowbeam-loader") as loader:
        load = loader.submit(
            Decoder.from_pretrained, model, device=device, dtype=dtype, block_size=8, num_blocks=8, compile=False
        )
        return Decoders(load.result())


class Decoders:
    """Owns the model. To be used from one thread: the demo's engine thread.

    ``first`` is a loaded decoder whose model and tokenizer all others share.
    """

    def __init__(self, first: Decoder) -> None:
        self.first = first
        self._kept: OrderedDict[tuple[int, int], Decoder] = OrderedDict()

    def of(self, settings: Settings, token_ids: Sequence[int]) -> Decoder:
        """The decoder for this search: its pool is the one asked for, or the least power of two that surely fits.

        Raises ValueError where the search may not fit.
        """
        num_blocks = self._num_blocks(settings, token_ids)
        key = (settings.block_size, num_blocks)
        if key not in self._kept:
            self._kept[key] = Decoder(
                self.first.model,
                self.first.tokenizer,
                block_size=settings.block_size,
                num_blocks=num_blocks,
                prefix_reuse=False,  # every search is shown from its first block on
                # Up to a minute for every decoder: a visitor waits for the first token, not for the thousandth.
                compile=False,
            )
        self._kept.move_to_end(key)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)[1].close()
        return self._kept[key]

    def _num_blocks(self, settings: Settings, token_ids: Sequence[int]) -> int:
        """The decoder would refuse what does not fit too, but in the words of its own parameters."""
        request = Request(tuple(token_ids), settings.params(), frozenset(), None)
        needed = worst_case_blocks(request, settings.block_size)
        num_blocks = settings.num_blocks or min(MAX_BLOCKS, max(MIN_BLOCKS, 1 << (needed - 1).bit_length()))
        if needed > num_blocks:
            more = "more blocks in the pool" if needed <= MAX_BLOCKS else "larger blocks"
            raise ValueError(
                f"a prompt of {len(token_ids):,} tokens with {settings.branches} branches and "
                f"{settings.max_new_tokens} new tokens may need {needed:,} blocks of {settings.block_size} tokens, but "
                f"the pool has {num_blocks:,}: choose {more}, fewer branches or fewer new tokens"
            )
        return num_blocks

    def token_ids(self, settings: Settings) -> list[int]:
        """The prompt as the model gets it: in its chat template where it has one and the visitor wants it."""
        tokenizer: Any = self.first.tokenizer
        if settings.chat and tokenizer.chat_template:
            messages = [{"role": "user", "content": settings.prompt}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            return list(tokenizer(text, add_special_tokens=False).input_ids)
        return list(tokenizer(settings.prompt).input_ids)

    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens included: the prompt's tokens are shown, not read."""
        return str(self.first.tokenizer.decode([token_id]))  # type: ignore[union-attr]

    @property
    def on_cpu(self) -> bool:
        """Is the model computed on the cores that serve the page?"""
        return self.first.model.device.type == "cpu"

    @property
    def all(self) -> list[Decoder]:
        """Those that are kept."""
        return list(self._kept.values())

    @property
    def num_live_blocks(self) -> int:
        """Blocks in use in all pools: 0 when nothing runs."""
        return sum(decoder.num_blocks - decoder.num_free_blocks for decoder in self.all)

    def close(self) -> None:
        """Give all pools back."""
        while self._kept:
            self._kept.popitem()[1].close()
        self.first.close()
