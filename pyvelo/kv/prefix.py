"""Prefix cache: which block holds the K and V of which tokens, as plain tables over the pool's blocks.

A full block is published under its block hash, which stands for its tokens and all tokens before them:
sha256(hash of the parent block, length of `extra`, `extra`, tokens as int32). `extra` contains everything
else that K and V depend on, and limits which sequences may share them. A hash alone proves no hit: the
published prefixes form a tree, and a block is a hit only if its parent is the prefix that was found before
and if its tokens are equal.

Sequences that compute the same tokens at the same time publish a block each; the oldest of them is the hit.
When no sequence holds them, the manager caches one of them. So a hit is a live block if one exists.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

from pyvelo.errors import InternalError

__all__ = ["BlockHashes", "Match", "PartialHit", "PrefixIndex"]

ROOT = bytes(32)
"""Parent hash of a first block."""

MAX_SIBLINGS = 64
"""Blocks that are compared for a partial hit: the newest with the same parent."""


def hash_block(parent: bytes, extra: bytes, tokens: bytes) -> bytes:
    """Return the hash of a block from its parent's hash, `extra` and its tokens (int32)."""
    return sha256(b"".join((parent, len(extra).to_bytes(8, "little"), extra, tokens))).digest()


class PartialHit(NamedTuple):
    """Block whose first `n_tokens` tokens are the wanted ones."""

    block: int
    n_tokens: int


class Match(NamedTuple):
    """Prefix hit of a sequence: whole blocks from its start, and a partial hit to copy."""

    blocks: tuple[int, ...]
    partial: PartialHit | None

    def n_tokens(self, block_size: int) -> int:
        """Return the number of tokens of both."""
        return len(self.blocks) * block_size + (self.partial.n_tokens if self.partial is not None else 0)


def common_tokens(a: bytes, b: bytes) -> int:
    """Return how many int32 at the start of both are equal."""
    n = min(len(a), len(b))
    differing = int.from_bytes(a[:n], "little") ^ int.from_bytes(b[:n], "little")
    return ((differing & -differing).bit_length() - 1) // 32 if differing else n // 4


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


class _Prefix:
    """Published prefix: the tokens of its last block, and the blocks that hold them, the oldest first.

    The root of a tree has no block; its hash is the `extra` of all prefixes below.
    """

    __slots__ = ("blocks", "children", "hash", "parent", "tokens")

    def __init__(self, block_hash: bytes, parent: _Prefix | None, tokens: bytes) -> None:
        self.hash = block_hash
        self.parent = parent
        self.tokens = tokens
        self.blocks: tuple[int, ...] = ()
        self.children: dict[_Prefix, None] = {}  # in the order in which they were published


