"""Which block holds the K and V of which tokens: the prefix cache, as plain tables over the pool's blocks.

A full block is published under a key that stands for its tokens and for all before them:
sha256(key of the block before, length of `extra`, `extra`, tokens as int32), where `extra` carries whatever
else K and V depend on and whom they may be shared with. No hit rests on a hash: the published prefixes form a
tree, and a block is a hit only below the prefix that was found before it, and if its tokens are equal.

Sequences that compute the same tokens at the same time publish a block each; a hit is the oldest of them.
When no sequence holds them, the manager keeps one of them. So a hit is a live block if there is one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

from pyvelo.errors import InternalError

__all__ = ["BlockHashes", "Head", "Match", "PrefixIndex"]

ROOT = bytes(32)
"""What stands before a first block."""

MOST_SIBLINGS = 64
"""Blocks that are looked at for a common head: the newest ones behind the same tokens."""


def hash_block(parent: bytes, extra: bytes, tokens: bytes) -> bytes:
    """The key of a block."""
    return sha256(b"".join((parent, len(extra).to_bytes(8, "little"), extra, tokens))).digest()


class Head(NamedTuple):
    """A block whose first `n_tokens` tokens are those wanted."""

    block: int
    n_tokens: int


class Match(NamedTuple):
    """What is there of a sequence: whole blocks from its start, and the head of one to copy."""

    blocks: tuple[int, ...]
    head: Head | None

    def n_tokens(self, block_size: int) -> int:
        """Tokens of both."""
        return len(self.blocks) * block_size + (self.head.n_tokens if self.head is not None else 0)


def common_tokens(a: bytes, b: bytes) -> int:
    """How many int32 at the start of both are equal."""
    n = min(len(a), len(b))
    differing = int.from_bytes(a[:n], "little") ^ int.from_bytes(b[:n], "little")
    return ((differing & -differing).bit_length() - 1) // 32 if differing else n // 4


class BlockHashes:
    """The keys of a growing sequence's full blocks, each computed once.

    `tokens` is the sequence's own array: it may grow, but what is there stays as it is.
    """

    __slots__ = ("_keys", "_tokens", "block_size", "extra", "matched")

    def __init__(self, tokens: array[int], block_size: int, extra: bytes = b"") -> None:
        self._tokens = tokens
        self._keys: list[bytes] = []
        self.block_size = block_size
        self.extra = extra
        self.matched: tuple[object, int, Match] | None = None  # see PrefixIndex.match

    @property
    def n_tokens(self) -> int:
        """Tokens that are there now."""
        return len(self._tokens)

    def fork(self, tokens: array[int], n_common: int) -> BlockHashes:
        """The hashes of a sequence whose first `n_common` tokens are those of this one."""
        twin = BlockHashes(tokens, self.block_size, self.extra)
        twin._keys = self._keys[: n_common // self.block_size]
        return twin

    def tokens(self, first: int, end: int) -> bytes:
        """Tokens as int32, 4 bytes each."""
        return self._tokens[first:end].tobytes()

    def block(self, index: int) -> bytes:
        """The tokens of a block."""
        return self.tokens(index * self.block_size, (index + 1) * self.block_size)

    def key(self, index: int) -> bytes:
        """The key of the block `index`, all of whose tokens must be there."""
        keys = self._keys
        while len(keys) <= index:
            keys.append(hash_block(keys[-1] if keys else ROOT, self.extra, self.block(len(keys))))
        return keys[index]


class _Prefix:
    """A published prefix: the tokens of its last block, and the blocks that hold them, the oldest first.

    The root of a tree has no block; its key is the `extra` of all prefixes below.
    """

    __slots__ = ("blocks", "children", "key", "parent", "tokens")

    def __init__(self, key: bytes, parent: _Prefix | None, tokens: bytes) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.blocks: tuple[int, ...] = ()
        self.children: dict[_Prefix, None] = {}  # in the order in which they were published


class PrefixIndex:
    """The published blocks. `make_key` is for tests that want hashes to collide. Not thread-safe."""

    def __init__(
        self, n_blocks: int, make_key: Callable[[BlockHashes, int], bytes] = BlockHashes.key
    ) -> None:
        self.n_duplicates = 0
        """Published blocks whose prefix an older block holds, too."""
        self._by_block: list[_Prefix | None] = [None] * n_blocks
        self._by_key: dict[bytes, _Prefix] = {}
        self._roots: dict[bytes, _Prefix] = {}  # by extra
        self._generation = object()  # another one after each change
        self._make_key = make_key

    def published(self) -> Iterator[int]:
        """The published blocks."""
        return (block for prefix in self._by_key.values() for block in prefix.blocks)

    def tokens(self, block: int) -> bytes | None:
        """The tokens of a published block."""
        prefix = self._by_block[block]
        return prefix.tokens if prefix is not None else None

    def blocks_like(self, block: int) -> tuple[int, ...]:
        """Return all published blocks of the same prefix, the oldest first; none if it is not published."""
        prefix = self._by_block[block]
        return prefix.blocks if prefix is not None else ()

    def match(self, hashes: BlockHashes, n_tokens: int) -> Match:
        """What is there of the first `n_tokens` tokens. Nothing is changed.

        A sequence that waits asks in every step: the answer is kept until another one could be given.
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
        return Match(tuple(blocks), _head(prefix, hashes.tokens(first, min(n_tokens, first + size))))

    def publish(self, hashes: BlockHashes, index: int, block: int, before: int | None = None) -> bool:
        """Make a full block a hit for others. `before` is the block before it in its table.

        Returns: False if the block before is no hit, or if the key is that of another prefix.
        """
        if self._by_block[block] is not None:
            raise InternalError(f"block {block} is published already")
        if before is None:
            parent = self._roots.get(hashes.extra) or _Prefix(hashes.extra, None, b"")
        else:
            known = self._by_block[before]
            if known is None:
                return False
            parent = known
        key = self._make_key(hashes, index)
        prefix = self._find(parent, hashes, index)
        if prefix is None:
            if key in self._by_key:
                return False
            self._generation = object()
            prefix = self._by_key[key] = _Prefix(key, parent, hashes.block(index))
            parent.children[prefix] = None
            if before is None:
                self._roots[hashes.extra] = parent
        else:
            self.n_duplicates += 1
        prefix.blocks += (block,)
        self._by_block[block] = prefix
        return True

    def forget(self, block: int) -> bool:
        """The block is no hit any more; False where it was none."""
        prefix = self._by_block[block]
        if prefix is None:
            return False
        self._generation = object()
        self._by_block[block] = None
        prefix.blocks = tuple(other for other in prefix.blocks if other != block)
        if prefix.blocks:
            self.n_duplicates -= 1
            return True
        del self._by_key[prefix.key]
        parent = prefix.parent
        if parent is not None:
            del parent.children[prefix]
            if parent.parent is None and not parent.children:
                del self._roots[parent.key]
        return True

    def clear(self) -> None:
        """Forget every block."""
        self._generation = object()  # what sequences have looked up is void
        self._by_block = [None] * len(self._by_block)
        self._by_key.clear()
        self._roots.clear()
        self.n_duplicates = 0

    def audit(self) -> None:
        """Checks that the tables agree, or InternalError."""
        listed = {block: id(prefix) for block, prefix in enumerate(self._by_block) if prefix is not None}
        prefixes = self._by_key.values()
        if listed != {block: id(prefix) for prefix in prefixes for block in prefix.blocks}:
            raise InternalError("prefix index: keys and blocks do not agree")
        if any(self._by_key[key].key != key or not self._by_key[key].blocks for key in self._by_key):
            raise InternalError("prefix index: a prefix has another key, or no block")
        if self.n_duplicates != len(listed) - len(prefixes):
            raise InternalError(
                f"prefix index: {self.n_duplicates} duplicates counted, {len(listed) - len(prefixes)} listed"
            )
        if any(prefix.parent is None or prefix not in prefix.parent.children for prefix in prefixes):
            raise InternalError("prefix index: blocks and their parents do not agree")

    def _find(self, parent: _Prefix, hashes: BlockHashes, index: int) -> _Prefix | None:
        """Return the prefix that follows `parent` in the hashes. Nothing of it rests on the key alone."""
        prefix = self._by_key.get(self._make_key(hashes, index))
        if prefix is None or prefix.parent is not parent or prefix.tokens != hashes.block(index):
            return None
        return prefix


def _head(parent: _Prefix, wanted: bytes) -> Head | None:
    """Return the longest common head among the blocks behind `parent`; of equal ones the newest."""
    best: Head | None = None
    for prefix in islice(reversed(parent.children), MOST_SIBLINGS if wanted else 0):
        n_tokens = common_tokens(prefix.tokens, wanted)
        if n_tokens > (best.n_tokens if best else 0):
            best = Head(prefix.blocks[0], n_tokens)
    return best
