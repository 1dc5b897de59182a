"""Allocation plan of a step, which counts blocks and changes nothing, and the rules for its changes.

A sequence starts only if the blocks of the tokens that it starts with can be reserved. It allocates them one
by one as it grows. Beyond its reserved blocks it grows while blocks are available; otherwise it may be freed.

The plan counts the references of each block that it touches, as they are when the plan allocates blocks. So
whether a block is free under the plan does not depend on the order of the calls.

A table grows in all groups of layers at once. A group with a window frees blocks as it advances, so fewer
blocks are reserved for it than it allocates in all. If other sequences hold the blocks that it frees, it may
have to wait for more when it grows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, ValuesView
from copy import copy
from typing import NamedTuple

from pyvelo.errors import InternalError
from pyvelo.kv.pool import BlockPool, BlockTable, Never, NotNow, Start, SwappedBlocks
from pyvelo.kv.prefix import BlockHashes, BlockLayout, Match, PrefixIndex, no_match

__all__ = [
    "MIN_PARTIAL_HIT",
    "AllocationPlan",
    "Change",
    "ManagerState",
    "check_changes",
]

MIN_PARTIAL_HIT = 4
"""Least tokens of a partial hit that is copied."""


class Change(NamedTuple):
    """Change of one table in a plan. `n_blocks`, `reserved` and `goal` are the table's afterwards."""

    table: BlockTable
    n_blocks: int
    reserved: int
    goal: int = 0
    match: Match | None = None  # the prefix hit of a new table
    swaps_in: SwappedBlocks | None = None  # the new table is swapped in
    resumes: bool = False
    copies: tuple[int, ...] = ()  # groups in which a copy replaces the block of its next token
    frees: bool = False  # the table is freed
    swaps_out: SwappedBlocks | None = None  # the freed table is swapped out

    @property
    def n_allocated(self) -> int:
        """Blocks that the plan allocates for the table."""
        return 0 if self.frees else self.table.n_missing(self.n_blocks) + len(self.copies)


