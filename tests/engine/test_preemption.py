"""More requests than the pool holds: preemption, progress, and answers equal to the ones alone."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvelo.engine.prefill_budget import Costs
from pyvelo.engine.request import ARRIVALS_PER_PRIORITY, Request
from pyvelo.engine.scheduler import schedule
from pyvelo.errors import InternalError
from pyvelo.kv.plan import AllocationPlan
from pyvelo.kv.pool import Start
from pyvelo.memory.budget import Limits

from .fakes import Bench, answer


def check(requests: list[Request], n: int) -> None:
    for request in requests:
        prompt = list(request.prompt_ids)
        assert request.generated_ids == answer(prompt, n)
        assert request.finish_reason == "length"


def always_swap(bench: Bench) -> None:
    """Swap out if there is room, for any measured costs."""
    bench.core.costs.favour_swap = lambda n_blocks, n_tokens: True  # type: ignore[method-assign]


def test_the_youngest_is_preempted_and_loses_nothing() -> None:
    bench = Bench(n_blocks=6, block_size=8)
    old, young = bench.submit([1] * 8, 32), bench.submit([2] * 8, 32)
    shown = []
    young.on_piece = lambda piece: shown.append(piece.token_ids)
    while bench.core.counters.preemptions == 0:
        before = old.n_generated
        bench.step()
        assert old.n_generated == before + 1, "others give way to it at once"
    assert old.sequence.table is not None
    assert young.sequence.table is None
    assert young.n_generated > 0
    bench.finish(old, young)
    check([old, young], 32)
    assert [token for tokens in shown for token in tokens] == list(young.generated_ids), "each is shown once"
    assert len(bench.samplers) == 2, "its draws go on"
    bench.assert_idle()


def test_the_answer_is_computed_again_as_one_prompt() -> None:
    bench = Bench(n_blocks=6, block_size=8, share=False)
    requests = [bench.submit([1] * 8, 32), bench.submit([2] * 8, 32)]
    bench.finish(*requests)
    longest = max(max(step.n_tokens) for step in bench.context.steps)
    assert longest > 16, "prompt and what was generated"


def test_what_is_still_there_is_not_computed_again() -> None:
    def fed(share: bool) -> int:
        bench = Bench(n_blocks=7, block_size=8, share=share)
        requests = [bench.submit([i] * 8, 30) for i in (1, 2)]
        bench.finish(*requests)
        check(requests, 30)
        assert bench.core.counters.preemptions > 0
        return sum(sum(step.n_tokens) for step in bench.context.steps)

    assert fed(share=True) < fed(share=False)


def test_priority_decides_before_age() -> None:
    bench = Bench(n_blocks=6, block_size=8)
    low, high = bench.submit([1] * 8, 32), bench.submit([2] * 8, 32, priority=-1)
    while bench.core.counters.preemptions == 0:
        bench.step()
    assert low.sequence.table is None
    assert high.sequence.table is not None
    bench.finish(low, high)
    check([low, high], 32)


def test_the_lower_value_starts_first_but_none_waits_for_ever() -> None:
    bench = Bench(max_seqs=1)
    low = bench.submit([1], 1)
    others = [bench.submit([2], 1, priority=-1) for _ in range(2 * ARRIVALS_PER_PRIORITY)]
    while not low.finished:
        bench.step()
    assert sum(other.finished for other in others) == ARRIVALS_PER_PRIORITY - 1
    bench.finish(*others)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), swap=st.sampled_from([0, 0, 6]), n_blocks=st.integers(8, 12))
def test_only_a_request_that_ranks_first_lets_another_be_preempted(
    data: st.DataObject, swap: int, n_blocks: int
) -> None:
    """Priorities, prompts and sessions in a small pool: the lowest value runs on and is never preempted."""
    bench = Bench(n_blocks=n_blocks, block_size=8, max_seqs=3, n_swap_blocks=swap)
    sessions = [bench.sequence([90 + n] * data.draw(st.integers(1, 20))) for n in range(2)]
    requests: list[Request] = []
    for number in range(data.draw(st.integers(3, 8))):
        priority = data.draw(st.integers(-2, 2))
        idle = [sequence for sequence in sessions if not sequence.busy and len(sequence.tokens) < 40]
        if idle and data.draw(st.booleans()):
            requests.append(bench.go_on(data.draw(st.sampled_from(idle)), 12, priority=priority))
        else:
            prompt = [number + 1] * data.draw(st.integers(1, 30))
            requests.append(bench.submit(prompt, data.draw(st.integers(1, 24)), priority=priority))
        for _ in range(data.draw(st.integers(0, 4))):
            before = {request for request in requests if request.sequence.table is not None}
            ended = {request for request in requests if request.finished}
            bench.step()
            preempted = {r for r in before if r.sequence.table is None and not r.finished}
            kept = [r for r in requests if r.sequence.table is not None or (r.finished and r not in ended)]
            for request in preempted:  # fewer than 64 requests: no arrival outweighs a priority
                values = [(other.params.priority, other.arrival) for other in kept]
                assert min(values) < (request.params.priority, request.arrival)
    tokens = {request: (list(request.prompt_ids), request.max_new) for request in requests}
    bench.finish(*requests)
    for request, (prompt, n) in tokens.items():
        assert request.generated_ids == answer(prompt, n)
    for sequence in sessions:
        bench.core.idle.free(sequence)
    bench.assert_idle()


def test_an_urgent_request_preempts_a_running_one() -> None:
    bench = Bench(n_blocks=4, block_size=8)
    low = bench.submit([1] * 8, 20)
    for _ in range(4):
        bench.step()
    high = bench.submit([2] * 8, 20, priority=-1)
    bench.step()
    assert low.sequence.table is None
    assert low.n_generated > 0
    assert high.n_generated == 1
    bench.finish(high)
    assert not low.finished
    bench.finish(low)
    check([low, high], 20)
    bench.assert_idle()


def test_an_urgent_request_starts_beside_the_others_if_there_is_room() -> None:
    bench = Bench(n_blocks=16, block_size=8, max_batch_tokens=12)
    lows = [bench.submit([i + 1] * 3, 20) for i in range(3)]
    waiting = bench.submit([9] * 20, 4)
    bench.step()
    high = bench.submit([2] * 20, 4, priority=-1)
    while not high.n_generated:
        n_before = [low.n_generated for low in lows]
        bench.step()
        assert [low.n_generated for low in lows] == [n + 1 for n in n_before], "they go on"
    assert waiting.n_generated == 0
    bench.finish(*lows, waiting, high)
    assert bench.core.counters.preemptions == 0
    check(lows, 20)


@pytest.mark.parametrize("max_seqs", [2, 3])
def test_an_urgent_request_preempts_even_if_all_tokens_of_a_step_decode(max_seqs: int) -> None:
    bench = Bench(max_seqs=max_seqs, max_batch_tokens=2)
    lows = [bench.submit([1, 2], 40), bench.submit([3, 4], 40)]
    while not all(low.n_generated for low in lows):
        bench.step()
    high = bench.submit([5], 4, priority=-5)
    for _ in range(6):
        bench.step()
    assert high.finished
    bench.finish(*lows)
    check(lows, 40)
    bench.assert_idle()


def test_the_same_importance_takes_nobodys_place() -> None:
    bench = Bench(n_blocks=4, block_size=8)
    first, second = bench.submit([1] * 8, 20, priority=-1), bench.submit([2] * 8, 20, priority=-1)
    bench.finish(first)
    assert second.n_generated == 0
    assert bench.core.counters.preemptions == 0


def test_age_protects_from_the_more_important() -> None:
    bench = Bench(n_blocks=4, block_size=8)
    low = bench.submit([1] * 8, 20)
    bench.step()
    bench.core.inbox.n_arrived = ARRIVALS_PER_PRIORITY + 1  # so many came in between
    high = bench.submit([2] * 8, 20, priority=-1)
    bench.finish(low)
    assert high.n_generated == 0
    bench.finish(high)


def test_a_preempted_request_frees_its_state() -> None:
    bench = Bench(n_blocks=6, block_size=8, n_states=2, max_seqs=2)
    requests = [bench.submit([i] * 8, 32) for i in (1, 2)]
    bench.finish(*requests)
    check(requests, 32)
    assert bench.core.counters.preemptions > 0
    assert bench.free_states == [0, 1]


def test_a_preempted_request_can_be_cancelled() -> None:
    bench = Bench(n_blocks=6, block_size=8)
    old, young = bench.submit([1] * 8, 32), bench.submit([2] * 8, 32)
    while bench.core.counters.preemptions == 0:
        bench.step()
    bench.core.inbox.cancel([young])
    bench.core.settle()
    assert young.finish_reason == "abort"
    assert young.n_generated > 0
    bench.finish(old)
    bench.assert_idle()


@pytest.mark.parametrize("n_swap_blocks", [0, 5, 1000])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("part", [1.0, 0.5, 0.25, 0.1])
def test_pressure(part: float, share: bool, n_swap_blocks: int) -> None:
    """A pool smaller than the demand: each request ends with its tokens, and the work is bounded."""
    size, n, n_seqs = 8, 40, 20
    demand = n_seqs * -(-(10 + n) // size)
    bench = Bench(
        n_blocks=max(7, int(part * demand)),
        block_size=size,
        max_seqs=n_seqs,
        max_batch_tokens=64,
        share=share,
        n_swap_blocks=n_swap_blocks,
    )
    always_swap(bench)
    requests = [bench.submit([i + 1] * 10, n) for i in range(n_seqs)]
    bench.finish(*requests)
    check(requests, n)
    bench.assert_idle()
    computed = sum(sum(step.n_tokens) for step in bench.context.steps)
    assert computed < 2.5 * n_seqs * (10 + n)
    if n_swap_blocks == 1000:
        assert computed == n_seqs * (10 + n - 1), "nothing is computed twice"
    assert (bench.core.counters.preemptions > 0) == (part < 1.0)
    assert (bench.core.counters.swaps > 0) == (part < 1.0 and n_swap_blocks > 0)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), share=st.booleans())
def test_allocations_may_fail_at_any_time(data: st.DataObject, share: bool) -> None:
    """As if blocks were there no more: now and then a step finds fewer than there are."""
    bench = Bench(n_blocks=24, block_size=8, max_seqs=4, share=share, n_swap_blocks=4)
    make = bench.manager.plan

    def plan() -> AllocationPlan:
        made = make()
        if bench.core.n_running:  # if nothing runs, the pool is free
            made.available -= min(made.available, data.draw(st.sampled_from([0, 0, 1, 100])))
        return made

    bench.manager.plan = plan  # type: ignore[method-assign]
    requests = [bench.submit([i + 1] * data.draw(st.integers(1, 20)), 12) for i in range(5)]
    bench.finish(*requests)
    check(requests, 12)
    bench.assert_idle()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n_states=st.sampled_from([0, 0, 3]), share=st.booleans(), swap=st.integers(0, 9))
def test_whatever_comes_ends_with_its_answer(
    data: st.DataObject, n_states: int, share: bool, swap: int
) -> None:
    """Equal and unequal priorities, adversarial sizes, cancels on the way, some streams, and a random prefill
    budget: nothing hangs."""
    bench = Bench(
        n_blocks=6,
        block_size=8,
        max_seqs=3,
        max_batch_tokens=20,
        n_states=n_states,
        share=share,
        n_swap_blocks=swap,
    )
    prefill_budget = random.Random(data.draw(st.integers(0, 99)))
    bench.core.prefill_budget.tokens = lambda *_: prefill_budget.choice([0, 0, 2, 20])  # type: ignore[method-assign]
    requests = []
    for _ in range(data.draw(st.integers(1, 10))):
        n_prompt = data.draw(st.integers(1, 40))
        prompt = [data.draw(st.integers(1, 2))] * n_prompt
        n = data.draw(st.integers(1, 48 - n_prompt))
        on_piece = data.draw(st.sampled_from([None, lambda piece: None]))
        priority = data.draw(st.sampled_from([0, 0, -1, 3]))
        requests.append(bench.submit(prompt, n, on_piece=on_piece, priority=priority))
        for _ in range(data.draw(st.integers(0, 15))):
            bench.step()
        if data.draw(st.integers(0, 7)) == 0:
            bench.core.inbox.cancel([data.draw(st.sampled_from(requests))])
            bench.core.settle()
    bench.finish(*requests)
    for request in requests:
        assert request.generated_ids == answer(list(request.prompt_ids), request.n_generated)
        assert request.finish_reason == "abort" or request.n_generated == request.max_new
    bench.assert_idle()


def test_a_swapped_out_sequence_is_not_computed_again() -> None:
    bench = Bench(n_blocks=6, block_size=8, n_swap_blocks=6, share=False)
    always_swap(bench)
    requests = [bench.submit([i] * 8, 32) for i in (1, 2)]
    bench.finish(*requests)
    check(requests, 32)
    assert bench.core.counters.swaps == bench.core.counters.preemptions > 0
    assert sum(sum(step.n_tokens) for step in bench.context.steps) == 2 * (8 + 31)
    assert bench.manager.counts.swapped_in == bench.manager.counts.swapped_out
    bench.assert_idle()


def test_what_is_cheaper_to_compute_is_computed() -> None:
    bench = Bench(n_blocks=6, block_size=8, n_swap_blocks=6)
    bench.core.costs.moved(1, 100.0)
    bench.core.costs.computed(1, 1e-9)
    requests = [bench.submit([i] * 8, 32) for i in (1, 2)]
    bench.finish(*requests)
    check(requests, 32)
    assert bench.core.counters.preemptions > 0
    assert bench.core.counters.swaps == 0


def test_a_swapped_out_request_can_be_cancelled() -> None:
    bench = Bench(n_blocks=6, block_size=8, n_swap_blocks=6)
    always_swap(bench)
    old, young = bench.submit([1] * 8, 32), bench.submit([2] * 8, 32)
    while bench.core.counters.swaps == 0:
        bench.step()
    assert young.sequence.swapped is not None
    bench.core.inbox.cancel([young])
    bench.core.settle()
    assert bench.manager.swap.n_free == 6
    bench.finish(old)
    bench.assert_idle()


def test_a_preempted_stream_that_runs_alone_is_not_bounded() -> None:
    bench = Bench(n_blocks=6, block_size=8, share=False, max_batch_tokens=8)
    bench.core.prefill_budget.tokens = lambda *_: 0  # type: ignore[method-assign]
    requests = [bench.submit([n] * 4, 40, on_piece=lambda piece: None) for n in (1, 2)]
    bench.finish(*requests)
    assert bench.core.counters.preemptions > 0
    check(requests, 40)


def test_costs_follow_what_is_measured() -> None:
    costs = Costs()
    assert costs.favour_swap(100, 1), "nothing is known yet"
    costs.computed(10, 1.0)
    costs.moved(10, 1.0)
    assert costs.favour_swap(1, 2)
    assert not costs.favour_swap(1, 1)
    for _ in range(100):
        costs.moved(10, 0.1)
    assert costs.favour_swap(4, 1)


def test_the_first_step_tells_no_costs() -> None:
    """It reads and packs weights, too."""
    bench = Bench(n_blocks=16, block_size=8)
    time = [0.0]
    bench.core.clock = lambda: time[0]

    def pass_time() -> None:
        time[0] += 1000.0 if not bench.context.steps else 4.0

    bench.context.before_run = pass_time
    bench.finish(bench.submit([1] * 40, 1))
    bench.core.costs.moved(1, 1.0)
    assert bench.core.costs.favour_swap(1000, 1), "nothing is known yet"
    bench.finish(bench.submit([2] * 40, 1))  # 0.1 s a token
    assert bench.core.costs.favour_swap(1, 21)
    assert not bench.core.costs.favour_swap(1, 19)


def test_running_requests_are_swapped_out_by_default() -> None:
    bench = Bench(n_blocks=6, block_size=8, n_swap_blocks=6)
    requests = [bench.submit([i] * 8, 32) for i in (1, 2)]
    while True:
        bench.step()
        plan = schedule((), bench.core._active.running, bench.manager, bench.core.limits)
        if plan.preempted:
            break
    assert [request for request, _ in plan.preempted] == [requests[1]]
    assert plan.preempted[0][1] is not None


def test_an_urgent_request_waits_while_a_step_takes_no_prompt() -> None:
    bench = Bench()
    low = bench.submit([1] * 8, 30, on_piece=lambda piece: None)
    bench.step()
    urgent = bench.request([2] * 8, 4, priority=-1)
    urgent.arrival = 2
    plan = schedule([urgent], [low], bench.manager, bench.core.limits, prefill_budget=lambda *_: 0)
    assert (plan.starts, plan.preempted, plan.decodes) == ([], [], [low])
    plan = schedule([urgent], [low], bench.manager, bench.core.limits, prefill_budget=lambda *_: 3)
    assert [(chunk.request, chunk.n_tokens) for chunk in plan.starts] == [(urgent, 3)]


def test_pieces_of_three_prompts_fill_a_step() -> None:
    bench = Bench(n_blocks=64, block_size=8, max_batch_tokens=16)
    requests = []
    for number, n_prompt in enumerate((100, 22, 17), 1):
        requests.append(bench.submit([number] * n_prompt, 4, priority=-number))
        bench.step()
    assert [step.n_tokens for step in bench.context.steps] == [[16], [1, 15], [2, 14]]
    bench.step()
    assert bench.context.steps[-1].n_tokens == [3, 5, 8]
    bench.finish(*requests)
    check(requests, 4)


def test_a_request_that_can_never_fit_is_a_defect() -> None:
    bench = Bench(n_blocks=2, block_size=8)
    with pytest.raises(InternalError, match="a request for 3 of 2 blocks was let in"):
        schedule([bench.request([1] * 17, 4)], [], bench.manager, bench.core.limits)


def test_an_urgent_request_preempts_no_equal_one() -> None:
    bench = Bench(n_blocks=10, block_size=8)
    equal = bench.submit([1] * 40, 8, priority=-1)
    bench.step()
    low = bench.submit([2] * 8, 8)
    bench.step()
    assert low.sequence.table is not None
    urgent = bench.submit([3] * 40, 8, priority=-1)
    bench.step()
    assert equal.sequence.table is not None
    assert (low.n_generated, urgent.sequence.table) == (2, None), "its place is not enough"
    assert bench.core.counters.preemptions == 0
    bench.finish(equal, low, urgent)
    check([equal, low, urgent], 8)


def test_as_many_are_preempted_as_an_urgent_request_needs() -> None:
    """The last of three is preempted, then the one before: each remaining request needs a block."""
    bench = Bench(n_blocks=12, block_size=8)
    lows = [bench.submit([1 + n] * 20, 4) for n in range(3)]
    bench.step()
    assert all(low.sequence.table is not None for low in lows)
    urgent = bench.submit([9] * 40, 8, priority=-1)
    bench.step()
    assert [low.sequence.table is not None for low in lows] == [True, False, False]
    assert urgent.n_generated == 1
    bench.finish(*lows, urgent)
    check(lows, 4)
    check([urgent], 8)
    bench.assert_idle()


@pytest.mark.parametrize(("budget", "shares"), [(64, [4, 8, 7]), (10, [4, 6])])
def test_urgent_requests_share_one_step(budget: int, shares: list[int]) -> None:
    bench = Bench(n_blocks=64, block_size=8, max_batch_tokens=20)
    low = bench.submit([1] * 8, 30, on_piece=lambda piece: None)
    bench.step()
    urgent = [bench.request([2 + n] * n, 4, priority=-1) for n in (4, 8, 20)]
    for number, request in enumerate(urgent):
        request.arrival = 2 + number
    plan = schedule(urgent, [low], bench.manager, bench.core.limits, prefill_budget=lambda *_: budget)
    assert [chunk.n_tokens for chunk in plan.starts] == shares
    assert plan.decodes == [low]


def test_urgent_requests_preempt_no_request_for_tokens_that_others_of_them_take() -> None:
    bench = Bench(n_blocks=512, block_size=8, max_batch_tokens=64)
    lows = [bench.submit([1 + n] * 8, 8) for n in range(3)]
    bench.step()
    urgent = [bench.submit([9 + n] * 100, 4, priority=-1) for n in range(4)]
    bench.step()
    assert sorted(bench.context.steps[-1].n_tokens) == [1, 1, 1, 61], "the first of them fills the step"
    bench.finish(*lows, *urgent)
    assert bench.core.counters.preemptions == 0
    check(lows, 8)
    check(urgent, 4)


def test_a_stream_without_a_first_token_bounds_no_prompt() -> None:
    """The prefill budget protects tokens that arrive one after another."""
    bench = Bench(n_blocks=64, block_size=8, max_batch_tokens=20)
    quiet = bench.submit([1] * 8, 30)
    bench.step()
    begun = bench.submit([2] * 60, 4, on_piece=lambda piece: None)
    bench.step()
    assert (quiet.n_generated, begun.n_generated) == (2, 0)

    def tokens(*numbers: int) -> int:
        asked.append(numbers)
        return 3

    asked: list[tuple[int, ...]] = []
    plan = schedule([], [quiet, begun], bench.manager, bench.core.limits, prefill_budget=tokens)
    assert not asked
    assert [chunk.n_tokens for chunk in plan.chunks] == [19]
    quiet.on_piece = lambda piece: None
    plan = schedule([], [quiet, begun], bench.manager, bench.core.limits, prefill_budget=tokens)
    assert asked == [(1, 1, 1)]
    assert [chunk.n_tokens for chunk in plan.chunks] == [3]


def test_what_the_urgent_leave_goes_to_prompts_that_have_begun() -> None:
    bench = Bench(n_blocks=64, block_size=8, max_batch_tokens=20)
    talking = bench.submit([1] * 8, 30, on_piece=lambda piece: None)
    bench.step()
    begun = bench.submit([2] * 60, 4)
    bench.core.prefill_budget.tokens = lambda *_: 5  # type: ignore[method-assign]
    bench.step()
    assert begun.n_computed == 5
    urgent = bench.request([3] * 4, 4, priority=-1)
    urgent.arrival = 3
    running = [talking, begun]
    plan = schedule([urgent], running, bench.manager, bench.core.limits, prefill_budget=lambda *_: 10)
    assert [(chunk.request, chunk.n_tokens) for chunk in plan.chunks] == [(begun, 6), (urgent, 4)]


def test_an_earlier_request_preempts_no_later_one_of_equal_priority() -> None:
    """It was preempted and waits for blocks; running requests continue."""
    bench = Bench(n_blocks=4, block_size=8)
    younger = bench.submit([1] * 20, 8)
    bench.step()
    older = bench.request([2] * 20, 4)
    older.arrival = younger.arrival - 1
    plan = schedule([older], [younger], bench.manager, bench.core.limits)
    assert (plan.starts, plan.preempted) == ([], [])


def test_a_sequence_that_resumes_in_a_step_is_not_evicted_in_it() -> None:
    bench = Bench(n_blocks=8, block_size=8, share=False)
    first, other = bench.sequence([1] * 12), bench.sequence([2] * 12)
    for sequence in (first, other):
        bench.finish(bench.go_on(sequence, 2))
    held = first.table
    again = bench.request(first.tokens, 4, sequence=first)
    large = bench.request([3] * 40, 4)
    again.arrival, large.arrival = 10, 11
    plan = schedule([again, large], [], bench.manager, bench.core.limits, idle=bench.core.idle)
    assert next(chunk.request for chunk in plan.starts) is again
    assert plan.starts[0].table is held
    assert all(sequence is other for sequence, _ in plan.evicted)


def test_nothing_is_evicted_for_a_sequence_that_is_evicted_itself() -> None:
    """It resumes in a later step, so the room would stay empty in this step."""
    bench = Bench(n_blocks=10, block_size=8, share=False)
    sequence = bench.sequence([1] * 10)
    bench.finish(bench.go_on(sequence, 2))
    low = bench.submit([2] * 8, 30)
    bench.step()
    large = bench.request([3] * 48, 4, priority=-1)
    again = bench.request(sequence.tokens, 4, sequence=sequence, priority=-1)
    large.arrival, again.arrival = 10, 11
    plan = schedule([large, again], [low], bench.manager, bench.core.limits, idle=bench.core.idle)
    assert [chunk.request for chunk in plan.starts] == [large]
    assert [gone for gone, _ in plan.evicted] == [sequence]
    assert (plan.decodes, plan.preempted) == ([low], [])


def running(bench: Bench, *requests: Request) -> list[Request]:
    """Requests that have begun to generate, in steps of their own."""
    for request in requests:
        while not request.n_generated:
            bench.step()
    return list(requests)


def test_a_seat_alone_is_no_reason_to_preempt() -> None:
    """The request that ranks last has a seat to give, but not the blocks."""
    bench = Bench(n_blocks=8, block_size=8, max_seqs=2)
    equal, low = running(bench, bench.submit([1] * 24, 8, priority=-1), bench.submit([2] * 4, 20))
    urgent = bench.submit([3] * 24, 8, priority=-1)
    bench.step()
    assert (low.sequence.table is not None, urgent.sequence.table) == (True, None)
    assert bench.core.counters.preemptions == 0
    bench.finish(equal, low, urgent)
    check([equal, urgent], 8)
    check([low], 20)


def test_blocks_that_an_urgent_request_shares_are_no_gain() -> None:
    """It needs the blocks of the request that it would preempt, so they would not become free."""
    bench = Bench(n_blocks=10, block_size=8)
    common = list(range(1, 25))
    equal, low = running(bench, bench.submit([91] * 24, 8, priority=-1), bench.submit([*common, 90], 20))
    urgent = bench.submit([*common, *[92] * 17], 8, priority=-1)
    bench.step()
    assert (low.sequence.table is not None, urgent.sequence.table) == (True, None)
    assert bench.core.counters.preemptions == 0
    bench.finish(equal, low, urgent)
    check([equal, urgent], 8)
    check([low], 20)


def test_no_sequence_is_evicted_for_a_request_that_still_cannot_start() -> None:
    bench = Bench(n_blocks=8, block_size=8)
    sequence = bench.sequence([2] * 13)
    bench.finish(bench.go_on(sequence, 0))
    (first,) = running(bench, bench.submit([1] * 24, 8))
    large = bench.submit([3] * 50, 4)
    bench.step()
    assert (sequence.table is not None, large.sequence.table) == (True, None)
    assert bench.core.counters.evicted_sequences == 0
    bench.finish(first, large)
    check([large], 4)
    assert sequence.table is None, "once it was enough"


def test_a_sequence_whose_blocks_others_hold_is_not_evicted_for_nothing() -> None:
    bench = Bench(n_blocks=8, block_size=8)
    shared, own = bench.sequence(range(1, 18)), bench.sequence([2] * 25)
    for sequence in (shared, own):
        bench.finish(bench.go_on(sequence, 0))
    twin = shared.fork([*shared.tokens, 5], len(shared.tokens))
    bench.core.idle.fork(shared, twin)
    (talking,) = running(bench, bench.go_on(twin, 6))
    other = bench.submit([3] * 16, 4)
    bench.step()
    assert (shared.table is not None, own.table) == (True, None)
    assert bench.core.counters.evicted_sequences == 1
    bench.finish(talking, other)
    check([other], 4)


def test_a_full_batch_preempts_a_request_and_evicts_no_idle_sequence() -> None:
    """There are blocks enough: only the seat is wanted."""
    bench = Bench(n_blocks=32, block_size=8, max_seqs=2)
    sequence = bench.sequence([4] * 13)
    bench.finish(bench.go_on(sequence, 0))
    first, low = running(bench, bench.submit([1] * 8, 20), bench.submit([2] * 8, 20))
    urgent = bench.submit([3] * 8, 4, priority=-1)
    bench.step()
    assert (first.sequence.table is not None, low.sequence.table, sequence.table is not None) == (
        True,
        None,
        True,
    )
    assert urgent.n_generated == 1
    bench.finish(first, low, urgent)
    check([first, low], 20)


def test_an_urgent_request_of_one_token_fills_the_step_beside_a_decode() -> None:
    bench = Bench(max_seqs=3, max_batch_tokens=2)
    (low,) = running(bench, bench.submit([1, 2], 20))
    urgent = bench.submit([5], 4, priority=-1)
    bench.step()
    assert (low.n_generated, urgent.n_generated) == (2, 1)
    assert bench.core.counters.preemptions == 0
    bench.finish(low, urgent)
    check([low], 20)


def test_a_request_that_grows_evicts_no_sequence_whose_blocks_it_holds() -> None:
    bench = Bench(n_blocks=7, block_size=8)
    shared, own = bench.sequence(range(1, 18)), bench.sequence([90] * 25)
    for sequence in (shared, own):
        bench.finish(bench.go_on(sequence, 0))
    growing = bench.submit([*range(1, 18), 91], 20)
    while growing.n_computed < 33:
        assert own.table is not None
        bench.step()
    assert (shared.table is not None, own.table) == (True, None)
    bench.finish(growing)
    check([growing], 20)


def test_a_request_that_is_not_preempted_decodes_in_the_same_step() -> None:
    """It ranks last, but the request that grows holds all of its blocks."""
    bench = Bench(n_blocks=12, block_size=8, share=False)
    first, middle = bench.submit([1] * 16, 20), bench.submit([2] * 12, 20)
    while first.n_computed < 24:  # all blocks that it has
        bench.step()
    assert first.sequence.table is not None
    last = bench.request(first.tokens, 4)
    last.sequence.table = bench.manager.fork(first.sequence.table, None)
    last.arrival, last.n_computed = 10, 24
    while bench.manager.n_free > bench.manager.n_reserved:
        plan = bench.manager.plan()
        assert isinstance(plan.start(8), Start)
        bench.manager.commit(plan)
    plan = schedule([], [first, middle, last], bench.manager, bench.core.limits)
    assert [request for request, _ in plan.preempted] == [middle]
    assert plan.decodes == [first, last]


def test_an_urgent_request_without_room_starts_no_other_one_twice() -> None:
    bench = Bench(n_blocks=10, block_size=8)
    (low,) = running(bench, bench.submit([1] * 8, 20))
    small, large = bench.request([2] * 8, 4, priority=-1), bench.request([3] * 70, 4, priority=-1)
    small.arrival, large.arrival = 10, 11
    plan = schedule([small, large], [low], bench.manager, bench.core.limits)
    assert [chunk.request for chunk in plan.starts] == [small]
    assert (plan.decodes, plan.preempted) == ([low], [])


def test_all_that_an_urgent_request_outranks_may_have_to_be_preempted() -> None:
    bench = Bench(max_seqs=2)
    lows = running(bench, bench.submit([1] * 8, 20), bench.submit([2] * 8, 20))
    bench.core.limits = Limits(1, bench.core.limits.max_batch_tokens)
    urgent = bench.request([3] * 8, 4, priority=-1)
    urgent.arrival = 10
    plan = schedule([urgent], lows, bench.manager, bench.core.limits)
    assert [chunk.request for chunk in plan.starts] == [urgent]
    assert [request for request, _ in plan.preempted] == lows[::-1]


def test_a_sequence_that_waits_for_room_to_go_on_keeps_its_blocks() -> None:
    bench = Bench(n_blocks=8, block_size=8, share=False)
    sequence = bench.sequence([1] * 12)
    bench.finish(bench.go_on(sequence, 2))
    (other,) = running(bench, bench.submit([2] * 28, 8))
    sequence.tokens.extend([3] * 20)
    again = bench.request(sequence.tokens, 4, sequence=sequence)
    plan = schedule([again], [other], bench.manager, bench.core.limits, idle=bench.core.idle)
    assert (plan.starts, plan.evicted, plan.decodes) == ([], [], [other])
