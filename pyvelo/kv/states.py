"""Prefix cache and block manager of models with recurrent layers: snapshots of their states in blocks.

A recurrent state has no parts, so a prefix is a hit only up to a place where a snapshot of the state was
taken. A snapshot takes blocks of the pool, and is published with the prefix that ends at its place. Like the
blocks of a prefix it stays a hit until its blocks are needed, and without one of them it is none.

The sequence of a session or a beam ends anywhere in a block. Its table holds the blocks of a state after
exactly its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pyvelo.kv.manager import BlockManager
from pyvelo.kv.pool import BlockTable, SwappedBlocks
from pyvelo.kv.prefix import BlockHashes, Match, Prefix, PrefixIndex
from pyvelo.kv.records import Copy

__all__ = [
    "SNAPSHOT_TOKENS",
    "SnapshotIndex",
    "StateManager",
    "is_regular_place",
    "last_place",
    "tokens_to_snapshot",
]

SNAPSHOT_TOKENS = 512
"""Tokens between two places for snapshots within a prompt; a multiple of every block size."""


def last_place(n_tokens: int, block_size: int) -> int:
    """Return the last place of a prompt of `n_tokens` tokens at which the same prompt can be a hit.

    Its last token is always computed, for its logits.
    """
    return (n_tokens - 1) // block_size * block_size


def is_regular_place(n_tokens: int) -> bool:
    """Return whether a place for a snapshot is after `n_tokens` tokens of any prompt."""
    return n_tokens % SNAPSHOT_TOKENS == 0


def tokens_to_snapshot(table: BlockTable, n_there: int, n_tokens: int, block_size: int) -> int:
    """Return the tokens up to the next place for a snapshot in a prompt of `n_tokens` tokens, or to its end.

    Places are the last one of the prompt, the end of a prefix that other prompts have, and every
    SNAPSHOT_TOKENS tokens.

    Args:
        n_there: tokens that are computed.
    """
    regular = (n_there // SNAPSHOT_TOKENS + 1) * SNAPSHOT_TOKENS
    places = (last_place(n_tokens, block_size), table.branch, regular)
    return min((place for place in places if n_there < place < n_tokens), default=n_tokens) - n_there


class SnapshotIndex(PrefixIndex):
    """Published blocks, and the snapshots of recurrent states after their prefixes."""

    def published(self) -> Iterator[int]:
        """Return the published blocks, snapshots included."""
        yield from super().published()
        for prefix in self.by_hash.values():
            yield from prefix.snapshot

    def snapshot_of(self, block: int) -> tuple[int, ...]:
        """Return all blocks of the snapshot that has the block; none if it belongs to none."""
        prefix = self._by_block[block]
        return prefix.snapshot if prefix is not None and block in prefix.snapshot else ()

    def blocks_like(self, block: int) -> tuple[int, ...]:
        """Return the published blocks of the same prefix and group, the oldest first; a snapshot has none."""
        return () if self.snapshot_of(block) else super().blocks_like(block)

    def publish_snapshot(self, prefix: Prefix, blocks: Sequence[int]) -> None:
        """Make blocks the snapshot after a listed prefix that has none."""
        self._generation = object()
        prefix.snapshot = tuple(blocks)
        for block in blocks:
            self._by_block[block] = prefix

    def unpublish(self, block: int) -> bool:
        """Make a block no hit, and with it all blocks of its snapshot. Return False if it was none."""
        prefix, snapshot = self._by_block[block], self.snapshot_of(block)
        if prefix is None or not snapshot:
            return super().unpublish(block)
        self._generation = object()
        prefix.snapshot = ()
        for each in snapshot:
            self._by_block[each] = None
        self.drop(prefix)
        return True

    def _search(self, hashes: BlockHashes, n_tokens: int) -> Match:
        match = super()._search(hashes, n_tokens)
        snapshot = match.prefix.snapshot if match.prefix is not None else ()
        return match._replace(partial=None, snapshot=snapshot)

    def _longest_hit(self, path: Sequence[Prefix]) -> int:
        """Return the number of prefixes up to the last snapshot before which no window lacks a block."""
        ends = (n for n in range(len(path), 0, -1) if path[n - 1].snapshot)
        return next((n for n in ends if super(SnapshotIndex, self)._longest_hit(path[:n]) == n), 0)


class StateManager(BlockManager):
    """Block manager of a model with recurrent layers. Not thread-safe.

    takes_snapshots: whether sequences share prefixes, up to snapshots.
    """

    _snapshots: SnapshotIndex | None = None

    def _make_index(self, make_hash: Callable[[BlockHashes, int], bytes]) -> PrefixIndex:
        self.takes_snapshots = True
        self._snapshots = SnapshotIndex(self.n_blocks, self.layout, make_hash)
        return self._snapshots

    def take(self, table: BlockTable, *, rolling: bool = False, spare: bool = False) -> list[int]:
        """Publish a snapshot of the state after the table's tokens. Return the blocks to save the state in.

        Args:
            rolling: it replaces the last one that was taken so for this table.
            spare: take none if a cached block would be evicted for it.

        Returns:
            No block if the tokens end within a block, if they are no prefix of the cache or one with a
            snapshot, or if too few blocks are free.
        """
        prefix, n = table.prefix, self.layout.state_blocks
        if self._snapshots is None or prefix is None or not prefix.is_listed or prefix.snapshot:
            return []
        room = self.n_free if spare else self._pool.n_free
        if table.n_tokens != table.n_published * self.block_size or room - self._reserved < n:
            return []
        self._version += 1
        if rolling:
            if table.rolling is not None and table.rolling.snapshot:
                self._drop_snapshot(table.rolling.snapshot)
            table.rolling = prefix
        blocks = self._allocate(n)
        if not prefix.is_listed:  # no table held its last block, which was evicted now
            self._pool.release(blocks)
            return []
        self._snapshots.publish_snapshot(prefix, blocks)
        for block in blocks:
            self._pool.cache(block)
            self._notify("stored", block)
        self._pool.release(blocks)
        return blocks

    def discard(self, blocks: Sequence[int]) -> None:
        """Unpublish a snapshot that was not saved."""
        self._version += 1
        self._drop_snapshot(blocks)

    def hold(self, table: BlockTable) -> list[int]:
        """Return blocks for the state after the table's tokens, held until `loaded`; without room none.

        The table holds no other state.
        """
        if self._pool.n_free - self._reserved < self.layout.state_blocks:
            return []
        self._version += 1
        blocks = self._allocate(self.layout.state_blocks)
        table.snapshot = tuple(blocks)
        return blocks

    def loaded(self, table: BlockTable) -> None:
        """Release the blocks of the state that the table goes on with."""
        self._version += 1
        snapshot, table.snapshot = table.snapshot, ()
        self._release(snapshot)

    def fork(self, table: BlockTable, hashes: BlockHashes | None) -> BlockTable:
        """Return another table of the same blocks, with the same held state."""
        twin = super().fork(table, hashes)
        twin.snapshot = table.snapshot
        for block in twin.snapshot:
            self._pool.share(block)
        return twin

    def free(self, table: BlockTable) -> None:
        """Free the table's blocks, held and reserved, and its held state.

        Snapshots are evicted with the blocks before them: the last place of the sequence first.
        """
        if id(table) in self._tables:
            self.loaded(table)
            prefix, number = table.prefix, table.n_published
            while prefix is not None and prefix.parent is not None:
                self._release(table.truncate(number))
                self._touch(prefix.snapshot)
                prefix, number = prefix.parent, number - 1
        super().free(table)

    def _touch(self, snapshot: Sequence[int]) -> None:
        """Evict a snapshot last."""
        for block in snapshot:
            self._pool.share(block)
        self._pool.release(snapshot)

    def _drop_snapshot(self, blocks: Sequence[int]) -> None:
        self._unpublish(blocks[0])
        self._notify("reset", blocks[0])

    def _unpublish(self, block: int) -> None:
        snapshot = self._snapshots.snapshot_of(block) if self._snapshots is not None else ()
        super()._unpublish(block)
        for other in snapshot:
            if other != block:
                self._pool.uncache(other)
                self._notify("reset", other)

    def _is_needed(self, table: BlockTable, group: int, number: int) -> bool:
        """Return whether a sequence that goes on after a snapshot of the table needs the block `number`."""
        size = self.block_size
        return any(
            self.layout.first_blocks(n_blocks * size + 1)[group] <= number < n_blocks
            for n_blocks in ((table.mark - 1) // size, table.branch // size)
        )

    def _swap_out(self, table: BlockTable, swapped: SwappedBlocks) -> list[Copy]:
        """Swap out the blocks, and the held state; the caller saves the state of a running sequence."""
        copies = super()._swap_out(table, swapped)
        state = self.swap.allocate(swapped.n_state)
        swapped.blocks += state
        self.counts.swapped_out += len(state)
        return copies + [Copy(*pair) for pair in zip(table.snapshot, state, strict=False)]
