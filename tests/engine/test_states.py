"""Recurrent states of requests: which are kept between requests, and when snapshots are taken."""

from __future__ import annotations

from typing import Any, cast

from pyvelo.kv.pool import BlockTable
from pyvelo.kv.states import StateManager

from .fakes import Bench, answer
from .test_sequences import close, fed, go_on

PROMPT = list(range(1, 101))


def places_in(bench: Bench) -> list[int]:
    """Return a list that gets the number of tokens of each snapshot from now on."""
    found: list[int] = []
    manager = cast(StateManager, bench.manager)
    take = manager.take

    def noted(table: BlockTable, *, rolling: bool = False, spare: bool = False) -> list[int]:
        blocks = take(table, rolling=rolling, spare=spare)
        if blocks:
            found.append(table.n_tokens)
        return blocks

    manager.take = noted  # type: ignore[method-assign]
    return found


def test_snapshots_are_taken_at_places_only() -> None:
    bench = Bench(n_blocks=64, n_states=1, max_seqs=1, max_batch_tokens=32)
    found = places_in(bench)
    bench.finish(bench.submit(list(range(1, 600)), 1))
    assert found == [512, 576]


def test_a_computed_prompt_that_is_a_hit_keeps_its_state() -> None:
    bench = Bench(n_states=1, max_seqs=1, state_blocks=2)
    bench.finish(bench.submit(PROMPT[:97], 1))  # leaves a snapshot after 96 tokens
    sequence = bench.sequence(PROMPT[:97])
    bench.finish(bench.go_on(sequence, 0))
    assert sequence.computed
    before = fed(bench)
    go_on(bench, sequence, 1)
    assert fed(bench) - before == 1
    close(bench, sequence)
    bench.assert_idle()


def test_a_computed_prompt_that_was_swapped_out_keeps_its_state() -> None:
    bench = Bench(n_states=1, max_seqs=1, state_blocks=2, n_swap_blocks=16)
    sequence = bench.sequence(PROMPT[:90])
    bench.finish(bench.go_on(sequence, 0))
    assert sequence.table is not None
    plan = bench.manager.plan()
    swapped = plan.swap_out(sequence.table)
    bench.core._mover.move(bench.manager.commit(plan))
    bench.core.idle.evict(sequence, swapped)
    bench.finish(bench.go_on(sequence, 0))
    assert sequence.computed
    before = fed(bench)
    go_on(bench, sequence, 1)
    assert fed(bench) - before == 1
    close(bench, sequence)
    bench.assert_idle()


def test_a_sample_that_fails_before_it_has_a_state_frees_none() -> None:
    bench = Bench(n_states=3, max_seqs=3)
    first, second = bench.request(PROMPT, 3), bench.request(PROMPT, 3)
    first.hold([second])
    advance = bench.manager.advance

    def fails(table: Any, n_tokens: int) -> None:
        if table is second.sequence.table:
            raise RuntimeError("broken")
        advance(table, n_tokens)

    bench.manager.advance = fails  # type: ignore[method-assign]
    bench.core.inbox.submit([first, second])
    bench.finish(first, second)
    assert str(second.error) == "broken"
    assert first.generated_ids == answer(PROMPT, 3)
    assert bench.free_states == [0, 1, 2]
    bench.assert_idle()
