"""What a step wants of the pool: a plan that counts blocks and changes nothing.

A sequence starts only when the blocks of the tokens that it starts with can be reserved. It takes them one by
one as it grows. Beyond its reserved blocks it grows while blocks are available, or else may be dropped.

The plan counts the references of each block that it touches, as they are when it takes blocks. So a block is
free under the plan in whatever order the plan was made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, ValuesView
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from pyvelo.errors import InternalError
from pyvelo.kv.pool import BlockPool, BlockTable, SwappedBlocks
from pyvelo.kv.prefix import BlockHashes, Match, PrefixIndex

__all__ = [
    "MIN_PARTIAL_HIT",
    "AllocationPlan",
    "Change",
    "Holders",
    "Never",
    "NotNow",
    "Start",
    "check_changes",
]

MIN_PARTIAL_HIT = 4
"""Tokens for which copying a block is worth its while."""


@dataclass(frozen=True)
class Start:
    """The sequence may start, with this table; the first `table.n_cached` tokens need not be computed."""

    table: BlockTable


@dataclass(frozen=True)
class NotNow:
    """The sequence has to wait: of `needed` blocks only `available` are not reserved for others."""

    needed: int
    available: int


@dataclass(frozen=True)
class Never:
    """The sequence could not fit into an empty pool."""

    needed: int
    total: int


class Change(NamedTuple):
    """What a plan does to one table. `n_blocks` and `reserved` are those that it has afterwards."""

    table: BlockTable
    n_blocks: int
    reserved: int
    match: Match | None = None  # it starts with these hits
    swaps_in: SwappedBlocks | None = None  # it starts from host memory
    resumes: bool = False
    copies: bool = False  # a copy replaces the block of its next token
    frees: bool = False
    swaps_out: SwappedBlocks | None = None  # it leaves for host memory

    @property
    def n_allocated(self) -> int:
        """Blocks that the table takes from the pool."""
        return 0 if self.frees else self.n_blocks - len(self.table.blocks) + self.copies


class AllocationPlan:
    """What one step wants of the pool; void once anything else was committed or freed.

    Its methods may be called in any order. A table that leaves takes no other part in the allocation.
    """

    __slots__ = (
        "_changes",
        "_index",
        "_pool",
        "_references",
        "_size",
        "_sources",
        "available",
        "n_swap_free",
        "version",
    )

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex | None,
        reserved: int,
        n_swap_free: int,
        size: int,
        version: int,
    ) -> None:
        self._pool = pool
        self._index = index
        self._size = size
        self._references: dict[int, int] = {}  # by block, those added when the allocation takes blocks
        self._sources: dict[int, int] = {}  # of all those, the ones that only copies hold, and then give up
        self._changes: dict[int, Change] = {}  # by the table's id
        self.available = pool.n_free - reserved
        self.n_swap_free = n_swap_free  # free blocks of host memory
        self.version = version

    @property
    def changes(self) -> ValuesView[Change]:
        """One change for each table that takes part, in the order in which they were first named."""
        return self._changes.values()

    def names(self, table: BlockTable) -> bool:
        """Return whether the table takes part in the allocation, or is dropped in it."""
        return id(table) in self._changes

    def copy(self) -> AllocationPlan:
        """Return an allocation of the same parts, to try more of them."""
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
        """Reserve the blocks of `n_tokens` tokens for a new sequence, less those of its prefix hit.

        `hashes` is of the tokens that it starts with; the last of them is always computed, for its logits.
        Without it nothing is shared. `spare` blocks must be left for others. What is `swapped` comes back,
        but for whole blocks that are there. Of what is there `max_cached` tokens are taken at most.
        """
        needed = -(-n_tokens // self._size)
        if needed > self._pool.n_blocks:
            return Never(needed, self._pool.n_blocks)
        match = self._match(hashes, max_cached)
        if swapped is not None:
            self._check_swapped(swapped)
            match = Match(match.blocks[: swapped.n_tokens // self._size], None)
        fresh, room = needed - len(match.blocks), self.available - spare
        n_revived = sum(map(self._is_free, match.blocks))
        if fresh + n_revived > room:
            return NotNow(fresh + n_revived, room)
        if match.partial is not None and fresh + n_revived + self._is_free(match.partial.block) > room:
            match = Match(match.blocks, None)  # there is no room to copy from it: compute it
        self.available -= fresh
        self._hold(match.blocks)
        if match.partial is not None:
            self._hold((match.partial.block,))
            self._copy_from(match.partial.block)
        n_cached = swapped.n_tokens if swapped is not None else match.n_tokens(self._size)
        table = BlockTable(match.blocks, n_cached, fresh, hashes if self._index is not None else None)
        self._changes[id(table)] = Change(table, len(match.blocks), fresh, match, swapped)
        return Start(table)

    def resume(self, table: BlockTable, n_tokens: int, spare: int = 0) -> Start | NotNow:
        """Reserve the blocks that `n_tokens` tokens need beyond those that the table has.

        `spare` blocks must be left for others.
        """
        change = self._change(table)
        missing = max(0, -(-n_tokens // self._size) - change.n_blocks - change.reserved)
        needed = missing + (self._writes_to_others(table) and not change.copies)
        if needed > self.available - spare:
            return NotNow(needed, self.available - spare)
        self.available -= missing
        reserved = change.reserved + missing
        self._changes[id(table)] = change._replace(reserved=reserved, resumes=True)
        return Start(table)

    def grow(self, table: BlockTable, n_tokens: int) -> bool:
        """Lets the table hold `n_tokens` tokens, more than it has.

        A block that others hold too, or may hit, is replaced by a copy before it is written to. False where
        there are no blocks for it.
        """
        in_place = not self._writes_to_others(table)
        if in_place and n_tokens <= len(table.blocks) * self._size and id(table) not in self._changes:
            return True
        change = self._change(table)
        missing = max(0, -(-n_tokens // self._size) - change.n_blocks)
        copies = not in_place and not change.copies
        from_reserved = min(missing, change.reserved)
        if missing - from_reserved + copies > self.available:
            return False
        if missing or copies:
            self.available -= missing - from_reserved + copies
            self._changes[id(table)] = change._replace(
                n_blocks=change.n_blocks + missing,
                reserved=change.reserved - from_reserved,
                copies=change.copies or copies,
            )
        if copies:
            self._copy_from(table.blocks[table.n_tokens // self._size])
        return True

    def free(self, table: BlockTable) -> None:
        """Free the table's blocks, held and reserved. The plan must not use it otherwise."""
        self._free(table, None)

    def swap_out(self, table: BlockTable) -> SwappedBlocks | None:
        """As `drop`, but what the table holds goes to host memory; None where that has no room."""
        n_blocks = -(-table.n_tokens // self._size)
        if n_blocks > self.n_swap_free:
            return None
        swapped = SwappedBlocks(table.n_tokens)
        self._free(table, swapped)
        self.n_swap_free -= n_blocks
        return swapped

    def _free(self, table: BlockTable, swapped: SwappedBlocks | None) -> None:
        if id(table) in self._changes:
            raise InternalError("a block table that takes part in an allocation cannot be dropped in it")
        self._let_go(table.blocks)
        self.available += table.reserved
        self._changes[id(table)] = Change(table, 0, 0, frees=True, swaps_out=swapped)

    def _change(self, table: BlockTable) -> Change:
        change = self._changes.get(id(table))
        if change is None:
            return Change(table, len(table.blocks), table.reserved)
        if change.frees:
            raise InternalError(
                "a block table that is dropped in an allocation can neither grow nor resume in it"
            )
        return change

    def _check_swapped(self, swapped: SwappedBlocks) -> None:
        if any(swapped in (change.swaps_in, change.swaps_out) for change in self.changes):
            raise InternalError("a swapped sequence comes back once, and in a later allocation than it left")

    def _writes_to_others(self, table: BlockTable) -> bool:
        """Whether the table's next token would go to a block that others hold too, or may hit."""
        index = table.n_tokens // self._size
        if index >= len(table.blocks):
            return False
        block = table.blocks[index]
        readers = self._pool.readers(block)  # the plan adds holders only to a block that others may hit
        return readers > 1 and readers + self._references.get(block, 0) - self._sources.get(block, 0) > 1

    # ---- which blocks are free under the plan ----

    def _is_free(self, block: int) -> bool:
        return self._pool.references(block) + self._references.get(block, 0) == 0

    def _hold(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block."""
        planned = self._references
        for block in blocks:
            self.available -= self._is_free(block)
            planned[block] = planned.get(block, 0) + 1

    def _let_go(self, blocks: Iterable[int]) -> None:
        """Drops a reference of each block."""
        planned = self._references
        for block in blocks:
            planned[block] = planned.get(block, 0) - 1
            self.available += self._is_free(block)

    def _copy_from(self, block: int) -> None:
        """Gives a reference of the block to a copy, which drops it once blocks were taken."""
        self._sources[block] = self._sources.get(block, 0) + 1

    def _match(self, hashes: BlockHashes | None, most: int | None) -> Match:
        if self._index is None or hashes is None:
            return Match((), None)
        last = hashes.n_tokens - 1
        match = self._index.match(hashes, last if most is None else min(most, last))
        partial = match.partial
        return match if partial is None or partial.n_tokens >= MIN_PARTIAL_HIT else Match(match.blocks, None)


class Holders(NamedTuple):
    """What refers to blocks: live tables and sequences in host memory, both by their ids."""

    tables: Mapping[int, BlockTable]
    swapped: Mapping[int, SwappedBlocks]
    reserved: int
    n_swap_free: int


def check_changes(changes: Collection[Change], pool: BlockPool, holders: Holders, size: int) -> None:
    """Raise InternalError if the changes of a plan cannot all be made."""
    for change in changes:
        _check_table(change, holders, size)
    if len({id(change.table) for change in changes}) < len(changes):
        raise InternalError("a plan changes a block table twice")
    swapped_in = [id(change.swaps_in) for change in changes if change.swaps_in is not None]
    if len(set(swapped_in)) < len(swapped_in):
        raise InternalError("two sequences come back from the same blocks of host memory")
    _check_blocks(changes, pool, holders.reserved)
    swapped_out = [change.swaps_out for change in changes if change.swaps_out is not None]
    n_swapped = sum(-(-swapped.n_tokens // size) for swapped in swapped_out)
    if n_swapped > holders.n_swap_free:
        raise InternalError(f"a plan allocates {n_swapped} swap blocks, {holders.n_swap_free} are free")


def _check_table(change: Change, holders: Holders, size: int) -> None:
    table, match = change.table, change.match
    if match is None:
        if holders.tables.get(id(table)) is not table:
            raise InternalError("a table that is dropped, resumes or grows must be a live one")
    elif id(table) in holders.tables or tuple(table.blocks) != match.blocks:
        raise InternalError("a table that starts must be a new one of the blocks that are there")
    if change.frees:
        if match is not None or change.resumes or change.copies or change.n_blocks or change.reserved:
            raise InternalError("a table that is dropped can take no other part in the plan")
    elif change.n_blocks < len(table.blocks) or change.reserved < 0:
        raise InternalError(f"a plan leaves a table {change.n_blocks} blocks and reserves {change.reserved}")
    swapped = change.swaps_out
    if swapped is not None and (not change.frees or swapped.blocks or swapped.n_tokens != table.n_tokens):
        raise InternalError("a sequence goes to host memory as it is, and when its table is dropped")
    if change.swaps_in is not None and (match is None or id(change.swaps_in) not in holders.swapped):
        raise InternalError("a sequence that comes back is not in host memory")
    if match is not None and change.n_blocks * size < table.n_tokens:
        raise InternalError("a sequence that starts with a block to fill must grow into it")
    if change.copies and table.n_tokens // size >= len(table.blocks):
        raise InternalError("a plan copies a block that its table has not")


def _check_blocks(changes: Collection[Change], pool: BlockPool, reserved: int) -> None:
    """Count the references that the plan adds and drops, and the blocks that this leaves to take."""
    references: Counter[int] = Counter()
    n_allocated, n_free = 0, pool.n_free
    for change in changes:
        match, table = change.match, change.table
        if match is not None:
            hits = match.blocks if match.partial is None else (*match.blocks, match.partial.block)
            if not all(0 <= block < pool.n_blocks and pool.readers(block) for block in hits):
                raise InternalError("a sequence starts with a block that holds nothing")
            references.update(hits)
        elif change.frees:
            references.subtract(table.blocks)
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
