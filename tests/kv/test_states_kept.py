"""Snapshots of recurrent states that are evicted, slid past, held, forked and swapped, and broken ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pyvelo.errors import InternalError
from pyvelo.kv.checks import audit_prefixes
from pyvelo.kv.pool import Start
from pyvelo.kv.prefix import FULL, Prefix, Window
from pyvelo.kv.records import Copy, Event
from pyvelo.kv.states import StateManager

from .test_manager import BLOCK, hashes, started
from .test_manager_windows import grown, swapped_out
from .test_states import computed, hit, index_of, manager_of, saved

# ---- eviction ----


def test_a_snapshot_without_one_block_is_lost() -> None:
    events: list[Event] = []
    manager = manager_of(n_blocks=4, state_blocks=3, observer=events.append)
    blocks = saved(manager, range(BLOCK))
    before = len(events)
    started(manager, BLOCK, [5] * BLOCK)
    assert manager.counts.evictions == 1
    assert sorted(event.block for event in events[before:] if event.kind != "stored") == sorted(blocks)
    assert [event.kind for event in events[before:]].count("evicted") == 1
    assert index_of(manager).snapshot_of(blocks[0]) == ()
    assert (manager.n_cached, manager.n_free) == (1, 2), "its other blocks are allocated before cached ones"
    manager.audit()
    assert hit(manager, range(BLOCK)) == (0, ())


def test_a_lost_snapshot_drops_a_prefix_without_blocks() -> None:
    manager = manager_of(n_blocks=6, state_blocks=1, windows=(Window(1),), max_chunk=BLOCK)
    table = started(manager, 3 * BLOCK, range(3 * BLOCK))
    for n_tokens in (BLOCK, 2 * BLOCK):
        manager.advance(table, n_tokens)
    blocks = manager.take(table)
    manager.free(table)
    index = index_of(manager)
    for block in sorted(manager.published() - {*blocks}):
        manager._unpublish(block)
        manager.audit()
    assert hit(manager, range(2 * BLOCK)) == (2 * BLOCK, tuple(blocks)), "only the snapshot is read"
    assert index.unpublish(blocks[0])
    assert not index.unpublish(blocks[0])
    assert (index.by_hash, index._roots) == ({}, {})


def test_a_lost_block_invalidates_stored_matches() -> None:
    manager = manager_of()
    table, index = computed(manager, range(BLOCK)), index_of(manager)
    wanted = hashes(range(2 * BLOCK))
    assert index.match(wanted, 2 * BLOCK - 1).snapshot == ()
    blocks = manager.take(table)
    assert index.match(wanted, 2 * BLOCK - 1).snapshot == tuple(blocks)
    manager.discard(blocks)
    assert index.match(wanted, 2 * BLOCK - 1).snapshot == ()


def test_places_are_evicted_from_the_last_one_with_their_blocks() -> None:
    manager = manager_of(n_blocks=9, state_blocks=2)
    table = started(manager, 3 * BLOCK, range(3 * BLOCK))
    snapshots = []
    for n_tokens in (BLOCK, 2 * BLOCK, 3 * BLOCK):
        manager.advance(table, n_tokens)
        snapshots.append(manager.take(table))
    blocks = list(table.blocks)
    manager.free(table)
    order = list(manager._pool.free_blocks())
    assert order[2::3] == blocks[::-1]
    assert [sorted(order[at : at + 2]) for at in (0, 3, 6)] == [sorted(s) for s in snapshots[::-1]]
    manager.audit()


def test_a_freed_snapshot_of_a_shared_prefix_stays_longest() -> None:
    manager = manager_of(n_blocks=8, state_blocks=1)
    blocks = saved(manager, range(BLOCK))
    later = saved(manager, [5] * BLOCK)
    table = started(manager, 2 * BLOCK, range(2 * BLOCK))
    manager.loaded(table)
    first = table.blocks[0]
    manager.free(table)
    assert list(manager._pool.free_blocks())[-2:] == [*blocks, first]
    assert later[0] in list(manager._pool.free_blocks())[:-2]


def test_only_a_live_table_is_freed() -> None:
    manager = manager_of()
    table = computed(manager, range(BLOCK))
    manager.hold(table)
    manager.free(table)
    assert (manager.n_used, table.snapshot) == (0, ())
    with pytest.raises(InternalError, match="not a live one"):
        manager.free(table)
    manager.audit()


# ---- windows ----


def test_a_hit_at_the_last_place_survives_sliding() -> None:
    """The blocks that it needs are evicted after all others that a window has left."""
    windows = (FULL, Window(BLOCK + 2))
    manager = manager_of(24, 1, windows, max_chunk=BLOCK)
    table = started(manager, 2 * BLOCK + 3, range(2 * BLOCK + 3))
    for n_tokens in (BLOCK, 2 * BLOCK):
        manager.advance(table, n_tokens)
    blocks = manager.take(table)
    needed = table.groups[1][:2]
    manager.advance(table, 2 * BLOCK + 3)
    for _ in range(4 * BLOCK):
        grown(manager, table, table.n_tokens + 1)
    assert not {*needed} & {*table.groups[1]}
    order = [block for block in manager._pool.free_blocks() if manager._pool.is_cached(block)]
    assert {*order[-3:]} == {*needed, *blocks}
    assert hit(manager, range(2 * BLOCK)) == (2 * BLOCK, tuple(blocks))


def test_hits_of_others_and_of_the_same_prompt_survive_sliding() -> None:
    manager = manager_of(24, 1, (FULL, Window(BLOCK)), max_chunk=BLOCK)
    table = started(manager, 5 * BLOCK, range(5 * BLOCK))
    table.branch = BLOCK
    blocks = list(table.groups[1])
    manager.advance(table, BLOCK)
    snapshot = manager.take(table)
    for n_tokens in (2 * BLOCK, 3 * BLOCK, 4 * BLOCK, 5 * BLOCK):
        manager.advance(table, n_tokens)
    order = [block for block in manager._pool.free_blocks() if manager._pool.is_cached(block)]
    assert order == [blocks[2], blocks[1], *snapshot, blocks[0], blocks[3]]
    assert hit(manager, range(BLOCK)) == (BLOCK, tuple(snapshot))


@pytest.mark.parametrize(("size", "needed"), [(1, []), (2, [1]), (9, [1]), (10, [0, 1])])
@pytest.mark.parametrize(("n_prompt", "known"), [(17, 0), (24, 0), (100, 16), (100, 23)])
def test_a_place_needs_the_blocks_that_its_next_token_reads(
    size: int, needed: list[int], n_prompt: int, known: int
) -> None:
    """The place is after two blocks: the last one of the prompt, or of a prefix that others have."""
    manager = manager_of(windows=(FULL, Window(size)))
    table = computed(manager, range(3))
    table.mark, table.branch = n_prompt, known
    assert [number for number in range(4) if manager._is_needed(table, 1, number)] == needed


def test_a_snapshot_behind_a_window_that_lacks_a_block_is_no_hit() -> None:
    manager = manager_of(24, 1, (FULL, Window(2 * BLOCK)))
    table = started(manager, 3 * BLOCK, range(3 * BLOCK))
    manager.advance(table, BLOCK)
    first = manager.take(table)
    lost = table.groups[1][1]
    manager.advance(table, 3 * BLOCK)
    second = manager.take(table)
    assert hit(manager, range(3 * BLOCK)) == (3 * BLOCK, tuple(second))
    manager._unpublish(lost)
    assert hit(manager, range(3 * BLOCK)) == (BLOCK, tuple(first))


# ---- held states, forks and swaps ----


def test_a_fork_holds_the_same_state() -> None:
    manager = manager_of()
    table = computed(manager, range(BLOCK + 3))
    blocks, version = manager.hold(table), manager._version
    twin = manager.fork(table, hashes(range(BLOCK + 3)))
    assert twin.snapshot == table.snapshot == tuple(blocks)
    assert manager._version > version
    manager.audit()
    manager.free(table)
    assert not {*blocks} & manager.unused_blocks()
    manager.loaded(twin)
    assert {*blocks} <= manager.unused_blocks()
    manager.audit()


def test_holding_a_state_invalidates_plans() -> None:
    manager = manager_of()
    table = computed(manager, range(3))
    plan = manager.plan()
    assert len(manager.hold(table)) == 2
    with pytest.raises(InternalError, match="changed after this plan"):
        manager.commit(plan)


def test_loading_a_state_invalidates_plans_too() -> None:
    manager = manager_of()
    table, other = computed(manager, range(3)), computed(manager, range(5))
    manager.hold(table)
    plan = manager.plan()
    manager.hold(other)
    manager.loaded(table)
    with pytest.raises(InternalError, match="changed after this plan"):
        manager.commit(plan)


def test_an_idle_sequence_is_swapped_with_its_state() -> None:
    manager = manager_of(n_swap_blocks=4)
    table = computed(manager, range(BLOCK + 3))
    state, blocks = manager.hold(table), list(table.blocks)
    plan = manager.plan()
    swapped = plan.swap_out(table)
    assert swapped is not None
    assert (plan.available, plan.n_swap_free) == (12, 0)
    moves = manager.commit(plan)
    assert moves.outs == [Copy(*pair) for pair in zip(blocks + state, swapped.blocks, strict=True)]
    assert swapped.state == swapped.blocks[2:]
    assert (manager.n_used, manager.counts.swapped_out) == (0, 4)
    manager.audit()
    host = list(swapped.blocks)
    plan = manager.plan()
    outcome = plan.start(2 * BLOCK, None, 0, swapped)
    assert isinstance(outcome, Start)
    plan.grow(outcome.table, 2 * BLOCK)
    moves = manager.commit(plan)
    assert [move.source for move in moves.ins] == host[:2]
    assert (outcome.table.state, outcome.table.snapshot) == (host[2:], ())
    assert (manager.counts.swapped_in, manager.swap.n_free) == (2, 4)
    manager.audit()


def test_the_caller_saves_the_state_of_a_running_sequence() -> None:
    manager = manager_of(n_swap_blocks=3)
    table = computed(manager, range(3))
    blocks, plan = list(table.blocks), manager.plan()
    swapped = plan.swap_out(table)
    assert swapped is not None
    assert manager.commit(plan).outs == [Copy(blocks[0], swapped.blocks[0])]
    assert (len(swapped.state), manager.swap.n_free) == (2, 0)


def test_a_sequence_without_room_for_its_state_is_not_swapped() -> None:
    manager = manager_of(n_swap_blocks=2)
    table = computed(manager, range(3))
    plan = manager.plan()
    assert plan.swap_out(table) is None
    assert manager.commit(plan).outs == []


def test_a_swapped_sequence_has_no_hit() -> None:
    manager = manager_of(n_swap_blocks=8)
    table = computed(manager, range(2 * BLOCK))
    manager.take(table)
    swapped = swapped_out(manager, table)
    outcome = manager.plan().start(3 * BLOCK, hashes(range(3 * BLOCK)), 0, swapped)
    assert isinstance(outcome, Start)
    assert (outcome.table.n_tokens, outcome.table.blocks, outcome.table.snapshot) == (2 * BLOCK, [], ())


# ---- audits ----


def break_length(manager: StateManager, prefix: Prefix) -> None:
    block = prefix.snapshot[-1]
    prefix.snapshot = prefix.snapshot[:-1]
    index_of(manager)._by_block[block] = None
    manager._pool.uncache(block)


def break_twice(manager: StateManager, prefix: Prefix) -> None:
    prefix.snapshot = (prefix.snapshot[0], prefix.snapshot[0])


def break_group(manager: StateManager, prefix: Prefix) -> None:
    prefix.snapshot = (prefix.snapshot[0], prefix.blocks[0][0])


def break_places(manager: StateManager, prefix: Prefix) -> None:
    """A block of K and V in the place of another one, which nothing names any more."""
    index_of(manager)._by_block[prefix.snapshot[1]] = None
    prefix.snapshot = (prefix.snapshot[0], prefix.blocks[0][0])


def break_lost(manager: StateManager, prefix: Prefix) -> None:
    prefix.snapshot = ()


def break_other(manager: StateManager, prefix: Prefix) -> None:
    index_of(manager)._by_block[prefix.snapshot[1]] = None


BREAKS = [break_length, break_twice, break_group, break_places, break_lost, break_other]


@pytest.mark.parametrize("spoil", BREAKS)
def test_audit_sees_a_broken_snapshot(spoil: Callable[[StateManager, Prefix], None]) -> None:
    manager = manager_of()
    table = computed(manager, range(BLOCK))
    manager.take(table)
    assert table.prefix is not None
    manager.audit()
    spoil(manager, table.prefix)
    with pytest.raises(InternalError, match="prefix index"):
        audit_prefixes(index_of(manager))


def test_audit_allows_a_prefix_with_a_snapshot_alone() -> None:
    manager = manager_of(windows=(Window(1),))
    table = computed(manager, range(BLOCK))
    manager.take(table)
    (block,) = table.blocks
    manager.free(table)
    manager._unpublish(block)
    audit_prefixes(index_of(manager))
    manager.audit()


def test_a_start_with_another_snapshot_than_its_hit_is_refused() -> None:
    manager = manager_of()
    saved(manager, range(BLOCK))
    plan = manager.plan()
    outcome = plan.start(2 * BLOCK, hashes(range(2 * BLOCK)))
    assert isinstance(outcome, Start)
    plan.grow(outcome.table, 2 * BLOCK)
    outcome.table.snapshot = ()
    with pytest.raises(InternalError, match="must be a new one with the blocks of its prefix hit"):
        manager.commit(plan)
    manager.audit()
