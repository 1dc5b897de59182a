"""Prefix cache: which blocks hold the K and V of which tokens, as plain tables over the pool's blocks.

A full block is published under its block hash, which stands for its tokens and all tokens before them:
sha256(hash of the parent block, length of `extra`, `extra`, tokens as int32). `extra` contains everything
else that K and V depend on, and limits which sequences may share them. A hash alone proves no hit: the
published prefixes form a tree, and a block is a hit only if its parent is the prefix that was found before
and if its tokens are equal.

Each group of layers has its own block for a prefix. A hit of n tokens needs all blocks of the groups without
a window, and of a group with a window only the blocks that the next query attends.

Sequences that compute the same tokens at the same time publish a block each; the oldest of them is the hit.
When no sequence holds them, the manager caches one of them. So a hit is a live block if one exists.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile
from typing import NamedTuple

from pyvelo.errors import InternalError
from pyvelo.kv.partial import PartialHit, find_partial_hit

__all__ = ["FULL", "ROOT", "BlockHashes", "BlockLayout", "Match", "Prefix", "PrefixIndex", "Window"]

ROOT = bytes(32)
"""Parent hash of a first block."""


def hash_block(parent: bytes, extra: bytes, tokens: bytes) -> bytes:
    """Return the hash of a block from its parent's hash, `extra` and its tokens (int32)."""
    return sha256(b"".join((parent, len(extra).to_bytes(8, "little"), extra, tokens))).digest()


class Window(NamedTuple):
    """Tokens that a query attends: the last `size`, or those since the last multiple of `size`; 0: all."""

    size: int = 0
    chunked: bool = False

    def first_token(self, position: int) -> int:
        """Return the first position that a query at `position` attends."""
        if not self.size:
            return 0
        return position // self.size * self.size if self.chunked else max(0, position - self.size + 1)


FULL = Window()


