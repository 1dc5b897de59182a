"""What a step wants of the pool: a plan that counts blocks and changes nothing.

A sequence starts only when the blocks of what it brings along can be promised; they are taken one by one, as
it grows into them. Beyond its promise it grows while there are blocks, and may have to be dropped when there
are none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pyvelo.kv.pool import BlockPool
from pyvelo.kv.prefix import Chain, Match, PrefixIndex

__all__ = ["SHORTEST_HEAD", "BlockTable", "Draft", "Never", "NotNow", "Start", "Swapped"]

SHORTEST_HEAD = 4
"""Tokens for which copying a block is worth its while."""


class Swapped:
    """A sequence in host memory; `blocks` are filled in when the draft is committed."""

    __slots__ = ("blocks", "n_tokens")

    def __init__(self, n_tokens: int) -> None:
        self.blocks: list[int] = []
        self.n_tokens = n_tokens


class BlockTable:
    """The blocks of one sequence in position order: token p lies in block `blocks[p // block_size]`.

    Change `blocks` by the methods alone: they keep `version`, by which a copy of the table knows that more
    was done to it than blocks added at its end.
    """

    __slots__ = ("blocks", "chain", "n_cached", "n_published", "n_tokens", "promised", "version")

    def __init__(self, blocks: Sequence[int], n_tokens: int, promised: int, chain: Chain | None) -> None:
        self.blocks = list(blocks)
        self.n_tokens = n_tokens  # whose K and V are there
        self.n_cached = n_tokens  # that were there when it started
        self.n_published = len(blocks)  # of its blocks, those whose tokens are published
        self.version = 0  # how often a block was replaced, or the table became shorter
        self.promised = promised  # blocks that it may still take
        self.chain = chain

    def extend(self, blocks: Iterable[int]) -> None:
        """Add blocks at the end."""
        self.blocks.extend(blocks)

    def replace(self, index: int, block: int) -> None:
        """Put another block in the place of one."""
        self.blocks[index] = block
        self.version += 1

    def truncate(self, n_blocks: int) -> list[int]:
        """Keep the first `n_blocks` blocks. Return the others."""
        cut = self.blocks[n_blocks:]
        del self.blocks[n_blocks:]
        self.version += 1
        return cut


@dataclass(frozen=True)
class Start:
    """The sequence may start, with this table; the first `table.n_cached` tokens need not be computed."""

    table: BlockTable


@dataclass(frozen=True)
class NotNow:
    """The sequence has to wait: of `needed` blocks only `available` are not promised to others."""

    needed: int
    available: int


@dataclass(frozen=True)
class Never:
    """The sequence could not fit into an empty pool."""

    needed: int
    total: int


class _Admission(NamedTuple):
    table: BlockTable
    match: Match
    swapped: Swapped | None


class _Promise(NamedTuple):
    table: BlockTable
    n_blocks: int


class _Growth(NamedTuple):
    table: BlockTable
    n_blocks: int
    n_promised: int  # of those
    replaces: bool  # the first of them takes the place of one that others hold too


class Draft:
    """What one step wants of the pool; void once anything else was committed or freed."""

    __slots__ = (
        "_index",
        "_let_gone",
        "_pool",
        "_resumed",
        "_size",
        "_spared",
        "admissions",
        "available",
        "dropped",
        "grown",
        "resumed",
        "swappable",
        "swapped",
        "version",
    )

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex | None,
        promised: int,
        swappable: int,
        size: int,
        version: int,
    ) -> None:
        self._pool = pool
        self._index = index
        self._size = size
        self._spared: set[int] = set()  # free blocks that this draft must not take
        self._let_gone: dict[int, int] = {}  # references that this draft gives up
        self._resumed: dict[int, int] = {}  # blocks that it promises to live tables
        self.available = pool.n_free - promised
        self.swappable = swappable  # free blocks of host memory
        self.version = version
        self.admissions: list[_Admission] = []
        self.resumed: list[_Promise] = []
        self.grown: list[_Growth] = []
        self.dropped: list[BlockTable] = []
        self.swapped: list[tuple[BlockTable, Swapped]] = []

    def start(
        self,
        n_tokens: int,
        chain: Chain | None = None,
        spare: int = 0,
        swapped: Swapped | None = None,
        most_cached: int | None = None,
    ) -> Start | NotNow | Never:
        """Promises a new sequence the blocks of `n_tokens` tokens, less what is there of its prefix.

        `chain` is of the tokens that it starts with; the last of them is always computed, for its logits.
        Without it nothing is shared. `spare` blocks must be left for others. What is `swapped` comes back,
        but for whole blocks that are there. Of what is there `most_cached` tokens are taken at most.
        """
        needed = -(-n_tokens // self._size)
        if needed > self._pool.n_blocks:
            return Never(needed, self._pool.n_blocks)
        match = self._match(chain, most_cached)
        if swapped is not None:
            match = Match(match.blocks[: swapped.n_tokens // self._size], None)
        fresh, spared = needed - len(match.blocks), self._free_ones(match.blocks)
        if fresh + len(spared) > self.available - spare:
            return NotNow(fresh + len(spared), self.available - spare)
        if match.head is not None:
            source = self._free_ones((match.head.block,)) - spared
            if fresh + len(spared) + len(source) > self.available - spare:
                match = Match(match.blocks, None)  # there is no room to copy from it: compute it
            else:
                spared |= source
        self.available -= fresh + len(spared)
        self._spared |= spared
        n_cached = swapped.n_tokens if swapped is not None else match.n_tokens(self._size)
        table = BlockTable(match.blocks, n_cached, fresh, chain if self._index is not None else None)
        self.admissions.append(_Admission(table, match, swapped))
        return Start(table)

    def resume(self, table: BlockTable, n_tokens: int, spare: int = 0) -> Start | NotNow:
        """Promises a live table the blocks that `n_tokens` tokens need beyond those that it has.

        `spare` blocks must be left for others.
        """
        missing = max(0, -(-n_tokens // self._size) - len(table.blocks) - table.promised)
        needed = missing + self._writes_to_others(table)
        if needed > self.available - spare:
            return NotNow(needed, self.available - spare)
        self.available -= missing
        self.resumed.append(_Promise(table, missing))
        self._resumed[id(table)] = missing
        return Start(table)

    def grow(self, table: BlockTable, n_tokens: int) -> bool:
        """Lets the table hold `n_tokens` tokens, more than it has; at most once a draft.

        A block that others hold too, or may hit, is replaced by a copy before it is written to. False where
        there are no blocks for it.
        """
        missing = -(-n_tokens // self._size) - len(table.blocks)
        replaced = self._writes_to_others(table)
        if missing > 0 or replaced:
            beyond = max(0, missing - table.promised - self._resumed.get(id(table), 0)) + replaced
            if beyond > self.available:
                return False
            self.available -= beyond
            self.grown.append(_Growth(table, missing + replaced, missing + replaced - beyond, replaced))
            if replaced:
                self._let_go(table.blocks[table.n_tokens // self._size])
        return True

    def would_free(self, tables: Iterable[BlockTable]) -> int:
        """Blocks that would be there if all these were dropped."""
        tables = list(tables)
        held = Counter(block for table in tables for block in table.blocks)
        gone, references = self._let_gone, self._pool.references
        last = sum(references(block) == n + gone.get(block, 0) for block, n in held.items())
        return last + sum(table.promised for table in tables)

    def drop(self, table: BlockTable) -> None:
        """Gives the table's blocks and promises back; it must not have grown in this draft."""
        for block in table.blocks:
            self.available += self._let_go(block)
        self.available += table.promised
        self.dropped.append(table)

    def swap_out(self, table: BlockTable) -> Swapped | None:
        """As `drop`, but what the table holds goes to host memory; None where that has no room."""
        n_blocks = -(-table.n_tokens // self._size)
        if n_blocks > self.swappable:
            return None
        self.swappable -= n_blocks
        self.drop(table)
        self.swapped.append((table, Swapped(table.n_tokens)))
        return self.swapped[-1][1]

    def _writes_to_others(self, table: BlockTable) -> bool:
        """Whether the table's next token would go to a block that others hold too, or may hit."""
        index = table.n_tokens // self._size
        if index >= len(table.blocks):
            return False
        block = table.blocks[index]
        return self._pool.readers(block) - self._let_gone.get(block, 0) > 1

    def _let_go(self, block: int) -> bool:
        """One reference less; whether it was the last."""
        self._let_gone[block] = self._let_gone.get(block, 0) + 1
        return self._let_gone[block] == self._pool.references(block)

    def _match(self, chain: Chain | None, most: int | None) -> Match:
        if self._index is None or chain is None:
            return Match((), None)
        last = chain.n_tokens - 1
        match = self._index.match(chain, last if most is None else min(most, last))
        head = match.head
        return match if head is None or head.n_tokens >= SHORTEST_HEAD else Match(match.blocks, None)

    def _free_ones(self, blocks: Iterable[int]) -> set[int]:
        references, gone = self._pool.references, self._let_gone
        return {b for b in blocks if references(b) == gone.get(b, 0) and b not in self._spared}
