"""Recurrent states of requests: which are kept between requests, and when snapshots are taken."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from pyvelo.engine.prefill_budget import Costs
from pyvelo.engine.request import Sequence
from pyvelo.engine.states import RecurrentStates
from pyvelo.errors import Cancelled, InternalError
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


def swap_out(bench: Bench, sequence: Sequence) -> None:
    """Swap an idle sequence out, as if its blocks were needed."""
    assert sequence.table is not None
    plan = bench.manager.plan()
    swapped = plan.swap_out(sequence.table)
    bench.core._mover.move(bench.manager.commit(plan))
    bench.core.idle.evict(sequence, swapped)


def states_of(bench: Bench) -> RecurrentStates:
    assert bench.core._states is not None
    return bench.core._states


def fails_with(error: BaseException) -> Callable[..., Any]:
    def fail(*given: Any, **named: Any) -> None:
        raise error

    return fail


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
    swap_out(bench, sequence)
    bench.finish(bench.go_on(sequence, 0))
    assert sequence.computed
    assert sequence.table is not None
    assert sequence.table.state == []
    before = fed(bench)
    go_on(bench, sequence, 1)
    assert fed(bench) - before == 1
    close(bench, sequence)
    bench.assert_idle()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_short_prompt_that_is_only_computed_keeps_the_state_before_its_last_token(n: int) -> None:
    bench = Bench(n_states=1, max_seqs=1, state_blocks=2)
    sequence = bench.sequence(PROMPT[:n])
    bench.finish(bench.go_on(sequence, 0))
    before = fed(bench)
    go_on(bench, sequence, 1)
    assert fed(bench) - before == 1
    close(bench, sequence)
    bench.assert_idle()


@pytest.mark.parametrize("kept", [False, True])
def test_a_prompt_before_an_answer_is_not_split_for_its_last_token(kept: bool) -> None:
    bench = Bench(n_states=1, max_seqs=1, state_blocks=2)
    sequence = bench.sequence(PROMPT[:20])
    bench.finish(bench.go_on(sequence, 1) if kept else bench.submit(PROMPT[:20], 1))
    assert [step.n_tokens for step in bench.context.steps] == [[20]]


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


def test_regular_places_take_spare_blocks_only() -> None:
    bench, spare = Bench(n_blocks=64, n_states=1, max_seqs=1), dict[int, bool]()
    manager = cast(StateManager, bench.manager)
    take = manager.take

    def noted(table: BlockTable, **how: bool) -> list[int]:
        spare.setdefault(table.n_tokens, how["spare"])
        return take(table, **how)

    manager.take = noted  # type: ignore[method-assign]
    bench.finish(bench.submit(list(range(1, 600)), 1))
    assert spare == {512: True, 576: False}


def test_a_snapshot_that_cannot_be_saved_is_no_hit(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(n_states=1, max_seqs=1)
    save, bench.context.save_state = bench.context.save_state, fails_with(OSError("full"))  # type: ignore[method-assign]
    first = bench.submit(PROMPT, 2)
    bench.finish(first)
    assert first.generated_ids == answer(PROMPT, 2)
    assert "a recurrent state was not saved: full" in caplog.text
    bench.context.save_state = save  # type: ignore[method-assign]
    second = bench.submit(PROMPT, 2)
    bench.finish(second)
    assert (second.n_cached, second.generated_ids) == (0, answer(PROMPT, 2))
    bench.assert_idle()


def test_an_interrupted_snapshot_is_no_hit() -> None:
    bench = Bench(n_states=1, max_seqs=1)
    save, bench.context.save_state = bench.context.save_state, fails_with(KeyboardInterrupt())  # type: ignore[method-assign]
    first = bench.submit(PROMPT, 2)
    with pytest.raises(KeyboardInterrupt):
        bench.finish(first)
    bench.context.save_state = save  # type: ignore[method-assign]
    bench.finish(first)
    second = bench.submit(PROMPT, 2)
    bench.finish(second)
    assert second.generated_ids == first.generated_ids == answer(PROMPT, 2)
    bench.assert_idle()


def test_the_time_of_saving_a_state_is_measured() -> None:
    bench, now, measured = Bench(n_states=1, max_seqs=1), [100.0], list[float]()
    states = states_of(bench)
    states._clock = lambda: now[0]
    save = bench.context.save_state

    def slow(*given: Any, **named: Any) -> None:
        now[0] += 0.5
        save(*given, **named)

    bench.context.save_state = slow  # type: ignore[method-assign]
    states._costs.saved = measured.append  # type: ignore[assignment, method-assign]
    bench.finish(bench.submit(PROMPT, 2))
    assert measured == [0.5]


def test_a_state_that_cannot_be_kept_frees_the_blocks() -> None:
    bench = Bench(n_states=1, max_seqs=1, share=False)
    sequence = bench.sequence(PROMPT)
    save, bench.context.save_state = bench.context.save_state, fails_with(OSError("full"))  # type: ignore[method-assign]
    bench.finish(bench.go_on(sequence, 2))
    assert sequence.table is None
    bench.assert_idle()
    bench.context.save_state = fails_with(KeyboardInterrupt())  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        bench.finish(bench.go_on(sequence, 0))
    assert all(not table.snapshot for table in bench.manager.tables())
    bench.context.save_state = save  # type: ignore[method-assign]
    go_on(bench, sequence, 2)
    close(bench, sequence)
    bench.assert_idle()


def test_a_sequence_whose_request_fails_before_its_step_keeps_its_state() -> None:
    bench = Bench(n_states=1, max_seqs=1)
    sequence = bench.sequence(PROMPT)
    go_on(bench, sequence, 2)
    bench.core.before_run.append(fails_with(OSError("gone")))
    bench.finish(bench.go_on(sequence, 2))
    assert sequence.table is not None
    bench.core.before_run.clear()
    before = fed(bench)
    go_on(bench, sequence, 1)
    assert fed(bench) - before == 1
    close(bench, sequence)
    bench.assert_idle()


def test_a_state_that_cannot_be_loaded_is_not_kept() -> None:
    """Another request has left a state of as many tokens."""
    bench = Bench(n_states=1, max_seqs=1, n_swap_blocks=16)
    sequence = bench.sequence(PROMPT)
    go_on(bench, sequence, 2)
    swap_out(bench, sequence)
    bench.finish(bench.submit([5] * (len(sequence.tokens) - 1), 1))
    load, bench.context.load_state = bench.context.load_state, fails_with(OSError("gone"))  # type: ignore[method-assign]
    bench.finish(bench.go_on(sequence, 2))
    assert sequence.table is None
    bench.context.load_state = load  # type: ignore[method-assign]
    go_on(bench, sequence, 2)
    close(bench, sequence)
    bench.assert_idle()


def test_samples_have_known_states_from_the_start() -> None:
    bench = Bench(n_states=2, max_seqs=2)
    requests = [bench.request(PROMPT, 5), bench.request(PROMPT, 5)]
    requests[0].hold(requests[1:])
    bench.core.inbox.submit(requests)
    while requests[1].n_computed < len(PROMPT):
        bench.step()
    assert sorted(request.recurrent_state for request in requests) == [0, 1]
    assert not any(states_of(bench).is_lost(request) for request in requests)
    bench.finish(*requests)
    assert [request.recurrent_state for request in requests] == [-1, -1]


def test_a_lost_state_is_not_saved() -> None:
    bench = Bench(n_states=1, max_seqs=1, max_batch_tokens=32)
    request, found = bench.submit(PROMPT[:65], 2), places_in(bench)
    bench.step()
    states_of(bench).lose()
    request.n_computed = 64
    states_of(bench).advanced(request)
    assert found == []


def test_a_step_that_fails_loses_the_state_of_a_request_that_was_paused() -> None:
    """A graph moves the states of other sequences, too."""
    bench = Bench(n_states=2, max_seqs=2)
    requests = [bench.submit([number] * 40, 9) for number in (1, 2)]
    bench.step()
    bench.step()
    schedule = bench.core.schedule
    bench.core.schedule = partial(schedule, paused=[requests[1]])

    def cut() -> None:
        bench.context.before_run, bench.core.schedule = lambda: None, schedule
        bench.context.states.update({state: [77] for state in range(2)})
        raise Cancelled("now")

    bench.context.before_run = cut
    bench.step()
    assert [request.recurrent_state for request in requests] == [-1, -1]
    bench.finish(*requests)
    assert [request.generated_ids for request in requests] == [answer([n] * 40, 9) for n in (1, 2)]


def test_only_requests_whose_state_is_lost_start_again() -> None:
    bench = Bench(n_states=1, max_seqs=1)
    request = bench.submit(PROMPT, 5)
    while request.n_generated < 2:
        bench.step()
    bench.core._active.restart_lost()
    assert (bench.core.n_running, request.n_computed) == (1, len(PROMPT) + 1)
    states_of(bench).lose()
    bench.core._active.restart_lost()
    assert (bench.core.n_running, bench.free_states) == (0, [0])
    bench.finish(request)
    assert request.generated_ids == answer(PROMPT, 5)
    bench.assert_idle()


def test_requests_without_a_state_or_a_table() -> None:
    bench = Bench(n_states=1, max_seqs=1)
    states, request = states_of(bench), bench.request(PROMPT, 2)
    states._tokens[-1] = 0
    assert states.is_lost(request)
    with pytest.raises(InternalError, match="has no block table"):
        states.keep(request)
    request.sequence.table = BlockTable([[0]], 3, None)
    with pytest.raises(InternalError, match="starts after 3 tokens without their state"):
        states.start(request)


def test_states_need_a_manager_of_snapshots() -> None:
    bench, context = Bench(), cast(Any, None)
    assert RecurrentStates.of(context, bench.manager, 0, Costs(), lambda: 0.0) is None
    with pytest.raises(InternalError, match="needs a manager of snapshots"):
        RecurrentStates.of(context, bench.manager, 1, Costs(), lambda: 0.0)
