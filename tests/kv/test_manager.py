"""The block manager: tables, reserved and shared blocks, copies, swaps, and which plans it accepts."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import pytest

from pyvelo.errors import InternalError
from pyvelo.kv.adopt import AdoptingManager, AdoptingStates
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.pool import BlockTable, NotNow, Start, SwappedBlocks
from pyvelo.kv.prefix import FULL, BlockHashes, Window
from pyvelo.kv.records import Moves

BLOCK = 8


def hashes(tokens: Sequence[int], salt: bytes = b"") -> BlockHashes:
    return BlockHashes(array("i", tokens), BLOCK, salt)


def started(manager: BlockManager, max_tokens: int, tokens: Sequence[int] = ()) -> BlockTable:
    """Start a sequence with blocks for its tokens. They are not computed yet."""
    allocation = manager.plan()
    outcome = allocation.start(max_tokens, hashes(tokens) if tokens else None)
    assert isinstance(outcome, Start)
    allocation.grow(outcome.table, len(tokens))
    manager.commit(allocation)
    return outcome.table


def ended(manager: BlockManager, tokens: Sequence[int]) -> None:
    """Start a sequence, compute it and free it."""
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
    manager.free(started(manager, BLOCK, [99] * BLOCK))  # evicts the last cached block
    assert started(manager, 4 * BLOCK - 1, range(4 * BLOCK - 1)).n_cached == 3 * BLOCK
    assert manager.counts.evictions == 1


def test_the_last_token_of_a_cached_prompt_is_computed() -> None:
    manager = BlockManager(8, BLOCK)
    ended(manager, range(2 * BLOCK))
    table = started(manager, 3 * BLOCK, range(2 * BLOCK))
    assert table.n_cached == 2 * BLOCK - 1
    assert manager.counts.copies == 1, "a published block is never written"


def test_live_sequences_share_a_block_until_the_last_is_freed() -> None:
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


def test_a_partial_hit_without_a_block_to_copy_to_is_computed() -> None:
    """The only free block is the source of the copy."""
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


def test_unpublished_prefixes_are_computed_again() -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, range(2 * BLOCK))
    manager.reset()
    assert (manager.n_cached, manager.n_free) == (0, 4)
    assert started(manager, 2 * BLOCK, range(2 * BLOCK)).n_cached == 0


def test_a_sequence_may_grow_beyond_its_reserved_blocks() -> None:
    manager = BlockManager(4, BLOCK)
    table, other = started(manager, BLOCK), started(manager, BLOCK)
    assert not manager.plan().grow(table, 3 * BLOCK + 1), "one is reserved for the other"
    allocation = manager.plan()
    assert allocation.grow(table, 3 * BLOCK)
    assert not allocation.grow(other, BLOCK + 1)
    manager.commit(allocation)
    assert (manager.n_used, manager.n_reserved) == (3, 1)


def test_a_freed_sequence_makes_room_in_the_same_plan() -> None:
    manager = BlockManager(4, BLOCK)
    first, second = started(manager, 2 * BLOCK, range(2 * BLOCK)), started(manager, 2 * BLOCK, range(9, 20))
    allocation = manager.plan()
    assert not allocation.grow(first, 4 * BLOCK)
    allocation.free(second)
    assert allocation.grow(first, 4 * BLOCK)
    manager.commit(allocation)
    assert (manager.n_used, manager.n_reserved) == (4, 0)
    manager.audit()


def test_a_shared_block_is_free_when_all_its_tables_are_freed() -> None:
    manager = BlockManager(8, BLOCK)
    table = started(manager, 3 * BLOCK, range(2 * BLOCK))
    manager.advance(table, 2 * BLOCK)
    fork, other = manager.fork(table, None), started(manager, 2 * BLOCK)

    def gained(*tables: BlockTable) -> int:
        allocation = manager.plan()
        for freed in tables:
            allocation.free(freed)
        return allocation.available - manager.plan().available

    assert [gained(table), gained(fork), gained(other), gained(table, fork)] == [1, 0, 2, 3]


def test_a_plan_may_keep_a_table_that_it_freed() -> None:
    manager = BlockManager(8, BLOCK)
    table = started(manager, 3 * BLOCK, range(2 * BLOCK))
    manager.advance(table, 2 * BLOCK)
    fork, before = manager.fork(table, None), manager.plan().available
    allocation = manager.plan()
    allocation.free(table)
    allocation.free(fork)
    allocation.keep(table)
    assert allocation.available == before, "the fork alone frees nothing"
    allocation.free(table)
    assert allocation.available == before + 3
    allocation.keep(fork)
    allocation.keep(table)
    assert allocation.grow(table, 2 * BLOCK + 1)
    manager.commit(allocation)
    manager.audit()


def test_a_plan_cannot_free_a_table_that_it_uses() -> None:
    manager = BlockManager(8, BLOCK, n_swap_blocks=2)
    table, other = started(manager, BLOCK, [1]), started(manager, 2 * BLOCK, [2])
    manager.advance(table, 1)
    allocation = manager.plan()
    assert allocation.grow(table, 2 * BLOCK)
    for free in (allocation.free, allocation.swap_out):
        with pytest.raises(InternalError, match="a plan that uses a block table cannot free it"):
            free(table)
    allocation.free(other)
    for again in (
        allocation.free,
        lambda table: allocation.grow(table, 9),
        lambda table: allocation.resume(table, 9),
    ):
        with pytest.raises(InternalError, match=r"uses a block table|neither grow"):
            again(other)
    manager.commit(allocation)
    assert (manager.n_used, manager.n_reserved, list(manager.tables())) == (2, 0, [table])
    assert manager.swap.n_free == 2
    manager.audit()


def test_prefix_hits_of_a_start_are_not_free_when_their_table_is_freed() -> None:
    """The plan counts them once, in either order."""
    for first in ("start", "free"):
        manager = BlockManager(8, BLOCK)
        holder = started(manager, 6 * BLOCK, range(4 * BLOCK))
        manager.advance(holder, 4 * BLOCK)
        allocation = manager.plan()
        if first == "free":
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


def test_the_source_of_a_copy_is_not_free_in_the_same_plan() -> None:
    """One table grows into a copy of it, the other is freed: the source is free after the copy only."""
    manager = BlockManager(3, BLOCK)
    table = started(manager, BLOCK, range(3))
    manager.advance(table, 3)
    twin, other = manager.fork(table, None), started(manager, BLOCK)
    allocation = manager.plan()
    assert allocation.grow(twin, 4)
    allocation.free(table)
    assert not allocation.grow(other, 2 * BLOCK), "it has one reserved block, and no other is available"
    assert allocation.grow(other, BLOCK)
    (copy,) = manager.commit(allocation).copies
    assert copy.source not in (*twin.blocks, *other.blocks)
    assert (manager.n_used, manager.n_free) == (2, 1)
    manager.audit()


def test_a_table_with_spare_blocks_may_grow_by_a_copy_alone() -> None:
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


def test_spare_blocks_stay_available() -> None:
    manager = BlockManager(4, BLOCK)
    assert manager.plan().start(3 * BLOCK, None, 2) == NotNow(3, 2)
    assert isinstance(manager.plan().start(2 * BLOCK, None, 2), Start)


def test_cached_blocks_of_a_hit_count_as_needed() -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, range(2 * BLOCK))
    started(manager, BLOCK)
    again = hashes(range(2 * BLOCK + 1))
    assert manager.plan().start(4 * BLOCK, again) == NotNow(4, 3)
    assert manager.plan().start(3 * BLOCK, again, spare=1) == NotNow(3, 2)
    assert isinstance(manager.plan().start(3 * BLOCK, again), Start)


@pytest.mark.parametrize(("spare", "n_cached"), [(2, BLOCK - 1), (3, 0)])
def test_the_source_of_a_copy_respects_spare_blocks(spare: int, n_cached: int) -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, range(BLOCK))
    outcome = manager.plan().start(BLOCK, hashes(range(BLOCK)), spare)
    assert isinstance(outcome, Start)
    assert outcome.table.n_cached == n_cached


def test_a_partial_hit_needs_a_block_for_its_copy() -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, range(BLOCK))
    allocation = manager.plan()
    allocation.start(BLOCK, hashes([*range(BLOCK - 1), 99]))
    with pytest.raises(InternalError, match="blocks for all its tokens"):
        manager.commit(allocation)
    assert (manager.n_used, manager.n_reserved) == (0, 0)
    manager.audit()


def test_a_stale_plan_is_refused_and_changes_nothing() -> None:
    manager = BlockManager(4, BLOCK)
    allocation = manager.plan()
    allocation.start(BLOCK)
    started(manager, BLOCK)
    with pytest.raises(InternalError, match="changed after this plan"):
        manager.commit(allocation)
    assert manager.n_reserved == 1
    manager.audit()


CHANGES: dict[str, Callable[[BlockManager, BlockTable], object]] = {
    "commit": lambda manager, table: manager.commit(manager.plan()),
    "fork": lambda manager, table: manager.fork(table, None),
    "free a fork": lambda manager, table: manager.free(manager.fork(table, None)),
    "park": lambda manager, table: manager.trim(table),
    "reset": lambda manager, table: manager.reset(),
    "advance": lambda manager, table: manager.advance(table, 3),
}


@pytest.mark.parametrize("first", CHANGES)
@pytest.mark.parametrize("second", [None, *CHANGES])
def test_every_change_makes_a_plan_stale(first: str, second: str | None) -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, 2 * BLOCK, range(BLOCK))
    allocation = manager.plan()
    for change in (first, second):
        if change is not None:
            CHANGES[change](manager, table)
    with pytest.raises(InternalError, match="changed after this plan"):
        manager.commit(allocation)


def test_an_empty_pool_makes_a_plan_stale() -> None:
    manager = BlockManager(4, BLOCK)
    allocation = manager.plan()
    manager.clear()
    manager.commit(manager.plan())
    with pytest.raises(InternalError, match="changed after this plan"):
        manager.commit(allocation)


def test_counts_start_at_zero() -> None:
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


def test_audit_sees_a_shared_block_that_its_table_takes_for_its_own() -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, BLOCK, range(4))
    manager.advance(table, 4)
    manager.fork(table, None)
    manager.audit()
    table.n_shared = 0
    with pytest.raises(InternalError, match="block 0 has 2 readers, its table knows one"):
        manager.audit()


def test_audit_includes_the_prefix_index() -> None:
    manager = BlockManager(4, BLOCK)
    manager.audit()
    assert manager._index is not None
    manager._index.n_duplicates += 1
    with pytest.raises(InternalError, match="1 duplicates counted"):
        manager.audit()


def test_audit_sees_a_cached_block_that_is_not_published() -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, BLOCK, range(4))
    manager._pool.cache(table.blocks[0])
    with pytest.raises(InternalError, match="not the published ones"):
        manager.audit()


def test_audit_sees_a_block_with_other_tokens() -> None:
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
    assert parent.blocks[1] == tail, "its last holder writes to it"
    assert manager.n_used == 5
    for table in (*twins, parent):
        manager.free(table)
    manager.audit()


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    manager = BlockManager(8, BLOCK)
    parent = started(manager, BLOCK, range(BLOCK))
    manager.advance(parent, BLOCK)
    twin = manager.fork(parent, None)
    allocation = manager.plan()
    assert allocation.grow(twin, BLOCK + 1)
    assert allocation.grow(parent, BLOCK + 1)
    assert manager.commit(allocation) == Moves([], [], [])
    assert manager.n_used == 3


def test_a_fork_publishes_its_own_blocks() -> None:
    """The last token of a block is computed again, and differs in the fork."""
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


def test_a_fork_does_not_share_empty_blocks() -> None:
    manager = BlockManager(8, BLOCK)
    parent = started(manager, 3 * BLOCK, range(3 * BLOCK))
    manager.advance(parent, BLOCK + 1)
    assert manager.fork(parent, None).blocks == parent.blocks[:2]


def test_a_sequence_is_swapped_in_except_for_its_prefix_hit() -> None:
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
    manager.free(started(manager, 5 * BLOCK, [99] * 5 * BLOCK))  # allocates the second block, not the first
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


def test_nothing_is_swapped_out_if_host_memory_is_full() -> None:
    manager = BlockManager(6, BLOCK, n_swap_blocks=1)
    table = started(manager, BLOCK + 1, range(BLOCK + 1))
    manager.advance(table, BLOCK + 1)
    allocation = manager.plan()
    assert allocation.swap_out(table) is None
    assert manager.commit(allocation) == Moves([], [], [])


def test_a_prefix_hit_replaces_no_swapped_block_of_several_groups() -> None:
    manager = BlockManager(12, BLOCK, windows=(FULL, FULL), n_swap_blocks=4)
    table = started(manager, 2 * BLOCK, range(BLOCK + 3))
    manager.advance(table, BLOCK + 3)
    allocation = manager.plan()
    swapped = allocation.swap_out(table)
    assert swapped is not None
    manager.commit(allocation)
    allocation = manager.plan()
    outcome = allocation.start(2 * BLOCK, hashes(range(BLOCK + 3)), 0, swapped)
    assert isinstance(outcome, Start)
    allocation.grow(outcome.table, BLOCK + 3)
    assert len(manager.commit(allocation).ins) == 4
    assert [len(blocks) for blocks in outcome.table.groups] == [2, 2]
    manager.audit()


def test_a_sequence_that_goes_on_keeps_what_it_has_reserved() -> None:
    manager = BlockManager(8, BLOCK)
    table = started(manager, 6 * BLOCK, range(BLOCK))
    manager.advance(table, BLOCK)
    allocation = manager.plan()
    assert allocation.resume(table, 2 * BLOCK) == Start(table)
    assert allocation.available == 2
    manager.commit(allocation)
    assert table.reserved == 5


def test_empty_blocks_are_not_swapped() -> None:
    manager = BlockManager(6, BLOCK, n_swap_blocks=3)
    table = started(manager, 3 * BLOCK, range(3 * BLOCK))
    manager.advance(table, BLOCK + 1)
    held = table.blocks[:2]
    allocation = manager.plan()
    allocation.swap_out(table)
    assert [move.source for move in manager.commit(allocation).outs] == held
    assert manager.swap.n_free == 1


def test_hit_tokens_are_counted() -> None:
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


def test_only_a_live_table_resumes_or_grows() -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, BLOCK, range(3))
    manager.free(table)
    allocation = manager.plan()
    allocation.resume(table, BLOCK)
    with pytest.raises(InternalError, match="must be a live one"):
        manager.commit(allocation)
    assert manager.n_reserved == 0


def test_only_a_swapped_sequence_is_swapped_in() -> None:
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


def test_a_cached_block_is_copied_even_by_its_only_holder() -> None:
    """A fork computes the last token of a full prompt again, after its parent was freed."""
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


def test_a_partial_hit_is_copied_from_four_tokens_up() -> None:
    for n_common, n_cached in ((4, 4), (3, 0)):
        manager = BlockManager(4, BLOCK)
        ended(manager, range(BLOCK))
        assert started(manager, BLOCK, [*range(n_common), *[99] * 4]).n_cached == n_cached


def test_the_source_of_a_partial_hit_is_not_available() -> None:
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


def test_hits_in_used_blocks_need_no_free_blocks() -> None:
    manager = BlockManager(4, BLOCK)
    first = started(manager, 2 * BLOCK, range(2 * BLOCK))
    manager.advance(first, 2 * BLOCK)
    outcome = manager.plan().start(4 * BLOCK, hashes([*range(2 * BLOCK), 99]))
    assert isinstance(outcome, Start)
    assert outcome.table.reserved == 2


def test_a_trimmed_table_has_only_blocks_with_tokens() -> None:
    manager = BlockManager(6, BLOCK)
    table = started(manager, 5 * BLOCK, range(3 * BLOCK))
    manager.advance(table, BLOCK + 1)
    manager.trim(table)
    assert len(table.blocks) == 2
    assert (manager.n_used, manager.n_free, manager.n_reserved) == (2, 4, 0)
    manager.audit()


def test_only_a_live_table_forks_or_is_trimmed() -> None:
    manager = BlockManager(6, BLOCK)
    table = started(manager, BLOCK)
    manager.free(table)
    assert (table.blocks, table.reserved) == ([], 0)
    for use in (lambda: manager.fork(table, None), lambda: manager.trim(table)):
        with pytest.raises(InternalError, match="not a live one"):
            use()


def test_freeing_swapped_blocks_makes_a_plan_stale() -> None:
    manager = BlockManager(6, BLOCK, n_swap_blocks=2)
    table = started(manager, BLOCK, range(5))
    manager.advance(table, 5)
    allocation = manager.plan()
    swapped = allocation.swap_out(table)
    assert swapped is not None
    manager.commit(allocation)
    allocation = manager.plan()
    manager.free_swapped(swapped)
    with pytest.raises(InternalError, match="changed after this plan"):
        manager.commit(allocation)


def test_the_version_of_a_table_changes_unless_it_only_grows() -> None:
    """While the version is the same, a copy of a row only needs the added blocks."""
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
        lambda: manager.trim(table),  # frees an empty block
        lambda: grow(table, 6),  # copies the block of its twin
        lambda: manager.free(table),
    ):
        change()
        assert table.version not in versions
        versions.append(table.version)
    assert twin.version == 0


def test_published_blocks_and_live_tables() -> None:
    for share in (True, False):
        manager = BlockManager(8, BLOCK, share=share)
        table = started(manager, 2 * BLOCK, range(BLOCK + 1))
        manager.advance(table, BLOCK + 1)
        assert manager.published() == (set(table.blocks[:1]) if share else set())
        assert list(manager.tables()) == [table]
        assert (manager.swap.n_blocks, manager.swap.n_free) == (0, 0)


def test_a_fork_may_differ_before_the_end_of_a_published_block() -> None:
    """The parent computes its last token again. The fork has another token at this position."""
    manager = BlockManager(8, BLOCK)
    parent = started(manager, BLOCK, range(BLOCK))
    manager.advance(parent, BLOCK)
    other = manager.fork(parent, None)
    manager.advance(parent, BLOCK - 1)
    assert manager.n_stored == BLOCK, "the other fork has the whole block"
    twin = manager.fork(parent, hashes([*range(BLOCK - 1), 99]))
    manager.audit()
    allocation = manager.plan()
    assert allocation.grow(twin, BLOCK)
    manager.commit(allocation)
    manager.advance(twin, BLOCK)
    manager.audit()
    assert manager.published() == {parent.blocks[0], twin.blocks[0]}
    assert other.blocks == parent.blocks


def test_a_used_duplicate_is_the_hit_and_is_not_evicted() -> None:
    """Two sequences compute the same block. The first is freed when the second publishes its own."""
    manager = BlockManager(4, BLOCK)
    first, second = (started(manager, BLOCK, range(BLOCK)) for _ in range(2))
    manager.advance(first, BLOCK)
    manager.free(first)
    manager.advance(second, BLOCK)
    assert manager.published() == {second.blocks[0]}
    assert (manager.n_cached, manager.n_free) == (0, 3), "the duplicate is not cached"
    started(manager, 3 * BLOCK, [99] * 3 * BLOCK)  # allocates every free block
    outcome = manager.plan().start(BLOCK + 1, hashes(range(BLOCK + 1)))
    assert outcome == NotNow(1, 0), "one more block: its prefix is in use"
    manager.audit()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_one_of_equal_blocks_stays_cached(order: tuple[int, ...]) -> None:
    manager = BlockManager(8, BLOCK)
    tables = [started(manager, 2 * BLOCK, range(2 * BLOCK)) for _ in range(3)]
    held = [list(table.blocks) for table in tables]
    for table in tables:
        manager.advance(table, 2 * BLOCK)
    assert len(manager.published()) == 6
    for number in order:
        found = started(manager, 2 * BLOCK + 1, range(2 * BLOCK + 1))
        assert manager.n_cached == 0
        assert found.blocks[:2] in [table.blocks for table in tables], "the hit is one live sequence's"
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
    manager._unpublish_duplicates = lambda blocks: None  # type: ignore[method-assign]
    manager.free(tables[1])
    with pytest.raises(InternalError, match="although another block has its tokens"):
        manager.audit()


def test_no_hit_below_a_prefix_with_the_same_hash() -> None:
    """Second blocks of equal tokens have the same hash in every prefix."""
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
    with pytest.raises(InternalError, match="changed after this plan"):
        manager.commit(allocation)
    manager.audit()


def test_growing_within_its_own_blocks_is_no_change() -> None:
    manager = BlockManager(6, BLOCK)
    table = started(manager, 2 * BLOCK, range(2 * BLOCK - 3))
    allocation = manager.plan()
    assert allocation.grow(table, 2 * BLOCK)
    assert not allocation.changes
    allocation.free(table)
    assert [change.frees for change in allocation.changes] == [True]


def test_a_plan_counts_a_cached_hit_as_allocated() -> None:
    """A plan uses all blocks, the cached one as a hit. Reserve one block more."""
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


def test_changes_after_a_plan_do_not_cancel_out() -> None:
    manager = BlockManager(6, BLOCK, n_swap_blocks=2)
    table, gone = started(manager, BLOCK, range(5)), started(manager, BLOCK, range(50, 55))
    manager.advance(gone, 5)
    allocation = manager.plan()
    swapped = allocation.swap_out(gone)
    assert swapped is not None
    manager.commit(allocation)
    stale = manager.plan()
    manager.free_swapped(swapped)
    manager.fork(table, None)
    with pytest.raises(InternalError, match="changed after this plan"):
        manager.commit(stale)


def test_a_copy_of_a_published_block_is_published_again() -> None:
    """Its last token is computed again, so the table writes to a block that others may hit."""
    manager = BlockManager(6, BLOCK)
    table = started(manager, 2 * BLOCK, range(BLOCK))
    manager.advance(table, BLOCK)
    (first,) = table.blocks
    twin = manager.fork(table, hashes(range(BLOCK)))
    manager.advance(table, BLOCK - 1)
    allocation = manager.plan()
    assert allocation.grow(table, BLOCK)
    (copy,) = manager.commit(allocation).copies
    assert (copy.source, copy.target) == (first, table.blocks[0])
    manager.advance(table, BLOCK)
    assert manager.published() == {first, table.blocks[0]}
    manager.free(twin)
    manager.free(table)
    manager.audit()


def test_blocks_without_a_duplicate_stay_cached_beside_duplicates() -> None:
    manager = BlockManager(8, BLOCK)
    twins = [started(manager, BLOCK, range(BLOCK)) for _ in range(2)]
    other = started(manager, BLOCK, range(90, 90 + BLOCK))
    for table in (*twins, other):
        manager.advance(table, BLOCK)
    (block,) = other.blocks
    manager.free(other)
    assert block in manager.published()
    assert started(manager, 2 * BLOCK, [*range(90, 90 + BLOCK), 1]).n_cached == BLOCK


def test_held_hashes_are_the_wanted_ones_and_then_the_newest() -> None:
    manager = AdoptingManager(6, BLOCK)
    old, new = hashes(range(2 * BLOCK)), hashes(range(100, 100 + 2 * BLOCK))
    for tokens in (range(2 * BLOCK), range(100, 100 + 2 * BLOCK)):
        ended(manager, tokens)
    assert manager.held_hashes((), 3) == [new.block_hash(1), new.block_hash(0), old.block_hash(1)]
    wanted = [bytes(32), old.block_hash(0)]
    assert manager.held_hashes(wanted, 2) == [old.block_hash(0), new.block_hash(1)]
    manager.free(started(manager, 5 * BLOCK, range(200, 200 + 5 * BLOCK)))  # evicts three blocks
    assert len(manager.held_hashes((), 9)) == 1
    manager.reset()
    assert manager.held_hashes(wanted, 9) == []
    assert AdoptingManager(6, BLOCK, share=False).held_hashes(wanted, 9) == []


def test_held_hashes_need_what_a_hit_needs() -> None:
    windowed = AdoptingManager(8, BLOCK, windows=(FULL, Window(BLOCK)))
    table = started(windowed, 3 * BLOCK, range(3 * BLOCK))
    windowed.advance(table, 3 * BLOCK)
    assert len(windowed.held_hashes((), 9)) == 3
    states = AdoptingStates(8, BLOCK, state_blocks=1)
    ended(states, range(2 * BLOCK))
    assert states.published()
    assert states.held_hashes((), 9) == []  # no snapshot was taken
