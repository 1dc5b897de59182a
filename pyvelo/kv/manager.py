"""Block manager: block tables of sequences, shared prefixes, and blocks reserved before they are needed.

An `AllocationPlan` collects the blocks of a step and changes nothing. `commit` makes all its changes or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from pyvelo.errors import InternalError
from pyvelo.kv.checks import audit_index, audit_own_blocks, audit_tables, stored_tokens
from pyvelo.kv.plan import AllocationPlan, Change, ManagerState, check_changes
from pyvelo.kv.pool import BlockPool, BlockTable, SwappedBlocks, SwapPool
from pyvelo.kv.prefix import FULL, BlockHashes, BlockLayout, Match, PrefixIndex, Window
from pyvelo.kv.records import Copy, Counts, Event, EventKind, Moves

__all__ = ["BlockManager"]


class BlockManager:
    """Owner of every block of the pool. Not thread-safe.

    Args:
        windows, max_chunk: of each group of layers; most tokens that a sequence computes in a step.
        state_blocks: of a snapshot of a recurrent state, in a `StateManager`.
        share: whether sequences share prefixes.
        observer: called with each event of a block.
    """

    takes_snapshots = False  # of recurrent states

    def __init__(
        self,
        n_blocks: int,
        block_size: int,
        *,
        windows: Sequence[Window] = (FULL,),
        max_chunk: int = 1 << 31,
        state_blocks: int = 0,
        share: bool = True,
        n_swap_blocks: int = 0,
        make_hash: Callable[[BlockHashes, int], bytes] = BlockHashes.block_hash,
        observer: Callable[[Event], None] | None = None,
    ) -> None:
        self.layout = BlockLayout(block_size, tuple(windows), max_chunk, state_blocks)
        self._is_windowed = self.layout.is_windowed
        self.block_size = block_size
        self.swap = SwapPool(n_swap_blocks)
        self._swapped: dict[int, SwappedBlocks] = {}
        self.counts = Counts()
        self._pool = BlockPool(n_blocks)
        self._index = self._make_index(make_hash) if share else None
        self._observer = observer
        self._observer_error: BaseException | None = None
        self._tables: dict[int, BlockTable] = {}
        self._reserved = 0
        self._version = 0

    def _make_index(self, make_hash: Callable[[BlockHashes, int], bytes]) -> PrefixIndex:
        return PrefixIndex(self.n_blocks, self.layout, make_hash)

    @property
    def n_blocks(self) -> int:
        """Used, cached and free blocks."""
        return self._pool.n_blocks

    @property
    def n_free(self) -> int:
        """Blocks that are neither used nor cached."""
        return self._pool.n_free - self._pool.n_cached

    @property
    def n_cached(self) -> int:
        """Cached blocks that no table refers to."""
        return self._pool.n_cached

    @property
    def n_used(self) -> int:
        """Blocks that a live table refers to."""
        return self._pool.n_blocks - self._pool.n_free

    @property
    def n_reserved(self) -> int:
        """Blocks that no table refers to, but that live tables may still allocate."""
        return self._reserved

    @property
    def n_stored(self) -> int:
        """Tokens in the blocks of live tables, in each group; tokens in shared blocks count once."""
        return stored_tokens(self._pool, self._tables.values(), self.block_size)

    def unused_blocks(self) -> set[int]:
        """Return the blocks that are neither used nor cached."""
        return {block for block in self._pool.free_blocks() if not self._pool.is_cached(block)}

    def tables(self) -> Iterable[BlockTable]:
        """Return the live tables, the oldest first."""
        return self._tables.values()

    def published(self) -> set[int]:
        """Return the published blocks, used or not."""
        return set(self._index.published()) if self._index is not None else set()

    def set_observer(self, observer: Callable[[Event], None] | None) -> Callable[[Event], None] | None:
        """Call `observer` with each event from now on. Return the previous observer."""
        before, self._observer = self._observer, observer
        return before

    def raise_observer_error(self) -> None:
        """Raise the first exception of the observer since the last call, if any."""
        error, self._observer_error = self._observer_error, None
        if error is not None:
            raise error

    def plan(self) -> AllocationPlan:
        """Return an empty plan for the current state of the pool."""
        return AllocationPlan(
            self._pool, self._index, self._reserved, self.swap.n_free, self.layout, self._version
        )

    def commit(self, allocation: AllocationPlan) -> Moves:
        """Make the changes of a plan, all or none.

        Returns:
            The blocks to move before anything else is written to a block.

        Raises:
            InternalError: the pool has changed since the plan was made, or the plan breaks a rule.
        """
        if allocation.version != self._version:
            raise InternalError("the pool was changed after this plan was made")
        changes = allocation.changes
        state = ManagerState(self._tables, self._swapped, self._reserved, self.swap.n_free)
        check_changes(changes, self._pool, state, self.block_size)
        outs: list[Copy] = []
        for change in changes:
            if change.swaps_out is not None:
                outs += self._swap_out(change.table, change.swaps_out)
        sources = [block for change in changes for block in self._begin(change)]
        for change in changes:
            if change.frees:
                self.free(change.table)
        blocks = iter(self._allocate(sum(change.n_allocated for change in changes)))
        copies = [copy for change in changes for copy in self._grow(change, blocks)]
        sources += [copy.source for copy in copies]
        ins = []
        for table, _, _, _, match, swapped, *_ in changes:
            if match is not None and match.partial is not None:
                pairs = zip(match.partial.blocks, table.at(match.n_blocks), strict=True)
                copies += [self._copy(source, target) for source, target in pairs]
            if match is not None and swapped is not None:
                ins += self._swap_in(table, swapped, len(match.blocks))
        self._release(sources)
        self._version += 1
        return Moves(outs, ins, copies)

    def _begin(self, change: Change) -> list[int]:
        """Share the prefix hit of a starting sequence. Return the source blocks of its partial hit."""
        table, match = change.table, change.match
        if match is None:
            if change.resumes:
                self._count_hits(table, table.n_tokens)
            return []
        self._tables[id(table)] = table
        self._reserved += table.reserved
        return self._take_hits(table, match)

    def _grow(self, change: Change, blocks: Iterator[int]) -> list[Copy]:
        """Add blocks to a table and set its reserved blocks. Return the copies into its new blocks."""
        if change.frees:
            return []
        table, copies = change.table, []
        index = table.n_tokens // self.block_size
        for group in change.copies:
            copies.append(self._copy(table.at(index)[group], next(blocks)))
            table.replace(group, index, copies[-1].target)
        if change.copies and table.n_published > index:
            self._set_published(table, index)
        table.extend(blocks, change.n_blocks)
        self._reserved += change.reserved - table.reserved
        table.reserved, table.goal = change.reserved, change.goal
        if change.resumes and table.hashes is not None:
            table.mark = table.hashes.n_tokens
        return copies

    def fork(self, table: BlockTable, hashes: BlockHashes | None) -> BlockTable:
        """Return another table of the same blocks. The first sequence that writes to the last one copies it.

        `hashes` are of the new sequence, which starts with the tokens of the table.
        """
        if id(table) not in self._tables:
            raise InternalError("this block table is not a live one")
        n_blocks = self.layout.blocks_for(table.n_tokens)
        groups = [
            blocks[: n_blocks - first] for first, blocks in zip(table.firsts, table.groups, strict=True)
        ]
        hashes = hashes if self._index is not None else None
        twin = BlockTable(groups, table.n_tokens, hashes, firsts=table.firsts, n_blocks=n_blocks)
        twin.n_published, twin.prefix = table.n_published, table.prefix
        twin.mark, twin.branch = table.mark, table.branch
        if table.n_published > table.n_tokens // self.block_size:  # only its own blocks
            self._set_published(twin, table.n_tokens // self.block_size)
        table.n_shared = max(table.n_shared, n_blocks)
        for block in twin.blocks:
            self._pool.share(block)
        self._tables[id(twin)] = twin
        self._version += 1
        return twin

    def _set_published(self, table: BlockTable, n_blocks: int) -> None:
        """Publish the table's blocks from `n_blocks` on again."""
        for _ in range(table.n_published - n_blocks):
            table.prefix = table.prefix.parent if table.prefix is not None else None
        table.n_published = n_blocks

    def advance(self, table: BlockTable, n_tokens: int) -> None:
        """Record that the table's first `n_tokens` tokens are computed.

        Publish its full blocks, and free the blocks that no later token attends.
        """
        self._version += 1
        table.n_tokens = n_tokens
        if self._index is not None and table.hashes is not None:
            self._publish(self._index, table, table.hashes)
        if self._is_windowed and (n_tokens >= table.slides_at or table.reserved):
            self._slide(table)

    def _publish(self, index: PrefixIndex, table: BlockTable, hashes: BlockHashes) -> None:
        for number in range(table.n_published, table.n_tokens // self.block_size):
            parts = zip(table.firsts, table.groups, strict=True)
            blocks = [blocks[number - first] if number >= first else None for first, blocks in parts]
            table.n_published = number + 1
            some = any(block is not None for block in blocks)
            table.prefix = index.publish(hashes, number, blocks, table.prefix) if some else None
            if table.prefix is None:
                continue
            for block in blocks:
                if block is not None:
                    self._pool.cache(block)
                    self._notify("stored", block)
                    if index.n_duplicates:
                        self._unpublish_duplicates(index.blocks_like(block))

    def _slide(self, table: BlockTable) -> None:
        """Free the blocks that the groups' windows have left.

        Other sequences may go on after the prompt, or after a prefix that others have, too. The blocks that
        they need there are evicted as late as any, the other ones first.
        """
        firsts = self.layout.first_blocks(table.n_tokens)
        n_before = self._pool.n_free
        for group, first in enumerate(firsts):
            n = first - table.firsts[group]
            if n > 0:
                for number, block in enumerate(table.slide(group, first), first - n):
                    self._release([block], evict_first=not self._is_needed(table, group, number))
        table.slides_at = table.next_slide(self.layout)
        wanted = self.layout.wanted(table.firsts, table.n_blocks, table.goal)
        reserved = min(wanted, table.reserved + self._pool.n_free - n_before)
        self._reserved += reserved - table.reserved
        table.reserved = reserved

    def _is_needed(self, table: BlockTable, group: int, number: int) -> bool:
        """Return whether a sequence that goes on after a place of the table needs the block `number`."""
        layout = self.layout
        return any(
            layout.first_blocks(place)[group] <= number < layout.blocks_for(place)
            for place in (table.mark, table.branch)
        )

    def trim(self, table: BlockTable) -> None:
        """Free the table's reserved blocks and the blocks beyond its tokens."""
        if id(table) not in self._tables:
            raise InternalError("this block table is not a live one")
        self._version += 1
        self._reserved -= table.reserved
        table.reserved = table.goal = 0
        self._release(table.truncate(self.layout.blocks_for(table.n_tokens)))

    def free(self, table: BlockTable) -> None:
        """Free the table's blocks, held and reserved. The table must not be used again."""
        if self._tables.pop(id(table), None) is None:
            raise InternalError("this block table is not a live one")
        self._version += 1
        self._reserved -= table.reserved
        self._release(table.truncate(0))
        table.reserved = 0

    def free_swapped(self, swapped: SwappedBlocks) -> None:
        """Free the blocks of a sequence in host memory."""
        if self._swapped.pop(id(swapped), None) is None:
            raise InternalError("this sequence is not in host memory")
        self._version += 1
        self.swap.release(swapped.blocks)

    def reset(self) -> None:
        """Unpublish every block. Live tables do not change."""
        self._version += 1
        if self._index is not None:
            for block in list(self._index.published()):
                self._unpublish(block)
                self._notify("reset", block)

    def clear(self) -> None:
        """Start over with an empty pool: no table, no prefix, nothing in host memory. The counts stay."""
        published = self.published()
        self._pool = BlockPool(self.n_blocks)
        self.swap.clear()
        if self._index is not None:
            self._index.clear()
        self._tables, self._swapped, self._reserved = {}, {}, 0
        self._version += 1
        for block in published:
            self._notify("reset", block)

    def has_swapped(self, swapped: SwappedBlocks) -> bool:
        """Return whether a sequence is in host memory; after `clear` none is."""
        return id(swapped) in self._swapped

    def audit(self) -> None:
        """Raise InternalError if an invariant of pool, prefixes or tables is broken."""
        tables = self._tables.values()
        audit_tables(self._pool, tables, self._reserved)
        self.swap.audit(block for swapped in self._swapped.values() for block in swapped.blocks)
        if self._index is not None:
            audit_index(self._index, self._pool, tables)
        audit_own_blocks(self._pool, tables)

    def _take_hits(self, table: BlockTable, match: Match) -> list[int]:
        """Share the blocks of a prefix hit. Return the source blocks of its partial hit, if any."""
        self._count_hits(table, match.n_tokens(self.block_size))
        for block in match.blocks:
            self._pool.share(block)
            self._notify("hit", block)
        if match.partial is None:
            return []
        for block in match.partial.blocks:
            self._pool.share(block)
        return list(match.partial.blocks)

    def _count_hits(self, table: BlockTable, n_tokens: int) -> None:
        if table.hashes is not None:
            self.counts.queried += table.hashes.n_tokens
            self.counts.hits += n_tokens

    def _swap_out(self, table: BlockTable, swapped: SwappedBlocks) -> list[Copy]:
        n_blocks = self.layout.blocks_for(swapped.n_tokens)
        held = table.in_order(0, n_blocks)
        swapped.blocks = self.swap.allocate(len(held))
        self._swapped[id(swapped)] = swapped
        self.counts.swapped_out += len(held)
        for block in held:
            self._notify("swapped", block)
        return [Copy(*pair) for pair in zip(held, swapped.blocks, strict=True)]

    def _swap_in(self, table: BlockTable, swapped: SwappedBlocks, n_hits: int) -> list[Copy]:
        sources, table.state = swapped.blocks[n_hits : len(swapped.blocks) - swapped.n_state], swapped.state
        self.free_swapped(swapped)
        self.counts.swapped_in += len(sources)
        targets = table.in_order(0, self.layout.blocks_for(swapped.n_tokens))[n_hits:]
        return [Copy(*pair) for pair in zip(sources, targets, strict=True)]

    def _allocate(self, n: int) -> list[int]:
        blocks = self._pool.allocate(n) if n else []
        for block in blocks:
            if self._pool.is_cached(block):
                self._unpublish(block)
                self.counts.evictions += 1
                self._notify("evicted", block)
        return blocks

    def _copy(self, source: int, target: int) -> Copy:
        self.counts.copies += 1
        self._notify("copied", source)
        return Copy(source, target)

    def _release(self, blocks: Sequence[int], evict_first: bool = False) -> None:
        self._pool.release(blocks, evict_first)
        if self._index is not None and self._index.n_duplicates:
            self._unpublish_duplicates(blocks)

    def _unpublish_duplicates(self, blocks: Iterable[int]) -> None:
        """Unpublish the blocks that no table holds and that are duplicates of other blocks."""
        for block in blocks:
            if not self._pool.references(block) and self._index and len(self._index.blocks_like(block)) > 1:
                self._unpublish(block)
                self._notify("duplicate", block)

    def _unpublish(self, block: int) -> None:
        if self._index is not None and self._index.unpublish(block):
            self._pool.uncache(block)

    def _notify(self, kind: EventKind, block: int) -> None:
        if self._observer is not None:
            try:
                self._observer(Event(kind, block))
            except BaseException as error:  # raised later: a commit must be complete
                self._observer_error = self._observer_error or error
