"""Windows and layouts: which tokens a query reads, and how many blocks a sequence holds at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvelo.kv.pool import BlockTable
from pyvelo.kv.prefix import FULL, BlockLayout, Window

from .naive_groups import BLOCK, first_needed, may_read

SIZES = (1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 2)
WINDOWS = [Window(size, chunked) for size in SIZES for chunked in (False, True)]

layouts = st.builds(
    lambda windows, max_chunk: BlockLayout(BLOCK, tuple(windows), max_chunk),
    st.lists(st.sampled_from([FULL, *WINDOWS]), min_size=1, max_size=4),
    st.integers(1, 3 * BLOCK),
)


@pytest.mark.parametrize("window", [FULL, *WINDOWS])
def test_a_query_reads_from_the_first_token_of_its_window_to_itself(window: Window) -> None:
    for position in range(5 * BLOCK):
        read = [other for other in range(6 * BLOCK) if may_read(window, position, other)]
        assert read == list(range(window.first_token(position), position + 1))


def test_windows_of_models() -> None:
    assert [Window(1024).first_token(position) for position in (0, 1023, 1024, 5000)] == [0, 0, 1, 3977]
    chunk = Window(8192, chunked=True)
    assert [chunk.first_token(position) for position in (0, 8191, 8192, 20000)] == [0, 0, 8192, 16384]
    assert (FULL.first_token(10**9), FULL.size) == (0, 0)


@given(layouts, st.integers(0, 9 * BLOCK))
def test_the_first_blocks_allow_the_last_token_to_be_computed_again(
    layout: BlockLayout, n_tokens: int
) -> None:
    wanted = tuple(first_needed(window, n_tokens) for window in layout.windows)
    assert layout.first_blocks(n_tokens) == wanted
    assert layout.is_windowed == any(window != FULL for window in layout.windows)
    assert layout.n_groups == len(layout.windows)


@pytest.mark.parametrize("max_chunk", [1, 2, 5, BLOCK, BLOCK + 3, 4 * BLOCK])
@pytest.mark.parametrize("window", WINDOWS)
def test_no_step_of_a_long_sequence_holds_more_than_the_most_blocks(window: Window, max_chunk: int) -> None:
    """A step of any size at any place; a sliding window reaches the limit somewhere."""
    layout = BlockLayout(BLOCK, (window,), max_chunk)
    held = max(
        -(-(begin + n) // BLOCK) - first_needed(window, begin)
        for begin in range(10 * BLOCK * window.size)
        for n in range(1, max_chunk + 1)
    )
    most = layout.most_blocks(window, 1 << 20)
    assert held <= most <= held + window.chunked
    assert most * BLOCK <= window.size + max_chunk + 2 * BLOCK - 2, "a window, a step and a block"


@pytest.mark.parametrize("window", [FULL, *WINDOWS])
def test_a_short_sequence_holds_no_more_than_its_own_blocks(window: Window) -> None:
    layout = BlockLayout(BLOCK, (window, FULL), 2 * BLOCK)
    for n_tokens in range(4 * BLOCK):
        n_blocks = -(-n_tokens // BLOCK)
        assert layout.blocks_for(n_tokens) == n_blocks
        assert layout.most_blocks(FULL, n_blocks) == n_blocks
        assert layout.peak_blocks(n_tokens) == n_blocks + layout.most_blocks(window, n_blocks)
        assert layout.peak_blocks(n_tokens) <= 2 * n_blocks


@settings(deadline=None)
@given(layouts, st.integers(1, 12 * BLOCK), st.data())
def test_a_sequence_alone_never_allocates_more_than_is_reserved(
    layout: BlockLayout, n_tokens: int, data: st.DataObject
) -> None:
    """What its windows free is reserved for it again; what it holds and reserves is never above the peak."""
    goal, n_computed, n_blocks, firsts = layout.blocks_for(n_tokens), 0, 0, [0] * layout.n_groups
    reserved = layout.wanted(firsts, 0, goal)
    peak = layout.peak_blocks(n_tokens)
    assert reserved == peak
    while n_computed < n_tokens:
        n_computed += data.draw(st.integers(1, min(layout.max_chunk, n_tokens - n_computed)))
        grown = max(n_blocks, layout.blocks_for(n_computed))
        reserved -= (grown - n_blocks) * layout.n_groups
        n_blocks = grown
        assert reserved >= 0
        held = sum(n_blocks - first for first in firsts)
        assert held + reserved <= peak
        after = list(layout.first_blocks(n_computed))
        reserved = min(layout.wanted(after, n_blocks, goal), reserved + sum(after) - sum(firsts))
        firsts = after
    assert reserved == 0, "nothing is reserved beyond the goal"


def test_a_table_in_several_groups() -> None:
    table = BlockTable([[5, 6, 7], [8, 9]], 20, None, firsts=[0, 1])
    assert (table.n_blocks, table.at(2)) == (3, [7, 9])
    assert table.blocks == [5, 6, 8, 7, 9], "position by position"
    assert [table.n_missing(n) for n in (3, 4, 6)] == [0, 2, 6]
    table.extend(iter([1, 2, 3]), 4)
    assert (table.groups, table.n_blocks, table.version, table.n_slides) == (
        [[5, 6, 7, 1], [8, 9, 2]],
        4,
        0,
        0,
    )
    assert table.slide(1, 3) == [8, 9]
    assert (table.groups[1], table.firsts, table.n_slides, table.version) == ([2], [0, 3], 1, 0)
    table.replace(1, 3, 4)
    assert (table.groups[1], table.version) == ([4], 1)
    assert table.truncate(2) == [7, 1, 4]
    assert (table.groups, table.n_blocks) == ([[5, 6], []], 2)
    assert [table.n_missing(n) for n in (2, 3, 4)] == [0, 1, 3], "the window has left the blocks before"


@given(
    st.lists(st.builds(Window, st.integers(0, 70), st.booleans()), min_size=1, max_size=3).filter(
        lambda windows: any(window.size for window in windows)
    ),
    st.integers(1, 200),
)
def test_a_table_knows_when_a_window_leaves_a_block(windows: list[Window], n_tokens: int) -> None:
    layout = BlockLayout(8, tuple(windows))
    firsts = layout.first_blocks(n_tokens)
    table = BlockTable([[0]] * len(windows), n_tokens, None, firsts=firsts)
    later = next(n for n in range(n_tokens, 600) if layout.first_blocks(n) != firsts)
    assert table.next_slide(layout) == later
