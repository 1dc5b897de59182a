"""The manager against a naive model: what each sequence holds, and what was promised to it."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pyvelo.errors import InternalError
from pyvelo.kv.manager import BlockManager, BlockTable, Never, NotNow, Start

BLOCK = 32


class ManagerMachine(RuleBasedStateMachine):
    """Steps start, grow and end sequences; nothing is ever taken that was promised to another."""

    @initialize(n_blocks=st.integers(1, 16))
    def start(self, n_blocks: int) -> None:
        self.n_blocks = n_blocks
        self.manager = BlockManager(n_blocks, BLOCK)
        self.worst: dict[BlockTable, int] = {}
        self.length: dict[BlockTable, int] = {}

    @rule(wanted=st.lists(st.integers(1, 17 * BLOCK), max_size=3), grow=st.data())
    def step(self, wanted: list[int], grow: st.DataObject) -> None:
        draft = self.manager.draft()
        used, free = self.manager.n_used, self.manager.n_free
        spare = self.n_blocks - sum(-(-worst // BLOCK) for worst in self.worst.values())
        for worst in wanted:
            needed = -(-worst // BLOCK)
            outcome = draft.start(worst)
            if needed > self.n_blocks:
                assert outcome == Never(needed, self.n_blocks)
            elif needed > spare:
                assert outcome == NotNow(needed, spare)
            else:
                assert isinstance(outcome, Start)
                spare -= needed
                self.worst[outcome.table], self.length[outcome.table] = worst, 0
        for table, worst in self.worst.items():
            length = grow.draw(st.integers(self.length[table], worst))
            draft.grow(table, length)
            self.length[table] = length
        assert (self.manager.n_used, self.manager.n_free) == (used, free), "planning changes nothing"
        self.manager.commit(draft)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if self.worst:
            table = list(self.worst)[data.draw(st.integers(0, len(self.worst) - 1))]
            self.manager.free(table)
            del self.worst[table], self.length[table]

    @invariant()
    def agrees(self) -> None:
        for table, length in self.length.items():
            assert len(table.blocks) == -(-length // BLOCK), "blocks are taken on demand"
        blocks = [block for table in self.worst for block in table.blocks]
        assert len(set(blocks)) == len(blocks) == self.manager.n_used
        assert self.manager.n_used + self.manager.n_free == self.manager.n_blocks == self.n_blocks
        worst = sum(-(-worst // BLOCK) for worst in self.worst.values())
        assert self.manager.n_promised == worst - self.manager.n_used
        self.manager.audit()


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def started(manager: BlockManager, max_tokens: int) -> BlockTable:
    draft = manager.draft()
    outcome = draft.start(max_tokens)
    assert isinstance(outcome, Start)
    manager.commit(draft)
    return outcome.table


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


def test_growing_beyond_the_promise_is_a_defect() -> None:
    manager = BlockManager(4, BLOCK)
    table = started(manager, BLOCK)
    with pytest.raises(InternalError, match="wants 2 more blocks, 1 are promised"):
        manager.draft().grow(table, BLOCK + 1)


def test_a_stale_draft_is_refused_and_changes_nothing() -> None:
    manager = BlockManager(4, BLOCK)
    draft = manager.draft()
    draft.start(BLOCK)
    started(manager, BLOCK)
    with pytest.raises(InternalError, match="changed after this draft"):
        manager.commit(draft)
    assert manager.n_promised == 1
    manager.audit()


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
