"""The block manager with windows: swaps, forks and prefix hits in several groups."""

from __future__ import annotations

from collections.abc import Sequence

from pyvelo.kv.manager import BlockManager
from pyvelo.kv.pool import BlockTable, Start, SwappedBlocks
from pyvelo.kv.prefix import FULL, Window

from .test_manager import BLOCK, ended, hashes, started


def grown(manager: BlockManager, table: BlockTable, n_tokens: int) -> None:
    allocation = manager.plan()
    assert allocation.grow(table, n_tokens)
    manager.commit(allocation)
    manager.advance(table, n_tokens)
    manager.audit()


def swapped_out(manager: BlockManager, table: BlockTable) -> SwappedBlocks:
    allocation = manager.plan()
    swapped = allocation.swap_out(table)
    assert swapped is not None
    manager.commit(allocation)
    return swapped


def n_hits(manager: BlockManager, tokens: Sequence[int]) -> int:
    """Return the cached tokens of a sequence that starts with these tokens and another one."""
    outcome = manager.plan().start(len(tokens) + 1, hashes([*tokens, 99]))
    assert isinstance(outcome, Start)
    return outcome.table.n_cached


def test_a_window_frees_blocks_while_a_sequence_advances() -> None:
    manager = BlockManager(12, BLOCK, windows=(FULL, Window(BLOCK + 2)), max_chunk=BLOCK)
    table = started(manager, 6 * BLOCK, range(6 * BLOCK))
    assert manager.n_reserved + len(table.blocks) <= 12
    for n_tokens in range(1, 6 * BLOCK + 1):
        manager.advance(table, n_tokens)
        first = max(0, n_tokens - BLOCK - 2) // BLOCK
        assert (table.firsts, len(table.groups[1])) == ([0, first], 6 - first)
        manager.audit()


def test_swapping_in_allocates_no_block_that_a_window_has_left() -> None:
    manager = BlockManager(11, BLOCK, windows=(FULL, Window(5)), n_swap_blocks=8)
    table = started(manager, 5 * BLOCK, range(5 * BLOCK))
    manager.advance(table, 4 * BLOCK - 2)
    swapped = swapped_out(manager, table)
    assert (swapped.firsts, len(swapped.blocks)) == ((0, 3), 5)
    allocation = manager.plan()
    outcome = allocation.start(5 * BLOCK, None, 0, swapped)
    assert isinstance(outcome, Start)
    assert (allocation.available, outcome.table.reserved) == (11 - 7, 7)
    assert allocation.grow(outcome.table, 5 * BLOCK)
    assert allocation.available == 11 - 7, "its blocks were reserved"
    moves = manager.commit(allocation)
    assert [len(blocks) for blocks in outcome.table.groups] == [5, 2]
    assert [move.target for move in moves.ins] == outcome.table.in_order(0, 4)
    manager.audit()


def test_a_swapped_in_sequence_publishes_blocks_whose_window_has_gone() -> None:
    manager = BlockManager(12, BLOCK, windows=(FULL, Window(5)), n_swap_blocks=8)
    text = range(5 * BLOCK)
    table = started(manager, 5 * BLOCK, text)
    manager.advance(table, 4 * BLOCK - 2)
    swapped = swapped_out(manager, table)
    manager.reset()
    allocation = manager.plan()
    outcome = allocation.start(5 * BLOCK, hashes(text), 0, swapped)
    assert isinstance(outcome, Start)
    allocation.grow(outcome.table, 5 * BLOCK)
    manager.commit(allocation)
    manager.advance(outcome.table, 5 * BLOCK)
    manager.free(outcome.table)
    assert n_hits(manager, text) == 5 * BLOCK


def test_without_a_largest_chunk_a_window_reserves_blocks_for_all_tokens() -> None:
    manager = BlockManager(12, BLOCK, windows=(FULL, Window(5)))
    assert started(manager, 6 * BLOCK).reserved == 12


def test_a_window_is_swapped_in_although_the_prefix_hit_is_beyond_it() -> None:
    """Another sequence has computed more of the same text; its window has blocks of another place."""
    manager = BlockManager(16, BLOCK, windows=(Window(BLOCK),), n_swap_blocks=4)
    text = range(6 * BLOCK)
    table = started(manager, 6 * BLOCK, text[: 2 * BLOCK + 3])
    manager.advance(table, 2 * BLOCK + 3)
    swapped = swapped_out(manager, table)
    ended(manager, text)
    allocation = manager.plan()
    outcome = allocation.start(6 * BLOCK, hashes(text), 0, swapped)
    assert isinstance(outcome, Start)
    assert (outcome.table.firsts, outcome.table.n_tokens) == ([1], 2 * BLOCK + 3)
    allocation.grow(outcome.table, 6 * BLOCK)
    moves = manager.commit(allocation)
    assert [move.source for move in moves.ins] == swapped.blocks
    assert [move.target for move in moves.ins] == outcome.table.groups[0][:2]
    manager.audit()


