"""Pools of KV blocks, on the model's devices and in host memory, and the block tables of sequences.

Layers that remember alike form a group, and a sequence has a block table for each group. A block holds
`block_size` tokens for the layers of one group. All blocks have the same bytes, so any group can use a block
that the window of another group has left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pyvelo.errors import InternalError, OutOfBlocks
from pyvelo.kv.prefix import BlockHashes, BlockLayout, Prefix

__all__ = ["BlockPool", "BlockTable", "Never", "NotNow", "Start", "SwapPool", "SwappedBlocks"]


class BlockPool:
    """Pool of the blocks 0..n_blocks-1 with reference counts. A block is free if it has no reference.

    Free blocks form a doubly linked list inside two arrays, so any of them is removed in O(1). Blocks are
    allocated from its front: first the blocks that are not cached, then the cached ones that were released
    with `evict_first`, then the other cached ones, least recently freed first. Not thread-safe.
    """

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.n_free = n_blocks
        self.n_cached = 0
        """Free blocks that are cached."""
        self._references = [0] * n_blocks
        self._cached = bytearray(n_blocks)
        # two entries are no blocks: the list's two ends (next of it is the first block, previous of it the
        # last), and the border between the blocks that are not cached and the cached ones
        self._end, self._border = n_blocks, n_blocks + 1
        self._next = [*range(1, n_blocks), self._border, 0, self._end]
        self._previous = [self._end, *range(n_blocks - 1), self._border, n_blocks - 1]

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
        blocks = []
        block, following = self._next[self._end], self._next
        before = self._end
        for _ in range(n):
            if block == self._border:
                self._join(before, block)
                before, block = block, following[block]
            blocks.append(block)
            self._references[block] = 1
            self.n_cached -= self._cached[block]
            block = following[block]
        self._join(before, block)
        self.n_free -= n
        return blocks

    def share(self, block: int) -> None:
        """Add a reference. A free block is removed from the list of free blocks."""
        if self._references[block] == 0:
            self._unlink(block)
            self.n_free -= 1
            self.n_cached -= self._cached[block]
        self._references[block] += 1

    def release(self, blocks: Sequence[int], evict_first: bool = False) -> None:
        """Drop one reference to each block of a sequence, given in position order; free the last block first.

        So the first cached blocks of a sequence, which others may share, are evicted last.

        Args:
            blocks: in position order.
            evict_first: evict these blocks before all other cached ones.
        """
        for block in reversed(blocks):
            count = self._references[block]
            if count == 0:
                raise InternalError(f"block {block} was released more often than it was held")
            self._references[block] = count - 1
            if count == 1:
                self._put_back(block, evict_first)

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
                self._link(block, self._end)
                self.n_cached -= 1

    def free_blocks(self) -> Iterator[int]:
        """Yield the free blocks in the order of allocation."""
        block = self._next[self._end]
        while block != self._end:
            if block != self._border:
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
        seen, cached, before, block = 0, 0, self._end, self._next[self._end]
        is_cached = False
        while block != self._end:
            if self._previous[block] != before:
                raise InternalError(f"free list: block {block} does not point back to {before}")
            if block == self._border:
                is_cached = True
            else:
                if self._references[block]:
                    raise InternalError(f"free list: block {block} has {self._references[block]} references")
                if is_cached != bool(self._cached[block]):
                    raise InternalError(f"free list: block {block} is on the wrong side of the cached blocks")
                seen += 1
                cached += self._cached[block]
            before, block = block, self._next[block]
        if self._previous[self._end] != before or not is_cached:
            raise InternalError(f"free list: its end is not block {before}, or it has no border")
        without = self._references.count(0)
        if not seen == self.n_free == without:
            raise InternalError(
                f"free list: {seen} blocks listed, {self.n_free} counted, {without} without a reference"
            )
        if cached != self.n_cached:
            raise InternalError(f"free list: {cached} cached blocks listed, {self.n_cached} counted")

    def _put_back(self, block: int, evict_first: bool) -> None:
        if self._cached[block]:
            self._link(block, self._border if evict_first else self._previous[self._end])
            self.n_cached += 1
        else:
            self._link(block, self._end)
        self.n_free += 1

    def _link(self, block: int, before: int) -> None:
        after = self._next[before]
        self._join(before, block)
        self._join(block, after)

    def _unlink(self, block: int) -> None:
        self._join(self._previous[block], self._next[block])

    def _join(self, before: int, after: int) -> None:
        self._next[before] = after
        self._previous[after] = before


class SwapPool:
    """Pool of the blocks 0..n_blocks-1 of host memory, each free or held once. Not thread-safe.

    on_growth: called before blocks are used whose memory was never written, with the number of all that are
        written then. The system gives memory when it is written, and freed blocks are used again first.
    """

    def __init__(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.on_growth: Callable[[int], None] = lambda n_written: None
        self._n_written = 0
        self._free = list(range(n_blocks))[::-1]

    @property
    def n_free(self) -> int:
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Allocate `n` blocks, or raise OutOfBlocks if fewer are free."""
        if n > len(self._free):
            raise OutOfBlocks(f"{n} swap blocks wanted, {len(self._free)} of {self.n_blocks} are free")
        n_used = self.n_blocks - len(self._free) + n
        if n_used > self._n_written:
            self._n_written = n_used
            self.on_growth(n_used)
        return [self._free.pop() for _ in range(n)]

    def clear(self) -> None:
        """Free all blocks."""
        self._free = list(range(self.n_blocks))[::-1]

    def release(self, blocks: Sequence[int]) -> None:
        """Free blocks."""
        self._free.extend(reversed(blocks))

    def audit(self, held: Iterable[int]) -> None:
        """Raise InternalError unless every block is free or held, once."""
        if sorted([*self._free, *held]) != list(range(self.n_blocks)):
            raise InternalError("swap pool: a block is neither free nor held, or both")


