"""Branches: fork, free and append over shared blocks. **This file decides when a block is copied.**

Two things grow along a branch, both persistent lists: its blocks (where K/V of its tokens lie) and its tokens. A
chosen token is appended at once; its slot is reserved at the start of the next step, when its K/V are computed. The
last token of a finished branch never gets a slot.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from cowbeam.decoder.blocks import Block, BlockCopy, BlockId, BlockPool, OutOfBlocksError, block_table
from cowbeam.decoder.chain import Link, links, release
from cowbeam.decoder.outputs import TokenLogprob


class Token(Link):
    """One generated token of a branch.

    ``logprob`` is of the processed distribution it was chosen from; ``beam`` is the rank of the branch it continued
    (transformers' ``beam_indices``); ``length`` counts generated tokens up to and including this one; ``plain`` is what
    the model alone says of it, where that is asked for.
    """

    __slots__ = ("beam", "length", "logprob", "plain", "token_id")

    def __init__(
        self, parent: "Token | None", token_id: int, logprob: float, beam: int, plain: TokenLogprob | None = None
    ) -> None:
        super().__init__(parent)
        self.token_id = token_id
        self.logprob = logprob
        self.beam = beam
        self.plain = plain
        self.length: int = 1 if parent is None else parent.length + 1


class Event(NamedTuple):
    """What happened to a block or a branch, for frames. ``tokens`` counts the slots a CoW had to carry over.

    To the group, that is: a block that it takes over or leaves to another group is "allocate" and "free" too.
    """

    kind: Literal["fork", "prune", "allocate", "cow", "free"]
    branch: int | None = None
    block: BlockId | None = None
    source: int | None = None
    tokens: int = 0


class Branch:
    """One live token chain: its last block, its last token, and how many of its tokens have a slot."""

    __slots__ = ("branch_id", "last_block", "last_token", "num_slots", "row", "state")

    def __init__(self, branch_id: int, last_block: Block | None, last_token: Token | None, num_slots: int) -> None:
        self.branch_id = branch_id
        self.last_block = last_block
        self.last_token = last_token
        self.num_slots = num_slots
        self.row: int | None = None  # its line in the device's table of the last step; children start from it
        self.state: object | None = None  # what recurrent layers keep of it; a value, which forks share

    @property
    def block_table(self) -> list[BlockId]:
        """Its block ids in logical order: O(blocks)."""
        return block_table(self.last_block)

    @property
    def tokens(self) -> list[Token]:
        """Its generated tokens, oldest first: O(tokens)."""
        return links(self.last_token)

    def token_ids_from(self, index: int) -> list[int]:
        """Its generated ids from the one at ``index`` on: O(their number)."""
        found: list[int] = []
        token = self.last_token
        while token is not None and token.length > index:
            found.append(token.token_id)
            token = token.parent
        found.reverse()
        return found


class BranchTree:
    """The branches of one group over a pool that groups share; counts what the group holds.

    ``num_blocks`` and ``num_tokens`` are the group's distinct live blocks and distinct live tokens (prompt included).
    Of these blocks, other groups may hold the prompt's full ones too; what is generated is the group's alone.
    ``events`` collects what happens while it is a list.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.branches: dict[int, Branch] = {}
        self.num_blocks = 0
        self.num_tokens = 0
        self.num_cow_copies = 0
        self.events: list[Event] | None = None
        self._prompt_tokens = 0
        self._next_id = 0

    def plant(self, num_prompt_tokens: int, prefix: Sequence[Block] = ()) -> Branch:
        """The first branch, with slots for the whole prompt. Raises OutOfBlocksError before anything is taken.

        ``prefix`` are full blocks that the pool found to hold the prompt's first tokens.
        """
        assert not self._next_id, "a tree is planted once"
        needed = -(-num_prompt_tokens // self.pool.block_size) - sum(block.ref_count > 0 for block in prefix)
        if needed > self.pool.num_free:
            raise OutOfBlocksError(f"the prompt needs {needed} blocks, {self.pool.num_free} are free")
        self._prompt_tokens = self.num_tokens = num_prompt_tokens
        branch = self._add(Branch(0, None, None, num_prompt_tokens))
        self.replant(prefix)
        return branch

    def uproot(self) -> None:
        """Give all blocks back; branches and tokens stay, for ``replant``."""
        for branch in self.branches.values():
            self._release(branch)
            branch.last_block = branch.row = None
        self.num_blocks = 0

    def blocks(self) -> list[Block]:
        """Its distinct blocks, in the order in which ``replant`` takes them: O(blocks of all branches)."""
        found: dict[Block, None] = {}
        for branch in self.branches.values():
            found |= dict.fromkeys(links(branch.last_block))
        return list(found)

    def replant(self, prefix: Sequence[Block] = ()) -> list[tuple[Branch, int]]:
        """Give every branch the blocks of its slots, shared as they were; the caller has made sure of enough.

        Returns the branches in whose name something is to be computed anew, each with the first position: in this
        order everything before that position is in ``prefix`` or in the name of an earlier one.
        """
        assert not self.num_blocks, "the tree has its blocks"
        first = next(iter(self.branches.values()))
        trunk = self._grow_trunk(prefix, first)
        # A block is known by its last slot: by its column in the prompt, by the token behind it.
        made: dict[int | Token, Block] = {}
        to_compute = []
        for branch in self.branches.values():
            column = self._prompt_tokens // self.pool.block_size
            branch.last_block = trunk
            start = len(prefix) * self.pool.block_size if branch is first else branch.num_slots
            for key in self._tail_keys(branch):
                if key not in made:
                    made[key] = self._allocate(branch.last_block, branch)
                    start = min(start, column * self.pool.block_size)
                branch.last_block = made[key]
                column += 1
            if branch.last_block is not None:
                branch.last_block.ref_count += 1
            if start < branch.num_slots:
                to_compute.append((branch, start))
        for block in (trunk, *made.values()):
            self.pool.release(block)  # branches and followers hold it, not who asked for it
        return to_compute

    def _grow_trunk(self, prefix: Sequence[Block], branch: Branch) -> Block | None:
        """The prompt's full blocks; of the last one the caller is a holder."""
        last = prefix[-1] if prefix else None
        if last is not None:
            self.pool.hold(last)
        self.num_blocks += len(prefix)
        for block in prefix:
            self._record(Event("allocate", branch=branch.branch_id, block=block.block_id))
        for _ in range(len(prefix), self._prompt_tokens // self.pool.block_size):
            follower = self._allocate(last, branch)
            self.pool.release(last)  # from here on the follower holds it, not the caller
            last = follower
        return last

    def _tail_keys(self, branch: Branch) -> Iterator[int | Token]:
        """What is in the last slot of each block behind the prompt's full ones."""
        size, prompt = self.pool.block_size, self._prompt_tokens
        tokens = branch.tokens if branch.num_slots > prompt else []
        for column in range(prompt // size, -(-branch.num_slots // size)):
            last = min((column + 1) * size, branch.num_slots) - 1
            yield column if last < prompt else tokens[last - prompt]

    def keep_findable(self, branch: Branch, prompt_token_ids: Sequence[int]) -> None:
        """Before ``branch`` is freed: make known what full blocks hold that nobody else holds, all of them computed.

        Only generated tokens' blocks are not known yet; a branch that goes on is the only one to hold them.
        """
        size, prefixes = self.pool.block_size, self.pool.prefixes
        unknown: list[Block] = []
        block = branch.last_block
        while block is not None and block.ref_count == 1 and not prefixes.knows(block):
            unknown.append(block)
            block = block.parent
        end = branch.num_slots // size * size  # of the full blocks
        first = (-(-branch.num_slots // size) - len(unknown)) * size
        if first >= end or not (block is None or prefixes.knows(block)):
            return
        token_ids = [*prompt_token_ids[first:], *branch.token_ids_from(max(0, first - self._prompt_tokens))]
        for number, full in enumerate(reversed(unknown)):
            if (number + 1) * size <= end - first:
                prefixes.enter(full, token_ids[number * size : (number + 1) * size])

    def fork(self, parent: Branch) -> Branch:
        """A branch that shares all of ``parent``'s blocks and tokens: O(1), whatever their number."""
        for link in (parent.last_block, parent.last_token):
            if link is not None:
                link.ref_count += 1
        child = self._add(Branch(self._next_id, parent.last_block, parent.last_token, parent.num_slots))
        child.row, child.state = parent.row, parent.state
        self._record(Event("fork", branch=child.branch_id, source=parent.branch_id))
        return child

    def free(self, branch: Branch) -> None:
        """Drop ``branch``; blocks and tokens that only it held are gone with it."""
        del self.branches[branch.branch_id]
        branch.state = None  # a step's inputs may hold the branch for a while
        self._record(Event("prune", branch=branch.branch_id))
        self.num_tokens -= len(release(branch.last_token))
        self._release(branch)
        if not self.branches:
            self.num_tokens -= self._prompt_tokens
            self.num_blocks = 0  # others may hold blocks of the prompt still

    def _release(self, branch: Branch) -> None:
        table = branch.block_table if self.events is not None else []
        freed = self.pool.release(branch.last_block)
        self.num_blocks -= len(freed)
        if self.events is not None:
            is_last = all(other is branch or other.last_block is None for other in self.branches.values())
            # With its last branch the group leaves all its blocks, also those that others hold.
            gone = reversed(table) if is_last else [block.block_id for block in freed]
            self.events += [Event("free", block=block_id) for block_id in gone]

    def append_token(
        self, branch: Branch, token_id: int, logprob: float, beam: int, plain: TokenLogprob | None = None
    ) -> None:
        """Record the token chosen for ``branch``; its slot is reserved by ``append_slot`` when it is computed."""
        token = Token(branch.last_token, token_id, logprob, beam, plain)
        release(branch.last_token)  # the new token holds it now
        branch.last_token = token
        self.num_tokens += 1

    def blocks_needed(self, branches: Iterable[Branch]) -> int:
        """How many blocks ``append_slot`` on each of ``branches`` will take: new last blocks plus CoW copies."""
        needed = 0
        appending: Counter[Block] = Counter()
        for branch in branches:
            if branch.num_slots % self.pool.block_size and branch.last_block is not None:
                appending[branch.last_block] += 1
            else:
                needed += 1
        # The last holder left writes in place; every one before it copies.
        return needed + sum(min(count, block.ref_count - 1) for block, count in appending.items())

    def append_slot(self, branch: Branch) -> BlockCopy | None:
        """Reserve the slot of ``branch``'s next token; return the copy that must run before it is written.

        Full last block: a new one follows it. Room and no other holder: written in place. Room but other holders:
        copy-on-write, since they still read the slots before it. Raises OutOfBlocksError, changing nothing.
        """
        last, filled = branch.last_block, branch.num_slots % self.pool.block_size
        copy: BlockCopy | None = None
        if last is None or filled == 0:
            branch.last_block = self._allocate(last, branch)
            self.pool.release(last)  # the follower holds it now
        elif last.ref_count > 1:
            branch.last_block = self._allocate(last.parent, branch, copied_from=last, filled=filled)
            self.pool.release(last)
            self.num_cow_copies += 1
            copy = BlockCopy(last.block_id, branch.last_block.block_id)
        branch.num_slots += 1
        return copy

    def slot(self, branch: Branch) -> int:
        """The slot of ``branch``'s newest reserved token: ``block_id * block_size + offset``."""
        assert branch.last_block is not None, "a branch without blocks has no slot"
        return branch.last_block.block_id * self.pool.block_size + (branch.num_slots - 1) % self.pool.block_size

    def _allocate(
        self, parent: Block | None, branch: Branch, copied_from: Block | None = None, filled: int = 0
    ) -> Block:
        block = self.pool.allocate(parent)
        self.num_blocks += 1
        if copied_from is None:
            self._record(Event("allocate", branch=branch.branch_id, block=block.block_id))
        else:
            self._record(Event("cow", branch.branch_id, block.block_id, source=copied_from.block_id, tokens=filled))
        return block

    def _add(self, branch: Branch) -> Branch:
        self.branches[branch.branch_id] = branch
        self._next_id += 1
        return branch

    def _record(self, event: Event) -> None:
        if self.events is not None:
            self.events.append(event)
