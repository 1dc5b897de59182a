"""The pool against a naive model of it: a list of free blocks and a count for each."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyvelo.errors import InternalError, OutOfBlocks
from pyvelo.kv.pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Random holders allocate, share, cache and release blocks. The order of the free list is tested too."""

    @initialize(n_blocks=st.integers(1, 24))
    def start(self, n_blocks: int) -> None:
        self.pool = BlockPool(n_blocks)
        self.free = list(range(n_blocks))
        self.cached: set[int] = set()
        self.holders: list[list[int]] = []

    def add_free(self, block: int, evict_first: bool = False) -> None:
        last = sum(free not in self.cached for free in self.free) if evict_first else len(self.free)
        self.free.insert(last if block in self.cached else 0, block)

    @rule(n=st.integers(0, 10))
    def take(self, n: int) -> None:
        if n > len(self.free):
            with pytest.raises(OutOfBlocks, match=f"{n} blocks wanted, {len(self.free)} of"):
                self.pool.allocate(n)
            return
        blocks = self.pool.allocate(n)
        assert blocks == self.free[:n]
        del self.free[:n]
        self.holders.append(blocks)

    @rule(block=st.integers(0, 23))
    def share(self, block: int) -> None:
        block %= self.pool.n_blocks
        self.pool.share(block)
        if block in self.free:
            self.free.remove(block)
        self.holders.append([block])

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), evict_first=st.booleans())
    def release(self, data: st.DataObject, evict_first: bool) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        blocks = self.holders.pop(index)
        self.pool.release(blocks, evict_first)
        held = {block for holder in self.holders for block in holder}
        for block in reversed(blocks):
            if block not in held:
                self.add_free(block, evict_first)

    @rule(block=st.integers(0, 23))
    def cache(self, block: int) -> None:
        block %= self.pool.n_blocks
        if block in self.free:
            with pytest.raises(InternalError, match="is free"):
                self.pool.cache(block)
        else:
            self.pool.cache(block)
            self.cached.add(block)

    @rule(block=st.integers(0, 23))
    def uncache(self, block: int) -> None:
        block %= self.pool.n_blocks
        self.pool.uncache(block)
        if block in self.cached:
            self.cached.remove(block)
            if block in self.free:
                self.free.remove(block)
                self.add_free(block)

    @invariant()
    def agrees(self) -> None:
        assert list(self.pool.free_blocks()) == self.free
        assert self.pool.n_free == len(self.free)
        assert self.pool.n_cached == len(self.cached.intersection(self.free))
        assert {block for block in range(self.pool.n_blocks) if self.pool.is_cached(block)} == self.cached
        held = [block for holder in self.holders for block in holder]
        assert all(self.pool.references(block) == held.count(block) for block in range(self.pool.n_blocks))
        self.pool.audit(held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_tail_of_a_cached_sequence_is_evicted_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    for block in range(4):
        pool.cache(block)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(4) == [3, 2, 1, 0]


def test_blocks_that_a_window_has_left_are_evicted_before_other_cached_blocks() -> None:
    pool = BlockPool(6)
    for block in pool.allocate(6)[:5]:
        pool.cache(block)
    pool.release([0, 1])
    pool.release([2, 3], evict_first=True)
    pool.release([4], evict_first=True)
    pool.release([5], evict_first=True)
    assert pool.n_cached == 5
    assert pool.allocate(6) == [5, 4, 2, 3, 1, 0], "block 5 is not cached"


def test_blocks_that_are_not_cached_are_allocated_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.cache(first[0])
    pool.release(first)
    pool.release(second)
    assert pool.allocate(4)[-1] == first[0]


def test_a_free_block_in_the_middle_can_be_shared() -> None:
    pool = BlockPool(5)
    pool.share(2)
    assert list(pool.free_blocks()) == [0, 1, 3, 4]
    assert pool.allocate(4) == [0, 1, 3, 4]
    pool.audit([0, 1, 2, 3, 4])


def test_a_failed_allocation_changes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(OutOfBlocks, match="4 blocks wanted, 3 of 3 are free"):
        pool.allocate(4)
    assert list(pool.free_blocks()) == [0, 1, 2]


def test_releasing_a_free_block_raises() -> None:
    pool = BlockPool(2)
    with pytest.raises(InternalError, match="released more often"):
        pool.release([1])


def test_audit_sees_a_lost_reference() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(InternalError, match="block 1: 1 references counted, 0 held"):
        pool.audit([0])


def test_audit_sees_a_held_block_in_the_free_list() -> None:
    pool = BlockPool(3)
    pool._references[1] = 1
    with pytest.raises(InternalError, match="free list: block 1 has 1 references"):
        pool.audit([1])


def test_audit_sees_a_broken_link() -> None:
    pool = BlockPool(4)
    pool._previous[2] = 0
    with pytest.raises(InternalError, match="block 2 does not point back to 1"):
        pool.audit([])


def test_audit_sees_a_cached_block_too_early() -> None:
    pool = BlockPool(3)
    pool._cached[0] = 1
    with pytest.raises(InternalError, match="block 0 is on the wrong side of the cached blocks"):
        pool.audit([])


def test_audit_sees_a_wrong_count_of_cached_blocks() -> None:
    pool = BlockPool(3)
    pool.n_cached = 1
    with pytest.raises(InternalError, match="0 cached blocks listed, 1 counted"):
        pool.audit([])


def test_audit_sees_a_block_missing_in_the_list() -> None:
    pool = BlockPool(4)
    pool._next[1], pool._previous[3] = 3, 1
    with pytest.raises(InternalError, match="3 blocks listed, 4 counted"):
        pool.audit([])


def test_audit_sees_a_wrong_end_of_the_list() -> None:
    pool = BlockPool(3)
    pool.cache(pool.allocate(3)[2])
    pool.release([0, 1, 2])
    pool._previous[3] = 1
    with pytest.raises(InternalError, match="its end is not block 2"):
        pool.audit([])