class SwappedBlocks:
    """Blocks of a sequence in host memory, in position order. `firsts`: the first that each group has.

    The last `n_state` of them hold its recurrent state.
    """

    __slots__ = ("blocks", "firsts", "n_state", "n_tokens")

    def __init__(self, n_tokens: int, firsts: Sequence[int] = (0,), n_state: int = 0) -> None:
        self.blocks: list[int] = []  # filled in by `commit`
        self.n_tokens = n_tokens
        self.firsts = tuple(firsts)
        self.n_state = n_state

    @property
    def state(self) -> list[int]:
        """Blocks of the recurrent state."""
        return self.blocks[len(self.blocks) - self.n_state :]


class BlockTable:
    """Blocks of one sequence: in group g, token p is in block `groups[g][p // block_size - firsts[g]]`.

    Blocks before `firsts[g]` were freed, because the group's window has left them. Change the lists only with
    the methods. They count blocks freed at the start in `n_slides`, and all changes but these and blocks
    added at the end in `version`, so a copy of the table knows when to start over.
    """

    __slots__ = (
        *("branch", "firsts", "goal", "groups", "hashes", "mark", "n_blocks", "n_cached", "n_published"),
        *("n_shared", "n_slides", "slides_at", "n_tokens", "prefix", "reserved", "rolling", "snapshot"),
        *("state", "version"),
    )

    def __init__(
        self,
        groups: Iterable[Sequence[int]],
        n_tokens: int,
        hashes: BlockHashes | None,
        *,
        firsts: Iterable[int] | None = None,
        n_blocks: int | None = None,
        reserved: int = 0,
        goal: int = 0,
    ) -> None:
        self.groups = [list(blocks) for blocks in groups]
        self.firsts = list(firsts) if firsts is not None else [0] * len(self.groups)
        # blocks from the start of the sequence to the end of the table, in each group
        self.n_blocks = n_blocks if n_blocks is not None else self.firsts[0] + len(self.groups[0])
        self.n_tokens = n_tokens  # with K and V in the blocks
        self.n_cached = n_tokens  # of the prefix hit or the swapped blocks at its start
        self.n_published = self.n_blocks  # its first blocks that need not be published again
        self.prefix: Prefix | None = None  # of the last of them, None if there is none
        self.n_shared = self.n_blocks  # its first blocks that other tables may hold
        self.version = 0  # how often a block was replaced, or the table became shorter at its end
        self.n_slides = 0  # how often it became shorter at its start
        self.slides_at = 0  # tokens before which it does not become shorter again; see `next_slide`
        self.reserved = reserved  # blocks that it may still allocate
        self.goal = goal  # `n_blocks` when it has allocated them
        # tokens after which other sequences may go on: of the prompt, and of a prefix that others have, too
        self.mark = self.branch = 0
        self.hashes = hashes
        self.snapshot: tuple[int, ...] = ()  # blocks of the recurrent state that it shall go on with
        self.state: list[int] = []  # the same in host memory, until blocks are swapped again
        self.rolling: Prefix | None = None  # with its last snapshot of a generated text

    @property
    def held(self) -> list[int]:
        """The blocks to which it has a reference, one for each."""
        return [*self.blocks, *self.snapshot] if self.snapshot else self.blocks

    @property
    def blocks(self) -> list[int]:
        """The blocks of all groups in position order. Do not change the list."""
        return self.groups[0] if len(self.groups) == 1 else self.in_order(0, self.n_blocks)

    def n_missing(self, n_blocks: int) -> int:
        """Return the blocks to add, so that each group has its blocks up to `n_blocks`."""
        return sum(
            max(0, n_blocks - first - len(blocks))
            for first, blocks in zip(self.firsts, self.groups, strict=True)
        )

    def at(self, index: int) -> list[int]:
        """Return the block at `index` of the sequence in each group, all of which hold one."""
        return [blocks[index - first] for first, blocks in zip(self.firsts, self.groups, strict=True)]

    def extend(self, blocks: Iterator[int], n_blocks: int) -> None:
        """Add blocks at the end of each group, up to `n_blocks`."""
        for first, held in zip(self.firsts, self.groups, strict=True):
            held.extend(islice(blocks, n_blocks - first - len(held)))
        self.n_blocks = n_blocks

    def replace(self, group: int, index: int, block: int) -> None:
        """Replace the block of a group at `index` of the sequence by a block of its own."""
        self.groups[group][index - self.firsts[group]] = block
        self.n_shared = min(self.n_shared, index)
        self.version += 1

    def truncate(self, n_blocks: int) -> list[int]:
        """Remove all blocks from `n_blocks` of the sequence on. Return them in position order."""
        cut = self.in_order(n_blocks, self.n_blocks)
        for first, held in zip(self.firsts, self.groups, strict=True):
            del held[max(0, n_blocks - first) :]
        self.n_blocks = min(n_blocks, self.n_blocks)
        self.n_shared = min(self.n_shared, n_blocks)
        self.version += 1
        return cut

    def slide(self, group: int, first: int) -> list[int]:
        """Remove the blocks of a group before block `first` of the sequence. Return them in order."""
        held, n = self.groups[group], first - self.firsts[group]
        cut = held[:n]
        del held[:n]
        self.firsts[group] = first
        self.n_slides += 1
        return cut

    def next_slide(self, layout: BlockLayout) -> int:
        """Return the number of tokens at which a window leaves a block next. Some group has a window."""
        places = []
        for first, window in zip(self.firsts, layout.windows, strict=True):
            if window.size:
                token = (first + 1) * layout.block_size
                chunk = -(-token // window.size) * window.size
                places.append(chunk + 1 if window.chunked else token + window.size)
        return min(places)

    def in_order(self, begin: int, end: int) -> list[int]:
        """Return the blocks of all groups at `begin` to `end` of the sequence, position by position."""
        pairs = list(zip(self.firsts, self.groups, strict=True))
        if len(pairs) == 1:
            first, blocks = pairs[0]
            return blocks[max(0, begin - first) : max(0, end - first)]
        return [
            blocks[index - first]
            for index in range(begin, end)
            for first, blocks in pairs
            if 0 <= index - first < len(blocks)
        ]


@dataclass(frozen=True)
class Start:
    """Outcome: the sequence starts with this table. Its first `table.n_cached` tokens need no computation."""

    table: BlockTable


@dataclass(frozen=True)
class NotNow:
    """Outcome: the sequence waits. It needs `needed` blocks, `available` are free and not reserved."""

    needed: int
    available: int


@dataclass(frozen=True)
class Never:
    """Outcome: the sequence does not fit into an empty pool of `total` blocks."""

    needed: int
    total: int
