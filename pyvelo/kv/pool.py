"""The pool of blocks: reference counts, and the list of those that nobody holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pyvelo.errors import InternalError, OutOfBlocks

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks 0..n_blocks-1. A block is free exactly when nobody refers to it.

    Free blocks form a doubly linked list inside two arrays, least recently freed first, so that any of them
    leaves it in O(1). Not thread-safe.
    """

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.n_free = n_blocks
        self._references = [0] * n_blocks
        # entry n_blocks is the list's two ends: next of it is the first block, previous of it the last
        self._next = [*range(1, n_blocks + 1), 0]
        self._previous = [n_blocks, *range(n_blocks)]

    def references(self, block: int) -> int:
        """How many hold the block."""
        return self._references[block]

    def take(self, n: int) -> list[int]:
        """Takes the `n` blocks freed longest ago, each with one reference; all of them, or OutOfBlocks."""
        if n > self.n_free:
            raise OutOfBlocks(f"{n} blocks wanted, {self.n_free} of {self.n_blocks} are free")
        end, following = self.n_blocks, self._next
        blocks = []
        block = following[end]
        for _ in range(n):
            blocks.append(block)
            self._references[block] = 1
            block = following[block]
        following[end] = block
        self._previous[block] = end
        self.n_free -= n
        return blocks

    def share(self, block: int) -> None:
        """Adds a reference; a free block is revived from wherever in the list it stands."""
        if self._references[block] == 0:
            before, after = self._previous[block], self._next[block]
            self._next[before] = after
            self._previous[after] = before
            self.n_free -= 1
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference to each block of a sequence, in position order; the tail is freed first.

        So that of a sequence's blocks the first ones, which others may share, are taken again last.
        """
        for block in reversed(blocks):
            count = self._references[block]
            if count == 0:
                raise InternalError(f"block {block} was released more often than it was held")
            self._references[block] = count - 1
            if count == 1:
                self._append(block)

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
        seen, before, block = 0, self.n_blocks, self._next[self.n_blocks]
        while block != self.n_blocks:
            if self._previous[block] != before:
                raise InternalError(f"free list: block {block} does not point back to {before}")
            if self._references[block]:
                raise InternalError(f"free list: block {block} has {self._references[block]} references")
            seen += 1
            if seen > self.n_blocks:
                raise InternalError("free list: it runs in a circle")
            before, block = block, self._next[block]
        if self._previous[self.n_blocks] != before:
            raise InternalError(f"free list: its end is not block {before}")
        without = self._references.count(0)
        if not seen == self.n_free == without:
            raise InternalError(
                f"free list: {seen} blocks listed, {self.n_free} counted, {without} without a reference"
            )

    def _append(self, block: int) -> None:
        end = self.n_blocks
        last = self._previous[end]
        self._next[last] = block
        self._previous[block] = last
        self._next[block] = end
        self._previous[end] = block
        self.n_free += 1
