"""Which groups run: first come, first served, and only what fits for its whole life.

A group is admitted when its worst case fits beside the worst cases of those that run, so no step can run out of
blocks. (Preemption, which allows more, is a scheduler's matter alone: nothing below it changes.)
"""

from collections import deque

from cowbeam.decoder.blocks import BlockPool
from cowbeam.decoder.group import Group, Request

# More rows than this make a step slower than the admission of fewer: the weights are read once per step anyway.
MAX_ROWS = 512
# Prompt tokens computed in one forward pass, unless one prompt alone is longer.
MAX_PREFILL_TOKENS = 8192


def worst_case_blocks(request: Request, block_size: int) -> int:
    """The most blocks the request can hold at once: the prompt's full blocks once, the rest once a branch."""
    full, rest = divmod(len(request.prompt_token_ids), block_size)
    return full + request.params.width * -(-(rest + request.params.max_new_tokens) // block_size)


class Scheduler:
    """Two queues: waiting and running."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.waiting: deque[Group] = deque()
        self.running: list[Group] = []

    def check_fits(self, request: Request) -> None:
        """Raises ValueError, with the numbers, if the request could never be admitted."""
        needed = worst_case_blocks(request, self._pool.block_size)
        if needed > self._pool.num_blocks:
            raise ValueError(
                f"a prompt of {len(request.prompt_token_ids)} tokens with {request.params.width} branches and "
                f"max_new_tokens={request.params.max_new_tokens} may need {needed} blocks of {self._pool.block_size} "
                f"tokens, but the pool has {self._pool.num_blocks}: raise num_blocks or kv_memory, or ask for less"
            )

    def add(self, group: Group) -> None:
        """Queue a group whose request fits."""
        self.waiting.append(group)

    def admit(self) -> list[Group]:
        """Move from waiting to running what fits now, in order; the caller computes their prompts."""
        admitted = self.admissible()
        for _ in admitted:
            self.waiting.popleft()
        self.running.extend(admitted)
        return admitted

    def admissible(self) -> list[Group]:
        """What ``admit`` would move now."""
        admitted: list[Group] = []
        reserved = sum(worst_case_blocks(group.request, self._pool.block_size) for group in self.running)
        rows = sum(group.strategy.width for group in self.running)
        prompt_tokens = 0
        for group in self.waiting:
            reserved += worst_case_blocks(group.request, self._pool.block_size)
            rows += group.strategy.width
            prompt_tokens += group.num_prompt_tokens
            is_first = not self.running and not admitted
            if reserved > self._pool.num_blocks or (rows > MAX_ROWS and not is_first):
                break
            if prompt_tokens > MAX_PREFILL_TOKENS and admitted:
                break
            admitted.append(group)
        return admitted

    def remove(self, group: Group) -> None:
        """Forget a group: finished, failed or aborted. The caller frees its blocks."""
        if group in self.running:
            self.running.remove(group)
        elif group in self.waiting:
            self.waiting.remove(group)
