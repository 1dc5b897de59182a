"""Choice of what is preempted or evicted: candidates in order until there is room, unless not needed."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyvelo.engine.request import Request, Sequence
from pyvelo.engine.scheduler import choose_victims
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.plan import AllocationPlan
from pyvelo.kv.pool import BlockTable, NotNow, Start
from pyvelo.kv.prefix import FULL

BLOCK = 8

Lacks = Callable[[AllocationPlan, Items[Sequence | Request]], int]


def owner(table: BlockTable) -> Sequence:
    sequence = Sequence([], BLOCK)
    sequence.table = table
    return sequence


def start(manager: BlockManager, n_tokens: int) -> BlockTable | None:
    """Start a sequence and compute its tokens, if there is room."""
    plan = manager.plan()
    outcome = plan.start(n_tokens)
    if not isinstance(outcome, Start):
        return None
    assert plan.grow(outcome.table, n_tokens)
    manager.commit(plan)
    manager.advance(outcome.table, n_tokens)
    return outcome.table


def started(manager: BlockManager, n_tokens: int) -> BlockTable:
    table = start(manager, n_tokens)
    assert table is not None
    return table


def resumes(table: BlockTable, n_tokens: int, running: Items[Sequence]) -> Lacks:
    """Return what a table lacks to resume beside `running`, each of which may grow by a block."""

    def lacks(plan: AllocationPlan, gone: Items[Sequence | Request]) -> int:
        outcome = plan.resume(table, n_tokens, sum(sequence not in gone for sequence in running))
        return outcome.needed - outcome.available if isinstance(outcome, NotNow) else 0

    return lacks


def is_enough(plan: AllocationPlan, gone: Items[Sequence | Request], lacks: Lacks) -> bool:
    trial = plan.copy()
    for sequence in gone:
        assert isinstance(sequence, Sequence)
        assert sequence.table is not None
        trial.free(sequence.table)
    return lacks(trial, gone) <= 0


@pytest.mark.parametrize("n_groups", [1, 2, 3])
@pytest.mark.parametrize("n_forks", [1, 2, 3, 4])
def test_one_that_frees_no_block_may_still_make_room(n_groups: int, n_forks: int) -> None:
    """Without it no block has to be free for its growth, and the last of its forks writes without a copy."""
    manager = BlockManager(n_groups, BLOCK, windows=(FULL,) * n_groups)
    table = started(manager, 4)
    running = [owner(manager.fork(table, None)) for _ in range(n_forks)]
    lacks = resumes(table, BLOCK, running)
    assert lacks(manager.plan(), ()) == n_groups * (n_forks + 1)
    assert choose_victims(manager.plan(), running, 0, lacks) == running


@pytest.mark.parametrize(
    ("blocks", "needed", "chosen"),
    [((1, 1, 2), 3, (0, 2)), ((1, 2, 2), 4, (1, 2)), ((2, 1, 1, 2), 5, (0, 1, 3))],
)
def test_the_last_that_are_not_needed_are_spared_first(
    blocks: tuple[int, ...], needed: int, chosen: tuple[int, ...]
) -> None:
    manager = BlockManager(sum(blocks), BLOCK)
    candidates = [owner(started(manager, n * BLOCK)) for n in blocks]

    def lacks(plan: AllocationPlan, gone: Items[Sequence | Request]) -> int:
        return needed - plan.available

    found = choose_victims(manager.plan(), candidates, 0, lacks)
    assert found == [candidates[i] for i in chosen]


@given(data=st.data())
def test_the_first_candidates_that_are_enough(data: st.DataObject) -> None:
    """As without the bound that ends the search early, and none of them without need."""
    n_groups = data.draw(st.integers(1, 3))
    manager = BlockManager(n_groups * data.draw(st.integers(1, 12)), BLOCK, windows=(FULL,) * n_groups)
    tables: list[BlockTable] = []
    for n_tokens in data.draw(st.lists(st.integers(1, 4 * BLOCK), min_size=1, max_size=8)):
        table = start(manager, n_tokens)
        if table is not None:
            tables.append(table)
        elif tables:
            tables.append(manager.fork(data.draw(st.sampled_from(tables)), None))
    if not tables:
        return
    first, *others = map(owner, tables)
    assert first.table is not None
    candidates = data.draw(st.permutations(others))
    n_first = data.draw(st.integers(0, len(candidates)))
    running = [sequence for sequence in candidates if data.draw(st.booleans())]
    lacks = resumes(first.table, first.table.n_tokens + data.draw(st.integers(0, 6 * BLOCK)), running)
    plan = manager.plan()
    counts = range(max(1, n_first), len(candidates) + 1)
    enough = [n for n in counts if is_enough(plan, candidates[:n], lacks)]
    chosen = choose_victims(plan, candidates, n_first, lacks)
    assert (chosen is None) == (not enough)
    assert not plan.changes
    if chosen is None:
        return
    needed = candidates[: enough[0]]
    assert chosen == [sequence for sequence in needed if sequence in chosen]
    assert chosen[:n_first] == needed[:n_first]
    assert chosen[-1] is needed[-1]
    assert is_enough(plan, chosen, lacks)
    for sequence in chosen[n_first:-1]:
        assert not is_enough(plan, [other for other in chosen if other is not sequence], lacks)