class PrefixIndex:
    """Published blocks, by their hashes. Not thread-safe.

    Args:
        n_blocks: blocks of the pool.
        make_hash: for tests whose hashes collide.
    """

    def __init__(
        self, n_blocks: int, make_hash: Callable[[BlockHashes, int], bytes] = BlockHashes.block_hash
    ) -> None:
        self.n_duplicates = 0
        """Published blocks whose prefix an older block holds, too."""
        self._by_block: list[_Prefix | None] = [None] * n_blocks
        self._by_hash: dict[bytes, _Prefix] = {}
        self._roots: dict[bytes, _Prefix] = {}  # by extra
        self._generation = object()  # another one after each change
        self._make_hash = make_hash

    def published(self) -> Iterator[int]:
        """Return the published blocks."""
        return (block for prefix in self._by_hash.values() for block in prefix.blocks)

    def tokens(self, block: int) -> bytes | None:
        """Return the tokens of a published block, None if it is not published."""
        prefix = self._by_block[block]
        return prefix.tokens if prefix is not None else None

    def blocks_like(self, block: int) -> tuple[int, ...]:
        """Return all published blocks of the same prefix, the oldest first; none if it is not published."""
        prefix = self._by_block[block]
        return prefix.blocks if prefix is not None else ()

    def match(self, hashes: BlockHashes, n_tokens: int) -> Match:
        """Return the prefix hit of the first `n_tokens` tokens. Change nothing.

        A waiting sequence is looked up in every step, so `hashes` stores the result until the index changes.
        """
        known = hashes.matched
        if known is None or known[0] is not self._generation or known[1] != n_tokens:
            known = hashes.matched = (self._generation, n_tokens, self._search(hashes, n_tokens))
        return known[2]

    def _search(self, hashes: BlockHashes, n_tokens: int) -> Match:
        prefix = self._roots.get(hashes.extra)
        if prefix is None:
            return Match((), None)
        blocks: list[int] = []
        size = hashes.block_size
        for index in range(n_tokens // size):
            following = self._find(prefix, hashes, index)
            if following is None:
                break
            prefix = following
            blocks.append(prefix.blocks[0])
        first = len(blocks) * size
        wanted = hashes.tokens(first, min(n_tokens, first + size))
        return Match(tuple(blocks), _find_partial_hit(prefix, wanted) if wanted else None)

    def publish(self, hashes: BlockHashes, index: int, block: int, parent_block: int | None = None) -> bool:
        """Make a full block a hit for other sequences.

        Args:
            hashes: of the sequence.
            index: of the block in its table.
            block: the block.
            parent_block: the block before it in the table, None for the first.

        Returns:
            False if the parent block is no hit, or if another prefix has the same hash.
        """
        if self._by_block[block] is not None:
            raise InternalError(f"block {block} is published already")
        if parent_block is None:
            parent = self._roots.get(hashes.extra) or _Prefix(hashes.extra, None, b"")
        else:
            known = self._by_block[parent_block]
            if known is None:
                return False
            parent = known
        block_hash = self._make_hash(hashes, index)
        prefix = self._find(parent, hashes, index)
        if prefix is None:
            if block_hash in self._by_hash:
                return False
            self._generation = object()
            prefix = self._by_hash[block_hash] = _Prefix(block_hash, parent, hashes.block_tokens(index))
            parent.children[prefix] = None
            if parent_block is None:
                self._roots[hashes.extra] = parent
        else:
            self.n_duplicates += 1
        prefix.blocks += (block,)
        self._by_block[block] = prefix
        return True

    def unpublish(self, block: int) -> bool:
        """Make a block no hit. Return False if it was none."""
        prefix = self._by_block[block]
        if prefix is None:
            return False
        self._generation = object()
        self._by_block[block] = None
        prefix.blocks = tuple(other for other in prefix.blocks if other != block)
        if prefix.blocks:
            self.n_duplicates -= 1
            return True
        del self._by_hash[prefix.hash]
        parent = prefix.parent
        if parent is not None:
            del parent.children[prefix]
            if parent.parent is None and not parent.children:
                del self._roots[parent.hash]
        return True

    def clear(self) -> None:
        """Unpublish every block."""
        self._generation = object()  # invalidates stored matches
        self._by_block = [None] * len(self._by_block)
        self._by_hash.clear()
        self._roots.clear()
        self.n_duplicates = 0

    def audit(self) -> None:
        """Raise InternalError if the tables disagree."""
        listed = {block: id(prefix) for block, prefix in enumerate(self._by_block) if prefix is not None}
        prefixes = self._by_hash.values()
        if listed != {block: id(prefix) for prefix in prefixes for block in prefix.blocks}:
            raise InternalError("prefix index: hashes and blocks do not agree")
        if any(prefix.hash != known or not prefix.blocks for known, prefix in self._by_hash.items()):
            raise InternalError("prefix index: a prefix has another hash, or no block")
        if self.n_duplicates != len(listed) - len(prefixes):
            raise InternalError(
                f"prefix index: {self.n_duplicates} duplicates counted, {len(listed) - len(prefixes)} listed"
            )
        if any(prefix.parent is None or prefix not in prefix.parent.children for prefix in prefixes):
            raise InternalError("prefix index: blocks and their parents do not agree")

    def _find(self, parent: _Prefix, hashes: BlockHashes, index: int) -> _Prefix | None:
        """Return the prefix that follows `parent` in the hashes. Its parent and its tokens prove the hit."""
        prefix = self._by_hash.get(self._make_hash(hashes, index))
        if prefix is None or prefix.parent is not parent or prefix.tokens != hashes.block_tokens(index):
            return None
        return prefix


def _find_partial_hit(parent: _Prefix, wanted: bytes) -> PartialHit | None:
    """Return the longest partial hit among the children of `parent`; of equal ones the newest."""
    best: PartialHit | None = None
    for prefix in islice(reversed(parent.children), MAX_SIBLINGS):
        n_tokens = common_tokens(prefix.tokens, wanted)
        if n_tokens > (best.n_tokens if best else 0):
            best = PartialHit(prefix.blocks[0], n_tokens)
    return best
