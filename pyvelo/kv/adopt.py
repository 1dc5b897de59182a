"""Blocks that come from elsewhere, and block hashes for others: what a hit lacks, what the pool holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate, chain, islice
from typing import NamedTuple

from pyvelo.kv.hits import Hits
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.prefix import BlockHashes, BlockLayout, Prefix, PrefixIndex
from pyvelo.kv.states import SnapshotIndex, StateManager

__all__ = ["SNAPSHOT", "AdoptingManager", "AdoptingStates", "Part", "needed_parts", "parts_to_load"]

SNAPSHOT = -1
"""Group of a part that is a recurrent state."""


class Part(NamedTuple):
    """Block `number` of a sequence in a group of layers, or the recurrent state after that block."""

    number: int
    group: int


def needed_parts(layout: BlockLayout, n_blocks: int) -> list[Part]:
    """Return the parts that a hit of `n_blocks` blocks needs."""
    firsts = layout.first_blocks(n_blocks * layout.block_size + 1)
    parts = [Part(number, group) for group, first in enumerate(firsts) for number in range(first, n_blocks)]
    return parts + [Part(n_blocks - 1, SNAPSHOT)] * bool(layout.state_blocks)


def parts_to_load(
    layout: BlockLayout, published: Collection[Part], stored: Collection[Part], n_blocks: int
) -> list[Part]:
    """Return the parts whose load makes the longest hit of up to `n_blocks` blocks, by their numbers.

    published, stored: parts in the pool, and parts that can be loaded.
    """
    full = [group for group, window in enumerate(layout.windows) if not window.size]
    n_hit = 0
    while n_hit < n_blocks and all(
        Part(n_hit, group) in published or Part(n_hit, group) in stored for group in full
    ):
        n_hit += 1
    for n_needed in range(n_hit, 0, -1):
        needed = needed_parts(layout, n_needed)
        if all(part in published or part in stored for part in reversed(needed)):
            missing = (part for part in needed if part not in published)
            return sorted(missing, key=lambda part: (part.number, part.group == SNAPSHOT, part.group))
    return []


class AdoptingManager(BlockManager):
    """Block manager that takes blocks from elsewhere. Not thread-safe."""

    @property
    def index(self) -> PrefixIndex | None:
        """Published blocks; None: sequences share no prefixes."""
        return self._index

    def published_parts(self, hashes: BlockHashes, n_blocks: int) -> dict[Part, tuple[int, ...]]:
        """Return the published blocks of the first `n_blocks` blocks of a sequence."""
        found: dict[Part, tuple[int, ...]] = {}
        path = self._index.path(hashes, n_blocks) if self._index is not None else []
        for number, prefix in enumerate(path):
            found |= {Part(number, group): blocks[:1] for group, blocks in enumerate(prefix.blocks) if blocks}
            if prefix.snapshot:
                found[Part(number, SNAPSHOT)] = prefix.snapshot
        return found

    def hit_blocks(self, hashes: BlockHashes, n_blocks: int) -> int:
        """Return how many of the first `n_blocks` blocks of a sequence would be a hit."""
        n_tokens = n_blocks * self.block_size
        return self._index.match(hashes, n_tokens).n_blocks if self._index is not None else 0

    def held_hashes(self, wanted: Iterable[bytes], n: int) -> list[bytes]:
        """Return up to `n` hashes of prefixes that would be a hit: the wanted ones first, then the newest."""
        known: dict[bytes, Prefix] = self._index.by_hash if self._index is not None else {}
        hits = Hits(self.layout)

        def is_hit(name: bytes) -> bool:
            prefix = known.get(name)
            return prefix is not None and hits.is_hit(prefix)

        names = dict.fromkeys(chain(wanted, islice(reversed(known), n)))
        return list(islice(filter(is_hit, names), n))

    def adopt(
        self, hashes: BlockHashes, parts: Sequence[Part], write: Callable[[Sequence[int]], None]
    ) -> int:
        """Publish parts that come from elsewhere, as cached blocks that no table holds.

        Args:
            hashes: of the sequence.
            parts: by number, each after published ones.
            write: fills the blocks of some parts, in their order, before they are published.

        Returns:
            The first so many parts for which there was room.
        """
        if self._index is None or not parts:
            return 0
        self._version += 1
        published = self.published_parts(hashes, parts[-1].number + 1).values()
        known = [block for blocks in published for block in blocks]
        for block in known:
            self._pool.share(block)  # so that it is not evicted for the new ones
        sizes = (self.layout.state_blocks if part.group == SNAPSHOT else 1 for part in parts)
        ends, room = list(accumulate(sizes)), self._pool.n_free - self._reserved
        n_parts = sum(end <= room for end in ends)
        blocks = self._allocate(ends[n_parts - 1] if n_parts else 0)
        try:
            if blocks:
                write(blocks)
                spans = zip(parts, [0, *ends], ends[:n_parts], strict=False)
                self._publish_parts(self._index, hashes, {part: blocks[a:b] for part, a, b in spans})
        finally:
            self._release(blocks)
            self._release(known)
        return n_parts

    def _publish_parts(self, index: PrefixIndex, hashes: BlockHashes, given: dict[Part, list[int]]) -> None:
        """Publish blocks as far as their prefixes can be published, and mark those as cached."""
        prefix: Prefix | None = None
        for number in range(max(part.number for part in given) + 1):
            parts = [Part(number, group) for group in range(self.layout.n_groups)]
            blocks = [given[part][0] if part in given else None for part in parts]
            following = index.publish(hashes, number, blocks, prefix)
            if following is None:
                break
            prefix, state = following, given.get(Part(number, SNAPSHOT))
            if state is not None and not prefix.snapshot and isinstance(index, SnapshotIndex):
                index.publish_snapshot(prefix, state)
        if prefix is not None:
            index.drop(prefix)  # if it is empty: no block came after it
        for block in (block for blocks in given.values() for block in blocks):
            if index.tokens(block) is not None:
                self._pool.cache(block)
                self._notify("stored", block)


class AdoptingStates(AdoptingManager, StateManager):
    """The same for models with recurrent layers."""
