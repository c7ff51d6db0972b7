"""Fork, free and append over shared blocks, against dense copies that share nothing."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cowbeam.decoder.blocks import Block, BlockCopy, BlockPool, OutOfBlocksError
from cowbeam.decoder.branches import Branch, BranchTree, Event
from cowbeam.decoder.chain import links
from dense import Forest

MAX_BRANCHES = 12


class ForestMachine(RuleBasedStateMachine):
    """Plants, forks, appends and frees in any order, several trees on one pool, often with the pool nearly full."""

    forest_class: ClassVar[type[Forest]] = Forest
    tree_class: ClassVar[type[BranchTree]] = BranchTree
    pool_class: ClassVar[type[BlockPool]] = BlockPool

    @initialize(num_blocks=st.integers(4, 30), block_size=st.sampled_from([1, 2, 4]), prompt=st.integers(1, 6))
    def start(self, num_blocks: int, block_size: int, prompt: int):
        self.forest = self.forest_class(num_blocks, block_size, self.tree_class, self.pool_class)
        self.plant(min(prompt, num_blocks * block_size))

    @rule(num_tokens=st.integers(1, 10))
    def plant(self, num_tokens: int):
        if -(-num_tokens // self.forest.pool.block_size) <= self.forest.pool.num_free:
            self.forest.plant(num_tokens)
        else:
            with pytest.raises(OutOfBlocksError, match="the prompt needs"):
                self.forest.plant(num_tokens)

    @precondition(lambda self: 0 < len(self.forest.dense) < MAX_BRANCHES)
    @rule(data=st.data())
    def fork(self, data: st.DataObject):
        self.forest.fork(data.draw(st.sampled_from(self.forest.branches), "parent"))

    @precondition(lambda self: self.forest.dense)
    @rule(data=st.data())
    def free(self, data: st.DataObject):
        self.forest.free(data.draw(st.sampled_from(self.forest.branches), "branch"))

    @precondition(lambda self: self.forest.dense)
    @rule(data=st.data())
    def step(self, data: st.DataObject):
        order = data.draw(st.permutations(self.forest.branches), "order")
        chosen = order[: data.draw(st.integers(1, len(order)), "number")]
        if self.forest.blocks_needed(chosen) <= self.forest.pool.num_free:
            self.forest.step(chosen)

    @precondition(lambda self: self.forest.dense)
    @rule(data=st.data())
    def advance(self, data: st.DataObject):
        tree = data.draw(st.sampled_from([tree for tree in self.forest.trees if tree.branches]), "tree")
        branches = self.forest.branches_of(tree)
        parents = data.draw(st.lists(st.sampled_from(branches), min_size=1, max_size=4), "parents")
        if len(parents) <= self.forest.pool.num_free:  # a step takes at most a block a branch
            self.forest.advance(tree, parents)

    @invariant()
    def everybody_reads_their_own_tokens(self):
        self.is_sound = False
        self.forest.check()
        self.is_sound = True

    def teardown(self):
        if getattr(self, "is_sound", False):  # what the check found must not be hidden by what clearing up would find
            self.forest.free_all()
            self.forest.check()
            assert self.forest.pool.num_live == 0, "when nothing runs, nothing is live"


TestForest = ForestMachine.TestCase
TestForest.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


class ForgetsToCopy(BranchTree):
    """CoW takes the new block but nobody copies (xLLM PR #1984: so it was on one back end)."""

    def append_slot(self, branch: Branch) -> BlockCopy | None:
        super().append_slot(branch)
        return None


class WritesInPlace(BranchTree):
    """CoW off: the last block is written whoever else holds it."""

    def append_slot(self, branch: Branch) -> BlockCopy | None:
        if branch.last_block is None or branch.num_slots % self.pool.block_size == 0:
            return super().append_slot(branch)
        branch.num_slots += 1
        return None

    def blocks_needed(self, branches: Iterable[Branch]) -> int:
        return sum(1 for branch in branches if branch.num_slots % self.pool.block_size == 0)


class CopiesWhereNobodyShares(BranchTree):
    """The last holder left copies too: a block too many for a moment, and bytes moved for nothing."""

    def append_slot(self, branch: Branch) -> BlockCopy | None:
        last, filled = branch.last_block, branch.num_slots % self.pool.block_size
        if last is None or filled == 0:
            return super().append_slot(branch)
        branch.num_slots += 1
        branch.last_block = self._allocate(last.parent, branch, copied_from=last, filled=filled)
        self.num_blocks -= len(self.pool.release(last))
        return BlockCopy(last.block_id, branch.last_block.block_id)

    def blocks_needed(self, branches: Iterable[Branch]) -> int:
        return len(list(branches))


class ForkForgetsItsHolder(BranchTree):
    def fork(self, parent: Branch) -> Branch:
        child = super().fork(parent)
        assert child.last_block is not None
        child.last_block.ref_count -= 1
        return child


class ForgetsTheTokensHolder(BranchTree):
    def fork(self, parent: Branch) -> Branch:
        child = super().fork(parent)
        if child.last_token is not None:
            child.last_token.ref_count -= 1
        return child


class CountsNoCopies(BranchTree):
    """vLLM and OpenVINO count references - 1 copies a shared last block; none is too few."""

    def blocks_needed(self, branches: Iterable[Branch]) -> int:
        return sum(1 for branch in branches if branch.num_slots % self.pool.block_size == 0)


class CountsACopyTooMany(BranchTree):
    """As if the last holder copied as well."""

    def blocks_needed(self, branches: Iterable[Branch]) -> int:
        return sum(
            1
            for branch in branches
            if branch.last_block is None
            or branch.num_slots % self.pool.block_size == 0
            or branch.last_block.ref_count > 1
        )


class ReleaseForgetsTheParent(BlockPool):
    def release(self, block: Block | None) -> list[Block]:
        if block is None or block.ref_count > 1:
            return super().release(block)
        parent, block.parent = block.parent, None
        freed = super().release(block)
        block.parent = parent
        return freed


class WritesBeforeCopies(Forest):
    """Copies are of whole blocks: one that runs late brings what the source's other holder has just written."""

    def run(self, copies: Sequence[BlockCopy], slots: Sequence[int], values: Sequence[int]) -> None:
        self.write(slots, values)
        self.copy(copies)


@pytest.mark.parametrize(
    ("part", "mutant", "message"),
    [
        ("tree_class", ForgetsToCopy, "reads .* instead of"),
        ("tree_class", WritesInPlace, "two tokens in one slot|reads .* instead of"),
        ("tree_class", CopiesWhereNobodyShares, "blocks_needed said"),
        ("tree_class", ForkForgetsItsHolder, "has ref count 1 but 2 holders"),
        ("tree_class", ForgetsTheTokensHolder, "released more often than held|are distinct"),
        ("tree_class", CountsNoCopies, "blocks_needed said"),
        ("tree_class", CountsACopyTooMany, "blocks_needed said"),
        ("pool_class", ReleaseForgetsTheParent, "has ref count 1 but 0 holders"),
        ("forest_class", WritesBeforeCopies, "reads .* instead of"),
    ],
)
def test_the_checker_catches(part: str, mutant: type, message: str):
    machine = type(mutant.__name__, (ForestMachine,), {part: mutant})
    only_generate = settings(
        max_examples=300,
        stateful_step_count=30,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises(AssertionError, match=message):
        run_state_machine_as_test(machine, settings=only_generate)


def test_who_copies_and_who_writes_in_place():
    """Exact ids: blocks of two slots, a prompt of three tokens, a fork in the middle of block 1."""
    forest = Forest(num_blocks=6, block_size=2)
    first = forest.plant(3)
    tree = forest.trees[0]
    assert first.block_table == [0, 1]
    second, third = forest.fork(first), forest.fork(first)
    assert first.block_table == second.block_table == third.block_table == [0, 1]
    assert tree.blocks_needed([first, second, third]) == 2
    assert tree.append_slot(first) == BlockCopy(1, 2)
    assert tree.append_slot(second) == BlockCopy(1, 3)
    assert tree.append_slot(third) is None  # the last holder left writes in place
    assert [branch.block_table for branch in (first, second, third)] == [[0, 2], [0, 3], [0, 1]]
    assert [tree.slot(branch) for branch in (first, second, third)] == [5, 7, 3]
    assert tree.append_slot(second) is None  # full: a new block follows, shared by nobody
    assert second.block_table == [0, 3, 4]
    tree.free(third)
    tree.free(second)
    assert tree.num_blocks == 2
    assert [forest.pool.allocate(None).block_id for _ in range(4)] == [5, 1, 4, 3]


def test_a_fork_at_a_block_boundary_copies_nothing():
    forest = Forest(num_blocks=4, block_size=2)
    first = forest.plant(2)
    second = forest.fork(first)
    forest.step([first, second])
    assert (first.block_table, second.block_table) == ([0, 1], [0, 2])
    assert forest.trees[0].num_cow_copies == 0
    forest.check()


def test_blocks_of_one_slot_are_never_copied():
    forest = Forest(num_blocks=8, block_size=1)
    first = forest.plant(2)
    second = forest.fork(first)
    for _ in range(3):
        forest.step([second, first])
    assert forest.trees[0].num_cow_copies == 0
    assert forest.pool.num_live == 2 + 2 * 3
    forest.check()


@pytest.mark.parametrize("spare", [0, 1])
def test_blocks_needed_is_exact(spare: int):
    """A step that fits exactly runs. With one block less the count says so before anything is touched."""
    forest = Forest(num_blocks=2 + 3 + 1 - spare, block_size=4)
    trunk = forest.plant(7)  # block 1 has one slot left
    shared = [trunk, *(forest.fork(trunk) for _ in range(3))]
    lone = forest.plant(3) if spare == 0 else None  # writes in place: takes nothing more
    chosen = [*shared, lone] if lone else shared
    assert forest.blocks_needed(chosen) == 3
    if lone is None:
        forest.plant(1)  # takes the block that would have been the third
        assert forest.blocks_needed(shared) == forest.pool.num_free + 1
    else:
        assert forest.pool.num_free == 3
        forest.step(chosen)
        assert forest.pool.num_free == 0
    forest.check()


def test_of_a_shared_block_only_some_holders_may_append():
    """Two of three holders append: both copy, since the third still reads. All three: only two copy."""
    forest = Forest(num_blocks=8, block_size=4)
    first = forest.plant(2)
    second, third = forest.fork(first), forest.fork(first)
    assert forest.blocks_needed([first, second]) == 2
    assert forest.blocks_needed([first, second, third]) == 2
    forest.step([first, second])
    assert third.block_table == [0]
    assert forest.blocks_needed([third]) == 0
    forest.step([third])
    forest.check()


def test_a_prompt_that_does_not_fit_takes_nothing():
    forest = Forest(num_blocks=3, block_size=4)
    with pytest.raises(OutOfBlocksError, match="the prompt needs 4 blocks, 3 are free"):
        forest.plant(13)
    assert forest.pool.num_free == 3
    forest.plant(12)
    assert forest.pool.num_free == 0
    forest.check()


@pytest.mark.parametrize("num_tokens", [4, 3], ids=["new block", "copy"])
def test_an_append_without_a_free_block_changes_nothing(num_tokens: int):
    """A branch that counted a slot it never got would read another's memory afterwards."""
    forest = Forest(num_blocks=1, block_size=4)
    branch = forest.plant(num_tokens)
    sibling = forest.fork(branch)
    with pytest.raises(OutOfBlocksError):
        forest.trees[0].append_slot(branch)
    assert branch.num_slots == num_tokens
    assert forest.trees[0].num_cow_copies == 0
    forest.check()
    forest.free(sibling)
    forest.check()


def test_freed_children_do_not_take_the_trunk_along():
    """Two children of one parent dropped at once: the trunk is freed with its last holder, once (sglang fork.py)."""
    forest = Forest(num_blocks=8, block_size=2)
    trunk = forest.plant(4)
    children = [forest.fork(trunk), forest.fork(trunk)]
    forest.step(children)
    for child in children:
        forest.free(child)
        forest.check()
    assert trunk.block_table == [0, 1]
    forest.free(trunk)
    assert forest.pool.num_free == 8


def test_a_child_outlives_its_parent():
    forest = Forest(num_blocks=8, block_size=2)
    trunk = forest.plant(3)
    child = forest.fork(trunk)
    forest.free(trunk)
    forest.check()
    forest.step([child])
    assert child.block_table == [0, 1]  # the only holder left: in place
    forest.check()


def test_tokens_are_shared_like_blocks():
    tree = BranchTree(BlockPool(8, 4))
    first = tree.plant(3)
    tree.append_token(first, 10, -0.5, beam=0)
    second = tree.fork(first)
    tree.append_token(first, 11, -1.0, beam=0)
    tree.append_token(second, 12, -1.5, beam=0)
    assert tree.num_tokens == 3 + 3
    assert [token.token_id for token in first.tokens] == [10, 11]
    assert [token.token_id for token in second.tokens] == [10, 12]
    assert first.tokens[0] is second.tokens[0]
    kept = second.last_token
    tree.free(second)
    assert tree.num_tokens == 3 + 2
    # A finished sequence is read after its branch is gone.
    assert [token.token_id for token in links(kept)] == [10, 12]
    assert [token.length for token in links(kept)] == [1, 2]
    tree.free(first)
    assert (tree.num_tokens, tree.num_blocks) == (0, 0)


def test_events_tell_the_story_in_order():
    tree = BranchTree(BlockPool(8, 2))
    tree.events = []
    first = tree.plant(3)
    second = tree.fork(first)
    tree.append_slot(first)
    tree.append_slot(second)
    tree.append_slot(second)
    tree.free(second)
    assert tree.events == [
        Event("allocate", branch=0, block=0),
        Event("allocate", branch=0, block=1),
        Event("fork", branch=1, source=0),
        Event("cow", branch=0, block=2, source=1, tokens=1),
        Event("allocate", branch=1, block=3),
        Event("prune", branch=1),
        Event("free", block=3),
        Event("free", block=1),
    ]
