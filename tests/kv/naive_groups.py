"""Naive models of what groups of layers read, and of published prefixes: dictionaries of token lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from pyvelo.kv.plan import MIN_PARTIAL_HIT
from pyvelo.kv.prefix import FULL, Window

BLOCK = 8

LAYOUTS: tuple[tuple[Window, ...], ...] = (
    (FULL,),
    (FULL,),
    (FULL, Window(5)),
    (FULL, Window(12), Window(12)),
    (FULL, Window(1), Window(BLOCK)),
    (FULL, Window(20), Window(2)),
    (FULL, Window(2 * BLOCK, chunked=True)),
    (FULL, FULL, Window(11, chunked=True), Window(3 * BLOCK)),
    (Window(2 * BLOCK + 1),),
    (Window(6), Window(17)),
    (Window(2 * BLOCK, chunked=True),),
    (Window(5, chunked=True), Window(BLOCK, chunked=True)),
)


def may_read(window: Window, position: int, other: int) -> bool:
    """Return whether a query at `position` reads the token at `other`."""
    if other > position:
        return False
    if not window.size:
        return True
    if window.chunked:
        return position // window.size == other // window.size
    return position - other < window.size


@cache
def first_needed(window: Window, n_tokens: int) -> int:
    """Return the first block that a query from the last of `n_tokens` tokens on may read."""
    query = max(0, n_tokens - 1)
    return min(other for other in range(query + 1) if may_read(window, query, other)) // BLOCK


@cache
def most_spanned(n_tokens: int) -> int:
    """Return the most blocks that so many tokens in a row are in."""
    return max(len({at // BLOCK for at in range(begin, begin + n_tokens)}) for begin in range(BLOCK))


@dataclass(frozen=True)
class NaiveLayout:
    """Windows of the groups, and the most tokens that a sequence computes in a step."""

    windows: tuple[Window, ...]
    max_chunk: int

    @property
    def n_groups(self) -> int:
        return len(self.windows)

    def firsts(self, n_tokens: int) -> list[int]:
        return [first_needed(window, n_tokens) for window in self.windows]

    def most(self, window: Window, n_blocks: int) -> int:
        """Return the most blocks of a group: of a window and a step's tokens, which begin anywhere."""
        return min(n_blocks, most_spanned(window.size + self.max_chunk)) if window.size else n_blocks

    def peak(self, n_tokens: int) -> int:
        return sum(self.most(window, -(-n_tokens // BLOCK)) for window in self.windows)

    def wanted(self, firsts: Sequence[int], n_blocks: int, goal: int) -> int:
        """Return the blocks that a table still allocates to reach `goal`, as far as it holds them at once."""
        total = 0
        for first, window in zip(firsts, self.windows, strict=True):
            n_held = len(range(first, n_blocks))
            missing = len(range(max(first, n_blocks), goal))
            total += max(0, min(missing, self.most(window, goal) - n_held))
        return total


class Entry:
    """Published prefix: its tokens, and the blocks of each group, the oldest first."""

    def __init__(self, key: tuple[bytes, tuple[int, ...]], parent: Entry | None, n_groups: int) -> None:
        self.key = key
        self.parent = parent
        self.blocks: list[list[int]] = [[] for _ in range(n_groups)]


class Hit(NamedTuple):
    """Prefix hit: its blocks in number, the first block of each group, and the blocks of each group.

    snapshot: blocks of the recurrent state after its tokens.
    """

    n_blocks: int
    firsts: list[int]
    groups: list[list[int]]
    snapshot: list[int]

    @property
    def blocks(self) -> list[int]:
        """All its blocks."""
        return [block for blocks in (*self.groups, self.snapshot) for block in blocks]


class NaivePrefixes:
    """Published prefixes by salt and all tokens. One without blocks stays while another follows it."""

    takes_partial_hits = True

    def __init__(self, layout: NaiveLayout) -> None:
        self.layout = layout
        self.entries: dict[tuple[bytes, tuple[int, ...]], Entry] = {}

    def lists(self) -> Iterator[list[int]]:
        """Yield the blocks of each prefix and group."""
        return (blocks for entry in self.entries.values() for blocks in entry.blocks)

    def published(self) -> set[int]:
        return {block for blocks in self.lists() for block in blocks}

    def get(self, tokens: Sequence[int], salt: bytes, n_blocks: int) -> Entry | None:
        return self.entries.get((salt, tuple(tokens[: n_blocks * BLOCK])))

    def is_listed(self, entry: Entry | None) -> bool:
        return entry is not None and self.entries.get(entry.key) is entry

    def no_hit(self) -> Hit:
        return Hit(0, [0] * self.layout.n_groups, [[] for _ in self.layout.windows], [])

    def snapshot_of(self, entry: Entry) -> list[int] | None:
        """Return the blocks of the state after a prefix. None: it was not saved, so it is no hit."""
        return []

    def hits(self, tokens: Sequence[int], salt: bytes) -> Hit:
        """Return the longest hit."""
        for n_blocks in range((len(tokens) - 1) // BLOCK, 0, -1):  # the last token is always computed
            last = self.get(tokens, salt, n_blocks)
            snapshot = self.snapshot_of(last) if last is not None else None
            if snapshot is None:
                continue
            firsts = self.layout.firsts(n_blocks * BLOCK + 1)
            groups: list[list[int]] = [
                [
                    entry.blocks[group][0]
                    for n in range(first, n_blocks)
                    if (entry := self.get(tokens, salt, n + 1)) is not None and entry.blocks[group]
                ]
                for group, first in enumerate(firsts)
            ]
            if all(len(blocks) == n_blocks - first for first, blocks in zip(firsts, groups, strict=True)):
                return Hit(n_blocks, firsts, groups, snapshot)
        return self.no_hit()

    def partials(self, tokens: Sequence[int], salt: bytes, n_blocks: int) -> dict[tuple[int, ...], int]:
        """Return the partial hits behind whole blocks: their tokens, by the blocks of the groups."""
        before = tuple(tokens[: n_blocks * BLOCK])
        wanted = tokens[n_blocks * BLOCK : len(tokens) - 1]
        found = {}
        for (other_salt, prefix), entry in self.entries.items() if self.takes_partial_hits else ():
            if other_salt == salt and prefix[:-BLOCK] == before and all(entry.blocks):
                same = zip(prefix[-BLOCK:], wanted, strict=False)
                length = next((i for i, (a, b) in enumerate(same) if a != b), min(BLOCK, len(wanted)))
                if length >= MIN_PARTIAL_HIT:
                    found[tuple(blocks[0] for blocks in entry.blocks)] = length
        return found

    def publish(
        self, tokens: Sequence[int], salt: bytes, n_blocks: int, blocks: dict[int, int], parent: Entry | None
    ) -> Entry | None:
        """Publish the last of `n_blocks` blocks, by group. None: the block before it is not published."""
        if not blocks or (n_blocks > 1 and not self.is_listed(parent)):
            return None
        return self.list_prefix(tokens, salt, n_blocks, blocks, parent)

    def list_prefix(
        self, tokens: Sequence[int], salt: bytes, n_blocks: int, blocks: dict[int, int], parent: Entry | None
    ) -> Entry | None:
        """Publish blocks, or none: then the prefix has to get others, or one that follows it."""
        key = (salt, tuple(tokens[: n_blocks * BLOCK]))
        entry = self.entries.setdefault(key, Entry(key, parent, self.layout.n_groups))
        for group, block in blocks.items():
            entry.blocks[group].append(block)
        return entry

    def unpublish(self, block: int) -> None:
        entry = next((e for e in self.entries.values() if any(block in blocks for blocks in e.blocks)), None)
        if entry is None:
            return
        for blocks in entry.blocks:
            if block in blocks:
                blocks.remove(block)
        self._drop(entry)

    def drop_empty(self, entry: Entry | None) -> None:
        """Remove a prefix if it is empty."""
        self._drop(entry)

    def _drop(self, entry: Entry | None) -> None:
        """Remove a prefix without blocks that none follows, and likewise its parents."""
        while entry is not None and not self._holds_any(entry) and not self._is_parent(entry):
            del self.entries[entry.key]
            entry = entry.parent

    def _holds_any(self, entry: Entry) -> bool:
        return any(entry.blocks)

    def _is_parent(self, entry: Entry) -> bool:
        return any(other.parent is entry for other in self.entries.values())

    def let_go(self, used: set[int]) -> None:
        """Unpublish the duplicates of blocks that are not used any more: one of equal blocks stays cached."""
        for blocks in list(self.lists()):
            for block in list(blocks):
                if block not in used and len(blocks) > 1:
                    self.unpublish(block)
