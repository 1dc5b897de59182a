"""Feed of the prefixes that can hit: how they change from step to step.

A router looks up the block hashes of a prompt, and expects a hit of all blocks before the first unknown hash.
So a prefix is announced if it can hit itself, or if a longer one can. Without windows and recurrent layers,
a prefix can hit if its blocks and the blocks of all prefixes before it are published. With windows, the last
blocks must also be published in the groups with windows. With recurrent layers, a snapshot must follow.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import NamedTuple

from pyvelo.kv.prefix import BlockLayout, Prefix, PrefixIndex
from pyvelo.kv.records import Event

__all__ = ["Block", "Changes", "Feed", "Identity"]

SplitExtra = Callable[[bytes], tuple[str | None, bytes] | None]

HASH_BYTES = 8
SALT_MARK = "pyvelo-salt:"


class Identity(NamedTuple):
    """Adapter and salt of blocks, on which K and V depend beside the tokens.

    lora: name of the adapter; None: none.
    salt: key of the cache salt, from which the salt cannot be computed; None: there is no salt.
    """

    lora: str | None
    salt: str | None


class Block(NamedTuple):
    """Block of a prefix as a router sees it.

    hash: 64 bits; the parent's: None for the first block. tokens: int32, 4 bytes each.
    """

    hash: int
    parent: int | None
    tokens: bytes
    identity: Identity


class Changes(NamedTuple):
    """Difference between two moments: first remove hashes, then store blocks, each after its parent.

    clears: nothing is cached after the removal.
    """

    removed: list[int]
    stored: list[Block]
    clears: bool


class _Node:
    """State of a prefix.

    number: its blocks, from the start of the sequence.
    n_announced_children: announced prefixes that are one block longer.
    reachable: all its blocks of the groups without a window are published, and its adapter is loaded.
    hits: a sequence can continue right after it.
    announced: it hits, or a longer prefix does.
    """

    __slots__ = (
        "announced",
        "block",
        "hits",
        "n_announced_children",
        "number",
        "parent",
        "prefix",
        "reachable",
    )

    def __init__(self, prefix: Prefix, parent: _Node | None) -> None:
        self.prefix, self.parent = prefix, parent
        self.number: int = 1 if parent is None else parent.number + 1
        self.n_announced_children = 0
        self.reachable = self.hits = self.announced = False
        self.block: Block | None = None  # made when it is first announced


class Feed:
    """Changes of the prefixes that can hit. Not thread-safe; call it while the manager is locked.

    It refers to no manager, which would make a circle.

    Args:
        split_extra: returns the name of the adapter and the salt for the `extra` of block hashes; None if the
            adapter is not loaded.
    """

    def __init__(
        self,
        index: PrefixIndex,
        layout: BlockLayout,
        split_extra: SplitExtra,
    ) -> None:
        self._index, self._layout = index, layout
        self._split_extra = split_extra
        self._secret = secrets.token_bytes(32)
        self._full = [group for group, window in enumerate(layout.windows) if not window.size]
        self._windowed = [group for group, window in enumerate(layout.windows) if window.size]
        self._prefixes: dict[int, Prefix] = {}  # by published block
        self._nodes: dict[Prefix, _Node] = {}
        self._dirty: dict[Prefix, None] = {}
        self._flipped: dict[_Node, None] = {}  # `announced` differs from what `take` has returned
        self._n_announced = 0
        for block in index.published():
            self.observe(Event("stored", block))

    def observe(self, event: Event) -> None:
        """Note an event of the manager."""
        if event.kind == "stored":
            prefix = self._index.prefix_of(event.block)
            if prefix is not None:
                self._prefixes[event.block] = prefix
                self._dirty[prefix] = None
        elif event.kind in ("evicted", "reset", "duplicate"):
            prefix = self._prefixes.pop(event.block, None)
            if prefix is not None:
                self._dirty[prefix] = None

    def note_adapters(self) -> None:
        """Note that `split_extra` returns other values for adapters, until `take` at least."""
        self._dirty |= {node.prefix: None for node in self._nodes.values() if node.parent is None}

    @property
    def has_changes(self) -> bool:
        """Whether `take` may return changes; it returns none if they cancel out."""
        self.update()
        return bool(self._flipped)

    def take(self) -> Changes | None:
        """Return the changes since the last call; None: there are none."""
        self.update()
        flipped, self._flipped = self._flipped, {}
        stored = {node.prefix.hash: node for node in sorted(flipped, key=_number) if node.announced}
        removed = {node.prefix.hash: node for node in flipped if not node.announced}
        for same in stored.keys() & removed.keys():  # dropped, and published again
            stored[same].block = removed[same].block
            del stored[same], removed[same]
        self._n_announced += len(stored) - len(removed)
        changes = Changes(
            [self._block(node).hash for node in removed.values()],
            [self._block(node) for node in stored.values()],
            bool(removed) and self._n_announced == len(stored),
        )
        for node in removed.values():
            node.block = None  # the adapter may be loaded again, by another name
        return changes if stored or removed else None

    # ---- what can hit ----

    def update(self) -> None:
        """Update the prefixes whose blocks have changed, and the prefixes that depend on them."""
        if not self._dirty:
            return
        pending: dict[_Node, None] = {}
        for prefix in self._dirty:
            self._enter(prefix, pending)
        self._dirty = {}
        touched: dict[_Node, None] = {}
        for node in sorted(pending, key=_number):
            if node in pending:
                self._look(node, pending, touched)
        for node in sorted(touched, key=_number, reverse=True):
            self._announce(node)
        for node in touched:
            if not node.prefix.is_listed:
                self._nodes.pop(node.prefix, None)

    def _enter(self, prefix: Prefix, pending: dict[_Node, None]) -> None:
        """Add the prefix's node to `pending`, and the nodes of its parents if they are new or gone."""
        way, parent = [prefix], prefix.parent
        while parent is not None and parent.parent is not None:
            node = self._nodes.get(parent)
            if node is not None and (parent.is_listed or node in pending):
                break
            way.append(parent)
            parent = parent.parent
        for each in reversed(way):
            if each not in self._nodes:
                above = self._nodes.get(each.parent) if each.parent is not None else None
                self._nodes[each] = _Node(each, above)
            pending[self._nodes[each]] = None

    def _look(self, first: _Node, pending: dict[_Node, None], touched: dict[_Node, None]) -> None:
        """Set `reachable` and `hits` of a node, and of the nodes after it that depend on it."""
        todo = [(first, self._runs_before(first), 0)]
        while todo:
            node, runs, last = todo.pop()
            if node in pending:
                del pending[node]
                last = node.number
            touched[node] = None
            prefix, listed = node.prefix, node.prefix.is_listed
            was_reachable = node.reachable
            node.reachable = (
                listed
                and (self._is_loaded(prefix) if node.parent is None else node.parent.reachable)
                and all(prefix.blocks[group] for group in self._full)
            )
            runs = [n + 1 if prefix.blocks[g] else 0 for n, g in zip(runs, self._windowed, strict=True)]
            node.hits = node.reachable and self._fits(node, runs)
            for child in prefix.children if listed else ():
                below = self._nodes.get(child)
                if below is not None and (
                    node.reachable != was_reachable or self._needs(below.number, last - 1)
                ):
                    todo.append((below, runs, last))

    def _runs_before(self, node: _Node) -> list[int]:
        """Return how many blocks in a row before a node's are published, in each group with a window."""
        counts = []
        for group in self._windowed:
            n, most = 0, self._layout.windows[group].size // self._layout.block_size + 2
            above = node.parent
            while above is not None and above.prefix.blocks[group] and n < most:
                n, above = n + 1, above.parent
            counts.append(n)
        return counts

    def _fits(self, node: _Node, runs: list[int]) -> bool:
        """Return whether the windows, and the recurrent layers, have what the next token needs."""
        if self._layout.state_blocks and not node.prefix.snapshot:
            return False
        if not self._windowed:
            return True
        firsts = self._layout.first_blocks(node.number * self._layout.block_size + 1)
        return all(n >= node.number - firsts[g] for n, g in zip(runs, self._windowed, strict=True))

    def _needs(self, number: int, block: int) -> bool:
        """Return whether a hit of `number` blocks needs the block `block` in a group with a window."""
        if not self._windowed:
            return False
        firsts = self._layout.first_blocks(number * self._layout.block_size + 1)
        return any(firsts[group] <= block for group in self._windowed)

    def _announce(self, node: _Node | None) -> None:
        """Set `announced` of a node, and of the nodes before it that depend on it."""
        while node is not None:
            announced = node.hits or (node.reachable and node.n_announced_children > 0)
            if announced == node.announced:
                return
            node.announced = announced
            if node in self._flipped:
                del self._flipped[node]
            else:
                self._flipped[node] = None
            if node.parent is not None:
                node.parent.n_announced_children += 1 if announced else -1
            node = node.parent

    # ---- as routers see it ----

    def _block(self, node: _Node) -> Block:
        """Return the block of a node whose parent was announced earlier."""
        if node.block is None:
            parent = None if node.parent is None else self._block(node.parent)
            identity = parent.identity if parent is not None else self._identity(node.prefix)
            known = node.prefix.hash if identity.salt is None else self._secret_hash(node.prefix.hash)
            number = int.from_bytes(known[-HASH_BYTES:], "big")
            node.block = Block(number, None if parent is None else parent.hash, node.prefix.tokens, identity)
        return node.block

    def _is_loaded(self, first: Prefix) -> bool:
        """Return whether the adapter of a first block is loaded."""
        return first.parent is not None and self._split_extra(first.parent.hash) is not None

    def _identity(self, first: Prefix) -> Identity:
        """Return the identity of a first block whose adapter is loaded."""
        found = self._split_extra(first.parent.hash) if first.parent is not None else None
        lora, salt = found or (None, b"")
        return Identity(lora, SALT_MARK + self._secret_hash(salt).hex() if salt else None)

    def _secret_hash(self, data: bytes) -> bytes:
        """Return a hash that tells nothing about the data without this process's secret."""
        return hashlib.blake2b(data, digest_size=HASH_BYTES, key=self._secret).digest()


def _number(node: _Node) -> int:
    return node.number
