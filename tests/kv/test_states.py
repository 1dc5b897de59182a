"""Snapshots of recurrent states: where they are taken, what a hit needs, and when they are replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pyvelo.kv.pool import BlockTable, NotNow, Start
from pyvelo.kv.prefix import FULL, Window
from pyvelo.kv.records import Event
from pyvelo.kv.states import SNAPSHOT_TOKENS, SnapshotIndex, StateManager, last_place, tokens_to_snapshot

from .test_manager import BLOCK, hashes, started


def manager_of(
    n_blocks: int = 12,
    state_blocks: int = 2,
    windows: tuple[Window, ...] = (FULL,),
    *,
    max_chunk: int = 1 << 31,
    share: bool = True,
    n_swap_blocks: int = 0,
    observer: Callable[[Event], None] | None = None,
) -> StateManager:
    return StateManager(
        n_blocks,
        BLOCK,
        windows=windows,
        max_chunk=max_chunk,
        state_blocks=state_blocks,
        share=share,
        n_swap_blocks=n_swap_blocks,
        observer=observer,
    )


def computed(manager: StateManager, tokens: Sequence[int]) -> BlockTable:
    """Start a sequence and compute its tokens."""
    table = started(manager, len(tokens), tokens)
    manager.advance(table, len(tokens))
    return table


def saved(manager: StateManager, tokens: Sequence[int]) -> list[int]:
    """Compute a sequence, take a snapshot after its last token, and free it. Return the snapshot's blocks."""
    table = computed(manager, tokens)
    blocks = manager.take(table)
    manager.free(table)
    manager.audit()
    return blocks


