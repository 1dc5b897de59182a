"""Who holds which blocks: a block table per sequence, blocks promised before they are needed.

Planning changes nothing: a `Draft` collects what a step wants, `commit` does all of it or none of it.
A sequence starts only when the blocks of its worst case can be promised, so none that started can starve; the
blocks themselves are taken one by one, as the sequence grows into them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyvelo.errors import InternalError
from pyvelo.kv.pool import BlockPool

__all__ = ["BlockManager", "BlockTable", "Draft", "Never", "NotNow", "Start"]


class BlockTable:
    """The blocks of one sequence in position order: token p lies in block `blocks[p // block_size]`."""

    __slots__ = ("blocks", "promised")

    def __init__(self, promised: int) -> None:
        self.blocks: list[int] = []
        self.promised = promised  # blocks that it may still take


@dataclass(frozen=True)
class Start:
    """The sequence may start, with this table."""

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


class Draft:
    """What one step wants of the pool; void once anything else was committed or freed."""

    __slots__ = ("_block_size", "available", "grown", "started", "total", "version")

    def __init__(self, total: int, available: int, block_size: int, version: int) -> None:
        self.total = total
        self.available = available
        self.version = version
        self.started: list[BlockTable] = []
        self.grown: list[tuple[BlockTable, int]] = []
        self._block_size = block_size

    def start(self, max_tokens: int) -> Start | NotNow | Never:
        """Promises a new sequence the blocks of `max_tokens` tokens."""
        needed = -(-max_tokens // self._block_size)
        if needed > self.total:
            return Never(needed, self.total)
        if needed > self.available:
            return NotNow(needed, self.available)
        self.available -= needed
        table = BlockTable(needed)
        self.started.append(table)
        return Start(table)

    def grow(self, table: BlockTable, n_tokens: int) -> None:
        """Lets the table hold `n_tokens` tokens, within what was promised to it; at most once a draft."""
        missing = -(-n_tokens // self._block_size) - len(table.blocks)
        if missing > 0:
            if missing > table.promised:
                raise InternalError(f"a sequence wants {missing} more blocks, {table.promised} are promised")
            self.grown.append((table, missing))


class BlockManager:
    """Owns every block of the pool. Not thread-safe."""

    def __init__(
        self, n_blocks: int, block_size: int, make_pool: Callable[[int], BlockPool] = BlockPool
    ) -> None:
        self.block_size = block_size
        self._pool = make_pool(n_blocks)
        self._tables: dict[int, BlockTable] = {}
        self._promised = 0
        self._version = 0

    @property
    def n_blocks(self) -> int:
        """All blocks: used, cached and free ones."""
        return self._pool.n_blocks

    @property
    def n_free(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.n_free

    @property
    def n_used(self) -> int:
        """Blocks that a live table refers to."""
        return self._pool.n_blocks - self._pool.n_free

    @property
    def n_promised(self) -> int:
        """Free blocks that live tables may still take."""
        return self._promised

    def draft(self) -> Draft:
        """An empty plan for the pool as it is now."""
        return Draft(self.n_blocks, self.n_free - self._promised, self.block_size, self._version)

    def commit(self, draft: Draft) -> None:
        """Does what the draft says; nothing is changed where it raises."""
        if draft.version != self._version:
            raise InternalError("the pool was changed after this draft was made")
        started = sum(table.promised for table in draft.started)
        if started > self.n_free - self._promised:
            raise InternalError(f"{started} blocks promised, {self.n_free - self._promised} could be")
        wanted = sum(missing for _, missing in draft.grown)
        blocks = self._pool.take(wanted) if wanted else []
        self._version += 1
        self._promised += started - wanted
        self._tables.update((id(table), table) for table in draft.started)
        first = 0
        for table, missing in draft.grown:
            table.blocks.extend(blocks[first : first + missing])
            table.promised -= missing
            first += missing

    def free(self, table: BlockTable) -> None:
        """Gives the table's blocks and promises back; the table must not be used again."""
        if self._tables.pop(id(table), None) is None:
            raise InternalError("this block table is not a live one")
        self._version += 1
        self._promised -= table.promised
        self._pool.release(table.blocks)
        table.promised = 0
        table.blocks = []

    def audit(self) -> None:
        """Checks the invariants of pool and tables; InternalError says which does not hold."""
        tables = self._tables.values()
        self._pool.audit(block for table in tables for block in table.blocks)
        promised = sum(table.promised for table in tables)
        if promised != self._promised or promised > self.n_free:
            raise InternalError(
                f"{self._promised} blocks promised, tables say {promised}, {self.n_free} are free"
            )
