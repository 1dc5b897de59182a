"""Pools of KV blocks on the model's devices and in host memory, and the block tables of sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pyvelo.errors import InternalError, OutOfBlocks
from pyvelo.kv.prefix import BlockHashes

__all__ = ["BlockPool", "BlockTable", "SwapPool", "SwappedBlocks"]


class BlockPool:
    """Pool of the blocks 0..n_blocks-1 with reference counts. A block is free if it has no reference.

    Free blocks form a doubly linked list inside two arrays, so any of them is removed in O(1). Blocks are
    allocated from its front: first the blocks that are not cached, then the cached ones, least recently freed
    first. Not thread-safe.
    """

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.n_free = n_blocks
        self.n_cached = 0
        """Free blocks that are cached."""
        self._references = [0] * n_blocks
        self._cached = bytearray(n_blocks)
        # entry n_blocks is the list's two ends: next of it is the first block, previous of it the last
        self._next = [*range(1, n_blocks + 1), 0]
        self._previous = [n_blocks, *range(n_blocks)]

    def references(self, block: int) -> int:
        """Return the number of tables and copies that hold the block."""
        return self._references[block]

    def readers(self, block: int) -> int:
        """Return the reference count, plus one if the block is cached."""
        return self._references[block] + self._cached[block]

    def allocate(self, n: int) -> list[int]:
        """Allocate the `n` first free blocks, each with one reference.

        Cached blocks stay marked as cached: check `is_cached` for each.

        Raises:
            OutOfBlocks: fewer blocks are free. None is allocated.
        """
        if n > self.n_free:
            raise OutOfBlocks(f"{n} blocks wanted, {self.n_free} of {self.n_blocks} are free")
        end, following, cached = self.n_blocks, self._next, self._cached
        blocks = []
        block = following[end]
        for _ in range(n):
            blocks.append(block)
            self._references[block] = 1
            self.n_cached -= cached[block]
            block = following[block]
        following[end] = block
        self._previous[block] = end
        self.n_free -= n
        return blocks

    def share(self, block: int) -> None:
        """Add a reference. A free block is removed from the list of free blocks."""
        if self._references[block] == 0:
            self._unlink(block)
            self.n_free -= 1
            self.n_cached -= self._cached[block]
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence, given in position order; free the last block first.

        So the first cached blocks of a sequence, which others may share, are evicted last.
        """
        for block in reversed(blocks):
            count = self._references[block]
            if count == 0:
                raise InternalError(f"block {block} was released more often than it was held")
            self._references[block] = count - 1
            if count == 1:
                self._put_back(block)

    def is_cached(self, block: int) -> bool:
        """Return whether the block stays a hit without references."""
        return bool(self._cached[block])

    def cache(self, block: int) -> None:
        """Mark a block that has references as cached."""
        if self._references[block] == 0:
            raise InternalError(f"block {block} is free: only blocks with references can become cached")
        self._cached[block] = 1

    def uncache(self, block: int) -> None:
        """Undo `cache`. A free block moves to the front of the list."""
        if self._cached[block]:
            self._cached[block] = 0
            if self._references[block] == 0:
                self._unlink(block)
                self._link(block, self.n_blocks)
                self.n_cached -= 1

    def free_blocks(self) -> Iterator[int]:
        """Yield the free blocks in the order of allocation."""
        block = self._next[self.n_blocks]
        while block != self.n_blocks:
            yield block
            block = self._next[block]

    def audit(self, held: Iterable[int]) -> None:
        """Raise InternalError if the counts or the list contradict `held`, the blocks of all references."""
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
            if cached and not self._cached[block]:
                raise InternalError(f"free list: block {block} is behind cached blocks")
            seen += 1
            cached += self._cached[block]
            before, block = block, self._next[block]
        if self._previous[self.n_blocks] != before:
            raise InternalError(f"free list: its end is not block {before}")
        without = self._references.count(0)
        if not seen == self.n_free == without:
            raise InternalError(
                f"free list: {seen} blocks listed, {self.n_free} counted, {without} without a reference"
            )
        if cached != self.n_cached:
            raise InternalError(f"free list: {cached} cached blocks listed, {self.n_cached} counted")

    def _put_back(self, block: int) -> None:
        end = self.n_blocks
        if self._cached[block]:
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
    """Pool of the blocks 0..n_blocks-1 of host memory, each free or held once. Not thread-safe."""

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self._free = list(range(n_blocks))[::-1]

    @property
    def n_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Allocate `n` blocks, or raise OutOfBlocks if fewer are free."""
        if n > len(self._free):
            raise OutOfBlocks(f"{n} swap blocks wanted, {len(self._free)} of {self.n_blocks} are free")
        return [self._free.pop() for _ in range(n)]

    def release(self, blocks: Sequence[int]) -> None:
        """Free blocks."""
        self._free.extend(reversed(blocks))

    def audit(self, held: Iterable[int]) -> None:
        """Raise InternalError unless every block is free or held, once."""
        if sorted([*self._free, *held]) != list(range(self.n_blocks)):
            raise InternalError("swap pool: a block is neither free nor held, or both")


class SwappedBlocks:
    """Blocks of a sequence in host memory. `commit` fills in `blocks`."""

    __slots__ = ("blocks", "n_tokens")

    def __init__(self, n_tokens: int) -> None:
        self.blocks: list[int] = []
        self.n_tokens = n_tokens


class BlockTable:
    """Blocks of one sequence in position order: token p is in block `blocks[p // block_size]`.

    Change `blocks` only with the methods. They increment `version` for every change except blocks added at
    the end, so a copy of the table knows when to start over.
    """

    __slots__ = ("blocks", "hashes", "n_cached", "n_published", "n_tokens", "reserved", "version")

    def __init__(
        self, blocks: Sequence[int], n_tokens: int, reserved: int, hashes: BlockHashes | None
    ) -> None:
        self.blocks = list(blocks)
        self.n_tokens = n_tokens  # with K and V in the blocks
        self.n_cached = n_tokens  # of the prefix hit or the swapped blocks at its start
        self.n_published = len(blocks)  # its first blocks that need not be published again
        self.version = 0  # how often a block was replaced, or the table became shorter
        self.reserved = reserved  # blocks that it may still allocate
        self.hashes = hashes

    def extend(self, blocks: Iterable[int]) -> None:
        """Add blocks at the end."""
        self.blocks.extend(blocks)

    def replace(self, index: int, block: int) -> None:
        """Replace the block at `index`."""
        self.blocks[index] = block
        self.version += 1

    def truncate(self, n_blocks: int) -> list[int]:
        """Remove all blocks but the first `n_blocks`. Return the removed blocks."""
        cut = self.blocks[n_blocks:]
        del self.blocks[n_blocks:]
        self.version += 1
        return cut
