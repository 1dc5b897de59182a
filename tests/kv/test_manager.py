"""The manager against a naive model: a memory of tokens, and what each sequence holds and was promised."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyvelo.errors import InternalError
from pyvelo.kv.draft import SHORTEST_HEAD, BlockTable, Draft, Never, NotNow, Start, Swapped
from pyvelo.kv.manager import BlockManager, Event, Moves
from pyvelo.kv.prefix import Chain

BLOCK = 8
EMPTY = -1
MOST_BLOCKS = 14
EFFORT = int(os.environ.get("VELO_TEST_EFFORT", "1"))  # 170: a million rules


@dataclass
class Sequence_:
    """A sequence of the naive model; its first `n_computed` tokens are in the memory."""

    tokens: array[int]
    chain: Chain
    salt: bytes
    n_computed: int
    n_shown: int  # blocks of it that others have had the chance to hit
    table: BlockTable = field(repr=False)


class ManagerMachine(RuleBasedStateMachine):
    """Sequences start, advance and end. Tokens are few, so that many begin alike."""

    @initialize(
        n_blocks=st.integers(1, MOST_BLOCKS),
        share=st.sampled_from([True, True, False]),
        n_swap=st.integers(0, 8),
    )
    def start(self, n_blocks: int, share: bool, n_swap: int) -> None:
        self.n_blocks, self.share = n_blocks, share
        self.events: list[Event] = []
        self.manager = BlockManager(
            n_blocks, BLOCK, share=share, n_swap_blocks=n_swap, observe=self.events.append
        )
        self.host: list[list[int]] = [[EMPTY] * BLOCK for _ in range(n_swap)]
        self.asleep: list[tuple[Sequence_, Swapped]] = []
        self.memory = [[EMPTY] * BLOCK for _ in range(n_blocks)]
        self.there: dict[tuple[bytes, tuple[int, ...]], int] = {}  # published prefixes, by all their tokens
        self.alive: list[Sequence_] = []

    # ---- what the naive model expects ----

    def hits(self, tokens: Sequence[int], salt: bytes) -> list[int]:
        blocks: list[int] = []
        for end in range(BLOCK, len(tokens), BLOCK):  # the last token is always computed
            block = self.there.get((salt, tuple(tokens[:end])))
            if block is None:
                break
            blocks.append(block)
        return blocks if self.share else []

    def best_head(self, tokens: Sequence[int], salt: bytes, n_hits: int) -> int:
        """Length of the longest head that any published block has, behind the same tokens."""
        before = tuple(tokens[: n_hits * BLOCK])
        wanted = tokens[n_hits * BLOCK : len(tokens) - 1]
        best = 0
        for (other_salt, prefix), _ in self.there.items():
            if other_salt == salt and prefix[:-BLOCK] == before:
                same = zip(prefix[-BLOCK:], wanted, strict=False)
                length = next((i for i, (a, b) in enumerate(same) if a != b), min(BLOCK, len(wanted)))
                best = max(best, length)
        return best if best >= SHORTEST_HEAD and self.share else 0

    def overwritten(self, block: int) -> None:
        self.memory[block] = [EMPTY] * BLOCK
        self.there = {prefix: b for prefix, b in self.there.items() if b != block}

    def stored(self, sequence: Sequence_) -> list[int]:
        slots = [self.memory[block][i] for block in sequence.table.blocks for i in range(BLOCK)]
        return slots[: sequence.n_computed]

    # ---- rules ----

    @rule(
        wanted=st.lists(
            st.tuples(
                st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=5 * BLOCK),
                st.integers(0, 3 * BLOCK),
                st.sampled_from([b"", b"", b"salt"]),
            ),
            max_size=3,
        ),
        data=st.data(),
    )
    def step(self, wanted: list[tuple[list[int], int, bytes]], data: st.DataObject) -> None:
        draft = self.manager.draft()
        # as if the n-th allocation failed: fewer blocks than there are
        withheld = min(draft.available, data.draw(st.sampled_from([0, 0, 0, 1, 2, MOST_BLOCKS])))
        draft.available -= withheld
        before = (self.manager.n_used, self.manager.n_cached, self.manager.n_free, self.manager.n_promised)
        self.available = self.n_blocks - len(self.used()) - sum(s.table.promised for s in self.alive)
        self.available -= withheld
        self.left: list[int] = []  # blocks of which somebody takes a copy
        dropped = [sequence for sequence in self.alive if data.draw(st.integers(0, 9)) == 0]
        self.swappable = len(self.host) - sum(-(-s.n_computed // BLOCK) for s, _ in self.asleep)
        leaving = [self.leave(draft, sequence, data.draw(st.booleans())) for sequence in dropped]
        grown = []
        for sequence in self.alive:
            extra = self.resume(draft, sequence, data) if data.draw(st.integers(0, 4)) == 0 else 0
            more = data.draw(st.integers(0, 2 * BLOCK))
            grown.append((sequence, self.grow(draft, sequence, more, extra)))
        waking = [pair for pair in self.asleep if data.draw(st.integers(0, 2)) == 0]
        for sequence, swapped in waking:
            if self.wake(draft, sequence, swapped):
                grown.append(
                    (sequence, data.draw(st.integers(sequence.n_computed + 1, len(sequence.tokens))))
                )
                draft.grow(sequence.table, grown[-1][1])
                self.asleep.remove((sequence, swapped))
        for prompt, more, salt in wanted:
            tokens = array("i", prompt)
            chain, worst = Chain(tokens, BLOCK, salt), len(prompt) + more
            outcome = draft.start(worst, chain)
            needed = -(-worst // BLOCK)
            if needed > self.n_blocks:
                assert outcome == Never(needed, self.n_blocks)
            elif not isinstance(outcome, NotNow):
                assert isinstance(outcome, Start)
                table = outcome.table
                hits = self.hits(prompt, salt)
                assert table.blocks == hits
                head = table.n_cached - len(hits) * BLOCK
                assert head in (0, self.best_head(prompt, salt, len(hits)))
                assert table.promised == needed - len(hits)
                sequence = Sequence_(tokens, chain, salt, table.n_cached, len(hits), table)
                end = data.draw(st.integers(table.n_cached + 1, len(prompt)))
                draft.grow(table, end)
                grown.append((sequence, end))
            else:
                assert outcome.needed > outcome.available
                if len(grown) == len(self.alive) and not waking:  # nobody else starts in this step
                    there = set(self.hits(prompt, salt)) & self.used()
                    assert outcome == NotNow(needed - len(there), self.available)
        after = (self.manager.n_used, self.manager.n_cached, self.manager.n_free, self.manager.n_promised)
        assert after == before, "planning changes nothing"
        self.commit(draft, grown)
        self.asleep += [pair for pair in leaving if pair is not None]

    def used(self) -> set[int]:
        return {block for sequence in self.alive for block in sequence.table.blocks}

    def leave(self, draft: Draft, sequence: Sequence_, swap: bool) -> tuple[Sequence_, Swapped] | None:
        """The sequence gives way; to host memory where that is wanted and there is room."""
        before = self.used()
        tables = [other.table for other in self.alive]
        assert draft.would_free(tables) == len(before) + sum(table.promised for table in tables)
        self.alive.remove(sequence)
        freed = len(before - self.used()) + sequence.table.promised
        assert draft.would_free([sequence.table]) == freed
        self.available += freed
        if swap and sequence.n_computed > 0:
            n_blocks = -(-sequence.n_computed // BLOCK)
            swapped = draft.swap_out(sequence.table)
            assert (swapped is not None) == (n_blocks <= self.swappable)
            if swapped is not None:
                self.swappable -= n_blocks
                return sequence, swapped
        draft.drop(sequence.table)
        return None

    def wake(self, draft: Draft, sequence: Sequence_, swapped: Swapped) -> bool:
        """Whether it comes back, with all that was computed."""
        if len(sequence.tokens) == sequence.n_computed:
            sequence.tokens.append(1)
        outcome = draft.start(len(sequence.tokens), sequence.chain, 0, swapped)
        if not isinstance(outcome, Start):
            return False
        sequence.table, sequence.n_shown = outcome.table, len(outcome.table.blocks)
        assert outcome.table.n_cached == outcome.table.n_tokens == sequence.n_computed
        hits = self.hits(sequence.tokens, sequence.salt)
        assert outcome.table.blocks == hits[: sequence.n_computed // BLOCK]
        return True

    def resume(self, draft: Draft, sequence: Sequence_, data: st.DataObject) -> int:
        """Blocks that a live sequence is promised beyond those that it has."""
        table = sequence.table
        n_tokens = sequence.n_computed + data.draw(st.integers(1, 3 * BLOCK))
        missing = max(0, -(-n_tokens // BLOCK) - len(table.blocks) - table.promised)
        index = sequence.n_computed // BLOCK
        needed = missing + (index < len(table.blocks) and self.holders(table.blocks[index]) > 1)
        spare = data.draw(st.integers(0, 1))
        outcome = draft.resume(table, n_tokens, spare)
        if needed > self.available - spare:
            assert outcome == NotNow(needed, self.available - spare)
            return 0
        assert outcome == Start(table)
        self.available -= missing
        return missing

    def grow(self, draft: Draft, sequence: Sequence_, more: int, extra: int = 0) -> int:
        """How far the sequence may go in this step."""
        end = sequence.n_computed + more
        table = sequence.table
        missing = max(0, -(-end // BLOCK) - len(table.blocks))
        index = sequence.n_computed // BLOCK
        shared = index < len(table.blocks) and self.holders(table.blocks[index]) > 1
        beyond = max(0, missing - table.promised - extra) + shared
        if more == 0:
            return end  # it does not take part
        assert draft.grow(table, end) == (beyond <= self.available)
        if beyond > self.available:
            return sequence.n_computed
        self.available -= beyond
        if shared:
            self.left.append(table.blocks[index])
        return end

    def holders(self, block: int) -> int:
        """How many will still hold the block after what was planned so far."""
        return sum(other.table.blocks.count(block) for other in self.alive) - self.left.count(block)

    def commit(self, draft: Draft, grown: list[tuple[Sequence_, int]]) -> None:
        held = {id(sequence): list(sequence.table.blocks) for sequence, _ in grown}
        fresh_sources = {b: list(self.memory[b]) for b in range(self.n_blocks)}
        moves = self.manager.commit(draft)
        copies = moves.copies
        for move in moves.outs:
            self.host[move.target] = list(self.memory[move.source])
        for sequence, _ in grown:
            before = held[id(sequence)]
            index = sequence.n_computed // BLOCK
            if len(before) > index and sequence.table.blocks[index] != before[index]:
                copied = (before[index], sequence.table.blocks[index])
                assert copied in copies, "what others hold is replaced by a copy"
                assert before[index] in self.left
                self.overwritten(copied[1])
                before[index] = copied[1]
            assert sequence.table.blocks[: len(before)] == before, "but for that, tables grow at the end"
            for block in sequence.table.blocks[len(before) :]:
                self.overwritten(block)
        for move in moves.ins:
            self.memory[move.target] = list(self.host[move.source])
        for copy in copies:
            assert self.memory[copy.source] == fresh_sources[copy.source], "a source stays until it is copied"
            self.memory[copy.target] = list(self.memory[copy.source])
        self.alive += [sequence for sequence, _ in grown[len(self.alive) :]]
        for sequence, end in grown:
            assert self.stored(sequence) == sequence.tokens[: sequence.n_computed].tolist()
            while len(sequence.tokens) < end:  # an answer, a token at a time
                sequence.tokens.append(len(sequence.tokens) % 2)
            self.advance(sequence, end)

    def advance(self, sequence: Sequence_, end: int) -> None:
        for position in range(sequence.n_computed, end):
            block = sequence.table.blocks[position // BLOCK]
            holders = sum(other.table.blocks.count(block) for other in self.alive)
            assert holders == 1, "what is written belongs to one sequence"
            assert block not in self.there.values(), "what others may hit is never written"
            self.memory[block][position % BLOCK] = sequence.tokens[position]
        sequence.n_computed = end
        self.manager.advance(sequence.table, end)
        begin, sequence.n_shown = sequence.n_shown, max(sequence.n_shown, end // BLOCK)
        for full in range((begin + 1) * BLOCK, end + 1, BLOCK):
            prefix = (sequence.salt, tuple(sequence.tokens[:full]))
            block = sequence.table.blocks[full // BLOCK - 1]
            if self.share and prefix not in self.there:
                self.there[prefix] = block

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), n=st.integers(1, 3))
    def fork(self, data: st.DataObject, n: int) -> None:
        parent = data.draw(st.sampled_from(self.alive))
        for _ in range(n):
            tokens = array("i", parent.tokens)
            chain = Chain(tokens, BLOCK, parent.salt)
            table = self.manager.fork(parent.table, chain)
            assert table.blocks == parent.table.blocks[: -(-parent.n_computed // BLOCK)]
            twin = Sequence_(tokens, chain, parent.salt, parent.n_computed, parent.n_shown, table)
            self.alive.append(twin)
            # as if it had drawn another token
            del tokens[parent.n_computed :]
            tokens.append(data.draw(st.integers(0, 1)))

    @precondition(lambda self: self.asleep)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        _, swapped = self.asleep.pop(data.draw(st.integers(0, len(self.asleep) - 1)))
        self.manager.discard(swapped)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        blocks = list(sequence.table.blocks)
        self.manager.park(sequence.table)
        assert sequence.table.promised == 0
        assert sequence.table.blocks == blocks[: -(-sequence.n_computed // BLOCK)]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.alive.pop(data.draw(st.integers(0, len(self.alive) - 1)))
        self.manager.free(sequence.table)

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.there = {}

    # ---- what always holds ----

    @invariant()
    def agrees(self) -> None:
        manager = self.manager
        used = self.used()
        assert manager.n_used == len(used)
        assert manager.n_cached == len(set(self.there.values()) - used)
        assert manager.n_used + manager.n_cached + manager.n_free == manager.n_blocks == self.n_blocks
        assert manager.n_promised == sum(sequence.table.promised for sequence in self.alive)
        filled: dict[int, int] = {}
        for sequence in self.alive:
            for index, block in enumerate(sequence.table.blocks):
                there = min(BLOCK, max(0, sequence.n_computed - index * BLOCK))
                filled[block] = max(filled.get(block, 0), there)
        assert manager.n_stored == sum(filled.values())
        held = sum(-(-sequence.n_computed // BLOCK) for sequence, _ in self.asleep)
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
                assert event.kind in ("copied", "swapped", "reset")
                there -= {event.block} if event.kind == "reset" else set()
        assert there == set(self.there.values())


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=150 * EFFORT, stateful_step_count=40, deadline=None)


def chain(tokens: Sequence[int], salt: bytes = b"") -> Chain:
    return Chain(array("i", tokens), BLOCK, salt)


def started(manager: BlockManager, max_tokens: int, tokens: Sequence[int] = ()) -> BlockTable:
    """A sequence that has room for its tokens; not computed yet."""
    draft = manager.draft()
    outcome = draft.start(max_tokens, chain(tokens) if tokens else None)
    assert isinstance(outcome, Start)
    draft.grow(outcome.table, len(tokens))
    manager.commit(draft)
    return outcome.table


def ended(manager: BlockManager, tokens: Sequence[int]) -> None:
    """A sequence that came, was computed, and went."""
    table = started(manager, len(tokens), tokens)
    manager.advance(table, len(tokens))
    manager.free(table)


def test_a_promise_takes_no_block_but_keeps_others_out() -> None:
    manager = BlockManager(4, BLOCK)
    started(manager, 3 * BLOCK)
    assert (manager.n_used, manager.n_free, manager.n_promised) == (0, 4, 3)
    assert manager.draft().start(2 * BLOCK) == NotNow(2, 1)


def test_an_ended_sequence_gives_its_promises_back() -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, 4 * BLOCK)
    draft = manager.draft()
    draft.grow(table, BLOCK + 1)
    manager.commit(draft)
    assert (manager.n_used, manager.n_promised) == (2, 2)
    manager.free(table)
    assert (manager.n_used, manager.n_promised) == (0, 0)
    assert isinstance(manager.draft().start(4 * BLOCK), Start)


def test_a_prefix_outlives_its_suffixes() -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, range(4 * BLOCK))
    manager.free(started(manager, BLOCK, [99] * BLOCK))  # took the last block of what is cached
    assert started(manager, 4 * BLOCK - 1, range(4 * BLOCK - 1)).n_cached == 3 * BLOCK
    assert manager.counts.evictions == 1


def test_the_whole_prompt_is_there_but_its_last_token_is_computed() -> None:
    manager = BlockManager(8, BLOCK)
    ended(manager, range(2 * BLOCK))
    table = started(manager, 3 * BLOCK, range(2 * BLOCK))
    assert table.n_cached == 2 * BLOCK - 1
    assert manager.counts.copies == 1, "a published block is never written"


def test_live_sequences_share_and_the_block_goes_with_the_last() -> None:
    manager = BlockManager(8, BLOCK)
    first = started(manager, 3 * BLOCK, range(2 * BLOCK + 1))
    manager.advance(first, 2 * BLOCK + 1)
    second = started(manager, 3 * BLOCK, range(2 * BLOCK + 1))
    assert second.blocks[:2] == first.blocks[:2]
    assert manager.n_used == 4
    manager.free(first)
    assert (manager.n_used, manager.n_cached) == (3, 0)
    manager.free(second)
    assert (manager.n_used, manager.n_cached) == (0, 2)


def test_a_copy_that_leaves_no_room_is_computed_instead() -> None:
    """The only free block is the one to copy from."""
    manager = BlockManager(2, BLOCK)
    ended(manager, range(BLOCK))
    held = started(manager, BLOCK)
    draft = manager.draft()
    outcome = draft.start(BLOCK, chain([*range(BLOCK - 1), 99]))
    assert isinstance(outcome, Start)
    assert outcome.table.n_cached == 0
    draft.grow(outcome.table, BLOCK)
    draft.grow(held, BLOCK)
    assert manager.commit(draft) == Moves([], [], [])
    assert manager.counts.evictions == 1


def test_forgotten_prefixes_are_computed_again() -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, range(2 * BLOCK))
    manager.reset()
    assert (manager.n_cached, manager.n_free) == (0, 4)
    assert started(manager, 2 * BLOCK, range(2 * BLOCK)).n_cached == 0


def test_beyond_the_promise_a_sequence_grows_while_there_are_blocks() -> None:
    manager = BlockManager(4, BLOCK)
    table, other = started(manager, BLOCK), started(manager, BLOCK)
    assert not manager.draft().grow(table, 3 * BLOCK + 1), "one is promised to the other"
    draft = manager.draft()
    assert draft.grow(table, 3 * BLOCK)
    assert not draft.grow(other, BLOCK + 1)
    manager.commit(draft)
    assert (manager.n_used, manager.n_promised) == (3, 1)


def test_a_dropped_sequence_makes_room_in_the_same_draft() -> None:
    manager = BlockManager(4, BLOCK)
    first, second = started(manager, 2 * BLOCK, range(2 * BLOCK)), started(manager, 2 * BLOCK, range(9, 20))
    draft = manager.draft()
    assert not draft.grow(first, 4 * BLOCK)
    draft.drop(second)
    assert draft.grow(first, 4 * BLOCK)
    manager.commit(draft)
    assert (manager.n_used, manager.n_promised) == (4, 0)
    manager.audit()


def test_what_several_hold_is_free_once_all_of_them_are_dropped() -> None:
    manager = BlockManager(8, BLOCK)
    table = started(manager, 3 * BLOCK, range(2 * BLOCK))
    manager.advance(table, 2 * BLOCK)
    fork, other = manager.fork(table, None), started(manager, 2 * BLOCK)
    draft = manager.draft()
    assert [draft.would_free(tables) for tables in ([table], [fork], [other])] == [1, 0, 2]
    assert draft.would_free([table, fork]) == 3
    draft.drop(other)
    assert draft.would_free([]) == 0


def test_a_table_that_grows_cannot_be_dropped_nor_dropped_twice() -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, BLOCK)
    draft = manager.draft()
    draft.grow(table, BLOCK)
    draft.drop(table)
    with pytest.raises(InternalError, match="cannot grow"):
        manager.commit(draft)
    draft = manager.draft()
    draft.drop(table)
    draft.drop(table)
    with pytest.raises(InternalError, match="dropped twice"):
        manager.commit(draft)
    manager.audit()


def test_blocks_to_spare_are_left() -> None:
    manager = BlockManager(4, BLOCK)
    assert manager.draft().start(3 * BLOCK, None, 2) == NotNow(3, 2)
    assert isinstance(manager.draft().start(2 * BLOCK, None, 2), Start)


def test_what_is_revived_is_needed_too() -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, range(2 * BLOCK))
    started(manager, BLOCK)
    again = chain(range(2 * BLOCK + 1))
    assert manager.draft().start(4 * BLOCK, again) == NotNow(4, 3)
    assert manager.draft().start(3 * BLOCK, again, spare=1) == NotNow(3, 2)
    assert isinstance(manager.draft().start(3 * BLOCK, again), Start)


@pytest.mark.parametrize(("spare", "n_cached"), [(2, BLOCK - 1), (3, 0)])
def test_a_block_to_copy_from_is_left_to_others(spare: int, n_cached: int) -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, range(BLOCK))
    outcome = manager.draft().start(BLOCK, chain(range(BLOCK)), spare)
    assert isinstance(outcome, Start)
    assert outcome.table.n_cached == n_cached


def test_a_copied_block_must_be_grown_into() -> None:
    manager = BlockManager(4, BLOCK)
    ended(manager, range(BLOCK))
    draft = manager.draft()
    draft.start(BLOCK, chain([*range(BLOCK - 1), 99]))
    with pytest.raises(InternalError, match="must grow into it"):
        manager.commit(draft)
    assert (manager.n_used, manager.n_promised) == (0, 0)
    manager.audit()


def test_a_stale_draft_is_refused_and_changes_nothing() -> None:
    manager = BlockManager(4, BLOCK)
    draft = manager.draft()
    draft.start(BLOCK)
    started(manager, BLOCK)
    with pytest.raises(InternalError, match="changed after this draft"):
        manager.commit(draft)
    assert manager.n_promised == 1
    manager.audit()


CHANGES: dict[str, Callable[[BlockManager, BlockTable], object]] = {
    "commit": lambda manager, table: manager.commit(manager.draft()),
    "fork": lambda manager, table: manager.fork(table, None),
    "free a fork": lambda manager, table: manager.free(manager.fork(table, None)),
    "park": lambda manager, table: manager.park(table),
    "reset": lambda manager, table: manager.reset(),
}


@pytest.mark.parametrize("first", CHANGES)
@pytest.mark.parametrize("second", [None, *CHANGES])
def test_whatever_changes_voids_a_draft(first: str, second: str | None) -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, 2 * BLOCK, range(BLOCK))
    draft = manager.draft()
    for change in (first, second):
        if change is not None:
            CHANGES[change](manager, table)
    with pytest.raises(InternalError, match="changed after this draft"):
        manager.commit(draft)


def test_nothing_is_counted_at_first() -> None:
    assert set(vars(BlockManager(4, BLOCK).counts).values()) == {0}


def test_a_table_is_freed_once() -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, BLOCK)
    manager.free(table)
    with pytest.raises(InternalError, match="not a live one"):
        manager.free(table)


def test_audit_sees_a_lost_promise() -> None:
    manager = BlockManager(4, BLOCK)
    started(manager, BLOCK).promised = 0
    with pytest.raises(InternalError, match="1 blocks promised, tables say 0"):
        manager.audit()


def test_audit_sees_a_block_kept_for_nothing() -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, BLOCK, range(4))
    manager._pool.keep(table.blocks[0])
    with pytest.raises(InternalError, match="not those that are published"):
        manager.audit()


def test_audit_sees_a_block_that_holds_other_tokens() -> None:
    manager = BlockManager(4, BLOCK)
    tokens = array("i", range(BLOCK + 1))
    draft = manager.draft()
    outcome = draft.start(len(tokens), Chain(tokens, BLOCK))
    assert isinstance(outcome, Start)
    draft.grow(outcome.table, len(tokens))
    manager.commit(draft)
    manager.advance(outcome.table, len(tokens))
    tokens[0] = 99
    with pytest.raises(InternalError, match="other tokens than its table has"):
        manager.audit()


def test_a_fork_shares_every_block_and_copies_on_the_first_write() -> None:
    manager = BlockManager(8, BLOCK)
    parent = started(manager, 2 * BLOCK, range(BLOCK + 3))
    manager.advance(parent, BLOCK + 3)
    twins = [manager.fork(parent, None) for _ in range(3)]
    assert manager.n_used == 2
    tail = parent.blocks[1]
    draft = manager.draft()
    for table in (*twins, parent):
        assert draft.grow(table, BLOCK + 4)
    copies = manager.commit(draft).copies
    assert [copy.source for copy in copies] == [tail] * 3
    assert [copy.target for copy in copies] == [twin.blocks[1] for twin in twins]
    assert parent.blocks[1] == tail, "the last to hold it writes to it"
    assert manager.n_used == 5
    for table in (*twins, parent):
        manager.free(table)
    manager.audit()


def test_a_fork_at_a_block_s_end_copies_nothing() -> None:
    manager = BlockManager(8, BLOCK)
    parent = started(manager, BLOCK, range(BLOCK))
    manager.advance(parent, BLOCK)
    twin = manager.fork(parent, None)
    draft = manager.draft()
    assert draft.grow(twin, BLOCK + 1)
    assert draft.grow(parent, BLOCK + 1)
    assert manager.commit(draft) == Moves([], [], [])
    assert manager.n_used == 3


def test_a_fork_has_published_only_what_it_shares() -> None:
    """Of a block whose last token is computed again the fork has another token there."""
    manager = BlockManager(4, BLOCK)
    table = started(manager, 2 * BLOCK, range(BLOCK))
    manager.advance(table, BLOCK)
    manager.advance(table, BLOCK - 1)
    twin = manager.fork(table, chain([*range(BLOCK - 1), 99]))
    manager.audit()
    draft = manager.draft()
    draft.grow(twin, BLOCK)
    manager.commit(draft)
    manager.advance(twin, BLOCK)
    manager.audit()
    assert manager.published() == {*table.blocks, *twin.blocks}


def test_a_fork_leaves_blocks_that_hold_nothing_yet_to_its_parent() -> None:
    manager = BlockManager(8, BLOCK)
    parent = started(manager, 3 * BLOCK, range(3 * BLOCK))
    manager.advance(parent, BLOCK + 1)
    assert manager.fork(parent, None).blocks == parent.blocks[:2]


def test_a_swapped_sequence_comes_back_but_for_what_is_there() -> None:
    manager = BlockManager(6, BLOCK, n_swap_blocks=3)
    tokens = range(2 * BLOCK + 3)
    table = started(manager, len(tokens), tokens)
    manager.advance(table, len(tokens) - 1)
    held = list(table.blocks)
    draft = manager.draft()
    swapped = draft.swap_out(table)
    assert swapped is not None
    moves = manager.commit(draft)
    assert [move.source for move in moves.outs] == held
    assert (manager.n_used, manager.n_cached, manager.swap.n_free) == (0, 2, 0)
    manager.free(started(manager, 5 * BLOCK, [99] * 5 * BLOCK))  # takes the second block, not the first
    draft = manager.draft()
    outcome = draft.start(len(tokens), chain(tokens), 0, swapped)
    assert isinstance(outcome, Start)
    draft.grow(outcome.table, len(tokens))
    moves = manager.commit(draft)
    assert outcome.table.blocks[0] == held[0]
    assert [move.target for move in moves.ins] == outcome.table.blocks[1:]
    assert [move.source for move in moves.ins] == swapped.blocks[1:]
    assert manager.swap.n_free == 3
    assert (manager.counts.swapped_out, manager.counts.swapped_in) == (3, 2)
    manager.audit()


def test_host_memory_that_is_full_takes_nobody() -> None:
    manager = BlockManager(6, BLOCK, n_swap_blocks=1)
    table = started(manager, BLOCK + 1, range(BLOCK + 1))
    manager.advance(table, BLOCK + 1)
    draft = manager.draft()
    assert draft.swap_out(table) is None
    assert manager.commit(draft) == Moves([], [], [])


def test_blocks_that_hold_nothing_yet_are_not_swapped() -> None:
    manager = BlockManager(6, BLOCK, n_swap_blocks=3)
    table = started(manager, 3 * BLOCK, range(3 * BLOCK))
    manager.advance(table, BLOCK + 1)
    held = table.blocks[:2]
    draft = manager.draft()
    draft.swap_out(table)
    assert [move.source for move in manager.commit(draft).outs] == held
    assert manager.swap.n_free == 1


def test_tokens_that_were_there_are_counted() -> None:
    manager = BlockManager(8, BLOCK)
    ended(manager, range(2 * BLOCK))
    assert (manager.counts.queried, manager.counts.hits) == (2 * BLOCK, 0)
    table = started(manager, 3 * BLOCK, range(2 * BLOCK + 3))
    assert (manager.counts.queried, manager.counts.hits) == (4 * BLOCK + 3, 2 * BLOCK)
    manager.advance(table, 2 * BLOCK + 3)
    draft = manager.draft()
    assert isinstance(draft.resume(table, 3 * BLOCK), Start)
    manager.commit(draft)
    assert (manager.counts.queried, manager.counts.hits) == (6 * BLOCK + 6, 4 * BLOCK + 3)


def test_who_resumes_is_alive() -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, BLOCK, range(3))
    draft = manager.draft()
    draft.resume(table, 2 * BLOCK)
    draft.drop(table)
    with pytest.raises(InternalError, match="must be a live one"):
        manager.commit(draft)
    manager.free(table)
    draft = manager.draft()
    draft.resume(table, BLOCK)
    with pytest.raises(InternalError, match="must be a live one"):
        manager.commit(draft)
    assert manager.n_promised == 0


def test_who_is_not_in_host_memory_cannot_come_back() -> None:
    manager = BlockManager(6, BLOCK, n_swap_blocks=3)
    draft = manager.draft()
    outcome = draft.start(BLOCK, chain(range(BLOCK)), 0, Swapped(3))
    assert isinstance(outcome, Start)
    draft.grow(outcome.table, BLOCK)
    with pytest.raises(InternalError, match="is not in host memory"):
        manager.commit(draft)
    assert (manager.n_used, manager.n_promised, list(manager.tables())) == (0, 0, [])
    with pytest.raises(InternalError, match="is not in host memory"):
        manager.discard(Swapped(3))


def test_what_others_may_hit_is_copied_even_by_its_only_holder() -> None:
    """The last token of a full prompt is computed again by a fork, after its parent has gone."""
    manager = BlockManager(8, BLOCK)
    parent = started(manager, BLOCK, range(BLOCK))
    manager.advance(parent, BLOCK)
    twin = manager.fork(parent, chain(range(BLOCK)))
    manager.advance(twin, BLOCK - 1)
    manager.free(parent)
    published = twin.blocks[0]
    draft = manager.draft()
    assert draft.grow(twin, BLOCK)
    (copy,) = manager.commit(draft).copies
    assert copy.source == published
    assert twin.blocks == [copy.target]
    assert manager.n_cached == 1
    manager.audit()


def test_a_head_is_copied_from_four_tokens_up() -> None:
    for n_common, n_cached in ((4, 4), (3, 0)):
        manager = BlockManager(4, BLOCK)
        ended(manager, range(BLOCK))
        assert started(manager, BLOCK, [*range(n_common), *[99] * 4]).n_cached == n_cached


def test_the_block_that_is_copied_from_is_no_room_for_others() -> None:
    manager = BlockManager(3, BLOCK)
    ended(manager, range(BLOCK))
    draft = manager.draft()
    outcome = draft.start(BLOCK, chain([*range(BLOCK - 1), 99]))
    assert isinstance(outcome, Start)
    assert outcome.table.n_cached == BLOCK - 1
    draft.grow(outcome.table, BLOCK)
    assert draft.start(2 * BLOCK) == NotNow(2, 1)
    assert isinstance(draft.start(BLOCK), Start)
    manager.commit(draft)
    manager.audit()


def test_hits_that_others_hold_need_no_room() -> None:
    manager = BlockManager(4, BLOCK)
    first = started(manager, 2 * BLOCK, range(2 * BLOCK))
    manager.advance(first, 2 * BLOCK)
    outcome = manager.draft().start(4 * BLOCK, chain([*range(2 * BLOCK), 99]))
    assert isinstance(outcome, Start)
    assert outcome.table.promised == 2


def test_a_parked_table_keeps_only_what_it_stores() -> None:
    manager = BlockManager(6, BLOCK)
    table = started(manager, 5 * BLOCK, range(3 * BLOCK))
    manager.advance(table, BLOCK + 1)
    manager.park(table)
    assert len(table.blocks) == 2
    assert (manager.n_used, manager.n_free, manager.n_promised) == (2, 4, 0)
    manager.audit()


def test_only_a_live_table_is_forked_or_parked() -> None:
    manager = BlockManager(6, BLOCK)
    table = started(manager, BLOCK)
    manager.free(table)
    assert (table.blocks, table.promised) == ([], 0)
    for use in (lambda: manager.fork(table, None), lambda: manager.park(table)):
        with pytest.raises(InternalError, match="not a live one"):
            use()


def test_to_discard_voids_a_draft() -> None:
    manager = BlockManager(6, BLOCK, n_swap_blocks=2)
    table = started(manager, BLOCK, range(5))
    manager.advance(table, 5)
    draft = manager.draft()
    swapped = draft.swap_out(table)
    assert swapped is not None
    manager.commit(draft)
    draft = manager.draft()
    manager.discard(swapped)
    with pytest.raises(InternalError, match="changed after this draft"):
        manager.commit(draft)


def test_a_table_has_another_version_when_more_than_its_end_changes() -> None:
    """A copy of a row is brought up to date by what was added, as long as the version stays."""
    manager = BlockManager(8, BLOCK)
    table = started(manager, 3 * BLOCK, range(5))
    versions = [table.version]

    def grow(grown: BlockTable, n_tokens: int) -> None:
        draft = manager.draft()
        assert draft.grow(grown, n_tokens)
        manager.commit(draft)

    grow(table, BLOCK + 1)
    manager.advance(table, 5)
    twin = manager.fork(table, chain(range(5)))
    assert table.version == versions[0], "it has grown only"
    for change in (
        lambda: manager.park(table),  # leaves a block that holds nothing
        lambda: grow(table, 6),  # copies the block of its twin
        lambda: manager.free(table),
    ):
        change()
        assert table.version not in versions
        versions.append(table.version)
    assert twin.version == 0


def test_what_is_published_and_who_lives() -> None:
    for share in (True, False):
        manager = BlockManager(8, BLOCK, share=share)
        table = started(manager, 2 * BLOCK, range(BLOCK + 1))
        manager.advance(table, BLOCK + 1)
        assert manager.published() == (set(table.blocks[:1]) if share else set())
        assert list(manager.tables()) == [table]
        assert (manager.swap.n_blocks, manager.swap.n_free) == (0, 0)
