"""The manager against a naive model: a memory of tokens, and the blocks of each sequence in each group.

Plans start, resume, grow, free and swap in any order. Spoiled plans change nothing.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyvelo.errors import InternalError
from pyvelo.kv.adopt import SNAPSHOT, AdoptingManager, Part, parts_to_load
from pyvelo.kv.plan import AllocationPlan
from pyvelo.kv.pool import BlockTable, Never, NotNow, Start, SwappedBlocks
from pyvelo.kv.prefix import FULL, BlockHashes, Window
from pyvelo.kv.records import Event, Moves

from .naive import N_SPOILERS, NaivePlan, Sequence_, snapshot, spoiled
from .naive_groups import BLOCK, LAYOUTS, Entry, NaiveLayout, NaivePrefixes, may_read

EMPTY = -1
MOST_BLOCKS = 14
EFFORT = float(os.environ.get("VELO_TEST_EFFORT", "1"))  # 170: a million rules
RANDOM = st.randoms(use_true_random=False, note_method_calls=False)

PARTS = ([], [], ["grow"], ["grow"], ["grow"], ["resume"], ["resume", "grow"], ["grow", "grow"])
PARTS += (["free"], ["swap"], ["grow", "free"], ["resume", "swap"])  # the last two refuse later calls
"""Calls for one live sequence in a plan, in any order."""

WANTED = st.tuples(
    st.builds(
        lambda n_common, tokens: ([0] * n_common + tokens)[: 5 * BLOCK],
        st.sampled_from([0, 0, BLOCK, 2 * BLOCK, 3 * BLOCK + 3]),
        st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=5 * BLOCK),
    ),
    st.integers(0, 3 * BLOCK),
    st.sampled_from([b"", b"", b"salt"]),
)
"""A prompt, the number of tokens that may follow, and a salt."""


class ManagerMachine(RuleBasedStateMachine):
    """Sequences start, advance and end. Few tokens exist, so many sequences start alike."""

    @initialize(
        n_blocks=st.integers(1, MOST_BLOCKS),
        windows=st.sampled_from(LAYOUTS),
        max_chunk=st.sampled_from([3, BLOCK, 5 * BLOCK, 5 * BLOCK]),
        share=st.sampled_from([True, True, False]),
        n_swap=st.integers(0, 8),
    )
    def start(
        self, n_blocks: int, windows: tuple[Window, ...], max_chunk: int, share: bool, n_swap: int
    ) -> None:
        self.begin(n_blocks, windows, max_chunk, share, n_swap)

    def begin(
        self,
        n_blocks: int,
        windows: tuple[Window, ...],
        max_chunk: int,
        share: bool,
        n_swap: int,
        kind: type[AdoptingManager] = AdoptingManager,
        **others: Any,
    ) -> None:
        """Make a manager of some kind, with other arguments, and an empty memory."""
        self.layout, self.n_groups = NaiveLayout(windows, max_chunk), len(windows)
        self.n_blocks, self.share = n_blocks + 4 * (self.n_groups - 1), share
        self.events: list[Event] = []
        self.manager = kind(
            self.n_blocks,
            BLOCK,
            windows=windows,
            max_chunk=max_chunk,
            share=share,
            n_swap_blocks=n_swap,
            observer=self.events.append,
            **others,
        )
        self.n_state = self.manager.layout.state_blocks
        self.host: list[list[int]] = [[EMPTY] * BLOCK for _ in range(n_swap)]
        self.swapped: list[tuple[Sequence_, SwappedBlocks]] = []
        self.memory = [[EMPTY] * BLOCK for _ in range(self.n_blocks)]
        self.there = self.no_prefixes()
        self.alive: list[Sequence_] = []

    def no_prefixes(self) -> NaivePrefixes:
        return NaivePrefixes(self.layout)

    # ---- the memory ----

    def overwritten(self, block: int) -> None:
        self.memory[block] = [EMPTY] * BLOCK
        self.there.unpublish(block)

    def stored(self, sequence: Sequence_, group: int) -> list[int]:
        """Return what the memory has in the sequence's blocks of a group."""
        table = sequence.table
        slots = [self.memory[block][i] for block in table.groups[group] for i in range(BLOCK)]
        return slots[: max(0, sequence.n_computed - table.firsts[group] * BLOCK)]

    def check_memory(self, sequence: Sequence_) -> None:
        for group, first in enumerate(sequence.table.firsts):
            wanted = sequence.values(group, first * BLOCK, sequence.n_computed)
            assert self.stored(sequence, group) == wanted

    def used(self) -> set[int]:
        return {block for sequence in self.alive for block in sequence.table.held}

    def n_swapped(self, sequence: Sequence_) -> int:
        """Return the blocks of a sequence in host memory, or if it is swapped out."""
        n_blocks = -(-sequence.n_computed // BLOCK)
        return self.n_state + sum(len(range(first, n_blocks)) for first in sequence.table.firsts)

    # ---- a step ----

    @rule(wanted=st.lists(WANTED, max_size=3), rng=RANDOM)
    def step(self, wanted: list[tuple[list[int], int, bytes]], rng: Random) -> None:
        todo: list[tuple[str, Any]] = [("begin", one) for one in wanted]
        todo += [("swap_in", pair) for pair in self.swapped if rng.randint(0, 2) == 0]
        for sequence in self.alive:
            todo += [(what, sequence) for what in rng.choice(PARTS)]
        self.carry_out(rng.sample(todo, len(todo)), rng)

    def carry_out(self, todo: list[tuple[str, Any]], rng: Random) -> None:
        """Plan and commit changes, the last of the list first."""
        allocation = self.manager.plan()
        plan = NaivePlan(
            self.n_blocks,
            self.layout,
            self.there.published(),
            len(self.host) - sum(self.n_swapped(sequence) for sequence, _ in self.swapped),
            # as if the n-th allocation failed
            min(allocation.available, rng.choice([0, 0, 0, 1, 2, MOST_BLOCKS])),
        )
        allocation.available -= plan.withheld
        for sequence in self.alive:
            plan.enter(sequence)
        before = snapshot(self.manager, ())
        while todo:
            what, subject = todo.pop()
            begun = getattr(self, f"plan_{what}")(allocation, plan, subject, rng)
            if begun is not None:  # it must grow into its first blocks in this plan
                todo.insert(rng.randint(0, len(todo)), ("fill", begun))
            assert (allocation.available, allocation.n_swap_free) == (plan.available, plan.n_swap_free)
        assert snapshot(self.manager, ()) == before, "planning changes nothing"
        self.refuse(allocation, plan, rng)
        self.commit(allocation, plan)

    def refuse(self, allocation: AllocationPlan, plan: NaivePlan, rng: Random) -> None:
        """Commit the plan with one wrong change."""
        wrong = allocation.copy()
        strange = BlockTable([[self.n_blocks]] * self.n_groups, 0, None)
        if not spoiled(wrong, rng.randint(0, N_SPOILERS - 1), strange):
            return
        started = [sequence.table for sequence in plan.started]
        before, n_events = snapshot(self.manager, started), len(self.events)
        with pytest.raises(InternalError):
            self.manager.commit(wrong)
        assert snapshot(self.manager, started) == before, "all or nothing"
        assert len(self.events) == n_events

    def plan_begin(
        self,
        allocation: AllocationPlan,
        plan: NaivePlan,
        wanted: tuple[list[int], int, bytes],
        rng: Random,
    ) -> Sequence_ | None:
        prompt, more, salt = wanted
        tokens, worst, spare = array("i", prompt), len(prompt) + more, rng.choice([0, 0, 1])
        hashes = BlockHashes(tokens, BLOCK, salt)
        available = plan.available - spare * self.n_groups
        hit = self.there.hits(prompt, salt)
        outcome = allocation.start(worst, hashes, spare)
        peak, goal = self.layout.peak(worst), -(-worst // BLOCK)
        if peak > self.n_blocks:
            assert outcome == Never(peak, self.n_blocks)
            return None
        n_fresh = self.layout.wanted(hit.firsts, hit.n_blocks, goal)
        needed = n_fresh + sum(not plan.is_held(block) for block in hit.blocks)
        n_all = self.layout.wanted(self.there.no_hit().firsts, 0, goal)
        if hit.snapshot and n_all < needed and needed > available:
            hit, n_fresh, needed = self.there.no_hit(), n_all, n_all
        if needed > available:
            assert outcome == NotNow(needed, available)
            return None
        assert isinstance(outcome, Start)
        table, n_hits = outcome.table, hit.n_blocks
        assert (table.groups, table.firsts, table.n_blocks) == (hit.groups, hit.firsts, n_hits)
        assert table.snapshot == tuple(hit.snapshot)
        assert (table.reserved, table.goal) == (n_fresh, goal)
        partials = self.there.partials(prompt, salt, n_hits)
        match = allocation._changes[id(table)].match
        assert match is not None
        if match.partial is not None:
            assert partials[match.partial.blocks] == match.partial.n_tokens == max(partials.values())
            assert needed + sum(not plan.is_held(block) for block in match.partial.blocks) <= available
        else:
            assert not partials or needed + self.n_groups > available, "no block is left for a copy"
        n_cached = n_hits * BLOCK + (match.partial.n_tokens if match.partial is not None else 0)
        assert table.n_cached == table.n_tokens == n_cached
        shown = [self.there.get(prompt, salt, n + 1) for n in range(n_hits)]
        sequence = Sequence_(tokens, hashes, salt, n_cached, shown, table)
        if match.partial is not None:
            plan.partials[sequence] = match.partial
        return self.begun(plan, sequence)

    def plan_swap_in(
        self,
        allocation: AllocationPlan,
        plan: NaivePlan,
        pair: tuple[Sequence_, SwappedBlocks],
        rng: Random,
    ) -> Sequence_ | None:
        """Plan to swap a sequence in, with all its computed tokens."""
        sequence, swapped = pair
        if len(sequence.tokens) == sequence.n_computed:
            sequence.tokens.append(1)
        n_tokens, n_hits, hits = len(sequence.tokens), 0, list[int]()
        if self.layout.windows == (FULL,) and not self.n_state:
            hit = self.there.hits(sequence.tokens, sequence.salt)
            n_hits = min(hit.n_blocks, sequence.n_computed // BLOCK)
            hits = hit.groups[0][:n_hits]
        n_fresh = self.layout.wanted(swapped.firsts, n_hits, -(-n_tokens // BLOCK))
        needed, available = n_fresh + sum(not plan.is_held(block) for block in hits), plan.available
        outcome = allocation.start(n_tokens, sequence.hashes, 0, swapped)
        if self.layout.peak(n_tokens) > self.n_blocks:
            assert outcome == Never(self.layout.peak(n_tokens), self.n_blocks)
            return None
        if needed > available:
            assert outcome == NotNow(needed, available)
            return None
        assert isinstance(outcome, Start)
        sequence.table = outcome.table
        sequence.shown = [self.there.get(sequence.tokens, sequence.salt, n + 1) for n in range(n_hits)]
        assert outcome.table.n_cached == outcome.table.n_tokens == sequence.n_computed
        assert (outcome.table.blocks, tuple(outcome.table.firsts)) == (hits, swapped.firsts)
        with pytest.raises(InternalError, match="is swapped in once"):
            allocation.start(n_tokens, sequence.hashes, 0, swapped)
        self.swapped.remove(pair)
        return self.begun(plan, sequence)

    def begun(self, plan: NaivePlan, sequence: Sequence_) -> Sequence_:
        plan.enter(sequence)
        plan.part.add(id(sequence))
        plan.started.append(sequence)
        return sequence

    def plan_fill(
        self, allocation: AllocationPlan, plan: NaivePlan, sequence: Sequence_, rng: Random
    ) -> None:
        begin = sequence.n_computed
        most = min(len(sequence.tokens), begin + self.layout.max_chunk)
        whole = max(begin + 1, most // BLOCK * BLOCK)
        end = rng.choice((most, whole, rng.randint(begin + 1, most)))
        if sequence in plan.partials and not plan.grow(sequence, end):
            # it holds the window before the partial hit, too
            assert not allocation.grow(sequence.table, end)
            end = begin + 1
        assert plan.grow(sequence, end)
        assert allocation.grow(sequence.table, end), "its blocks are reserved"
        plan.ends[sequence] = end

    def plan_grow(
        self, allocation: AllocationPlan, plan: NaivePlan, sequence: Sequence_, rng: Random
    ) -> None:
        most = min(2 * BLOCK, self.layout.max_chunk)
        end = sequence.n_computed + rng.choice((most, rng.randint(1, most)))
        if sequence in plan.freed:
            if -(-end // BLOCK) > 0:
                with pytest.raises(InternalError, match="neither grow nor resume"):
                    allocation.grow(sequence.table, end)
            return
        room = plan.grow(sequence, end)
        assert allocation.grow(sequence.table, end) == room
        if room:
            plan.ends[sequence] = max(end, plan.ends.get(sequence, 0))

    def plan_resume(
        self, allocation: AllocationPlan, plan: NaivePlan, sequence: Sequence_, rng: Random
    ) -> None:
        """Plan to resume a live sequence: reserve the blocks that it needs."""
        n_tokens = sequence.n_computed + rng.randint(1, 3 * BLOCK)
        spare = rng.randint(0, 1)
        if sequence in plan.freed:
            with pytest.raises(InternalError, match="neither grow nor resume"):
                allocation.resume(sequence.table, n_tokens, spare)
            return
        goal = max(plan.goals[sequence], -(-n_tokens // BLOCK))
        wanted = self.layout.wanted(sequence.table.firsts, plan.n_blocks_of[sequence], goal)
        missing = max(0, wanted - plan.reserved[sequence])
        needed, available = missing + len(plan.copies(sequence)), plan.available - spare * self.n_groups
        outcome = allocation.resume(sequence.table, n_tokens, spare)
        if needed > available:
            assert outcome == NotNow(needed, available)
            return
        assert outcome == Start(sequence.table)
        plan.reserved[sequence] += missing
        plan.goals[sequence] = goal
        plan.part.add(id(sequence))

    def plan_free(
        self, allocation: AllocationPlan, plan: NaivePlan, sequence: Sequence_, rng: Random
    ) -> None:
        if id(sequence) in plan.part:
            with pytest.raises(InternalError, match="uses a block table"):
                allocation.free(sequence.table)
            return
        allocation.free(sequence.table)
        plan.free(sequence)

    def plan_swap(
        self, allocation: AllocationPlan, plan: NaivePlan, sequence: Sequence_, rng: Random
    ) -> None:
        n_blocks = self.n_swapped(sequence)
        if id(sequence) in plan.part and n_blocks <= plan.n_swap_free:
            with pytest.raises(InternalError, match="uses a block table"):
                allocation.swap_out(sequence.table)
            return
        swapped = allocation.swap_out(sequence.table)
        assert (swapped is not None) == (n_blocks <= plan.n_swap_free)
        if swapped is not None:
            plan.n_swap_free -= n_blocks
            plan.free(sequence)
            plan.swapped[sequence] = swapped
            assert (swapped.n_tokens, list(swapped.firsts)) == (sequence.n_computed, sequence.table.firsts)

    def commit(self, allocation: AllocationPlan, plan: NaivePlan) -> None:
        before = {
            sequence: [list(blocks) for blocks in sequence.table.groups]
            for sequence in (*self.alive, *plan.started)
        }
        leaving = [list(sequence.table.held) for sequence in plan.freed]
        firsts = {sequence: list(sequence.table.firsts) for sequence in plan.freed}
        contents = [list(block) for block in self.memory]
        moves = self.manager.commit(allocation)
        held = {block for blocks in plan.held.values() for block in blocks}
        held |= {block for partial in plan.partials.values() for block in partial.blocks}
        for number in range(len(leaving)):  # one by one
            self.there.let_go(held.union(*leaving[number + 1 :]))
        for move in moves.outs:
            self.host[move.target] = list(self.memory[move.source])
        for sequence in plan.held:
            self.check_growth(plan, sequence, before[sequence], moves)
        n_copies = sum(map(len, plan.copied.values())) + len(plan.partials) * self.n_groups
        assert len(moves.copies) == n_copies
        for move in moves.ins:
            self.memory[move.target] = list(self.host[move.source])
        for source, target in moves.copies:
            assert self.memory[source] == contents[source], "a source is unchanged until it is copied"
            self.memory[target] = list(self.memory[source])
        self.alive = list(plan.held)
        self.there.let_go(self.used())
        self.swapped += plan.swapped.items()
        assert all(sequence.table.firsts == firsts[sequence] for sequence in plan.swapped)
        for sequence, end in plan.ends.items():
            self.check_memory(sequence)
            while len(sequence.tokens) < end:  # an answer, a token at a time
                sequence.tokens.append(len(sequence.tokens) % 2)
            self.advance(sequence, end)

    def check_growth(
        self, plan: NaivePlan, sequence: Sequence_, before: list[list[int]], moves: Moves
    ) -> None:
        """Verify the blocks of a table after the commit."""
        table, index = sequence.table, sequence.n_computed // BLOCK
        for group, block in plan.copied.get(sequence, {}).items():
            at = index - table.firsts[group]
            assert before[group][at] == block
            assert (block, table.groups[group][at]) in moves.copies, "a shared block is replaced by a copy"
            self.overwritten(table.groups[group][at])
            before[group][at] = table.groups[group][at]
            del sequence.shown[index:]
        assert table.n_blocks == plan.n_blocks_of[sequence]
        assert (table.reserved, table.goal) == (plan.reserved[sequence], plan.goals[sequence])
        for group, (first, blocks) in enumerate(zip(table.firsts, table.groups, strict=True)):
            n = len(before[group])
            assert blocks[:n] == before[group], "otherwise tables grow at the end"
            assert len(blocks) == len(range(first, table.n_blocks))
            for block in blocks[n:]:
                self.overwritten(block)
            if sequence in plan.partials:
                assert (plan.partials[sequence].blocks[group], blocks[n]) in moves.copies

    def advance(self, sequence: Sequence_, end: int) -> None:
        """Write the slots of a step; publish its blocks; free the blocks that no window can reach."""
        table, begin, used = sequence.table, sequence.n_computed, self.used()
        self.check_reach(sequence)
        for group, (first, blocks) in enumerate(zip(table.firsts, table.groups, strict=True)):
            for position, value in enumerate(sequence.values(group, begin, end), begin):
                block = blocks[position // BLOCK - first]
                holders = sum(other.table.held.count(block) for other in self.alive)
                assert holders == 1, "only a block of one sequence is written"
                assert block not in self.there.published(), "a published block is never written"
                self.memory[block][position % BLOCK] = value
        sequence.n_computed, sequence.stepped_back = end, False
        groups, firsts = [list(blocks) for blocks in table.groups], list(table.firsts)
        reserved = table.reserved
        self.manager.advance(table, end)
        for number in range(len(sequence.shown), end // BLOCK if self.share else 0):
            held = {g: groups[g][number - firsts[g]] for g in range(self.n_groups) if number >= firsts[g]}
            parent = sequence.shown[number - 1] if number else None
            entry = self.there.publish(sequence.tokens, sequence.salt, number + 1, held, parent)
            sequence.shown.append(entry)
            self.there.let_go(used)
        wanted = [max(*pair) for pair in zip(firsts, self.layout.firsts(end), strict=True)]
        assert table.firsts == wanted, "exactly the blocks that no window can reach are freed"
        cuts = [wanted[group] - firsts[group] for group in range(self.n_groups)]
        assert table.groups == [blocks[cut:] for blocks, cut in zip(groups, cuts, strict=True)]
        if any(window.size for window in self.layout.windows):
            most = self.layout.wanted(wanted, table.n_blocks, table.goal)
            assert table.reserved == min(most, reserved + len(used - self.used()))
        self.there.let_go(self.used())

    # ---- blocks from elsewhere ----

    def all_parts(self, n_blocks: int) -> list[Part]:
        groups = [*range(self.n_groups), *([SNAPSHOT] if self.n_state else [])]
        return [Part(number, group) for number in range(n_blocks) for group in groups]

    def published_part(self, tokens: Sequence[int], salt: bytes, part: Part) -> list[int]:
        """Return the blocks that the model has for a part, or none."""
        entry = self.there.get(tokens, salt, part.number + 1)
        return entry.blocks[part.group][:1] if entry is not None else []

    def part_values(self, sequence: Sequence_, part: Part) -> list[list[int]]:
        """Return what the blocks of a part hold."""
        begin = part.number * BLOCK
        return [sequence.values(part.group, begin, begin + BLOCK)]

    def longest(self, there: set[Part], n_blocks: int) -> set[Part]:
        """Return what the longest hit needs that can be made of parts."""
        for n in range(n_blocks, 0, -1):
            firsts = enumerate(self.layout.firsts(n * BLOCK + 1))
            needed = {Part(number, group) for group, first in firsts for number in range(first, n)}
            needed |= {Part(n - 1, SNAPSHOT)} if self.n_state else set()
            if needed <= there:
                return needed
        return set()

    @rule(wanted=WANTED, rng=RANDOM)
    def adopt(self, wanted: tuple[list[int], int, bytes], rng: Random) -> None:
        """Publish the stored parts that make a hit longer, as far as there is room."""
        prompt, _, salt = wanted
        tokens, n_blocks = array("i", prompt), len(prompt) // BLOCK
        hashes = BlockHashes(tokens, BLOCK, salt)
        twin = Sequence_(tokens, hashes, salt, len(tokens), [], BlockTable([[]] * self.n_groups, 0, None))
        every = self.all_parts(n_blocks) if self.share else []
        blocks_of = {part: self.published_part(tokens, salt, part) for part in every}
        published = {part: tuple(blocks) for part, blocks in blocks_of.items() if blocks}
        assert self.manager.published_parts(hashes, n_blocks) == published
        stored = {part for part in every if rng.random() < 0.9}
        parts = parts_to_load(self.manager.layout, published, stored, n_blocks)
        assert set(parts) == self.longest(stored | set(published), n_blocks if self.share else 0) - set(
            published
        )
        last = max((part.number for part in parts), default=-1)
        kept = {block for part, blocks in published.items() if part.number <= last for block in blocks}
        room = self.n_blocks - len(self.used() | kept) - self.manager.n_reserved
        values = [self.part_values(twin, part) for part in parts]
        n_wanted = next((n for n in range(len(parts), 0, -1) if sum(map(len, values[:n])) <= room), 0)
        written: list[int] = []
        fails = bool(n_wanted) and rng.random() < 0.1

        def write(blocks: Sequence[int]) -> None:
            for block in blocks:
                self.overwritten(block)
            if fails:
                raise OSError("these blocks cannot be written")
            written.extend(blocks)
            contents = [each for value in values[:n_wanted] for each in value]
            for block, content in zip(blocks, contents, strict=True):
                self.memory[block] = content

        if fails:
            with pytest.raises(OSError, match="cannot be written"):
                self.manager.adopt(hashes, parts, write)
            return
        assert self.manager.adopt(hashes, parts, write) == n_wanted
        taken = iter(written)
        own = {
            part: [next(taken) for _ in value] for part, value in zip(parts, values[:n_wanted], strict=False)
        }
        self.publish_parts(tokens, salt, own)

    def publish_parts(self, tokens: Sequence[int], salt: bytes, own: dict[Part, list[int]]) -> None:
        entry: Entry | None = None
        for number in range(max((part.number for part in own), default=-1) + 1):
            parts = [Part(number, group) for group in range(self.n_groups)]
            blocks = {part.group: own[part][0] for part in parts if part in own}
            following = self.there.list_prefix(tokens, salt, number + 1, blocks, entry)
            if following is None:
                break
            entry = following
            self.publish_state(entry, own.get(Part(number, SNAPSHOT)))
        self.there.drop_empty(entry)

    def publish_state(self, entry: Entry, blocks: list[int] | None) -> None:
        assert blocks is None

    # ---- between steps ----

    @precondition(lambda self: self.alive)
    @rule(rng=RANDOM, n=st.integers(1, 3))
    def fork(self, rng: Random, n: int) -> None:
        parent = rng.choice(self.alive)
        for _ in range(n):
            tokens = array("i", parent.tokens)
            hashes = BlockHashes(tokens, BLOCK, parent.salt)
            table = self.manager.fork(parent.table, hashes)
            end = -(-parent.n_computed // BLOCK)
            pairs = zip(parent.table.firsts, parent.table.groups, strict=True)
            assert table.groups == [blocks[: end - first] for first, blocks in pairs]
            assert (table.firsts, table.n_blocks, table.reserved) == (parent.table.firsts, end, 0)
            shown = parent.shown[: parent.n_computed // BLOCK]
            twin = Sequence_(tokens, hashes, parent.salt, parent.n_computed, shown, table)
            twin.stepped_back, twin.held = parent.stepped_back, parent.held
            self.alive.append(twin)
            # as if it had drawn another token
            del tokens[parent.n_computed :]
            tokens.append(rng.randint(0, 1))

    @precondition(lambda self: self.alive)
    @rule(rng=RANDOM)
    def step_back(self, rng: Random) -> None:
        """Compute the last token of a sequence again, as if its logits were wanted again."""
        sequence = rng.choice(self.alive)
        if sequence.n_computed > 0 and not sequence.stepped_back:
            sequence.stepped_back = True
            sequence.n_computed -= 1
            self.manager.advance(sequence.table, sequence.n_computed)

    @precondition(lambda self: self.swapped)
    @rule(rng=RANDOM)
    def discard(self, rng: Random) -> None:
        _, swapped = self.swapped.pop(rng.randrange(len(self.swapped)))
        self.manager.free_swapped(swapped)

    @precondition(lambda self: self.alive)
    @rule(rng=RANDOM)
    def park(self, rng: Random) -> None:
        sequence = rng.choice(self.alive)
        table, end = sequence.table, -(-sequence.n_computed // BLOCK)
        wanted = [blocks[: end - first] for first, blocks in zip(table.firsts, table.groups, strict=True)]
        self.manager.trim(table)
        assert (table.reserved, table.groups, table.n_blocks) == (0, wanted, end)
        self.there.let_go(self.used())

    @precondition(lambda self: self.alive)
    @rule(rng=RANDOM)
    def free(self, rng: Random) -> None:
        sequence = self.alive.pop(rng.randrange(len(self.alive)))
        self.manager.free(sequence.table)
        self.there.let_go(self.used())

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.there = self.no_prefixes()

    # ---- invariants ----

    @invariant()
    def agrees(self) -> None:
        manager = self.manager
        used = self.used()
        assert manager.n_used == len(used)
        assert manager.n_cached == len(self.there.published() - used)
        assert manager.n_used + manager.n_cached + manager.n_free == manager.n_blocks == self.n_blocks
        assert manager.n_reserved == sum(sequence.table.reserved for sequence in self.alive)
        filled: dict[int, int] = {}
        for sequence in self.alive:
            for first, blocks in zip(sequence.table.firsts, sequence.table.groups, strict=True):
                for index, block in enumerate(blocks, first):
                    there = min(BLOCK, max(0, sequence.n_computed - index * BLOCK))
                    filled[block] = max(filled.get(block, 0), there)
        assert manager.n_stored == sum(filled.values())
        assert manager.n_reserved <= manager.n_free + manager.n_cached
        assert manager.swap.n_free == len(self.host) - sum(self.n_swapped(s) for s, _ in self.swapped)
        for sequence in self.alive:
            self.check_memory(sequence)
            self.check_reach(sequence)
        manager.audit()

    def check_reach(self, sequence: Sequence_) -> None:
        """A table holds what its next query reads; else what its last one did, and a block in each group."""
        table, query = sequence.table, sequence.n_computed
        for group, window in enumerate(self.layout.windows):
            blocks, first = table.groups[group], table.firsts[group]
            read = {at // BLOCK for at in range(query) if may_read(window, query, at)}
            assert read <= set(range(first, first + len(blocks))), "what a query reads is not freed"
            last = query // BLOCK + (query % BLOCK > 0)
            read |= {at // BLOCK for at in range(query) if may_read(window, query - 1, at)}
            assert len(range(first, last)) <= len(read) + 1
            most = self.layout.most(window, table.n_blocks)
            assert len(blocks) <= most + 1, "a window, a step and a block"

    @invariant()
    def events_agree(self) -> None:
        there: set[int] = set()
        for event in self.events:
            if event.kind == "stored":
                assert event.block not in there
                there.add(event.block)
            elif event.kind == "evicted":
                there.remove(event.block)
            elif event.kind == "hit":
                assert event.block in there
            else:
                assert event.kind in ("copied", "swapped", "reset", "duplicate")
                there -= {event.block} if event.kind in ("reset", "duplicate") else set()
        assert there == self.there.published()

    @invariant()
    def prefixes_outlive_their_suffixes(self) -> None:
        """A prefix outlives what follows it in the groups without a window."""
        full = [group for group, window in enumerate(self.layout.windows) if not window.size]
        for entry in self.there.entries.values():
            parent, tokens = entry.parent, entry.key[1]
            assert (parent is None) == (len(tokens) == BLOCK)
            assert parent is None or self.there.is_listed(parent)
            for group in full if parent is not None else ():
                assert parent is None or parent.blocks[group] or not entry.blocks[group]


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=int(150 * EFFORT), stateful_step_count=40, deadline=None)
