"""Naive model of a plan: it stores the blocks of each sequence, and counts from scratch each time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

from pyvelo.kv.manager import BlockManager
from pyvelo.kv.partial import PartialHit
from pyvelo.kv.plan import AllocationPlan
from pyvelo.kv.pool import BlockTable, SwappedBlocks
from pyvelo.kv.prefix import BlockHashes

from .naive_groups import BLOCK, Entry, NaiveLayout


@dataclass(eq=False)
class Sequence_:
    """Sequence whose first `n_computed` tokens are in the memory, as far as a window may read them."""

    tokens: array[int]
    hashes: BlockHashes
    salt: bytes
    n_computed: int
    shown: list[Entry | None]  # of its blocks that were published
    table: BlockTable = field(repr=False)
    stepped_back: bool = False  # by one token, which is computed again
    held: list[list[int]] = field(default_factory=list)  # blocks of a state that its table holds
    rolling: Entry | None = None  # the prefix with the last snapshot of a generated text

    def values(self, group: int, begin: int, end: int) -> list[int]:
        """Return what the sequence stores in a group: it depends on all tokens before."""
        values = accumulate(self.tokens[:end], lambda before, token: hash((before, token)), initial=0)
        return [hash((self.salt, group, value)) for value in islice(values, begin + 1, None)]


@dataclass
class NaivePlan:
    """State of a plan, by sequence. `published` blocks must not be written."""

    n_blocks: int
    layout: NaiveLayout
    published: set[int]
    n_swap_free: int
    withheld: int = 0
    held: dict[Sequence_, list[int]] = field(default_factory=dict)  # while blocks are allocated
    n_blocks_of: dict[Sequence_, int] = field(default_factory=dict)  # its table afterwards, from its start
    reserved: dict[Sequence_, int] = field(default_factory=dict)
    goals: dict[Sequence_, int] = field(default_factory=dict)
    copied: dict[Sequence_, dict[int, int]] = field(default_factory=dict)  # the blocks that copies replace
    partials: dict[Sequence_, PartialHit] = field(default_factory=dict)  # copied for a starting sequence
    ends: dict[Sequence_, int] = field(default_factory=dict)  # its computed tokens after this step
    started: list[Sequence_] = field(default_factory=list)
    freed: list[Sequence_] = field(default_factory=list)
    swapped: dict[Sequence_, SwappedBlocks] = field(default_factory=dict)
    part: set[int] = field(default_factory=set)  # ids of sequences in the plan
    n_allocated: int = 0

    def enter(self, sequence: Sequence_) -> None:
        """Add a live or starting sequence."""
        table = sequence.table
        self.held[sequence] = list(table.held)
        self.n_blocks_of[sequence] = table.n_blocks
        self.reserved[sequence], self.goals[sequence] = table.reserved, table.goal

    def is_held(self, block: int) -> bool:
        return any(block in blocks for blocks in self.held.values()) or any(
            block in partial.blocks for partial in self.partials.values()
        )

    @property
    def available(self) -> int:
        n_held = sum(map(self.is_held, range(self.n_blocks)))
        return self.n_blocks - n_held - self.n_allocated - sum(self.reserved.values()) - self.withheld

    def copies(self, sequence: Sequence_) -> dict[int, int]:
        """Return the shared or cached blocks of its next token, by group."""
        table, index = sequence.table, sequence.n_computed // BLOCK
        if sequence in self.copied or index >= table.n_blocks:
            return {}
        found = {}
        for group, (first, blocks) in enumerate(zip(table.firsts, table.groups, strict=True)):
            block = blocks[index - first]
            n_holders = sum(held.count(block) for held in self.held.values())
            n_holders -= sum(block in copied.values() for copied in self.copied.values())
            if n_holders + (block in self.published) > 1:
                found[group] = block
        return found

    def missing(self, sequence: Sequence_, n_blocks: int) -> int:
        """Return the blocks that the table lacks up to `n_blocks` of the sequence."""
        there = self.n_blocks_of[sequence]
        return sum(len(range(max(first, there), n_blocks)) for first in sequence.table.firsts)

    def grow(self, sequence: Sequence_, end: int) -> bool:
        """Plan to grow a sequence. Return whether enough blocks are available."""
        copies, n_blocks = self.copies(sequence), max(self.n_blocks_of[sequence], -(-end // BLOCK))
        missing = self.missing(sequence, n_blocks)
        from_reserved = min(missing, self.reserved[sequence])
        if not missing and not copies:
            return True
        if missing - from_reserved + len(copies) > self.available:
            return False
        if copies:
            self.copied[sequence] = copies
        self.n_allocated += missing + len(copies)
        self.n_blocks_of[sequence] = n_blocks
        self.reserved[sequence] -= from_reserved
        self.part.add(id(sequence))
        return True

    def free(self, sequence: Sequence_) -> None:
        """Plan to free a sequence."""
        for of in (self.held, self.n_blocks_of, self.reserved, self.goals):
            del of[sequence]
        self.ends.pop(sequence, None)
        self.freed.append(sequence)
        self.part.add(id(sequence))


def snapshot(manager: BlockManager, tables: Sequence[BlockTable]) -> object:
    """Return all state that a commit may change. `tables` are new tables of a plan."""
    pool, index, swap = manager._pool, manager._index, manager.swap
    return (
        [pool.references(block) for block in range(pool.n_blocks)],
        [pool.is_cached(block) for block in range(pool.n_blocks)],
        list(pool.free_blocks()),
        (pool.n_free, pool.n_cached, manager.n_reserved, manager._version),
        [(block, index.tokens(block)) for block in index.published()] if index is not None else None,
        [id(table) for table in manager.tables()],
        [_state(table) for table in (*manager.tables(), *tables)],
        list(swap._free),
        [(key, list(swapped.blocks)) for key, swapped in manager._swapped.items()],
        vars(manager.counts).copy(),
    )


def _state(table: BlockTable) -> object:
    groups = [list(blocks) for blocks in table.groups]
    numbers = (table.n_blocks, table.n_tokens, table.n_published, table.reserved, table.goal, table.mark)
    states = table.snapshot, list(table.state), id(table.rolling), table.branch
    return groups, list(table.firsts), numbers, (table.version, table.n_slides), id(table.prefix), states


def spoiled(allocation: AllocationPlan, how: int, strange: BlockTable) -> bool:
    """Make one change of a plan wrong, if possible. `strange` is not a live table."""
    changes, n_blocks = allocation._changes, allocation._pool.n_blocks
    some = next(iter(changes.items()), None)
    growing = next(((k, c) for k, c in changes.items() if not c.frees), None)
    starting = next(((k, c) for k, c in changes.items() if c.match is not None), None)
    leaving = next(((k, c) for k, c in changes.items() if c.frees), None)
    if how == 0:
        allocation.version -= 1
    elif how == 1 and some:
        changes[-1] = some[1]  # twice
    elif how == 2 and some:
        changes[some[0]] = some[1]._replace(table=strange)
    elif how == 3 and growing:
        changes[growing[0]] = growing[1]._replace(n_blocks=growing[1].n_blocks + n_blocks + 1)
    elif how == 4 and growing:
        changes[growing[0]] = growing[1]._replace(reserved=growing[1].reserved + n_blocks + 1)
    elif how == 5 and growing:
        changes[growing[0]] = growing[1]._replace(reserved=-1)
    elif how == 6 and growing and growing[1].table.n_blocks:
        changes[growing[0]] = growing[1]._replace(n_blocks=growing[1].table.n_blocks - 1)
    elif how == 7 and growing:
        changes[growing[0]] = growing[1]._replace(swaps_in=SwappedBlocks(growing[1].table.n_tokens))
    elif how == 8 and starting and starting[1].match is not None:
        partial = PartialHit((0,) * (allocation.n_groups - 1) + (n_blocks,), 4)
        match = starting[1].match._replace(partial=partial)
        changes[starting[0]] = starting[1]._replace(match=match)
    elif how == 9 and leaving:
        changes[leaving[0]] = leaving[1]._replace(n_blocks=1)
    elif how == 10 and leaving:
        table = leaving[1].table
        changes[leaving[0]] = leaving[1]._replace(swaps_out=SwappedBlocks(table.n_tokens + 1, table.firsts))
    elif how == 11 and growing:
        changes[growing[0]] = growing[1]._replace(frees=True)
    elif how == 12 and starting:
        changes[starting[0]] = starting[1]._replace(n_blocks=0)
        return starting[1].table.n_tokens > 0
    elif how == 13 and leaving:
        table = leaving[1].table
        swapped = SwappedBlocks(table.n_tokens, [*table.firsts[:-1], table.firsts[-1] + 1])
        changes[leaving[0]] = leaving[1]._replace(swaps_out=swapped)
    elif how == 14 and starting and starting[1].match is not None:
        match = starting[1].match
        changes[starting[0]] = starting[1]._replace(match=match._replace(groups=((0,), *match.groups)))
    elif how == 15 and starting and starting[1].match is not None:
        match = starting[1].match
        changes[starting[0]] = starting[1]._replace(
            match=match._replace(snapshot=(*match.snapshot, n_blocks))
        )
    else:
        return False
    return True


N_SPOILERS = 16
