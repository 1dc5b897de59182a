"""The manager against a naive model: a memory of tokens, and the blocks of each sequence.

Plans start, resume, grow, free and swap in any order. Spoiled plans change nothing.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyvelo.errors import InternalError
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.plan import MIN_PARTIAL_HIT, AllocationPlan
from pyvelo.kv.pool import BlockTable, SwappedBlocks
from pyvelo.kv.prefix import BlockHashes
from pyvelo.kv.records import Event, Never, NotNow, Start

from .naive import BLOCK, N_SPOILERS, NaivePlan, Sequence_, snapshot, spoiled

EMPTY = -1
MOST_BLOCKS = 14
EFFORT = float(os.environ.get("VELO_TEST_EFFORT", "1"))  # 170: a million rules

PARTS = ([], [], ["grow"], ["grow"], ["grow"], ["resume"], ["resume", "grow"], ["grow", "grow"])
PARTS += (["free"], ["swap"], ["grow", "free"], ["resume", "swap"])  # the last two refuse later calls
"""Calls for one live sequence in a plan, in any order."""

WANTED = st.tuples(
    st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=5 * BLOCK),
    st.integers(0, 3 * BLOCK),
    st.sampled_from([b"", b"", b"salt"]),
)
"""A prompt, the number of tokens that may follow, and a salt."""


class ManagerMachine(RuleBasedStateMachine):
    """Sequences start, advance and end. Few tokens exist, so many sequences start alike."""

    @initialize(
        n_blocks=st.integers(1, MOST_BLOCKS),
        share=st.sampled_from([True, True, False]),
        n_swap=st.integers(0, 8),
    )
    def start(self, n_blocks: int, share: bool, n_swap: int) -> None:
        self.n_blocks, self.share = n_blocks, share
        self.events: list[Event] = []
        self.manager = BlockManager(
            n_blocks, BLOCK, share=share, n_swap_blocks=n_swap, observer=self.events.append
        )
        self.host: list[list[int]] = [[EMPTY] * BLOCK for _ in range(n_swap)]
        self.swapped: list[tuple[Sequence_, SwappedBlocks]] = []
        self.memory = [[EMPTY] * BLOCK for _ in range(n_blocks)]
        # blocks of published prefixes, the oldest first, by all tokens
        self.there: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}
        self.alive: list[Sequence_] = []

    # ---- expectations of the naive model ----

    def hits(self, tokens: Sequence[int], salt: bytes) -> list[int]:
        blocks: list[int] = []
        for end in range(BLOCK, len(tokens), BLOCK):  # the last token is always computed
            published = self.there.get((salt, tuple(tokens[:end])))
            if published is None:
                break
            blocks.append(published[0])
        return blocks if self.share else []

    def partials(self, tokens: Sequence[int], salt: bytes, n_hits: int) -> dict[int, int]:
        """Return the partial hits below the hit blocks: their tokens, by block."""
        before = tuple(tokens[: n_hits * BLOCK])
        wanted = tokens[n_hits * BLOCK : len(tokens) - 1]
        found = {}
        for (other_salt, prefix), blocks in self.there.items():
            if other_salt == salt and prefix[:-BLOCK] == before:
                same = zip(prefix[-BLOCK:], wanted, strict=False)
                length = next((i for i, (a, b) in enumerate(same) if a != b), min(BLOCK, len(wanted)))
                if length >= MIN_PARTIAL_HIT:
                    found[blocks[0]] = length
        return found

    def overwritten(self, block: int) -> None:
        self.memory[block] = [EMPTY] * BLOCK
        self.unpublish(block)

    def unpublish(self, block: int) -> None:
        left = {prefix: [b for b in blocks if b != block] for prefix, blocks in self.there.items()}
        self.there = {prefix: blocks for prefix, blocks in left.items() if blocks}

    def published(self) -> set[int]:
        return {block for blocks in self.there.values() for block in blocks}

    def let_go(self, used: set[int]) -> None:
        """Unpublish the duplicates of blocks that are not used any more: one of equal blocks stays cached."""
        for blocks in list(self.there.values()):
            for block in blocks:
                if block not in used and len(self.published_like(block)) > 1:
                    self.unpublish(block)

    def published_like(self, block: int) -> list[int]:
        return next(blocks for blocks in self.there.values() if block in blocks)

    def stored(self, sequence: Sequence_) -> list[int]:
        slots = [self.memory[block][i] for block in sequence.table.blocks for i in range(BLOCK)]
        return slots[: sequence.n_computed]

    def used(self) -> set[int]:
        return {block for sequence in self.alive for block in sequence.table.blocks}

    # ---- a step ----

    @rule(wanted=st.lists(WANTED, max_size=3), data=st.data())
    def step(self, wanted: list[tuple[list[int], int, bytes]], data: st.DataObject) -> None:
        allocation = self.manager.plan()
        plan = NaivePlan(
            self.n_blocks,
            self.published(),
            len(self.host) - sum(-(-s.n_computed // BLOCK) for s, _ in self.swapped),
            # as if the n-th allocation failed
            min(allocation.available, data.draw(st.sampled_from([0, 0, 0, 1, 2, MOST_BLOCKS]))),
        )
        allocation.available -= plan.withheld
        for sequence in self.alive:
            plan.enter(sequence)
        before = snapshot(self.manager, ())
        todo: list[tuple[str, Any]] = [("begin", one) for one in wanted]
        todo += [("swap_in", pair) for pair in self.swapped if data.draw(st.integers(0, 2)) == 0]
        for sequence in self.alive:
            todo += [(what, sequence) for what in data.draw(st.sampled_from(PARTS))]
        todo = list(data.draw(st.permutations(todo)))
        while todo:
            what, subject = todo.pop()
            begun = getattr(self, f"plan_{what}")(allocation, plan, subject, data)
            if begun is not None:  # it must grow into its first blocks in this plan
                todo.insert(data.draw(st.integers(0, len(todo))), ("fill", begun))
            assert (allocation.available, allocation.n_swap_free) == (plan.available, plan.n_swap_free)
        assert snapshot(self.manager, ()) == before, "planning changes nothing"
        self.refuse(allocation, plan, data)
        self.commit(allocation, plan)

    def refuse(self, allocation: AllocationPlan, plan: NaivePlan, data: st.DataObject) -> None:
        """Commit the plan with one wrong change."""
        wrong = allocation.copy()
        strange = BlockTable((self.n_blocks,), 0, 0, None)
        if not spoiled(wrong, data.draw(st.integers(0, N_SPOILERS - 1)), strange):
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
        data: st.DataObject,
    ) -> Sequence_ | None:
        prompt, more, salt = wanted
        tokens, worst, spare = array("i", prompt), len(prompt) + more, data.draw(st.sampled_from([0, 0, 1]))
        hashes = BlockHashes(tokens, BLOCK, salt)
        available, hits = plan.available - spare, self.hits(prompt, salt)
        outcome = allocation.start(worst, hashes, spare)
        n_fresh = -(-worst // BLOCK) - len(hits)
        if n_fresh + len(hits) > self.n_blocks:
            assert outcome == Never(n_fresh + len(hits), self.n_blocks)
            return None
        needed = n_fresh + sum(not plan.is_held(block) for block in hits)
        if needed > available:
            assert outcome == NotNow(needed, available)
            return None
        assert isinstance(outcome, Start)
        table = outcome.table
        assert (table.blocks, table.reserved) == (hits, n_fresh)
        partials = self.partials(prompt, salt, len(hits))
        match = allocation._changes[id(table)].match
        assert match is not None
        if match.partial is not None:
            assert partials[match.partial.block] == match.partial.n_tokens == max(partials.values())
            assert needed + (not plan.is_held(match.partial.block)) <= available
        else:
            assert not partials or needed == available, "it is computed if no block is left for a copy"
        n_cached = len(hits) * BLOCK + (match.partial.n_tokens if match.partial is not None else 0)
        assert table.n_cached == table.n_tokens == n_cached
        sequence = Sequence_(tokens, hashes, salt, n_cached, len(hits), table)
        if match.partial is not None:
            plan.partials[sequence] = match.partial
        return self.begun(plan, sequence)

    def plan_swap_in(
        self,
        allocation: AllocationPlan,
        plan: NaivePlan,
        pair: tuple[Sequence_, SwappedBlocks],
        data: st.DataObject,
    ) -> Sequence_ | None:
        """Plan to swap a sequence in, with all its computed tokens."""
        sequence, swapped = pair
        if len(sequence.tokens) == sequence.n_computed:
            sequence.tokens.append(1)
        hits = self.hits(sequence.tokens, sequence.salt)[: sequence.n_computed // BLOCK]
        n_fresh = -(-len(sequence.tokens) // BLOCK) - len(hits)
        needed, available = n_fresh + sum(not plan.is_held(block) for block in hits), plan.available
        outcome = allocation.start(len(sequence.tokens), sequence.hashes, 0, swapped)
        if n_fresh + len(hits) > self.n_blocks:
            assert outcome == Never(n_fresh + len(hits), self.n_blocks)
            return None
        if needed > available:
            assert outcome == NotNow(needed, available)
            return None
        assert isinstance(outcome, Start)
        sequence.table, sequence.n_shown = outcome.table, len(outcome.table.blocks)
        assert outcome.table.n_cached == outcome.table.n_tokens == sequence.n_computed
        assert outcome.table.blocks == hits
        with pytest.raises(InternalError, match="is swapped in once"):
            allocation.start(len(sequence.tokens), sequence.hashes, 0, swapped)
        self.swapped.remove(pair)
        return self.begun(plan, sequence)

    def begun(self, plan: NaivePlan, sequence: Sequence_) -> Sequence_:
        plan.enter(sequence)
        plan.part.add(id(sequence))
        plan.started.append(sequence)
        return sequence

    def plan_fill(
        self, allocation: AllocationPlan, plan: NaivePlan, sequence: Sequence_, data: st.DataObject
    ) -> None:
        end = data.draw(st.integers(sequence.n_computed + 1, len(sequence.tokens)))
        assert plan.grow(sequence, end)
        assert allocation.grow(sequence.table, end), "its blocks are reserved"
        plan.ends[sequence] = end

    def plan_grow(
        self, allocation: AllocationPlan, plan: NaivePlan, sequence: Sequence_, data: st.DataObject
    ) -> None:
        end = sequence.n_computed + data.draw(st.integers(1, 2 * BLOCK))
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
        self, allocation: AllocationPlan, plan: NaivePlan, sequence: Sequence_, data: st.DataObject
    ) -> None:
        """Plan to resume a live sequence: reserve the blocks that it needs."""
        n_tokens = sequence.n_computed + data.draw(st.integers(1, 3 * BLOCK))
        spare = data.draw(st.integers(0, 1))
        if sequence in plan.freed:
            with pytest.raises(InternalError, match="neither grow nor resume"):
                allocation.resume(sequence.table, n_tokens, spare)
            return
        missing = max(0, -(-n_tokens // BLOCK) - plan.n_held[sequence] - plan.reserved[sequence])
        needed, available = missing + plan.copies(sequence), plan.available - spare
        outcome = allocation.resume(sequence.table, n_tokens, spare)
        if needed > available:
            assert outcome == NotNow(needed, available)
            return
        assert outcome == Start(sequence.table)
        plan.reserved[sequence] += missing
        plan.part.add(id(sequence))

    def plan_free(
        self, allocation: AllocationPlan, plan: NaivePlan, sequence: Sequence_, data: st.DataObject
    ) -> None:
        if id(sequence) in plan.part:
            with pytest.raises(InternalError, match="uses a block table"):
                allocation.free(sequence.table)
            return
        allocation.free(sequence.table)
        plan.free(sequence)

    def plan_swap(
        self, allocation: AllocationPlan, plan: NaivePlan, sequence: Sequence_, data: st.DataObject
    ) -> None:
        n_blocks = -(-sequence.n_computed // BLOCK)
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

    def commit(self, allocation: AllocationPlan, plan: NaivePlan) -> None:
        before = {sequence: list(sequence.table.blocks) for sequence in plan.held}
        leaving = [list(sequence.table.blocks) for sequence in plan.freed]
        contents = [list(block) for block in self.memory]
        moves = self.manager.commit(allocation)
        held = {block for blocks in plan.held.values() for block in blocks}
        held |= {partial.block for partial in plan.partials.values()}
        for number in range(len(leaving)):  # one by one
            self.let_go(held.union(*leaving[number + 1 :]))
        for move in moves.outs:
            self.host[move.target] = list(self.memory[move.source])
        for sequence, blocks in before.items():
            if sequence in plan.copied:
                index = sequence.n_computed // BLOCK
                copied = (blocks[index], sequence.table.blocks[index])
                assert copied in moves.copies, "a shared block is replaced by a copy"
                assert blocks[index] == plan.copied[sequence]
                self.overwritten(copied[1])
                blocks[index] = copied[1]
                sequence.n_shown = min(sequence.n_shown, index)
            assert sequence.table.blocks[: len(blocks)] == blocks, "otherwise tables grow at the end"
            assert len(sequence.table.blocks) == plan.n_held[sequence]
            assert sequence.table.reserved == plan.reserved[sequence]
            for block in sequence.table.blocks[len(blocks) :]:
                self.overwritten(block)
            if sequence in plan.partials:
                partial = plan.partials[sequence]
                assert (partial.block, sequence.table.blocks[len(blocks)]) in moves.copies
        assert len(moves.copies) == len(plan.copied) + len(plan.partials)
        for move in moves.ins:
            self.memory[move.target] = list(self.host[move.source])
        for source, target in moves.copies:
            assert self.memory[source] == contents[source], "a source is unchanged until it is copied"
            self.memory[target] = list(self.memory[source])
        self.alive = list(plan.held)
        self.let_go(self.used())
        self.swapped += plan.swapped.items()
        for sequence, end in plan.ends.items():
            assert self.stored(sequence) == sequence.tokens[: sequence.n_computed].tolist()
            while len(sequence.tokens) < end:  # an answer, a token at a time
                sequence.tokens.append(len(sequence.tokens) % 2)
            self.advance(sequence, end)

    def advance(self, sequence: Sequence_, end: int) -> None:
        for position in range(sequence.n_computed, end):
            block = sequence.table.blocks[position // BLOCK]
            holders = sum(other.table.blocks.count(block) for other in self.alive)
            assert holders == 1, "only a block of one sequence is written"
            assert block not in self.published(), "a published block is never written"
            self.memory[block][position % BLOCK] = sequence.tokens[position]
        sequence.n_computed, sequence.stepped_back = end, False
        self.manager.advance(sequence.table, end)
        begin, sequence.n_shown = sequence.n_shown, max(sequence.n_shown, end // BLOCK)
        for full in range((begin + 1) * BLOCK, end + 1, BLOCK):
            prefix = (sequence.salt, tuple(sequence.tokens[:full]))
            parent = (sequence.salt, prefix[1][:-BLOCK])
            *before, block = sequence.table.blocks[: full // BLOCK]
            if self.share and (not before or before[-1] in self.there.get(parent, ())):
                self.there.setdefault(prefix, []).append(block)
                self.let_go(self.used())

    # ---- between steps ----

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), n=st.integers(1, 3))
    def fork(self, data: st.DataObject, n: int) -> None:
        parent = data.draw(st.sampled_from(self.alive))
        for _ in range(n):
            tokens = array("i", parent.tokens)
            hashes = BlockHashes(tokens, BLOCK, parent.salt)
            table = self.manager.fork(parent.table, hashes)
            assert table.blocks == parent.table.blocks[: -(-parent.n_computed // BLOCK)]
            n_shown = min(parent.n_shown, parent.n_computed // BLOCK)
            twin = Sequence_(tokens, hashes, parent.salt, parent.n_computed, n_shown, table)
            twin.stepped_back = parent.stepped_back
            self.alive.append(twin)
            # as if it had drawn another token
            del tokens[parent.n_computed :]
            tokens.append(data.draw(st.integers(0, 1)))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def step_back(self, data: st.DataObject) -> None:
        """Compute the last token of a sequence again, as if its logits were wanted again."""
        sequence = data.draw(st.sampled_from(self.alive))
        if sequence.n_computed > 0 and not sequence.stepped_back:
            sequence.stepped_back = True
            sequence.n_computed -= 1
            self.manager.advance(sequence.table, sequence.n_computed)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        _, swapped = self.swapped.pop(data.draw(st.integers(0, len(self.swapped) - 1)))
        self.manager.free_swapped(swapped)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        blocks = list(sequence.table.blocks)
        self.manager.trim(sequence.table)
        assert sequence.table.reserved == 0
        assert sequence.table.blocks == blocks[: -(-sequence.n_computed // BLOCK)]
        self.let_go(self.used())

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
        self.manager.free(sequence.table)
        self.let_go(self.used())

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.there = {}

    # ---- invariants ----

    @invariant()
    def agrees(self) -> None:
        manager = self.manager
        used = self.used()
        assert manager.n_used == len(used)
        assert manager.n_cached == len(self.published() - used)
        assert manager.n_used + manager.n_cached + manager.n_free == manager.n_blocks == self.n_blocks
        assert manager.n_reserved == sum(sequence.table.reserved for sequence in self.alive)
        filled: dict[int, int] = {}
        for sequence in self.alive:
            for index, block in enumerate(sequence.table.blocks):
                there = min(BLOCK, max(0, sequence.n_computed - index * BLOCK))
                filled[block] = max(filled.get(block, 0), there)
        assert manager.n_stored == sum(filled.values())
        held = sum(-(-sequence.n_computed // BLOCK) for sequence, _ in self.swapped)
        assert manager.swap.n_free == len(self.host) - held
        for sequence in self.alive:
            assert self.stored(sequence) == sequence.tokens[: sequence.n_computed].tolist()
        manager.audit()

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
        assert there == self.published()

    @invariant()
    def prefixes_outlive_their_suffixes(self) -> None:
        for salt, tokens in self.there:
            assert len(tokens) == BLOCK or (salt, tokens[:-BLOCK]) in self.there


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=int(150 * EFFORT), stateful_step_count=40, deadline=None)