@dataclass(frozen=True)
class BlockLayout:
    """Block size in tokens, the window of each group, and the most tokens of a sequence in a step.

    `state_blocks`: blocks that a snapshot of a recurrent state takes; 0: the model has no recurrent layer.
    """

    block_size: int
    windows: tuple[Window, ...] = (FULL,)
    max_chunk: int = 1 << 31
    state_blocks: int = 0

    @property
    def n_groups(self) -> int:
        return len(self.windows)

    @property
    def is_windowed(self) -> bool:
        """Whether a group frees blocks before the sequence ends."""
        return any(window.size for window in self.windows)

    def blocks_for(self, n_tokens: int) -> int:
        """Return the blocks of `n_tokens` tokens in a group without a window."""
        return -(-n_tokens // self.block_size)

    def first_blocks(self, n_tokens: int) -> tuple[int, ...]:
        """Return the first block that each group still needs after `n_tokens` tokens.

        The last of these tokens may be computed again, for its logits.
        """
        position = max(0, n_tokens - 1)
        return tuple(window.first_token(position) // self.block_size for window in self.windows)

    def most_blocks(self, window: Window, n_blocks: int) -> int:
        """Return the most blocks that a group holds at once for a sequence of `n_blocks` blocks.

        A step needs the window before its first token and its own tokens. These `size + max_chunk` tokens
        begin and end anywhere in a block.
        """
        if not window.size:
            return n_blocks
        return min(n_blocks, (window.size + self.max_chunk - 2) // self.block_size + 2)

    def widest(self, n_tokens: int) -> int:
        """Return the most blocks of a table of `n_tokens` tokens, of any group."""
        n_blocks = self.blocks_for(n_tokens)
        # a partial hit may begin a block later than the window of its first token
        return min(n_blocks, max(self.most_blocks(window, n_blocks) for window in self.windows) + 1)

    def peak_blocks(self, n_tokens: int) -> int:
        """Return the most blocks that a sequence of `n_tokens` tokens holds at once, over all groups."""
        n_blocks = self.blocks_for(n_tokens)
        return sum(self.most_blocks(window, n_blocks) for window in self.windows)

    def wanted(self, firsts: Sequence[int], n_blocks: int, goal: int) -> int:
        """Return the blocks to reserve for a table of `n_blocks` blocks that shall grow to `goal` blocks.

        `firsts` are the first blocks that the groups hold.
        """
        if goal <= n_blocks:
            return 0
        total = 0
        for first, window in zip(firsts, self.windows, strict=True):
            most = self.most_blocks(window, goal)
            total += max(0, min(goal - max(first, n_blocks), most - max(0, n_blocks - first)))
        return total


class Match(NamedTuple):
    """Prefix hit of a sequence: `n_blocks` whole blocks from its start, and a partial hit to copy.

    groups: the blocks of each group that its window needs, from `firsts` on.
    prefix: of the last block; None: there is none.
    snapshot: blocks of the recurrent state after these tokens.
    n_known: blocks of the longest prefix in the index, beyond the hit if a window lacks blocks.
    """

    n_blocks: int
    groups: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...]
    partial: PartialHit | None
    prefix: Prefix | None
    n_known: int = 0
    snapshot: tuple[int, ...] = ()

    @property
    def blocks(self) -> list[int]:
        """The whole blocks of all groups, then the snapshot's."""
        return [block for blocks in (*self.groups, self.snapshot) for block in blocks]

    def n_tokens(self, block_size: int) -> int:
        """Return the number of tokens of both."""
        return self.n_blocks * block_size + (self.partial.n_tokens if self.partial is not None else 0)


def no_match(n_groups: int) -> Match:
    """Return a prefix hit of no tokens."""
    return Match(0, ((),) * n_groups, (0,) * n_groups, None, None)


class BlockHashes:
    """Hashes of the full blocks of a growing sequence, each computed once.

    `tokens` is the sequence's own array: it may grow, but its tokens must not change.
    """

    __slots__ = ("_hashes", "_tokens", "block_size", "extra", "matched")

    def __init__(self, tokens: array[int], block_size: int, extra: bytes = b"") -> None:
        self._tokens = tokens
        self._hashes: list[bytes] = []
        self.block_size = block_size
        self.extra = extra
        self.matched: tuple[object, int, Match] | None = None  # see PrefixIndex.match

    @property
    def n_tokens(self) -> int:
        """Tokens of the sequence now."""
        return len(self._tokens)

    def fork(self, tokens: array[int], n_common: int) -> BlockHashes:
        """Return the hashes of a sequence whose first `n_common` tokens are the same."""
        twin = BlockHashes(tokens, self.block_size, self.extra)
        twin._hashes = self._hashes[: n_common // self.block_size]
        return twin

    def tokens(self, first: int, end: int) -> bytes:
        """Return tokens as int32, 4 bytes each."""
        return self._tokens[first:end].tobytes()

    def block_tokens(self, index: int) -> bytes:
        """Return the tokens of a block as int32."""
        return self.tokens(index * self.block_size, (index + 1) * self.block_size)

    def block_hash(self, index: int) -> bytes:
        """Return the hash of the block `index`, which must be full."""
        known = self._hashes
        while len(known) <= index:
            known.append(hash_block(known[-1] if known else ROOT, self.extra, self.block_tokens(len(known))))
        return known[index]


class Prefix:
    """Published prefix: the tokens of its last block, and the blocks that hold them in each group.

    The oldest block of a group is first. A prefix without blocks stays while another one follows it. The root
    of a tree has no block; its hash is the `extra` of all prefixes below. `snapshot`: blocks of the recurrent
    state after the prefix.
    """

    __slots__ = ("blocks", "children", "hash", "is_listed", "parent", "snapshot", "tokens")

    def __init__(self, block_hash: bytes, parent: Prefix | None, tokens: bytes, n_groups: int) -> None:
        self.hash = block_hash
        self.parent = parent
        self.tokens = tokens
        self.blocks: list[tuple[int, ...]] = [()] * n_groups
        self.snapshot: tuple[int, ...] = ()
        self.children: dict[Prefix, None] = {}  # in the order in which they were published
        self.is_listed = True  # in the index


class PrefixIndex:
    """Published blocks, by their hashes. Not thread-safe.

    Args:
        n_blocks: blocks of the pool.
        layout: the groups and their windows.
        make_hash: for tests whose hashes collide.
    """

    def __init__(
        self,
        n_blocks: int,
        layout: BlockLayout,
        make_hash: Callable[[BlockHashes, int], bytes] = BlockHashes.block_hash,
    ) -> None:
        self.n_duplicates = 0
        """Published blocks whose prefix an older block of the group holds, too."""
        self._layout = layout
        self._by_block: list[Prefix | None] = [None] * n_blocks
        self.by_hash: dict[bytes, Prefix] = {}
        self._roots: dict[bytes, Prefix] = {}  # by extra
        self._generation = object()  # another one after each change
        self._make_hash = make_hash

    def published(self) -> Iterator[int]:
        """Return the published blocks."""
        return (block for prefix in self.by_hash.values() for blocks in prefix.blocks for block in blocks)

    def tokens(self, block: int) -> bytes | None:
        """Return the tokens of a published block, None if it is not published."""
        prefix = self._by_block[block]
        return prefix.tokens if prefix is not None else None

    def prefix_of(self, block: int) -> Prefix | None:
        """Return the prefix of a published block, None if it is not published."""
        return self._by_block[block]

    def blocks_like(self, block: int) -> tuple[int, ...]:
        """Return the published blocks of the same prefix and group, the oldest first; none if unpublished."""
        prefix = self._by_block[block]
        return prefix.blocks[_group_of(prefix, block)] if prefix is not None else ()

    def match(self, hashes: BlockHashes, n_tokens: int) -> Match:
        """Return the prefix hit of the first `n_tokens` tokens. Change nothing.

        A waiting sequence is looked up in every step, so `hashes` stores the result until the index changes.
        """
        known = hashes.matched
        if known is None or known[0] is not self._generation or known[1] != n_tokens:
            known = hashes.matched = (self._generation, n_tokens, self._search(hashes, n_tokens))
        return known[2]

    def _search(self, hashes: BlockHashes, n_tokens: int) -> Match:
        root = self._roots.get(hashes.extra)
        if root is None:
            return no_match(self._layout.n_groups)
        path = self._path(hashes, n_tokens)
        n_blocks = self._longest_hit(path)
        size, prefix = hashes.block_size, path[n_blocks - 1] if n_blocks else root
        wanted = hashes.tokens(n_blocks * size, min(n_tokens, (n_blocks + 1) * size))
        siblings = ((child.tokens, child.blocks) for child in reversed(prefix.children))
        partial = find_partial_hit(siblings, wanted) if wanted else None
        firsts = self._layout.first_blocks(n_blocks * size + 1)
        groups = tuple(
            tuple(each.blocks[group][0] for each in path[first:n_blocks])
            for group, first in enumerate(firsts)
        )
        return Match(n_blocks, groups, firsts, partial, prefix if n_blocks else None, len(path))

    def path(self, hashes: BlockHashes, n_blocks: int) -> list[Prefix]:
        """Return the published prefixes of the first `n_blocks` blocks, each after the one before."""
        path, prefix = list[Prefix](), self._roots.get(hashes.extra)
        while prefix is not None and len(path) < n_blocks:
            prefix = self.find(prefix, hashes, len(path))
            path += [prefix] if prefix is not None else []
        return path

    def _path(self, hashes: BlockHashes, n_tokens: int) -> list[Prefix]:
        """Return the prefixes of the sequence, as far as the groups without a window have blocks."""
        full = [group for group, window in enumerate(self._layout.windows) if not window.size]
        path = self.path(hashes, n_tokens // hashes.block_size)
        return list(takewhile(lambda prefix: all(prefix.blocks[group] for group in full), path))

    def _longest_hit(self, path: Sequence[Prefix]) -> int:
        """Return the number of prefixes up to which each window has all the blocks that it needs."""
        layout = self._layout
        if not layout.is_windowed:
            return len(path)
        best, n_in_a_row = 0, [0] * layout.n_groups
        for n_blocks, prefix in enumerate(path, 1):
            n_in_a_row = [n + 1 if blocks else 0 for n, blocks in zip(n_in_a_row, prefix.blocks, strict=True)]
            firsts = layout.first_blocks(n_blocks * layout.block_size + 1)
            if all(n >= n_blocks - first for n, first in zip(n_in_a_row, firsts, strict=True)):
                best = n_blocks
        return best

    def publish(
        self, hashes: BlockHashes, index: int, blocks: Sequence[int | None], parent: Prefix | None = None
    ) -> Prefix | None:
        """Make full blocks a hit for other sequences.

        Args:
            hashes: of the sequence.
            index: of the blocks in the sequence.
            blocks: one of each group; None: the group has freed it.
            parent: the prefix of the block before, as returned for it; None for the first block.

        Returns:
            Their prefix. None: the block before is no hit, or another prefix has the same hash.
        """
        taken = next(
            (block for block in blocks if block is not None and self._by_block[block] is not None), None
        )
        if taken is not None:
            raise InternalError(f"block {taken} is published already")
        if index == 0:
            parent = self._roots.get(hashes.extra) or Prefix(hashes.extra, None, b"", len(blocks))
        elif parent is None or not parent.is_listed:
            return None
        block_hash, prefix = self._make_hash(hashes, index), self.find(parent, hashes, index)
        if prefix is None and block_hash not in self.by_hash:
            if index == 0:
                self._roots[hashes.extra] = parent
            tokens = hashes.block_tokens(index)
            prefix = self.by_hash[block_hash] = Prefix(block_hash, parent, tokens, len(blocks))
            parent.children[prefix] = None
        if prefix is None:
            return None
        for group, block in enumerate(blocks):
            if block is not None:
                if prefix.blocks[group]:
                    self.n_duplicates += 1
                else:
                    self._generation = object()
                prefix.blocks[group] += (block,)
                self._by_block[block] = prefix
        return prefix

    def unpublish(self, block: int) -> bool:
        """Make a block no hit. Return False if it was none."""
        prefix = self._by_block[block]
        if prefix is None:
            return False
        self._generation = object()
        self._by_block[block] = None
        group = _group_of(prefix, block)
        prefix.blocks[group] = tuple(other for other in prefix.blocks[group] if other != block)
        self.n_duplicates -= bool(prefix.blocks[group])
        self.drop(prefix)
        return True

    def drop(self, prefix: Prefix) -> None:
        """Remove a prefix that holds nothing and that none follows; then its parents likewise."""
        while prefix.parent is not None and not (prefix.children or any(prefix.blocks) or prefix.snapshot):
            parent = prefix.parent
            prefix.is_listed = False
            del self.by_hash[prefix.hash]
            del parent.children[prefix]
            if parent.parent is None and not parent.children:
                del self._roots[parent.hash]
            prefix = parent

    def clear(self) -> None:
        """Unpublish every block."""
        self._generation = object()  # invalidates stored matches
        for prefix in self.by_hash.values():
            prefix.is_listed = False
        self._by_block = [None] * len(self._by_block)
        self.by_hash.clear()
        self._roots.clear()
        self.n_duplicates = 0

    def find(self, parent: Prefix, hashes: BlockHashes, index: int) -> Prefix | None:
        """Return the prefix that follows `parent` in the hashes. Its parent and its tokens prove the hit."""
        prefix = self.by_hash.get(self._make_hash(hashes, index))
        if prefix is None or prefix.parent is not parent or prefix.tokens != hashes.block_tokens(index):
            return None
        return prefix


def _group_of(prefix: Prefix, block: int) -> int:
    """Return the group in which a block has the tokens of a prefix."""
    return next(group for group, blocks in enumerate(prefix.blocks) if block in blocks)