def test_a_swapped_in_sequence_with_a_longer_hit_publishes_what_follows() -> None:
    manager = BlockManager(16, BLOCK, n_swap_blocks=4)
    text = [*range(2 * BLOCK), *[7] * BLOCK]
    table = started(manager, 3 * BLOCK, text[: BLOCK + 2])
    manager.advance(table, BLOCK + 2)
    swapped = swapped_out(manager, table)
    ended(manager, text)
    allocation = manager.plan()
    outcome = allocation.start(3 * BLOCK, hashes([*range(2 * BLOCK), *[8] * BLOCK]), 0, swapped)
    assert isinstance(outcome, Start)
    assert outcome.table.firsts == [0]
    allocation.grow(outcome.table, 3 * BLOCK)
    manager.commit(allocation)
    manager.advance(outcome.table, 3 * BLOCK)
    assert n_hits(manager, [*range(2 * BLOCK), *[8] * BLOCK]) == 3 * BLOCK
    manager.audit()


def test_a_fork_that_computes_a_published_block_again_publishes_its_own_continuation() -> None:
    manager = BlockManager(16, BLOCK)
    table = started(manager, 3 * BLOCK, range(2 * BLOCK))
    manager.advance(table, 2 * BLOCK)
    manager.advance(table, 2 * BLOCK - 1)  # its last token is computed again
    mine = [*range(2 * BLOCK - 1), 50, *[51] * BLOCK]
    twin = manager.fork(table, hashes(mine))
    grown(manager, twin, 3 * BLOCK)
    assert n_hits(manager, mine) == 3 * BLOCK
    assert n_hits(manager, range(2 * BLOCK)) == 2 * BLOCK


def test_a_prefix_hit_needs_the_blocks_in_reach_of_the_window_only() -> None:
    manager = BlockManager(12, BLOCK, windows=(FULL, Window(BLOCK)))
    ended(manager, range(4 * BLOCK))
    assert n_hits(manager, range(4 * BLOCK)) == 4 * BLOCK
    # eight blocks are cached; the next sequence evicts blocks that the window has left first
    other = started(manager, 3 * BLOCK, [60] * 3 * BLOCK)
    assert manager.counts.evictions == 2
    manager.free(other)
    assert n_hits(manager, range(4 * BLOCK)) == 4 * BLOCK
    manager.audit()


def test_the_end_of_the_prompt_stays_cached_longer_than_the_middle_of_an_answer() -> None:
    manager = BlockManager(16, BLOCK, windows=(FULL, Window(BLOCK)), max_chunk=BLOCK)
    prompt = range(2 * BLOCK)
    table = started(manager, 6 * BLOCK, prompt)
    manager.advance(table, 2 * BLOCK)
    assert table.hashes is not None
    table.hashes._tokens.extend(range(100, 100 + 4 * BLOCK))
    for n_tokens in range(2 * BLOCK + 1, 6 * BLOCK + 1):
        grown(manager, table, n_tokens)
    n_cached = manager.n_cached  # of the window, at the end of the prompt and in the answer
    started(manager, 3 * BLOCK, [60] * 3 * BLOCK)
    assert 0 < manager.counts.evictions < n_cached
    assert n_hits(manager, prompt) == 2 * BLOCK, "the next answer to the prompt starts behind it"


def decoded(manager: BlockManager, table: BlockTable, n_tokens: int) -> None:
    """Let a sequence generate until it has so many tokens."""
    assert table.hashes is not None
    table.hashes._tokens.extend(range(100 + len(table.hashes._tokens), 100 + n_tokens))
    for n in range(table.n_tokens + 1, n_tokens + 1):
        grown(manager, table, n)


def test_all_blocks_that_a_window_has_left_are_evicted_before_those_at_the_end_of_the_prompt() -> None:
    manager = BlockManager(16, BLOCK, windows=(FULL, Window(BLOCK)), max_chunk=BLOCK)
    prompt = range(2 * BLOCK)
    table = started(manager, 6 * BLOCK, prompt)
    manager.advance(table, 2 * BLOCK)
    decoded(manager, table, 6 * BLOCK)
    # the window has left five blocks; one of them is the last of the prompt
    others = [started(manager, BLOCK, [60 + n] * BLOCK) for n in range(4)]
    assert (manager.counts.evictions, manager.n_cached) == (4, 1)
    manager.free(others[0])
    manager.free(others[1])
    assert n_hits(manager, prompt) == 2 * BLOCK


def test_a_sequence_that_goes_on_needs_the_end_of_its_new_prompt() -> None:
    manager = BlockManager(20, BLOCK, windows=(FULL, Window(BLOCK)), max_chunk=BLOCK)
    table = started(manager, 2 * BLOCK, range(2 * BLOCK))
    manager.advance(table, 2 * BLOCK)
    assert table.hashes is not None
    table.hashes._tokens.extend(range(50, 50 + 2 * BLOCK))
    prompt = [*table.hashes._tokens]
    allocation = manager.plan()
    assert isinstance(allocation.resume(table, 8 * BLOCK), Start)
    manager.commit(allocation)
    for n_tokens in (3 * BLOCK, 4 * BLOCK):
        grown(manager, table, n_tokens)
    decoded(manager, table, 8 * BLOCK)
    # the window has left seven blocks; two are the last of a prompt, and only the new one counts
    assert (manager.n_free, manager.n_cached) == (4, 7)
    others = [started(manager, BLOCK, [60 + n] * BLOCK) for n in range(5)]
    assert (manager.counts.evictions, manager.n_cached) == (6, 1)
    manager.free(others[0])
    manager.free(others[1])
    assert n_hits(manager, prompt) == 4 * BLOCK
