"""The manager: who holds which blocks, what is reserved, shared, copied and moved, and what a plan may be."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import pytest

from pyvelo.errors import InternalError
from pyvelo.kv.manager import BlockManager, Moves
from pyvelo.kv.plan import NotNow, Start
from pyvelo.kv.pool import BlockTable, SwappedBlocks
from pyvelo.kv.prefix import BlockHashes

BLOCK = 8


def hashes(tokens: Sequence[int], salt: bytes = b"") -> BlockHashes:
    return BlockHashes(array("i", tokens), BLOCK, salt)


def started(manager: BlockManager, max_tokens: int, tokens: Sequence[int] = ()) -> BlockTable:
    """A sequence that has room for its tokens; not computed yet."""
    allocation = manager.plan()
    outcome = allocation.start(max_tokens, hashes(tokens) if tokens else None)
    assert isinstance(outcome, Start)
    allocation.grow(outcome.table, len(tokens))
    manager.commit(allocation)
    return outcome.table


def ended(manager: BlockManager, tokens: Sequence[int]) -> None:
    """A sequence that came, was computed, and went."""
    table = started(manager, len(tokens), tokens)
    manager.advance(table, len(tokens))
    manager.free(table)


def test_reserved_blocks_are_not_used_but_unavailable() -> None:
    manager = BlockManager(4, BLOCK)
    started(manager, 3 * BLOCK)
    assert (manager.n_used, manager.n_free, manager.n_reserved) == (0, 4, 3)
    assert manager.plan().start(2 * BLOCK) == NotNow(2, 1)


def test_an_ended_sequence_frees_its_reserved_blocks() -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, 4 * BLOCK)
    allocation = manager.plan()
    allocation.grow(table, BLOCK + 1)
    manager.commit(allocation)
    assert (manager.n_used, manager.n_reserved) == (2, 2)
    manager.free(table)
    assert (manager.n_used, manager.n_reserved) == (0, 0)
    assert isinstance(manager.plan().start(4 * BLOCK), Start)


def test_a_prefix_outlives_its_suffixes() -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, range(4 * BLOCK))
    manager.free(started(manager, BLOCK, [99] * BLOCK))  # took the last block of what is cached
    assert started(manager, 4 * BLOCK - 1, range(4 * BLOCK - 1)).n_cached == 3 * BLOCK
    assert manager.counts.evictions == 1


def test_the_whole_prompt_is_there_but_its_last_token_is_computed() -> None:
    manager = BlockManager(8, BLOCK)
    ended(manager, range(2 * BLOCK))
    table = started(manager, 3 * BLOCK, range(2 * BLOCK))
    assert table.n_cached == 2 * BLOCK - 1
    assert manager.counts.copies == 1, "a published block is never written"


def test_live_sequences_share_and_the_block_goes_with_the_last() -> None:
    manager = BlockManager(8, BLOCK)
    first = started(manager, 3 * BLOCK, range(2 * BLOCK + 1))
    manager.advance(first, 2 * BLOCK + 1)
    second = started(manager, 3 * BLOCK, range(2 * BLOCK + 1))
    assert second.blocks[:2] == first.blocks[:2]
    assert manager.n_used == 4
    manager.free(first)
    assert (manager.n_used, manager.n_cached) == (3, 0)
    manager.free(second)
    assert (manager.n_used, manager.n_cached) == (0, 2)


def test_a_copy_that_leaves_no_room_is_computed_instead() -> None:
    """The only free block is the one to copy from."""
    manager = BlockManager(2, BLOCK)
    ended(manager, range(BLOCK))
    held = started(manager, BLOCK)
    allocation = manager.plan()
    outcome = allocation.start(BLOCK, hashes([*range(BLOCK - 1), 99]))
    assert isinstance(outcome, Start)
    assert outcome.table.n_cached == 0
    allocation.grow(outcome.table, BLOCK)
    allocation.grow(held, BLOCK)
    assert manager.commit(allocation) == Moves([], [], [])
    assert manager.counts.evictions == 1


def test_forgotten_prefixes_are_computed_again() -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, range(2 * BLOCK))
    manager.reset()
    assert (manager.n_cached, manager.n_free) == (0, 4)
    assert started(manager, 2 * BLOCK, range(2 * BLOCK)).n_cached == 0


def test_beyond_its_reserved_blocks_a_sequence_grows_while_there_are_blocks() -> None:
    manager = BlockManager(4, BLOCK)
    table, other = started(manager, BLOCK), started(manager, BLOCK)
    assert not manager.plan().grow(table, 3 * BLOCK + 1), "one is reserved for the other"
    allocation = manager.plan()
    assert allocation.grow(table, 3 * BLOCK)
    assert not allocation.grow(other, BLOCK + 1)
    manager.commit(allocation)
    assert (manager.n_used, manager.n_reserved) == (3, 1)


def test_a_dropped_sequence_makes_room_in_the_same_draft() -> None:
    manager = BlockManager(4, BLOCK)
    first, second = started(manager, 2 * BLOCK, range(2 * BLOCK)), started(manager, 2 * BLOCK, range(9, 20))
    allocation = manager.plan()
    assert not allocation.grow(first, 4 * BLOCK)
    allocation.free(second)
    assert allocation.grow(first, 4 * BLOCK)
    manager.commit(allocation)
    assert (manager.n_used, manager.n_reserved) == (4, 0)
    manager.audit()


def test_what_several_hold_is_free_once_all_of_them_are_dropped() -> None:
    manager = BlockManager(8, BLOCK)
    table = started(manager, 3 * BLOCK, range(2 * BLOCK))
    manager.advance(table, 2 * BLOCK)
    fork, other = manager.fork(table, None), started(manager, 2 * BLOCK)

    def gained(*tables: BlockTable) -> int:
        allocation = manager.plan()
        for dropped in tables:
            allocation.free(dropped)
        return allocation.available - manager.plan().available

    assert [gained(table), gained(fork), gained(other), gained(table, fork)] == [1, 0, 2, 3]


def test_a_table_takes_part_in_a_draft_or_is_dropped_in_it() -> None:
    manager = BlockManager(8, BLOCK, n_swap_blocks=2)
    table, other = started(manager, BLOCK, [1]), started(manager, 2 * BLOCK, [2])
    manager.advance(table, 1)
    allocation = manager.plan()
    assert allocation.grow(table, 2 * BLOCK)
    for leave in (allocation.free, allocation.swap_out):
        with pytest.raises(InternalError, match="takes part in an allocation cannot be dropped"):
            leave(table)
    allocation.free(other)
    for again in (
        allocation.free,
        lambda table: allocation.grow(table, 9),
        lambda table: allocation.resume(table, 9),
    ):
        with pytest.raises(InternalError, match="dropped"):
            again(other)
    manager.commit(allocation)
    assert (manager.n_used, manager.n_reserved, list(manager.tables())) == (2, 0, [table])
    assert manager.swap.n_free == 2
    manager.audit()


def test_blocks_that_a_start_adopts_are_no_room_when_their_holder_is_dropped() -> None:
    """In either order the allocation counts them once."""
    for first in ("start", "drop"):
        manager = BlockManager(8, BLOCK)
        holder = started(manager, 6 * BLOCK, range(4 * BLOCK))
        manager.advance(holder, 4 * BLOCK)
        allocation = manager.plan()
        if first == "drop":
            allocation.free(holder)
        outcome = allocation.start(5 * BLOCK, hashes(range(4 * BLOCK + 1)))
        assert isinstance(outcome, Start)
        if first == "start":
            before = allocation.available
            allocation.free(holder)
            assert allocation.available - before == 2, "what it had reserved"
        assert allocation.start(4 * BLOCK) == NotNow(4, 3)
        assert allocation.grow(outcome.table, 8 * BLOCK)
        manager.commit(allocation)
        assert (manager.n_used, manager.n_reserved, manager.n_free) == (8, 0, 0)
        manager.audit()


def test_a_block_to_copy_from_is_no_room_though_all_its_holders_leave_it() -> None:
    """One grows into a copy of it, the other is dropped: it is free once it was copied, and not before."""
    manager = BlockManager(3, BLOCK)
    table = started(manager, BLOCK, range(3))
    manager.advance(table, 3)
    twin, other = manager.fork(table, None), started(manager, BLOCK)
    allocation = manager.plan()
    assert allocation.grow(twin, 4)
    allocation.free(table)
    assert not allocation.grow(other, 2 * BLOCK), "it has a block reserved, and there is no other"
    assert allocation.grow(other, BLOCK)
    (copy,) = manager.commit(allocation).copies
    assert copy.source not in (*twin.blocks, *other.blocks)
    assert (manager.n_used, manager.n_free) == (2, 1)
    manager.audit()


def test_a_table_may_grow_by_a_copy_alone_though_it_has_blocks_to_spare() -> None:
    manager = BlockManager(8, BLOCK)
    table = started(manager, 3 * BLOCK, range(3 * BLOCK))
    manager.advance(table, 3)
    manager.fork(table, None)
    allocation = manager.plan()
    assert allocation.grow(table, 4)
    tail = table.blocks[1:]
    assert len(manager.commit(allocation).copies) == 1
    assert table.blocks[1:] == tail
    manager.audit()


def test_blocks_to_spare_are_left() -> None:
    manager = BlockManager(4, BLOCK)
    assert manager.plan().start(3 * BLOCK, None, 2) == NotNow(3, 2)
    assert isinstance(manager.plan().start(2 * BLOCK, None, 2), Start)


def test_what_is_revived_is_needed_too() -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, range(2 * BLOCK))
    started(manager, BLOCK)
    again = hashes(range(2 * BLOCK + 1))
    assert manager.plan().start(4 * BLOCK, again) == NotNow(4, 3)
    assert manager.plan().start(3 * BLOCK, again, spare=1) == NotNow(3, 2)
    assert isinstance(manager.plan().start(3 * BLOCK, again), Start)


@pytest.mark.parametrize(("spare", "n_cached"), [(2, BLOCK - 1), (3, 0)])
def test_a_block_to_copy_from_is_left_to_others(spare: int, n_cached: int) -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, range(BLOCK))
    outcome = manager.plan().start(BLOCK, hashes(range(BLOCK)), spare)
    assert isinstance(outcome, Start)
    assert outcome.table.n_cached == n_cached


def test_a_copied_block_must_be_grown_into() -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, range(BLOCK))
    allocation = manager.plan()
    allocation.start(BLOCK, hashes([*range(BLOCK - 1), 99]))
    with pytest.raises(InternalError, match="must grow into it"):
        manager.commit(allocation)
    assert (manager.n_used, manager.n_reserved) == (0, 0)
    manager.audit()


def test_a_stale_draft_is_refused_and_changes_nothing() -> None:
    manager = BlockManager(4, BLOCK)
    allocation = manager.plan()
    allocation.start(BLOCK)
    started(manager, BLOCK)
    with pytest.raises(InternalError, match="changed after this allocation"):
        manager.commit(allocation)
    assert manager.n_reserved == 1
    manager.audit()


CHANGES: dict[str, Callable[[BlockManager, BlockTable], object]] = {
    "commit": lambda manager, table: manager.commit(manager.plan()),
    "fork": lambda manager, table: manager.fork(table, None),
    "free a fork": lambda manager, table: manager.free(manager.fork(table, None)),
    "park": lambda manager, table: manager.park(table),
    "reset": lambda manager, table: manager.reset(),
    "advance": lambda manager, table: manager.advance(table, 3),
}


@pytest.mark.parametrize("first", CHANGES)
@pytest.mark.parametrize("second", [None, *CHANGES])
def test_whatever_changes_voids_a_draft(first: str, second: str | None) -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, 2 * BLOCK, range(BLOCK))
    allocation = manager.plan()
    for change in (first, second):
        if change is not None:
            CHANGES[change](manager, table)
    with pytest.raises(InternalError, match="changed after this allocation"):
        manager.commit(allocation)


def test_nothing_is_counted_at_first() -> None:
    assert set(vars(BlockManager(4, BLOCK).counts).values()) == {0}


def test_a_table_is_freed_once() -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, BLOCK)
    manager.free(table)
    with pytest.raises(InternalError, match="not a live one"):
        manager.free(table)


def test_audit_sees_a_lost_reservation() -> None:
    manager = BlockManager(4, BLOCK)
    started(manager, BLOCK).reserved = 0
    with pytest.raises(InternalError, match="1 blocks reserved, tables say 0"):
        manager.audit()


def test_audit_sees_a_cached_block_that_is_not_published() -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, BLOCK, range(4))
    manager._pool.cache(table.blocks[0])
    with pytest.raises(InternalError, match="not the published ones"):
        manager.audit()


def test_audit_sees_a_block_that_holds_other_tokens() -> None:
    manager = BlockManager(4, BLOCK)
    tokens = array("i", range(BLOCK + 1))
    allocation = manager.plan()
    outcome = allocation.start(len(tokens), BlockHashes(tokens, BLOCK))
    assert isinstance(outcome, Start)
    allocation.grow(outcome.table, len(tokens))
    manager.commit(allocation)
    manager.advance(outcome.table, len(tokens))
    tokens[0] = 99
    with pytest.raises(InternalError, match="other tokens than its table has"):
        manager.audit()


def test_a_fork_shares_every_block_and_copies_on_the_first_write() -> None:
    manager = BlockManager(8, BLOCK)
    parent = started(manager, 2 * BLOCK, range(BLOCK + 3))
    manager.advance(parent, BLOCK + 3)
    twins = [manager.fork(parent, None) for _ in range(3)]
    assert manager.n_used == 2
    tail = parent.blocks[1]
    allocation = manager.plan()
    for table in (*twins, parent):
        assert allocation.grow(table, BLOCK + 4)
    copies = manager.commit(allocation).copies
    assert [copy.source for copy in copies] == [tail] * 3
    assert [copy.target for copy in copies] == [twin.blocks[1] for twin in twins]
    assert parent.blocks[1] == tail, "the last to hold it writes to it"
    assert manager.n_used == 5
    for table in (*twins, parent):
        manager.free(table)
    manager.audit()


def test_a_fork_at_a_block_s_end_copies_nothing() -> None:
    manager = BlockManager(8, BLOCK)
    parent = started(manager, BLOCK, range(BLOCK))
    manager.advance(parent, BLOCK)
    twin = manager.fork(parent, None)
    allocation = manager.plan()
    assert allocation.grow(twin, BLOCK + 1)
    assert allocation.grow(parent, BLOCK + 1)
    assert manager.commit(allocation) == Moves([], [], [])
    assert manager.n_used == 3


def test_a_fork_has_published_only_what_it_shares() -> None:
    """Of a block whose last token is computed again the fork has another token there."""
    manager = BlockManager(4, BLOCK)
    table = started(manager, 2 * BLOCK, range(BLOCK))
    manager.advance(table, BLOCK)
    manager.advance(table, BLOCK - 1)
    twin = manager.fork(table, hashes([*range(BLOCK - 1), 99]))
    manager.audit()
    allocation = manager.plan()
    allocation.grow(twin, BLOCK)
    manager.commit(allocation)
    manager.advance(twin, BLOCK)
    manager.audit()
    assert manager.published() == {*table.blocks, *twin.blocks}


def test_a_fork_leaves_blocks_that_hold_nothing_yet_to_its_parent() -> None:
    manager = BlockManager(8, BLOCK)
    parent = started(manager, 3 * BLOCK, range(3 * BLOCK))
    manager.advance(parent, BLOCK + 1)
    assert manager.fork(parent, None).blocks == parent.blocks[:2]


def test_a_swapped_sequence_comes_back_but_for_what_is_there() -> None:
    manager = BlockManager(6, BLOCK, n_swap_blocks=3)
    tokens = range(2 * BLOCK + 3)
    table = started(manager, len(tokens), tokens)
    manager.advance(table, len(tokens) - 1)
    held = list(table.blocks)
    allocation = manager.plan()
    swapped = allocation.swap_out(table)
    assert swapped is not None
    moves = manager.commit(allocation)
    assert [move.source for move in moves.outs] == held
    assert (manager.n_used, manager.n_cached, manager.swap.n_free) == (0, 2, 0)
    manager.free(started(manager, 5 * BLOCK, [99] * 5 * BLOCK))  # takes the second block, not the first
    allocation = manager.plan()
    outcome = allocation.start(len(tokens), hashes(tokens), 0, swapped)
    assert isinstance(outcome, Start)
    allocation.grow(outcome.table, len(tokens))
    moves = manager.commit(allocation)
    assert outcome.table.blocks[0] == held[0]
    assert [move.target for move in moves.ins] == outcome.table.blocks[1:]
    assert [move.source for move in moves.ins] == swapped.blocks[1:]
    assert manager.swap.n_free == 3
    assert (manager.counts.swapped_out, manager.counts.swapped_in) == (3, 2)
    manager.audit()


def test_host_memory_that_is_full_takes_nobody() -> None:
    manager = BlockManager(6, BLOCK, n_swap_blocks=1)
    table = started(manager, BLOCK + 1, range(BLOCK + 1))
    manager.advance(table, BLOCK + 1)
    allocation = manager.plan()
    assert allocation.swap_out(table) is None
    assert manager.commit(allocation) == Moves([], [], [])


def test_blocks_that_hold_nothing_yet_are_not_swapped() -> None:
    manager = BlockManager(6, BLOCK, n_swap_blocks=3)
    table = started(manager, 3 * BLOCK, range(3 * BLOCK))
    manager.advance(table, BLOCK + 1)
    held = table.blocks[:2]
    allocation = manager.plan()
    allocation.swap_out(table)
    assert [move.source for move in manager.commit(allocation).outs] == held
    assert manager.swap.n_free == 1


def test_tokens_that_were_there_are_counted() -> None:
    manager = BlockManager(8, BLOCK)
    ended(manager, range(2 * BLOCK))
    assert (manager.counts.queried, manager.counts.hits) == (2 * BLOCK, 0)
    table = started(manager, 3 * BLOCK, range(2 * BLOCK + 3))
    assert (manager.counts.queried, manager.counts.hits) == (4 * BLOCK + 3, 2 * BLOCK)
    manager.advance(table, 2 * BLOCK + 3)
    allocation = manager.plan()
    assert isinstance(allocation.resume(table, 3 * BLOCK), Start)
    manager.commit(allocation)
    assert (manager.counts.queried, manager.counts.hits) == (6 * BLOCK + 6, 4 * BLOCK + 3)


def test_a_table_that_resumes_or_grows_is_a_live_one() -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, BLOCK, range(3))
    manager.free(table)
    allocation = manager.plan()
    allocation.resume(table, BLOCK)
    with pytest.raises(InternalError, match="must be a live one"):
        manager.commit(allocation)
    assert manager.n_reserved == 0


def test_who_is_not_in_host_memory_cannot_come_back() -> None:
    manager = BlockManager(6, BLOCK, n_swap_blocks=3)
    allocation = manager.plan()
    outcome = allocation.start(BLOCK, hashes(range(BLOCK)), 0, SwappedBlocks(3))
    assert isinstance(outcome, Start)
    allocation.grow(outcome.table, BLOCK)
    with pytest.raises(InternalError, match="is not in host memory"):
        manager.commit(allocation)
    assert (manager.n_used, manager.n_reserved, list(manager.tables())) == (0, 0, [])
    with pytest.raises(InternalError, match="is not in host memory"):
        manager.free_swapped(SwappedBlocks(3))


def test_what_others_may_hit_is_copied_even_by_its_only_holder() -> None:
    """The last token of a full prompt is computed again by a fork, after its parent has gone."""
    manager = BlockManager(8, BLOCK)
    parent = started(manager, BLOCK, range(BLOCK))
    manager.advance(parent, BLOCK)
    twin = manager.fork(parent, hashes(range(BLOCK)))
    manager.advance(twin, BLOCK - 1)
    manager.free(parent)
    published = twin.blocks[0]
    allocation = manager.plan()
    assert allocation.grow(twin, BLOCK)
    (copy,) = manager.commit(allocation).copies
    assert copy.source == published
    assert twin.blocks == [copy.target]
    assert manager.n_cached == 1
    manager.audit()


def test_a_head_is_copied_from_four_tokens_up() -> None:
    for n_common, n_cached in ((4, 4), (3, 0)):
        manager = BlockManager(4, BLOCK)
        ended(manager, range(BLOCK))
        assert started(manager, BLOCK, [*range(n_common), *[99] * 4]).n_cached == n_cached


def test_the_block_that_is_copied_from_is_no_room_for_others() -> None:
    manager = BlockManager(3, BLOCK)
    ended(manager, range(BLOCK))
    allocation = manager.plan()
    outcome = allocation.start(BLOCK, hashes([*range(BLOCK - 1), 99]))
    assert isinstance(outcome, Start)
    assert outcome.table.n_cached == BLOCK - 1
    allocation.grow(outcome.table, BLOCK)
    assert allocation.start(2 * BLOCK) == NotNow(2, 1)
    assert isinstance(allocation.start(BLOCK), Start)
    manager.commit(allocation)
    manager.audit()


def test_hits_that_others_hold_need_no_room() -> None:
    manager = BlockManager(4, BLOCK)
    first = started(manager, 2 * BLOCK, range(2 * BLOCK))
    manager.advance(first, 2 * BLOCK)
    outcome = manager.plan().start(4 * BLOCK, hashes([*range(2 * BLOCK), 99]))
    assert isinstance(outcome, Start)
    assert outcome.table.reserved == 2


def test_a_parked_table_keeps_only_what_it_stores() -> None:
    manager = BlockManager(6, BLOCK)
    table = started(manager, 5 * BLOCK, range(3 * BLOCK))
    manager.advance(table, BLOCK + 1)
    manager.park(table)
    assert len(table.blocks) == 2
    assert (manager.n_used, manager.n_free, manager.n_reserved) == (2, 4, 0)
    manager.audit()


def test_only_a_live_table_is_forked_or_parked() -> None:
    manager = BlockManager(6, BLOCK)
    table = started(manager, BLOCK)
    manager.free(table)
    assert (table.blocks, table.reserved) == ([], 0)
    for use in (lambda: manager.fork(table, None), lambda: manager.park(table)):
        with pytest.raises(InternalError, match="not a live one"):
            use()


def test_to_discard_voids_a_draft() -> None:
    manager = BlockManager(6, BLOCK, n_swap_blocks=2)
    table = started(manager, BLOCK, range(5))
    manager.advance(table, 5)
    allocation = manager.plan()
    swapped = allocation.swap_out(table)
    assert swapped is not None
    manager.commit(allocation)
    allocation = manager.plan()
    manager.free_swapped(swapped)
    with pytest.raises(InternalError, match="changed after this allocation"):
        manager.commit(allocation)


def test_a_table_has_another_version_when_more_than_its_end_changes() -> None:
    """A copy of a row is brought up to date by what was added, as long as the version stays."""
    manager = BlockManager(8, BLOCK)
    table = started(manager, 3 * BLOCK, range(5))
    versions = [table.version]

    def grow(grown: BlockTable, n_tokens: int) -> None:
        allocation = manager.plan()
        assert allocation.grow(grown, n_tokens)
        manager.commit(allocation)

    grow(table, BLOCK + 1)
    manager.advance(table, 5)
    twin = manager.fork(table, hashes(range(5)))
    assert table.version == versions[0], "it has grown only"
    for change in (
        lambda: manager.park(table),  # leaves a block that holds nothing
        lambda: grow(table, 6),  # copies the block of its twin
        lambda: manager.free(table),
    ):
        change()
        assert table.version not in versions
        versions.append(table.version)
    assert twin.version == 0


def test_what_is_published_and_who_lives() -> None:
    for share in (True, False):
        manager = BlockManager(8, BLOCK, share=share)
        table = started(manager, 2 * BLOCK, range(BLOCK + 1))
        manager.advance(table, BLOCK + 1)
        assert manager.published() == (set(table.blocks[:1]) if share else set())
        assert list(manager.tables()) == [table]
        assert (manager.swap.n_blocks, manager.swap.n_free) == (0, 0)


def test_a_fork_may_go_its_own_way_before_the_end_of_a_published_block() -> None:
    """The parent computes its last token again; the fork has another one in its place."""
    manager = BlockManager(8, BLOCK)
    parent = started(manager, BLOCK, range(BLOCK))
    manager.advance(parent, BLOCK)
    other = manager.fork(parent, None)
    manager.advance(parent, BLOCK - 1)
    assert manager.n_stored == BLOCK, "the other fork has all of it"
    twin = manager.fork(parent, hashes([*range(BLOCK - 1), 99]))
    manager.audit()
    allocation = manager.plan()
    assert allocation.grow(twin, BLOCK)
    manager.commit(allocation)
    manager.advance(twin, BLOCK)
    manager.audit()
    assert manager.published() == {parent.blocks[0], twin.blocks[0]}
    assert other.blocks == parent.blocks


def test_a_running_duplicate_is_the_hit_that_no_eviction_ends() -> None:
    """Two compute the same block; the first is gone when the second publishes its own."""
    manager = BlockManager(4, BLOCK)
    first, second = (started(manager, BLOCK, range(BLOCK)) for _ in range(2))
    manager.advance(first, BLOCK)
    manager.free(first)
    manager.advance(second, BLOCK)
    assert manager.published() == {second.blocks[0]}
    assert (manager.n_cached, manager.n_free) == (0, 3), "the other one is worth nothing"
    started(manager, 3 * BLOCK, [99] * 3 * BLOCK)  # takes every free block
    outcome = manager.plan().start(BLOCK + 1, hashes(range(BLOCK + 1)))
    assert outcome == NotNow(1, 0), "one block more: its prefix is a live one"
    manager.audit()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_of_equal_blocks_one_is_kept_in_the_end(order: tuple[int, ...]) -> None:
    manager = BlockManager(8, BLOCK)
    tables = [started(manager, 2 * BLOCK, range(2 * BLOCK)) for _ in range(3)]
    held = [list(table.blocks) for table in tables]
    for table in tables:
        manager.advance(table, 2 * BLOCK)
    assert len(manager.published()) == 6
    for number in order:
        found = started(manager, 2 * BLOCK + 1, range(2 * BLOCK + 1))
        assert manager.n_cached == 0
        assert found.blocks[:2] in [table.blocks for table in tables], "a live one, of one sequence"
        manager.free(found)
        manager.free(tables[number])
        manager.audit()
    assert manager.published() == set(held[order[-1]])
    assert (manager.n_cached, manager.n_free) == (2, 6)


def test_audit_sees_a_cached_duplicate() -> None:
    manager = BlockManager(8, BLOCK)
    tables = [started(manager, BLOCK, range(BLOCK)) for _ in range(2)]
    for table in tables:
        manager.advance(table, BLOCK)
    manager._forget_duplicates = lambda blocks: None  # type: ignore[method-assign]
    manager.free(tables[1])
    with pytest.raises(InternalError, match="although another block has its tokens"):
        manager.audit()


def test_no_hit_behind_a_prefix_with_the_same_hash() -> None:
    """Second blocks of equal tokens collide, whatever comes before them."""
    manager = BlockManager(8, BLOCK, make_hash=lambda hashes, number: hashes.block_tokens(number))
    tail = [5] * BLOCK
    ended(manager, [1] * BLOCK + tail)
    ended(manager, [2] * BLOCK)
    assert started(manager, 3 * BLOCK, [2] * BLOCK + tail + [6]).n_cached == BLOCK
    assert started(manager, 3 * BLOCK, [1] * BLOCK + tail + [6]).n_cached == 2 * BLOCK
    manager.audit()


def test_a_plan_made_before_the_pool_was_cleared_is_refused() -> None:
    manager = BlockManager(6, BLOCK)
    allocation = manager.plan()
    assert isinstance(allocation.start(BLOCK), Start)
    manager.clear()
    with pytest.raises(InternalError, match="changed after this allocation"):
        manager.commit(allocation)
    manager.audit()


def test_growing_within_own_blocks_is_no_part_of_a_plan() -> None:
    manager = BlockManager(6, BLOCK)
    table = started(manager, 2 * BLOCK, range(2 * BLOCK - 3))
    allocation = manager.plan()
    assert allocation.grow(table, 2 * BLOCK)
    assert not allocation.changes
    allocation.free(table)
    assert [change.frees for change in allocation.changes] == [True]


def test_a_plan_that_revives_a_cached_block_counts_it_as_taken() -> None:
    """Spoil a plan that takes all blocks, the cached one as a hit, by one more block."""
    manager = BlockManager(4, BLOCK)
    ended(manager, range(BLOCK))
    allocation = manager.plan()
    outcome = allocation.start(4 * BLOCK, hashes(range(BLOCK + 1)))
    assert isinstance(outcome, Start)
    (change,) = allocation.changes
    assert (change.match is not None, change.reserved) == (True, 3)
    allocation._changes[id(outcome.table)] = change._replace(reserved=4)
    with pytest.raises(InternalError, match="but 3 are free"):
        manager.commit(allocation)
    manager.audit()
