"""The manager of models with recurrent layers against a naive model of states in blocks.

The rules of test_manager_machine.py, and snapshots that are taken, held, loaded and lost in any order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from pyvelo.kv.adopt import SNAPSHOT, AdoptingStates, Part
from pyvelo.kv.plan import AllocationPlan
from pyvelo.kv.prefix import FULL, BlockHashes, Window

from .naive import NaivePlan, Sequence_
from .naive_groups import BLOCK, Entry, NaiveLayout, NaivePrefixes
from .test_manager_machine import MOST_BLOCKS, RANDOM, WANTED, ManagerMachine

EFFORT = float(os.environ.get("VELO_TEST_EFFORT", "1"))

LAYOUTS: tuple[tuple[Window, ...], ...] = (
    (FULL,),
    (FULL,),
    (Window(1),),
    (Window(1),),
    (FULL, Window(5)),
    (FULL, Window(12), Window(2 * BLOCK, chunked=True)),
    (Window(2 * BLOCK + 1),),
)


RARELY = st.sampled_from([False] * 15 + [True])
"""Whether to start over."""

TAKE = st.tuples(st.booleans(), st.booleans(), st.sampled_from([False] * 4 + [True]))
"""Whether a snapshot is a rolling one, takes spare blocks only, and is not saved."""


def colliding_hash(hashes: BlockHashes, index: int) -> bytes:
    """Return a hash of the tokens of a block alone: prefixes of other tokens before it have the same."""
    return bytes([sum(hashes.block_tokens(index))])


class NaiveSnapshots(NaivePrefixes):
    """Published prefixes, and the blocks in which the states after some of them are saved."""

    takes_partial_hits = False

    def __init__(self, layout: NaiveLayout, collide: bool) -> None:
        super().__init__(layout)
        self.snapshots: dict[Entry, list[int]] = {}
        self.collide = collide

    def published(self) -> set[int]:
        return super().published().union(*self.snapshots.values())

    def snapshot_of(self, entry: Entry) -> list[int] | None:
        return self.snapshots.get(entry)

    def unpublish(self, block: int) -> None:
        entry = next((entry for entry, blocks in self.snapshots.items() if block in blocks), None)
        if entry is None:
            super().unpublish(block)
        else:
            self.drop_snapshot(entry)

    def drop_snapshot(self, entry: Entry) -> None:
        """Lose all blocks of a snapshot."""
        del self.snapshots[entry]
        self._drop(entry)

    def _holds_any(self, entry: Entry) -> bool:
        return entry in self.snapshots or super()._holds_any(entry)

    def list_prefix(
        self, tokens: Sequence[int], salt: bytes, n_blocks: int, blocks: dict[int, int], parent: Entry | None
    ) -> Entry | None:
        key = (salt, tuple(tokens[: n_blocks * BLOCK]))
        same = [other for other in self.entries if sum(other[1][-BLOCK:]) == sum(key[1][-BLOCK:])]
        if self.collide and key not in self.entries and same:
            return None
        return super().list_prefix(tokens, salt, n_blocks, blocks, parent)


class StatesMachine(ManagerMachine):
    """Each sequence has a state of its computed tokens. A snapshot of it has `n_state` blocks."""

    manager: AdoptingStates
    there: NaiveSnapshots

    @initialize(
        n_blocks=st.integers(2, MOST_BLOCKS),
        windows=st.sampled_from(LAYOUTS),
        max_chunk=st.sampled_from([3, BLOCK, 5 * BLOCK, 5 * BLOCK]),
        share=st.sampled_from([True, True, True, False]),
        n_swap=st.integers(0, 8),
        n_state=st.integers(1, 3),
        collide=st.sampled_from([False, False, True]),
    )
    def start(
        self,
        n_blocks: int,
        windows: tuple[Window, ...],
        max_chunk: int,
        share: bool,
        n_swap: int,
        n_state: int,
        collide: bool,
    ) -> None:
        self.collide = collide
        self.begin(
            n_blocks,
            windows,
            max_chunk,
            share,
            n_swap,
            AdoptingStates,
            state_blocks=n_state,
            make_hash=colliding_hash if collide else BlockHashes.block_hash,
        )

    def no_prefixes(self) -> NaiveSnapshots:
        return NaiveSnapshots(self.layout, self.collide)

    # ---- states in blocks ----

    def parts(self, salt: bytes, tokens: Sequence[int]) -> list[list[int]]:
        """Return what the blocks of a saved state hold: it depends on all tokens."""
        return [[hash((salt, tuple(tokens), part))] * BLOCK for part in range(self.n_state)]

    def state_of(self, sequence: Sequence_) -> list[list[int]]:
        return self.parts(sequence.salt, sequence.tokens[: sequence.n_computed])

    def save(self, blocks: Sequence[int], sequence: Sequence_) -> None:
        assert len(set(blocks)) == len(blocks) == self.n_state
        for block, part in zip(blocks, self.state_of(sequence), strict=True):
            self.memory[block] = part

    def evicted_since(self, n_events: int) -> None:
        """Lose what the manager has evicted since so many events."""
        for event in self.events[n_events:]:
            if event.kind == "evicted":
                self.overwritten(event.block)

    def room(self, *, spare: bool) -> int:
        """Return the blocks that may be allocated between steps; spare: without eviction."""
        unusable = self.used() | (self.there.published() if spare else set())
        return self.n_blocks - len(unusable) - sum(sequence.table.reserved for sequence in self.alive)

    def commit(self, allocation: AllocationPlan, plan: NaivePlan) -> None:
        idle = [one for one in plan.swapped if one.held == self.state_of(one)]
        for sequence in plan.started:
            if sequence.table.snapshot:
                sequence.held = self.state_of(sequence)
                assert [self.memory[block] for block in sequence.table.snapshot] == sequence.held
        swapped_in = {one: self.state_of(one) for one in plan.started if one.n_computed and not one.held}
        super().commit(allocation, plan)
        for sequence, swapped in plan.swapped.items():
            assert len(swapped.state) == self.n_state
            if sequence not in idle:  # its caller saves the state
                for block, part in zip(swapped.state, self.state_of(sequence), strict=True):
                    self.host[block] = part
            assert [self.host[block] for block in swapped.state] == self.state_of(sequence)
            sequence.held, sequence.rolling = [], None
        for sequence, wanted in swapped_in.items():
            assert [self.host[block] for block in sequence.table.state] == wanted
            sequence.table.state = []

    def with_state(self, holds: bool) -> list[Sequence_]:
        """Return the sequences whose tables hold a state, or none."""
        return [sequence for sequence in self.alive if bool(sequence.table.snapshot) == holds]

    def published_part(self, tokens: Sequence[int], salt: bytes, part: Part) -> list[int]:
        entry = self.there.get(tokens, salt, part.number + 1)
        if entry is not None and part.group == SNAPSHOT:
            return self.there.snapshots.get(entry, [])
        return super().published_part(tokens, salt, part)

    def part_values(self, sequence: Sequence_, part: Part) -> list[list[int]]:
        if part.group == SNAPSHOT:
            return self.parts(sequence.salt, sequence.tokens[: (part.number + 1) * BLOCK])
        return super().part_values(sequence, part)

    def publish_state(self, entry: Entry, blocks: list[int] | None) -> None:
        if blocks is not None:
            self.there.snapshots[entry] = blocks

    # ---- rules ----

    @rule(wanted=WANTED, rng=RANDOM, how=TAKE)
    def begin_one(
        self, wanted: tuple[list[int], int, bytes], rng: Random, how: tuple[bool, bool, bool]
    ) -> None:
        """Start a sequence, and take a snapshot after its first tokens."""
        n_before = len(self.alive)
        self.carry_out([("begin", wanted)], rng)
        for sequence in self.alive[n_before:]:
            self.take_of(sequence, *how)

    @precondition(lambda self: self.alive)
    @rule(rng=RANDOM, how=TAKE)
    def go_on(self, rng: Random, how: tuple[bool, bool, bool]) -> None:
        """Compute more tokens of a sequence, and take a snapshot after them."""
        sequence = rng.choice(self.alive)
        self.carry_out([("grow", sequence)], rng)
        self.take_of(sequence, *how)

    @precondition(lambda self: self.alive)
    @rule(rng=RANDOM, how=TAKE)
    def take(self, rng: Random, how: tuple[bool, bool, bool]) -> None:
        whole = [sequence for sequence in self.alive if sequence.n_computed % BLOCK == 0]
        self.take_of(rng.choice(whole or self.alive), *how)

    def take_of(self, sequence: Sequence_, rolling: bool, spare: bool, fails: bool) -> None:
        n, n_events = sequence.n_computed, len(self.events)
        entry = sequence.shown[-1] if sequence.shown and len(sequence.shown) * BLOCK == n else None
        may = entry is not None and self.there.is_listed(entry) and entry not in self.there.snapshots
        may = may and self.room(spare=spare) >= self.n_state
        blocks = self.manager.take(sequence.table, rolling=rolling, spare=spare)
        if may and rolling:
            if sequence.rolling in self.there.snapshots:
                self.there.drop_snapshot(sequence.rolling)
            sequence.rolling = entry
        self.evicted_since(n_events)
        assert bool(blocks) == (may and self.there.is_listed(entry))
        if not blocks or entry is None:
            return
        assert not self.there.published() & set(blocks)
        self.there.snapshots[entry] = blocks
        self.save(blocks, sequence)
        if fails:
            self.manager.discard(blocks)
            self.there.drop_snapshot(entry)

    @precondition(lambda self: self.with_state(False))
    @rule(rng=RANDOM)
    def hold(self, rng: Random) -> None:
        sequence = rng.choice(self.with_state(False))
        room, n_events = self.room(spare=False), len(self.events)
        blocks = self.manager.hold(sequence.table)
        self.evicted_since(n_events)
        assert bool(blocks) == (room >= self.n_state)
        assert sequence.table.snapshot == tuple(blocks)
        if blocks:
            self.save(blocks, sequence)
            sequence.held = self.state_of(sequence)

    @precondition(lambda self: self.with_state(True))
    @rule(rng=RANDOM)
    def loaded(self, rng: Random) -> None:
        sequence = rng.choice(self.with_state(True))
        self.manager.loaded(sequence.table)
        assert sequence.table.snapshot == ()
        sequence.held = []

    @rule(sure=RARELY)
    def reset(self, sure: bool) -> None:
        if sure:
            self.manager.reset()
            self.there = self.no_prefixes()

    @rule(sure=RARELY)
    def clear(self, sure: bool) -> None:
        if sure:
            self.manager.clear()
            self.alive, self.swapped, self.there = [], [], NaiveSnapshots(self.layout, self.collide)

    # ---- invariants ----

    @invariant()
    def states_stay(self) -> None:
        """Blocks of a snapshot that is a hit, or that a table holds, have their state."""
        for entry, blocks in self.there.snapshots.items():
            assert self.there.is_listed(entry)
            assert [self.memory[block] for block in blocks] == self.parts(*entry.key)
        for sequence in self.alive:
            assert [self.memory[block] for block in sequence.table.snapshot] == sequence.held


TestStatesMachine = StatesMachine.TestCase
TestStatesMachine.settings = settings(max_examples=int(50 * EFFORT), stateful_step_count=40, deadline=None)


def wanted_of(rng: Random) -> tuple[list[int], int, bytes]:
    """Return a prompt, the number of tokens that may follow, and a salt."""
    prompt = [0] * rng.choice((0, BLOCK, 2 * BLOCK, 3 * BLOCK + 3))
    prompt += rng.choices((0, 0, 0, 1), k=rng.choice((1, BLOCK, rng.randint(1, 3 * BLOCK))))
    return prompt, rng.randint(0, 3 * BLOCK), rng.choice((b"", b"", b"salt"))


def how_of(rng: Random) -> tuple[bool, bool, bool]:
    """Return how a snapshot is taken, see TAKE."""
    return rng.random() < 0.5, rng.random() < 0.3, rng.random() < 0.1


OPERATIONS: dict[str, tuple[int, Callable[[StatesMachine, Random], object]]] = {
    "step": (10, lambda m, rng: m.step([wanted_of(rng) for _ in range(rng.randint(0, 2))], rng)),
    "begin_one": (12, lambda m, rng: m.begin_one(wanted_of(rng), rng, how_of(rng))),
    "go_on": (20, lambda m, rng: m.go_on(rng, how_of(rng))),
    "take": (8, lambda m, rng: m.take(rng, how_of(rng))),
    "adopt": (6, lambda m, rng: m.adopt(wanted_of(rng), rng)),
    "hold": (4, lambda m, rng: m.hold(rng)),
    "loaded": (8, lambda m, rng: m.loaded(rng)),
    "fork": (2, lambda m, rng: m.fork(rng, 1)),
    "step_back": (2, lambda m, rng: m.step_back(rng)),
    "park": (3, lambda m, rng: m.park(rng)),
    "free": (10, lambda m, rng: m.free(rng)),
    "discard": (1, lambda m, rng: m.discard(rng)),
    "reset": (1, lambda m, rng: m.reset(rng.random() < 0.2)),
    "clear": (1, lambda m, rng: m.clear(rng.random() < 0.2)),
}
"""How often each rule is done, and how."""


def is_any_alive(machine: StatesMachine) -> bool:
    return bool(machine.alive)


NEEDS: dict[str, Callable[[StatesMachine], bool]] = {
    **dict.fromkeys(("step", "begin_one", "adopt", "reset", "clear"), lambda machine: True),
    "discard": lambda machine: bool(machine.swapped),
    "hold": lambda machine: bool(machine.with_state(False)),
    "loaded": lambda machine: bool(machine.with_state(True)),
}
"""Preconditions of the rules that need no sequence, or a certain one."""


def live(seed: int, n_operations: int = 60) -> None:
    """Do what the seed chooses, and verify the invariants after each operation."""
    rng, machine = Random(seed), StatesMachine()
    n_blocks, windows = rng.randint(2, MOST_BLOCKS), rng.choice(LAYOUTS)
    max_chunk, share, n_swap = rng.choice((3, BLOCK, 5 * BLOCK)), rng.random() < 0.9, rng.randint(0, 8)
    machine.start(n_blocks, windows, max_chunk, share, n_swap, rng.randint(1, 3), rng.random() < 0.3)
    weights = [weight for weight, _ in OPERATIONS.values()]
    for name in rng.choices(list(OPERATIONS), weights, k=n_operations):
        if NEEDS.get(name, is_any_alive)(machine):
            OPERATIONS[name][1](machine, rng)
        machine.agrees()
        machine.events_agree()
        machine.prefixes_outlive_their_suffixes()
        machine.states_stay()


@pytest.mark.parametrize("part", range(4))
def test_long_lives(part: int) -> None:
    """The same rules by chance alone, which reaches more snapshots that are hits."""
    for number in range(int(60 * EFFORT)):
        seed = part * 10_000_000 + number
        try:
            live(seed)
        except BaseException as error:
            raise AssertionError(f"live({seed}) fails") from error