def hit(manager: StateManager, tokens: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return the tokens and the snapshot of the hit of a sequence that goes on after `tokens`."""
    outcome = manager.plan().start(len(tokens) + 1, hashes([*tokens, 99]))
    assert isinstance(outcome, Start)
    return outcome.table.n_cached, outcome.table.snapshot


def index_of(manager: StateManager) -> SnapshotIndex:
    assert manager._snapshots is not None
    return manager._snapshots


# ---- places ----


@pytest.mark.parametrize(("n_tokens", "place"), [(1, 0), (8, 0), (9, 8), (16, 8), (17, 16)])
def test_the_last_place_of_a_prompt_leaves_a_token(n_tokens: int, place: int) -> None:
    assert last_place(n_tokens, BLOCK) == place


@pytest.mark.parametrize(
    ("n_there", "n_tokens", "known", "wanted"),
    [
        (0, 5, 0, 5),  # no place: all tokens
        (0, 8, 0, 8),
        (0, 20, 0, 16),  # the last place
        (16, 20, 0, 4),  # after it
        (20, 21, 0, 1),
        (0, 100, 24, 24),  # a prefix that others have
        (24, 100, 24, 72),  # at it
        (30, 100, 24, 66),  # after it
        (0, 100, 200, 96),  # beyond the prompt
        (0, 2000, 0, SNAPSHOT_TOKENS),
        (5, 2000, 0, SNAPSHOT_TOKENS - 5),
        (SNAPSHOT_TOKENS - 1, 2000, 0, 1),
        (SNAPSHOT_TOKENS, 2000, 0, SNAPSHOT_TOKENS),
        (SNAPSHOT_TOKENS, 2000, SNAPSHOT_TOKENS + 8, 8),
        (3 * SNAPSHOT_TOKENS, 2000, 0, 2000 - 8 - 3 * SNAPSHOT_TOKENS),
        (0, SNAPSHOT_TOKENS, 0, SNAPSHOT_TOKENS - 8),
        (0, SNAPSHOT_TOKENS + 1, 0, SNAPSHOT_TOKENS),
    ],
)
def test_tokens_to_the_next_place(n_there: int, n_tokens: int, known: int, wanted: int) -> None:
    table = BlockTable([[]], 0, None)
    assert (table.mark, table.branch) == (0, 0)
    table.branch = known
    assert tokens_to_snapshot(table, n_there, n_tokens, BLOCK) == wanted


def test_places_are_ends_of_blocks_of_every_size() -> None:
    assert all(SNAPSHOT_TOKENS % size == 0 for size in (32, 64, 128, 256))


# ---- hits ----


def test_a_prefix_is_a_hit_up_to_its_last_snapshot() -> None:
    manager = manager_of()
    table = started(manager, 4 * BLOCK, range(4 * BLOCK))
    manager.advance(table, 2 * BLOCK)
    blocks = manager.take(table)
    assert len(set(blocks)) == 2
    manager.advance(table, 4 * BLOCK)
    assert hit(manager, range(4 * BLOCK)) == (2 * BLOCK, tuple(blocks))
    assert hit(manager, range(2 * BLOCK)) == (2 * BLOCK, tuple(blocks))
    assert hit(manager, range(2 * BLOCK - 1)) == (0, ())
    assert hit(manager, [*range(2 * BLOCK + 5), 7]) == (2 * BLOCK, tuple(blocks)), "no partial hit"
    later = manager.take(table)
    assert hit(manager, range(4 * BLOCK)) == (4 * BLOCK, tuple(later))


def test_a_starting_table_knows_the_prefix_that_others_have() -> None:
    manager = manager_of()
    blocks = saved(manager, range(BLOCK))
    computed(manager, range(3 * BLOCK))
    table = started(manager, 4 * BLOCK, range(4 * BLOCK))
    assert (table.n_cached, table.branch, table.mark) == (BLOCK, 3 * BLOCK, 4 * BLOCK)
    assert table.held == [*table.blocks, *blocks]


def test_the_snapshot_of_a_hit_is_held_until_it_is_loaded() -> None:
    manager = manager_of(n_blocks=6, state_blocks=2)
    blocks = saved(manager, range(BLOCK))
    table = started(manager, 2 * BLOCK, range(BLOCK + 1))
    assert (manager.n_used, manager.n_stored) == (4, BLOCK), "a state has no tokens"
    assert manager.plan().start(3 * BLOCK) == NotNow(3, 2)
    version = manager._version
    manager.loaded(table)
    assert (table.snapshot, manager.n_used, manager.n_cached) == ((), 2, 2)
    assert manager._version > version, "a plan that was made before is invalid"
    assert index_of(manager).snapshot_of(blocks[1]) == tuple(blocks)
    started(manager, 3 * BLOCK, [6] * 3 * BLOCK)
    assert [index_of(manager).snapshot_of(block) for block in blocks] == [(), ()]
    manager.audit()


def test_a_hit_that_does_not_fit_is_computed() -> None:
    """The snapshot needs two blocks beside the blocks of all tokens."""
    manager = manager_of(n_blocks=4, state_blocks=2)
    saved(manager, range(2 * BLOCK))
    table = started(manager, 3 * BLOCK, range(3 * BLOCK))
    assert (table.n_cached, table.snapshot, table.branch) == (0, (), 0)
    assert (table.prefix, table.n_blocks, table.reserved) == (None, 3, 0)
    manager.audit()


def test_a_hit_that_just_fits_is_taken() -> None:
    manager = manager_of(n_blocks=5, state_blocks=2)
    blocks = saved(manager, range(2 * BLOCK))
    table = started(manager, 3 * BLOCK, range(3 * BLOCK))
    assert (table.n_cached, table.snapshot) == (2 * BLOCK, tuple(blocks))
    manager.audit()


def test_without_room_the_fewest_missing_blocks_are_named() -> None:
    """A running sequence holds the blocks of the hit, so the hit needs fewer than all tokens do."""
    manager = manager_of(n_blocks=8, state_blocks=1)
    table = computed(manager, range(4 * BLOCK))
    manager.take(table)
    started(manager, 3 * BLOCK)  # one block is left, which has the snapshot
    assert manager.plan().start(5 * BLOCK, hashes(range(5 * BLOCK))) == NotNow(2, 1)
    manager.reset()
    assert manager.plan().start(5 * BLOCK, hashes(range(5 * BLOCK))) == NotNow(5, 1)


def test_the_blocks_of_a_snapshot_have_no_duplicates() -> None:
    manager = manager_of()
    table = computed(manager, range(BLOCK))
    blocks = manager.take(table)
    twin = computed(manager, range(BLOCK))  # computes the same tokens again: its last one is no hit
    index = index_of(manager)
    assert len(index.blocks_like(table.blocks[0])) == 2
    assert [index.blocks_like(block) for block in blocks] == [(), ()]
    assert index.snapshot_of(table.blocks[0]) == ()
    assert index.snapshot_of(blocks[1]) == tuple(blocks)
    assert index.snapshot_of(twin.blocks[-1]) == ()
    assert manager.published() == {*table.blocks, *twin.blocks, *blocks}


def test_without_sharing_there_are_no_snapshots() -> None:
    manager = manager_of(share=False)
    assert not manager.takes_snapshots
    assert manager_of().takes_snapshots
    table = computed(manager, range(BLOCK))
    assert manager.take(table) == []
    blocks = manager.hold(table)
    assert len(blocks) == 2
    manager.loaded(table)
    manager.free(table)
    assert manager.n_free == 12
    manager.audit()


# ---- take ----


def test_a_snapshot_is_cached_and_not_held() -> None:
    events: list[Event] = []
    manager = manager_of(observer=events.append)
    table = computed(manager, range(BLOCK))
    before, version = len(events), manager._version
    blocks = manager.take(table)
    assert (manager.n_used, manager.n_cached) == (1, 2)
    assert events[before:] == [Event("stored", block) for block in blocks]
    assert manager._version > version
    assert manager.take(table) == [], "its prefix has one"


def test_a_sequence_within_a_block_has_no_snapshot() -> None:
    manager = manager_of()
    table = started(manager, 3 * BLOCK, range(2 * BLOCK))
    assert manager.take(table) == [], "nothing is published"
    for n_tokens in (BLOCK - 1, BLOCK + 1):
        manager.advance(table, n_tokens)
        assert manager.take(table) == []
    manager.advance(table, BLOCK)  # computed again
    assert len(manager.take(table)) == 2


def test_an_unlisted_prefix_has_no_snapshot() -> None:
    manager = manager_of()
    table = computed(manager, range(BLOCK))
    manager.reset()
    assert manager.take(table) == []
    manager.advance(table, BLOCK)
    assert manager.take(table) == []
    manager.audit()


def test_a_snapshot_needs_blocks_that_are_free_and_not_reserved() -> None:
    manager = manager_of(n_blocks=4, state_blocks=2)
    table = computed(manager, range(BLOCK))
    other = started(manager, 2 * BLOCK)
    version = manager._version
    assert (manager.take(table), manager.hold(table)) == ([], [])
    assert manager._version == version
    manager.free(other)
    started(manager, BLOCK)
    assert len(manager.take(table)) == 2, "exactly two are left"
    manager.audit()


def test_a_spare_snapshot_evicts_nothing() -> None:
    manager = manager_of(n_blocks=4, state_blocks=2)
    manager.free(computed(manager, range(2 * BLOCK)))
    table = computed(manager, [5] * BLOCK)
    assert manager.take(table, spare=True) == []
    assert hit(manager, range(2 * BLOCK)) == (0, ())
    assert manager.n_cached == 2
    assert len(manager.take(table)) == 2
    assert manager.counts.evictions == 1


def test_a_spare_snapshot_takes_the_last_unused_blocks() -> None:
    manager = manager_of(n_blocks=5, state_blocks=2)
    manager.free(computed(manager, range(2 * BLOCK)))
    table = computed(manager, [5] * BLOCK)
    assert len(manager.take(table, spare=True)) == 2
    assert manager.counts.evictions == 0


def test_a_rolling_snapshot_replaces_the_last_one() -> None:
    events: list[Event] = []
    manager = manager_of(observer=events.append)
    table = started(manager, 4 * BLOCK, range(4 * BLOCK))
    manager.advance(table, BLOCK)
    first = manager.take(table)
    manager.advance(table, 2 * BLOCK)
    second = manager.take(table, rolling=True)
    manager.advance(table, 3 * BLOCK)
    before = len(events)
    third = manager.take(table, rolling=True)
    assert sorted(event.block for event in events[before:] if event.kind == "reset") == sorted(second)
    assert hit(manager, range(2 * BLOCK)) == (BLOCK, tuple(first))
    assert hit(manager, range(3 * BLOCK)) == (3 * BLOCK, tuple(third))
    manager.audit()


def test_a_rolling_snapshot_that_was_lost_is_not_replaced() -> None:
    manager = manager_of()
    table = started(manager, 2 * BLOCK, range(2 * BLOCK))
    manager.advance(table, BLOCK)
    manager.discard(manager.take(table, rolling=True))
    manager.advance(table, 2 * BLOCK)
    assert len(manager.take(table, rolling=True)) == 2
    assert manager.n_cached == 2
    manager.audit()


def test_a_rolling_snapshot_that_another_sequence_loads_stays_until_then() -> None:
    manager = manager_of()
    table = started(manager, 2 * BLOCK, range(2 * BLOCK))
    manager.advance(table, BLOCK)
    blocks = manager.take(table, rolling=True)
    other = started(manager, 2 * BLOCK, range(BLOCK + 1))
    assert other.snapshot == tuple(blocks)
    manager.advance(table, 2 * BLOCK)
    assert not {*manager.take(table, rolling=True)} & {*blocks}
    assert not manager.published() & {*blocks}
    manager.audit()
    manager.loaded(other)
    assert {*blocks} <= manager.unused_blocks()
    manager.audit()


def test_a_snapshot_that_was_not_saved_is_no_hit() -> None:
    events: list[Event] = []
    manager = manager_of(observer=events.append)
    table = computed(manager, range(BLOCK))
    blocks, version = manager.take(table), manager._version
    before = len(events)
    manager.discard(blocks)
    assert sorted(events[before:]) == sorted(Event("reset", block) for block in blocks)
    assert manager._version > version
    assert (hit(manager, range(BLOCK)), manager.n_cached) == ((0, ()), 0)
    manager.audit()
    assert len(manager.take(table)) == 2


def test_taking_a_snapshot_may_evict_its_own_prefix() -> None:
    """The table of a hit holds no block of its prefix if only the next token reads them."""
    manager = manager_of(n_blocks=3, state_blocks=1, windows=(Window(1),), max_chunk=BLOCK)
    first = computed(manager, range(BLOCK))
    blocks = manager.take(first)
    table = started(manager, BLOCK + 1, range(BLOCK + 1))
    assert (table.snapshot, table.firsts, len(table.blocks)) == (tuple(blocks), [1], 1)
    manager.loaded(table)
    manager.discard(blocks)
    manager.free(first)
    started(manager, 1, [7])
    assert (manager.n_free, manager.n_cached) == (0, 1), "only the block of the prefix is left"
    assert manager.take(table) == []
    assert (manager.n_free, manager.n_cached) == (1, 0)
    manager.audit()
