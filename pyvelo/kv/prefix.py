"""Which block holds the K and V of which tokens: the prefix cache, as plain tables over the pool's blocks.

A full block is published under a key that stands for its tokens and for all before them:
sha256(key of the block before, length of `extra`, `extra`, tokens as int32), where `extra` carries whatever
else K and V depend on and whom they may be shared with. No hit rests on the hash alone: tokens are compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from hashlib import sha256
from itertools import islice
from typing import NamedTuple

from pyvelo.errors import InternalError

__all__ = ["Chain", "Head", "Match", "PrefixIndex"]

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


class Chain:
    """The keys of a growing sequence's full blocks, each computed once.

    `tokens` is the sequence's own array: it may grow, but what is there stays as it is.
    """

    __slots__ = ("_keys", "_tokens", "block_size", "extra", "matched")

    def __init__(self, tokens: array[int], block_size: int, extra: bytes = b"") -> None:
        self._tokens = tokens
        self._keys: list[bytes] = []
        self.block_size = block_size
        self.extra = extra
        self.matched: tuple[int, int, Match] | None = None  # see PrefixIndex.match

    @property
    def n_tokens(self) -> int:
        """Tokens that are there now."""
        return len(self._tokens)

    def fork(self, tokens: array[int], n_common: int) -> Chain:
        """The chain of a sequence whose first `n_common` tokens are those of this one."""
        twin = Chain(tokens, self.block_size, self.extra)
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


class _Entry(NamedTuple):
    """What is known of a published block."""

    key: bytes
    parent: bytes
    extra: bytes
    tokens: bytes


class PrefixIndex:
    """The published blocks. `make_key` is for tests that want hashes to collide. Not thread-safe."""

    def __init__(self, n_blocks: int, make_key: Callable[[Chain, int], bytes] = Chain.key) -> None:
        self._entries: list[_Entry | None] = [None] * n_blocks
        self._blocks: dict[bytes, int] = {}
        self._children: dict[bytes, dict[int, None]] = {}  # in the order in which they were published
        self._generation = 0
        self._make_key = make_key

    def published(self) -> Iterator[int]:
        """The published blocks."""
        return iter(self._blocks.values())

    def tokens(self, block: int) -> bytes | None:
        """The tokens of a published block."""
        entry = self._entries[block]
        return entry.tokens if entry is not None else None

    def match(self, chain: Chain, n_tokens: int) -> Match:
        """What is there of the first `n_tokens` tokens. Nothing is changed.

        A sequence that waits asks in every step: the answer is kept until another one could be given.
        """
        known = chain.matched
        if known is None or known[:2] != (self._generation, n_tokens):
            known = chain.matched = (self._generation, n_tokens, self._search(chain, n_tokens))
        return known[2]

    def _search(self, chain: Chain, n_tokens: int) -> Match:
        blocks: list[int] = []
        size = chain.block_size
        for index in range(n_tokens // size):
            block = self._find(chain, index)
            if block is None:
                break
            blocks.append(block)
        return Match(tuple(blocks), self._head(chain, len(blocks), n_tokens - len(blocks) * size))

    def publish(self, chain: Chain, index: int, block: int) -> bool:
        """Makes a full block a hit for others; False where another block is one already."""
        if self._entries[block] is not None:
            raise InternalError(f"block {block} is published already")
        key = self._make_key(chain, index)
        if key in self._blocks:
            return False
        self._generation += 1
        parent = self._parent(chain, index)
        self._entries[block] = _Entry(key, parent, chain.extra, chain.block(index))
        self._blocks[key] = block
        self._children.setdefault(parent, {})[block] = None
        return True

    def forget(self, block: int) -> bool:
        """The block is no hit any more; False where it was none."""
        entry = self._entries[block]
        if entry is None:
            return False
        self._generation += 1
        self._entries[block] = None
        del self._blocks[entry.key]
        siblings = self._children[entry.parent]
        del siblings[block]
        if not siblings:
            del self._children[entry.parent]
        return True

    def clear(self) -> None:
        """Forget every block."""
        self._generation += 1  # what sequences have looked up is void
        self._entries = [None] * len(self._entries)
        self._blocks.clear()
        self._children.clear()

    def audit(self) -> None:
        """Checks that the tables agree, or InternalError."""
        entries = {block: entry for block, entry in enumerate(self._entries) if entry is not None}
        if {block: entry.key for block, entry in entries.items()} != {b: k for k, b in self._blocks.items()}:
            raise InternalError("prefix index: keys and blocks do not agree")
        children = {(entry.parent, block) for block, entry in entries.items()}
        if children != {(parent, b) for parent, blocks in self._children.items() for b in blocks}:
            raise InternalError("prefix index: blocks and their parents do not agree")

    def _parent(self, chain: Chain, index: int) -> bytes:
        return self._make_key(chain, index - 1) if index else ROOT

    def _find(self, chain: Chain, index: int) -> int | None:
        block = self._blocks.get(self._make_key(chain, index))
        if block is None:
            return None
        entry = self._entries[block]
        same = entry is not None and entry.tokens == chain.block(index) and entry.extra == chain.extra
        return block if same else None

    def _head(self, chain: Chain, index: int, n_wanted: int) -> Head | None:
        """The longest common head among the blocks behind the same tokens; of equal ones the newest."""
        first = index * chain.block_size
        wanted = chain.tokens(first, first + min(n_wanted, chain.block_size))
        siblings = self._children.get(self._parent(chain, index))
        if not wanted or siblings is None:
            return None
        best: Head | None = None
        for block in islice(reversed(siblings), MOST_SIBLINGS):
            entry = self._entries[block]
            if entry is not None and entry.extra == chain.extra:
                n_tokens = common_tokens(entry.tokens, wanted)
                if n_tokens > (best.n_tokens if best else 0):
                    best = Head(block, n_tokens)
        return best
