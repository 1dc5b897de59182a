"""The rules for the changes of a plan, broken one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pyvelo.errors import InternalError
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.partial import PartialHit
from pyvelo.kv.plan import Change, ManagerState, check_changes
from pyvelo.kv.pool import BlockPool, BlockTable, NotNow, Start, SwappedBlocks
from pyvelo.kv.prefix import Match

BLOCK = 8


def table(*blocks: int, n_tokens: int, reserved: int) -> BlockTable:
    """Return a table of these blocks in the only group."""
    return BlockTable([blocks], n_tokens, None, reserved=reserved)


def hits(*blocks: int, partial: PartialHit | None = None) -> Match:
    """Return a prefix hit of these blocks in the only group."""
    return Match(len(blocks), (blocks,), (0,), partial, None)


@dataclass
class Plan:
    """Valid changes: one table grows, one is swapped out, one starts, one is swapped in.

    The pool has ten blocks: 0 and 1 belong to the first table, 2 and 3 to the second, 4 is cached, 5 to 9 are
    free. Host memory has two free blocks, and one that the fourth table comes from.
    """

    pool: BlockPool = field(default_factory=lambda: BlockPool(10))
    grows: BlockTable = field(default_factory=lambda: table(0, 1, n_tokens=12, reserved=2))
    freed: BlockTable = field(default_factory=lambda: table(2, 3, n_tokens=16, reserved=0))
    starts: BlockTable = field(default_factory=lambda: table(4, n_tokens=8, reserved=1))
    returns: BlockTable = field(default_factory=lambda: table(n_tokens=5, reserved=1))
    swapped: SwappedBlocks = field(default_factory=lambda: SwappedBlocks(5))

    def __post_init__(self) -> None:
        self.pool.allocate(5)
        self.pool.cache(4)
        self.pool.release([4])
        self.swapped.blocks = [0]
        self.n_swap_free = 2
        self.reserved = 2
        self.changes = {
            "grows": Change(self.grows, 3, 1),
            "freed": Change(self.freed, 0, 0, frees=True, swaps_out=SwappedBlocks(16)),
            "starts": Change(self.starts, 2, 1, match=hits(4)),
            "returns": Change(self.returns, 1, 0, match=hits(), swaps_in=self.swapped),
        }

    def change(self, name: str, **fields: object) -> None:
        self.changes[name] = self.changes[name]._replace(**fields)  # type: ignore[arg-type]

    def check(self) -> None:
        tables = {id(table): table for table in (self.grows, self.freed)}
        state = ManagerState(tables, {id(self.swapped): self.swapped}, self.reserved, self.n_swap_free)
        check_changes(self.changes.values(), self.pool, state, BLOCK)


BREAKS: dict[str, tuple[Callable[[Plan], object], str]] = {
    "a dead table grows": (
        lambda p: p.change("grows", table=table(0, 1, n_tokens=12, reserved=2)),
        "must be a live one",
    ),
    "a live table starts": (
        lambda p: p.change("grows", match=hits(0, 1)),
        "must be a new one",
    ),
    "other blocks than the hits": (
        lambda p: p.change("starts", match=hits(5)),
        "must be a new one",
    ),
    "a freed table starts": (lambda p: p.change("starts", frees=True), "no other change"),
    "a freed table resumes": (lambda p: p.change("freed", resumes=True), "no other change"),
    "a freed table copies": (lambda p: p.change("freed", copies=(0,)), "no other change"),
    "a freed table has blocks": (lambda p: p.change("freed", n_blocks=1), "no other change"),
    "a freed table reserves": (lambda p: p.change("freed", reserved=1), "no other change"),
    "a table shrinks": (lambda p: p.change("grows", n_blocks=1), "gives a table 1 blocks"),
    "less than nothing is reserved": (lambda p: p.change("grows", reserved=-1), "reserves -1"),
    "a table that stays is swapped out": (
        lambda p: p.change("grows", swaps_out=SwappedBlocks(12)),
        "swapped out with all its tokens",
    ),
    "another length is swapped out": (
        lambda p: p.change("freed", swaps_out=SwappedBlocks(15)),
        "swapped out with all its tokens",
    ),
    "a live table is swapped in": (lambda p: p.change("grows", swaps_in=p.swapped), "not in host memory"),
    "another sequence is swapped in": (
        lambda p: p.change("returns", swaps_in=SwappedBlocks(5)),
        "not in host memory",
    ),
    "no block for what is swapped in": (lambda p: p.change("returns", n_blocks=0), "blocks for all"),
    "a copy of a block that is not there": (
        lambda p: (setattr(p.grows, "n_tokens", 16), p.change("grows", copies=(0,))),
        "not in its table",
    ),
    "a table twice": (lambda p: p.changes.update(again=p.changes["grows"]), "table twice"),
    "a swapped sequence twice": (
        lambda p: p.changes.update(again=p.changes["returns"]._replace(table=table(n_tokens=5, reserved=1))),
        "the same blocks of host memory",
    ),
    "a hit of an empty block": (
        lambda p: p.change("starts", match=hits(5), table=table(5, n_tokens=8, reserved=1)),
        "neither used nor cached",
    ),
    "a hit outside the pool": (
        lambda p: p.change("starts", match=hits(10), table=table(10, n_tokens=8, reserved=1)),
        "neither used nor cached",
    ),
    "a hit before the pool": (
        lambda p: (
            p.pool.allocate(5),
            p.change("starts", match=hits(-1), table=table(-1, n_tokens=8, reserved=1)),
        ),
        "neither used nor cached",
    ),
    "a partial hit in an empty block": (
        lambda p: p.change("starts", match=hits(4, partial=PartialHit((9,), 4))),
        "neither used nor cached",
    ),
    "a block released twice": (lambda p: p.pool.release([3]), "drops 1 references to block 3, which has 0"),
    "more swap blocks than are free": (lambda p: setattr(p, "n_swap_free", 1), "2 swap blocks, 1 are free"),
    "more blocks than are free": (lambda p: p.change("grows", n_blocks=8), "8 blocks .* 7 are free"),
    "more is reserved than is free": (lambda p: setattr(p, "reserved", 5), "reserves 5, but 7 are free"),
}


def test_the_changes_are_valid() -> None:
    Plan().check()


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_rule_is_an_error_by_name(name: str) -> None:
    spoil, message = BREAKS[name]
    plan = Plan()
    spoil(plan)
    with pytest.raises(InternalError, match=message):
        plan.check()


def test_exactly_the_free_blocks_may_be_allocated_and_reserved() -> None:
    """Seven blocks are free: six now, less the hit, plus two of the freed table."""
    plan = Plan()
    plan.change("grows", n_blocks=5)
    plan.check()
    plan.change("grows", n_blocks=6)
    with pytest.raises(InternalError, match="allocates 6 blocks and reserves 2, but 7 are free"):
        plan.check()


def test_resuming_reserves_no_more_than_the_available_blocks() -> None:
    manager = BlockManager(4, BLOCK)
    outcome = manager.plan().start(BLOCK)
    assert isinstance(outcome, Start)
    plan = manager.plan()
    outcome = plan.start(BLOCK)
    assert isinstance(outcome, Start)
    manager.commit(plan)
    assert manager.plan().resume(outcome.table, 4 * BLOCK) == Start(outcome.table)
    assert manager.plan().resume(outcome.table, 4 * BLOCK + 1) == NotNow(4, 3)
    assert manager.plan().resume(outcome.table, 4 * BLOCK, spare=1) == NotNow(3, 2)