class AllocationPlan:
    """Blocks that one step allocates, reserves and frees. Invalid once anything else was committed or freed.

    The methods may be called in any order. A table that the plan frees has no other change in it.
    """

    __slots__ = (
        *("_changes", "_index", "_layout", "_pool", "_references", "_size", "_sources"),
        *("available", "n_swap_free", "version"),
    )

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex | None,
        reserved: int,
        n_swap_free: int,
        layout: BlockLayout,
        version: int,
    ) -> None:
        self._pool = pool
        self._index = index
        self._layout = layout
        self._size = layout.block_size
        self._references: dict[int, int] = {}  # by block, added before blocks are allocated
        self._sources: dict[int, int] = {}  # of these, the sources of copies, released afterwards
        self._changes: dict[int, Change] = {}  # by the table's id
        self.available = pool.n_free - reserved
        self.n_swap_free = n_swap_free  # free blocks of host memory
        self.version = version

    @property
    def changes(self) -> ValuesView[Change]:
        """One change for each table of the plan, in the order of the first call."""
        return self._changes.values()

    @property
    def n_groups(self) -> int:
        """Groups of layers, with a table each."""
        return self._layout.n_groups

    def names(self, table: BlockTable) -> bool:
        """Return whether the plan has a change of the table."""
        return id(table) in self._changes

    def copy(self) -> AllocationPlan:
        """Return a copy of the plan, to try further changes."""
        twin = copy(self)
        twin._references, twin._sources = self._references.copy(), self._sources.copy()
        twin._changes = self._changes.copy()
        return twin

    def start(
        self,
        n_tokens: int,
        hashes: BlockHashes | None = None,
        spare: int = 0,
        swapped: SwappedBlocks | None = None,
        max_cached: int | None = None,
    ) -> Start | NotNow | Never:
        """Reserve the blocks of `n_tokens` tokens for a new sequence, less the blocks of its prefix hit.

        Args:
            n_tokens: tokens of the sequence.
            hashes: of the tokens that it starts with, None to share nothing. The last token is always
                computed, for its logits.
            spare: sequences for whose growth by one block in each group blocks must stay available.
            swapped: its blocks in host memory, swapped in except for whole blocks of the prefix hit.
            max_cached: limit of the prefix hit in tokens.
        """
        layout, peak = self._layout, self._layout.peak_blocks(n_tokens)
        if peak > self._pool.n_blocks:
            return Never(peak, self._pool.n_blocks)
        match = self._match(hashes, max_cached)
        if swapped is not None:
            self._check_swapped(swapped)
            match = self._match_of_swapped(match, swapped)
        goal, room = layout.blocks_for(n_tokens), self.available - spare * layout.n_groups
        fresh = layout.wanted(match.firsts, match.n_blocks, goal)
        hits = match.blocks
        n_revived = sum(map(self._is_free, hits))
        if fresh + n_revived > room and match.snapshot:
            nothing = no_match(layout.n_groups)
            n_all = layout.wanted(nothing.firsts, 0, goal)
            if n_all < fresh + n_revived:  # the snapshot needs no room if all tokens are computed
                match, fresh, hits, n_revived = nothing, n_all, [], 0
        if fresh + n_revived > room:
            return NotNow(fresh + n_revived, room)
        if match.partial is not None:
            n_sources = sum(map(self._is_free, match.partial.blocks))
            if fresh + n_revived + n_sources > room:
                match = match._replace(partial=None)  # no block is left to copy it to: compute these tokens
        self.available -= fresh
        self._hold(hits)
        if match.partial is not None:
            self._hold(match.partial.blocks)
        n_cached = swapped.n_tokens if swapped is not None else match.n_tokens(layout.block_size)
        table = BlockTable(
            match.groups,
            n_cached,
            hashes if self._index is not None else None,
            firsts=match.firsts,
            n_blocks=match.n_blocks,
            reserved=fresh,
            goal=goal,
        )
        table.prefix, table.branch = match.prefix, match.n_known * layout.block_size
        table.snapshot = match.snapshot
        table.mark = hashes.n_tokens if hashes is not None else n_tokens
        self._changes[id(table)] = Change(table, match.n_blocks, fresh, goal, match, swapped)
        return Start(table)

    def _match_of_swapped(self, match: Match, swapped: SwappedBlocks) -> Match:
        """Return the part of a prefix hit that replaces swapped blocks: whole blocks of an only group.

        A group with a window has no hit: the blocks of the hit are the blocks of another place. So is a
        snapshot.
        """
        if self._layout.n_groups > 1 or self._layout.is_windowed or self._layout.state_blocks:
            return no_match(self._layout.n_groups)._replace(firsts=swapped.firsts)
        n_blocks, prefix = min(match.n_blocks, swapped.n_tokens // self._layout.block_size), match.prefix
        for _ in range(match.n_blocks - n_blocks):
            prefix = prefix.parent if prefix is not None else None
        return Match(n_blocks, (match.groups[0][:n_blocks],), (0,), None, prefix if n_blocks else None)

    def resume(self, table: BlockTable, n_tokens: int, spare: int = 0) -> Start | NotNow:
        """Reserve the blocks that `n_tokens` tokens need beyond the blocks of a live table.

        `spare` sequences may grow by one block in each group: their blocks must stay available.
        """
        change, layout = self._change(table), self._layout
        goal = max(change.goal, layout.blocks_for(n_tokens))
        wanted = layout.wanted(table.firsts, change.n_blocks, goal)
        missing = max(0, wanted - change.reserved)
        needed = missing + (0 if change.copies else len(self._written_to_others(table)))
        room = self.available - spare * layout.n_groups
        if needed > room:
            return NotNow(needed, room)
        self.available -= missing
        reserved = change.reserved + missing
        self._changes[id(table)] = change._replace(reserved=reserved, goal=goal, resumes=True)
        return Start(table)

    def grow(self, table: BlockTable, n_tokens: int) -> bool:
        """Grow the table to `n_tokens` tokens. Return False if no blocks are available for them.

        A shared or cached block is replaced by a copy before the table writes to it.
        """
        size = self._size
        index = table.n_tokens // size
        is_own = index >= table.n_shared and index >= table.n_published
        writes = [] if is_own else self._written_to_others(table)
        if not writes and n_tokens <= table.n_blocks * size and id(table) not in self._changes:
            return True
        change = self._change(table)
        n_blocks = max(change.n_blocks, -(-n_tokens // size))
        missing = table.n_missing(n_blocks) - table.n_missing(change.n_blocks)
        copied = [] if change.copies else writes
        from_reserved = min(missing, change.reserved)
        if missing - from_reserved + len(copied) > self.available:
            return False
        if missing or copied:
            self.available -= missing - from_reserved + len(copied)
            self._changes[id(table)] = change._replace(
                n_blocks=n_blocks,
                reserved=change.reserved - from_reserved,
                copies=change.copies or tuple(copied),
            )
        if copied:
            written = table.at(index)
            for group in copied:  # the copy keeps the table's reference, and drops it after the allocation
                self._sources[written[group]] = self._sources.get(written[group], 0) + 1
        return True

    def free(self, table: BlockTable, swapped: SwappedBlocks | None = None) -> None:
        """Free the table's blocks, held and reserved. The plan must not change the table otherwise."""
        if id(table) in self._changes:
            raise InternalError("a plan that uses a block table cannot free it")
        self._release(table.held)
        self.available += table.reserved
        self._changes[id(table)] = Change(table, 0, 0, frees=True, swaps_out=swapped)

    def keep(self, table: BlockTable) -> None:
        """Undo `free`, after which the plan has not changed otherwise."""
        del self._changes[id(table)]
        self._hold(table.held)
        self.available -= table.reserved

    def swap_out(self, table: BlockTable) -> SwappedBlocks | None:
        """Free the table and swap its blocks out. Return None, and change nothing, if host memory is full."""
        swapped = SwappedBlocks(table.n_tokens, table.firsts, self._layout.state_blocks)
        n_blocks = n_swapped(swapped, self._layout.block_size)
        if n_blocks > self.n_swap_free:
            return None
        self.free(table, swapped)
        self.n_swap_free -= n_blocks
        return swapped

    def _change(self, table: BlockTable) -> Change:
        change = self._changes.get(id(table))
        if change is None:
            return Change(table, table.n_blocks, table.reserved, table.goal)
        if change.frees:
            raise InternalError("a block table that a plan frees can neither grow nor resume in it")
        return change

    def _check_swapped(self, swapped: SwappedBlocks) -> None:
        if any(swapped in (change.swaps_in, change.swaps_out) for change in self.changes):
            raise InternalError("a sequence is swapped in once, and in a later plan than it was swapped out")

    def _written_to_others(self, table: BlockTable) -> list[int]:
        """Return the groups in which the table's next token would go to a shared or cached block."""
        index = table.n_tokens // self._layout.block_size
        if index >= table.n_blocks:
            return []
        readers, changed = self._pool.readers, self._references  # added only to cached blocks
        return [
            group
            for group, block in enumerate(table.at(index))
            if readers(block) > 1 and readers(block) + changed.get(block, 0) - self._sources.get(block, 0) > 1
        ]

    # ---- blocks that are free under the plan ----

    def _is_free(self, block: int) -> bool:
        return self._pool.references(block) + self._references.get(block, 0) == 0

    def _hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block."""
        planned = self._references
        for block in blocks:
            self.available -= self._is_free(block)
            planned[block] = planned.get(block, 0) + 1

    def _release(self, blocks: Iterable[int]) -> None:
        """Drop a reference of each block."""
        planned = self._references
        for block in blocks:
            planned[block] = planned.get(block, 0) - 1
            self.available += self._is_free(block)

    def _match(self, hashes: BlockHashes | None, most: int | None) -> Match:
        if self._index is None or hashes is None:
            return no_match(self._layout.n_groups)
        last = hashes.n_tokens - 1
        match = self._index.match(hashes, last if most is None else min(most, last))
        if match.partial is not None and match.partial.n_tokens < MIN_PARTIAL_HIT:
            return match._replace(partial=None)
        return match


def n_swapped(swapped: SwappedBlocks, block_size: int) -> int:
    """Return the blocks that a sequence takes in host memory."""
    n_blocks = -(-swapped.n_tokens // block_size)
    return sum(n_blocks - first for first in swapped.firsts) + swapped.n_state


class ManagerState(NamedTuple):
    """State that changes are checked against: live tables and swapped sequences, by their ids."""

    tables: Mapping[int, BlockTable]
    swapped: Mapping[int, SwappedBlocks]
    reserved: int
    n_swap_free: int


def check_changes(changes: Collection[Change], pool: BlockPool, state: ManagerState, size: int) -> None:
    """Raise InternalError if the changes of a plan cannot all be made."""
    for change in changes:
        _check_table(change, state, size)
    if len({id(change.table) for change in changes}) < len(changes):
        raise InternalError("a plan changes a block table twice")
    swapped_in = [id(change.swaps_in) for change in changes if change.swaps_in is not None]
    if len(set(swapped_in)) < len(swapped_in):
        raise InternalError("two sequences are swapped in from the same blocks of host memory")
    _check_blocks(changes, pool, state.reserved)
    swapped_out = [change.swaps_out for change in changes if change.swaps_out is not None]
    n_out = sum(n_swapped(swapped, size) for swapped in swapped_out)
    if n_out > state.n_swap_free:
        raise InternalError(f"a plan allocates {n_out} swap blocks, {state.n_swap_free} are free")


def _check_table(change: Change, state: ManagerState, size: int) -> None:
    table, match = change.table, change.match
    if match is None:
        if state.tables.get(id(table)) is not table:
            raise InternalError("a table that is freed, resumes or grows must be a live one")
    elif id(table) in state.tables or (*map(tuple, table.groups), table.snapshot) != (
        *match.groups,
        match.snapshot,
    ):
        raise InternalError("a table that starts must be a new one with the blocks of its prefix hit")
    if change.frees:
        if match is not None or change.resumes or change.copies or change.n_blocks or change.reserved:
            raise InternalError("a table that is freed can have no other change")
    elif change.n_blocks < table.n_blocks or change.reserved < 0:
        raise InternalError(f"a plan gives a table {change.n_blocks} blocks and reserves {change.reserved}")
    swapped = change.swaps_out
    as_table = swapped is None or (swapped.n_tokens, swapped.firsts) == (table.n_tokens, tuple(table.firsts))
    if swapped is not None and (not change.frees or swapped.blocks or not as_table):
        raise InternalError("a sequence is swapped out with all its tokens, and when its table is freed")
    if change.swaps_in is not None and (match is None or id(change.swaps_in) not in state.swapped):
        raise InternalError("a sequence that is swapped in is not in host memory")
    if match is not None and change.n_blocks * size < table.n_tokens:
        raise InternalError("a sequence that starts must get blocks for all its tokens")
    if change.copies and table.n_tokens // size >= table.n_blocks:
        raise InternalError("a plan copies a block that is not in its table")


def _check_blocks(changes: Collection[Change], pool: BlockPool, reserved: int) -> None:
    """Raise InternalError unless enough blocks are free, and every hit and reference exists."""
    references: Counter[int] = Counter()
    n_allocated, n_free = 0, pool.n_free
    for change in changes:
        match, table = change.match, change.table
        if match is not None:
            hits = match.blocks if match.partial is None else [*match.blocks, *match.partial.blocks]
            if not all(0 <= block < pool.n_blocks and pool.readers(block) for block in hits):
                raise InternalError("a sequence starts with a block that is neither used nor cached")
            references.update(hits)
        elif change.frees:
            references.subtract(table.held)
        n_allocated += change.n_allocated
        reserved += change.reserved - (table.reserved if match is None else 0)
    for block, n in references.items():
        before = pool.references(block)
        if before + n < 0:
            raise InternalError(f"a plan drops {-n} references to block {block}, which has {before}")
        n_free += (before + n == 0) - (before == 0)
    if n_allocated + reserved > n_free:
        raise InternalError(
            f"a plan allocates {n_allocated} blocks and reserves {reserved}, but {n_free} are free"
        )
