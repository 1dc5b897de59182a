"""Events of the block manager, its audit, and plans that it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyvelo.errors import InternalError
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.pool import NotNow, Start
from pyvelo.kv.records import Event

from .test_manager import BLOCK, ended, hashes, started

TOKENS = range(2 * BLOCK)


def told(manager: BlockManager, act: Callable[[], object]) -> list[Event]:
    """Return the events while `act` runs."""
    events: list[Event] = []
    before = manager.set_observer(events.append)
    act()
    assert manager.set_observer(before) is not None
    return events


def test_the_observer_gets_every_event_of_a_block() -> None:
    manager = BlockManager(6, BLOCK, n_swap_blocks=4)
    table = started(manager, 3 * BLOCK, [*TOKENS, 5])
    first, second, tail = table.blocks
    assert told(manager, lambda: manager.advance(table, 2 * BLOCK + 1)) == [
        Event("stored", first),
        Event("stored", second),
    ]
    twin = manager.fork(table, None)
    allocation = manager.plan()
    assert allocation.grow(twin, 2 * BLOCK + 2)
    assert told(manager, lambda: manager.commit(allocation)) == [Event("copied", tail)]
    manager.free(twin)
    assert told(manager, lambda: started(manager, 2 * BLOCK + 1, [*TOKENS, 9])) == [
        Event("hit", first),
        Event("hit", second),
    ]
    allocation = manager.plan()
    assert allocation.swap_out(table) is not None
    assert told(manager, lambda: manager.commit(allocation)) == [
        Event("swapped", b) for b in (first, second, tail)
    ]
    assert told(manager, manager.reset) == [Event("reset", first), Event("reset", second)]


def test_clearing_the_pool_resets_each_published_block() -> None:
    manager = BlockManager(6, BLOCK)
    table = started(manager, 3 * BLOCK, [*TOKENS, 5])
    manager.advance(table, 2 * BLOCK + 1)
    assert told(manager, manager.clear) == [Event("reset", block) for block in table.blocks[:2]]


def test_the_observer_gets_unpublished_duplicates() -> None:
    manager = BlockManager(6, BLOCK)
    first, second = started(manager, BLOCK, range(BLOCK)), started(manager, BLOCK, range(BLOCK))
    manager.advance(first, BLOCK)
    kept, other = first.blocks[0], second.blocks[0]
    assert told(manager, lambda: manager.advance(second, BLOCK)) == [Event("stored", other)]
    assert told(manager, lambda: manager.free(second)) == [Event("duplicate", other)]
    third = started(manager, 2 * BLOCK, [*range(BLOCK - 1), 99, 1])
    manager.free(first)
    fourth = manager.fork(third, hashes(range(BLOCK)))
    manager.advance(fourth, BLOCK - 1)
    allocation = manager.plan()
    assert allocation.grow(fourth, BLOCK)
    manager.commit(allocation)
    mine = fourth.blocks[0]
    assert told(manager, lambda: manager.advance(fourth, BLOCK)) == [
        Event("stored", mine),
        Event("duplicate", kept),
    ]
    manager.audit()


def test_the_eviction_event_comes_before_the_new_owner() -> None:
    manager = BlockManager(2, BLOCK)
    ended(manager, TOKENS)
    (event,) = told(manager, lambda: started(manager, BLOCK, [99] * BLOCK))
    assert event.kind == "evicted"
    assert event.block not in manager.published()


def test_a_hit_found_before_a_clear_is_none_after_it() -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, range(BLOCK))
    waiting = hashes([*range(BLOCK), 5])
    outcome = manager.plan().start(BLOCK + 1, waiting)
    assert isinstance(outcome, Start)
    assert len(outcome.table.blocks) == 1
    manager.clear()
    ended(manager, [9] * BLOCK)
    outcome = manager.plan().start(BLOCK + 1, waiting)
    assert isinstance(outcome, Start)
    assert outcome.table.blocks == []
    manager.audit()


def test_one_observer_at_a_time() -> None:
    one: list[Event] = []
    other: list[Event] = []
    manager = BlockManager(2, BLOCK, observer=one.append)
    assert manager.set_observer(other.append) == one.append
    assert manager.set_observer(one.append) == other.append
    ended(manager, TOKENS)
    assert len(one) == 2
    assert not other


def test_audit_looks_at_the_pool_the_index_and_host_memory() -> None:
    def lose_a_reference(manager: BlockManager) -> None:
        manager._pool.share(next(iter(manager.tables())).blocks[0])

    def lose_an_entry(manager: BlockManager) -> None:
        assert manager._index is not None
        manager._index.by_hash.clear()

    def lose_swapped_blocks(manager: BlockManager) -> None:
        manager._swapped.clear()

    for harm in (lose_a_reference, lose_an_entry, lose_swapped_blocks):
        manager = BlockManager(8, BLOCK, n_swap_blocks=4)
        gone = started(manager, BLOCK + 1, [7] * (BLOCK + 1))
        manager.advance(gone, BLOCK + 1)
        allocation = manager.plan()
        allocation.swap_out(gone)
        manager.commit(allocation)
        manager.advance(started(manager, 2 * BLOCK, TOKENS), 2 * BLOCK)
        manager.audit()
        harm(manager)
        with pytest.raises(InternalError):
            manager.audit()


def test_a_plan_that_reserves_too_much_is_refused() -> None:
    manager = BlockManager(2, BLOCK)
    allocation = manager.plan()
    allocation.available += 1
    assert isinstance(allocation.start(BLOCK), Start)
    assert isinstance(allocation.start(2 * BLOCK), Start)
    with pytest.raises(InternalError, match="allocates 0 blocks and reserves 3, but 2 are free"):
        manager.commit(allocation)
    assert (manager.n_reserved, list(manager.tables())) == (0, [])


def test_two_starts_with_the_same_cached_hits_need_them_once() -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, TOKENS)
    allocation = manager.plan()
    for _ in range(2):  # a hit of two blocks, and one more each
        assert isinstance(allocation.start(3 * BLOCK, hashes([*TOKENS, 1])), Start)
    assert allocation.start(BLOCK) == NotNow(1, 0)
    manager.commit(allocation)
    assert (manager.n_used, manager.n_reserved) == (2, 2)


def test_a_swapped_in_sequence_takes_no_longer_hit() -> None:
    """Another sequence has computed more of the same text meanwhile."""
    manager = BlockManager(8, BLOCK, n_swap_blocks=4)
    text = [*TOKENS, 1, 2]
    table = started(manager, 3 * BLOCK, text)
    manager.advance(table, BLOCK + 2)
    allocation = manager.plan()
    swapped = allocation.swap_out(table)
    assert swapped is not None
    manager.commit(allocation)
    ended(manager, text)
    allocation = manager.plan()
    outcome = allocation.start(3 * BLOCK, hashes(text), 0, swapped)
    assert isinstance(outcome, Start)
    assert len(outcome.table.blocks) == 1
    assert outcome.table.n_cached == BLOCK + 2
    allocation.grow(outcome.table, len(text))
    moves = manager.commit(allocation)
    assert [move.target for move in moves.ins] == outcome.table.blocks[1:2]
    manager.audit()


def test_a_resumed_table_never_needs_less_than_zero_blocks() -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, 3 * BLOCK, range(BLOCK))
    allocation = manager.plan()
    assert isinstance(allocation.resume(table, BLOCK), Start)
    assert allocation.available == 4 - 3
    manager.commit(allocation)
    assert manager.n_reserved == 2


def test_without_hashes_nothing_is_published() -> None:
    manager = BlockManager(8, BLOCK)
    table = started(manager, 2 * BLOCK)
    allocation = manager.plan()
    assert allocation.grow(table, 2 * BLOCK)
    manager.commit(allocation)
    manager.advance(table, 2 * BLOCK)
    assert (table.n_tokens, manager.published()) == (2 * BLOCK, set())


def test_freeing_blocks_makes_a_plan_stale() -> None:
    manager = BlockManager(8, BLOCK, n_swap_blocks=2)
    table, other = started(manager, BLOCK, range(3)), started(manager, BLOCK, range(3, 6))
    manager.advance(other, 3)
    allocation = manager.plan()
    swapped = allocation.swap_out(other)
    assert swapped is not None
    manager.commit(allocation)
    for change in (lambda: manager.free(table), lambda: manager.free_swapped(swapped)):
        allocation = manager.plan()
        change()
        with pytest.raises(InternalError, match="changed after this plan was made"):
            manager.commit(allocation)
    assert table.blocks == []
