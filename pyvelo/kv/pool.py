"""Pools of blocks, in memory of the model and of the host, and the tables of sequences that hold blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pyvelo.errors import InternalError, OutOfBlocks
from pyvelo.kv.prefix import BlockHashes

__all__ = ["BlockPool", "BlockTable", "SwapPool", "SwappedBlocks"]


class BlockPool:
    """Blocks 0..n_blocks-1. A block is free exactly when nobody refers to it.

    Free blocks form a doubly linked list inside two arrays, so that any of them leaves it in O(1). They are
    taken from its front: first those that are not worth keeping, then the kept ones, least recently freed
    first. Not thread-safe.
    """

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.n_free = n_blocks
        self.n_cached = 0
        """Free blocks that are kept."""
        self._references = [0] * n_blocks
        self._kept = bytearray(n_blocks)
        # entry n_blocks is the list's two ends: next of it is the first block, previous of it the last
        self._next = [*range(1, n_blocks + 1), 0]
        self._previous = [n_blocks, *range(n_blocks)]

    def references(self, block: int) -> int:
        """How many hold the block."""
        return self._references[block]

    def readers(self, block: int) -> int:
        """How many hold the block, and one more where it is worth keeping: whoever comes for it later."""
        return self._references[block] + self._kept[block]

    def take(self, n: int) -> list[int]:
        """Takes the `n` first free blocks, each with one reference; all of them, or OutOfBlocks.

        Whether they are worth keeping stays as it is: ask `kept` of each.
        """
        if n > self.n_free:
            raise OutOfBlocks(f"{n} blocks wanted, {self.n_free} of {self.n_blocks} are free")
        end, following, kept = self.n_blocks, self._next, self._kept
        blocks = []
        block = following[end]
        for _ in range(n):
            blocks.append(block)
            self._references[block] = 1
            self.n_cached -= kept[block]
            block = following[block]
        following[end] = block
        self._previous[block] = end
        self.n_free -= n
        return blocks

    def share(self, block: int) -> None:
        """Adds a reference; a free block is revived from wherever in the list it stands."""
        if self._references[block] == 0:
            self._unlink(block)
            self.n_free -= 1
            self.n_cached -= self._kept[block]
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference to each block of a sequence, in position order; the tail is freed first.

        So that of a sequence's kept blocks the first ones, which others may share, are taken again last.
        """
        for block in reversed(blocks):
            count = self._references[block]
            if count == 0:
                raise InternalError(f"block {block} was released more often than it was held")
            self._references[block] = count - 1
            if count == 1:
                self._put_back(block)

    def kept(self, block: int) -> bool:
        """Whether the block is worth keeping while nobody refers to it."""
        return bool(self._kept[block])

    def keep(self, block: int) -> None:
        """Says of a block that is held that it is worth keeping."""
        if self._references[block] == 0:
            raise InternalError(f"block {block} is free: only blocks that are held can become worth keeping")
        self._kept[block] = 1

    def forget(self, block: int) -> None:
        """The opposite of `keep`; a free block moves to the front of the list."""
        if self._kept[block]:
            self._kept[block] = 0
            if self._references[block] == 0:
                self._unlink(block)
                self._link(block, self.n_blocks)
                self.n_cached -= 1

    def free_blocks(self) -> Iterator[int]:
        """The free blocks in the order in which they will be taken."""
        block = self._next[self.n_blocks]
        while block != self.n_blocks:
            yield block
            block = self._next[block]

    def audit(self, held: Iterable[int]) -> None:
        """Checks invariants 1 and 2 against `held`, every reference there should be, or InternalError."""
        counts = [0] * self.n_blocks
        for block in held:
            counts[block] += 1
        for block, (count, references) in enumerate(zip(counts, self._references, strict=True)):
            if count != references:
                raise InternalError(f"block {block}: {references} references counted, {count} held")
        self._audit_list()

    def _audit_list(self) -> None:
        seen, cached, before, block = 0, 0, self.n_blocks, self._next[self.n_blocks]
        while block != self.n_blocks:
            if self._previous[block] != before:
                raise InternalError(f"free list: block {block} does not point back to {before}")
            if self._references[block]:
                raise InternalError(f"free list: block {block} has {self._references[block]} references")
            if cached and not self._kept[block]:
                raise InternalError(f"free list: block {block} stands behind kept ones")
            seen += 1
            cached += self._kept[block]
            before, block = block, self._next[block]
        if self._previous[self.n_blocks] != before:
            raise InternalError(f"free list: its end is not block {before}")
        without = self._references.count(0)
        if not seen == self.n_free == without:
            raise InternalError(
                f"free list: {seen} blocks listed, {self.n_free} counted, {without} without a reference"
            )
        if cached != self.n_cached:
            raise InternalError(f"free list: {cached} kept blocks listed, {self.n_cached} counted")

    def _put_back(self, block: int) -> None:
        end = self.n_blocks
        if self._kept[block]:
            self._link(block, self._previous[end])
            self.n_cached += 1
        else:
            self._link(block, end)
        self.n_free += 1

    def _link(self, block: int, before: int) -> None:
        after = self._next[before]
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before


class SwapPool:
    """Blocks 0..n_blocks-1, each free or held once. Not thread-safe."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks))[::-1]

    @property
    def n_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """Takes `n` blocks, all of them or OutOfBlocks."""
        if n > len(self._free):
            raise OutOfBlocks(f"{n} swap blocks wanted, {len(self._free)} of {self.n_blocks} are free")
        return [self._free.pop() for _ in range(n)]

    def release(self, blocks: Sequence[int]) -> None:
        """Gives blocks back."""
        self._free.extend(reversed(blocks))

    def audit(self, held: Iterable[int]) -> None:
        """Checks that every block is free or held, once, or InternalError."""
        if sorted([*self._free, *held]) != list(range(self.n_blocks)):
            raise InternalError("swap: some block is neither free nor held, or both")


class SwappedBlocks:
    """A sequence in host memory; `blocks` are filled in when the allocation is committed."""

    __slots__ = ("blocks", "n_tokens")

    def __init__(self, n_tokens: int) -> None:
        self.blocks: list[int] = []
        self.n_tokens = n_tokens


class BlockTable:
    """The blocks of one sequence in position order: token p lies in block `blocks[p // block_size]`.

    Change `blocks` by the methods alone: they keep `version`, by which a copy of the table knows that more
    was done to it than blocks added at its end.
    """

    __slots__ = ("blocks", "hashes", "n_cached", "n_published", "n_tokens", "reserved", "version")

    def __init__(
        self, blocks: Sequence[int], n_tokens: int, reserved: int, hashes: BlockHashes | None
    ) -> None:
        self.blocks = list(blocks)
        self.n_tokens = n_tokens  # whose K and V are there
        self.n_cached = n_tokens  # that were there when it started
        self.n_published = len(blocks)  # of its blocks, those whose tokens are published
        self.version = 0  # how often a block was replaced, or the table became shorter
        self.reserved = reserved  # blocks that it may still take
        self.hashes = hashes

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
