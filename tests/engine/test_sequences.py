"""Sequences that outlive requests: they continue, fork, are evicted first, and lose nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvelo.engine.request import Request, Sequence
from pyvelo.kv.plan import AllocationPlan

from .fakes import Bench, answer

PROMPT = [7 * i % 90 + 1 for i in range(45)]


def fed(bench: Bench) -> int:
    return sum(sum(step.n_tokens) for step in bench.context.steps)


def go_on(bench: Bench, sequence: Sequence, max_new: int = 4, **params: Any) -> None:
    """Check that one more answer equals the answer of its tokens alone."""
    wanted = answer(sequence.tokens, max_new)
    request = bench.go_on(sequence, max_new, **params)
    bench.finish(request)
    assert request.generated_ids == wanted
    assert not sequence.busy


def fork(bench: Bench, sequence: Sequence, *more: int) -> Sequence:
    twin = sequence.fork([*sequence.tokens, *more], len(sequence.tokens))
    bench.core.idle.fork(sequence, twin)
    return twin


def close(bench: Bench, *sequences: Sequence) -> None:
    for sequence in sequences:
        bench.core.inbox.release(sequence)
    bench.core.settle()


@pytest.mark.parametrize("share", [True, False])
def test_the_next_answer_computes_only_what_is_new(share: bool) -> None:
    bench = Bench(share=share)
    sequence = bench.sequence(PROMPT)
    go_on(bench, sequence, 10)
    assert fed(bench) == len(PROMPT) + 9
    sequence.tokens.extend([1, 2, 3])
    go_on(bench, sequence, 10)
    assert fed(bench) == len(PROMPT) + 9 + (1 + 3) + 9
    assert bench.manager.n_reserved == 0
    assert list(bench.core.idle) == [sequence]
    close(bench, sequence)
    bench.assert_idle()


@pytest.mark.parametrize("n_prompt", [1, 2, 31, 32, 33, 64, 65])
@pytest.mark.parametrize("share", [True, False])
def test_forks_share_all_and_go_their_own_ways(n_prompt: int, share: bool) -> None:
    bench = Bench(n_blocks=32, share=share)
    sequence = bench.sequence(PROMPT[:1] * n_prompt)
    go_on(bench, sequence)
    n_used = bench.manager.n_used
    twins = [fork(bench, sequence, number + 1) for number in range(4)]
    assert bench.manager.n_used == n_used
    before = fed(bench)
    for _ in range(2):
        requests = [bench.go_on(twin, 5) for twin in twins]
        wanted = [answer(twin.tokens, 5) for twin in twins]
        bench.finish(*requests)
        assert [request.generated_ids for request in requests] == wanted
    assert fed(bench) - before == 4 * ((2 + 4) + (1 + 4)), "nothing is computed again"
    go_on(bench, sequence)
    close(bench, sequence, *twins)
    bench.assert_idle()


def test_a_fork_keeps_the_salt() -> None:
    """What it stores is a hit for its own tenant alone."""
    bench = Bench(n_blocks=32)
    sequence = Sequence(PROMPT, bench.manager.block_size, "tenant")
    go_on(bench, sequence)
    twin = fork(bench, sequence, *PROMPT, *PROMPT)
    tokens = list(twin.tokens)
    go_on(bench, twin)
    other, same = bench.submit(tokens, 1), bench.submit(tokens, 1, cache_salt="tenant")
    bench.finish(other, same)
    assert other.n_cached == 0
    assert same.n_cached is not None
    assert same.n_cached > len(PROMPT)
    close(bench, sequence, twin)
    bench.assert_idle()


def test_a_sequence_is_computed_except_its_last_token() -> None:
    bench = Bench()
    sequence = bench.sequence(PROMPT)
    assert not sequence.computed
    bench.finish(bench.go_on(sequence, 0))
    assert sequence.computed
    sequence.tokens.append(5)
    assert not sequence.computed
    bench.finish(bench.go_on(sequence, 0))
    assert sequence.computed
    close(bench, sequence)
    bench.assert_idle()


def test_a_request_that_arrives_for_a_closed_sequence_is_cancelled() -> None:
    """It was prepared while another thread closed the session."""
    bench = Bench()
    sequence = bench.sequence(PROMPT)
    go_on(bench, sequence)
    close(bench, sequence)
    request = bench.go_on(sequence, 4)
    bench.finish(request)
    assert (request.finish_reason, request.generated_ids) == ("abort", ())
    bench.assert_idle()


def test_to_compute_only_draws_nothing_and_shows_nothing() -> None:
    bench = Bench()
    sequence = bench.sequence(PROMPT)
    request = bench.go_on(sequence, 0)
    bench.finish(request)
    assert list(sequence.tokens) == PROMPT
    assert request.text == ""
    assert sequence.computed
    assert bench.core.counters.completion_tokens == 0
    n_used = bench.manager.n_used
    go_on(bench, sequence)
    assert fed(bench) == len(PROMPT) + 1 + 3
    assert bench.manager.n_used == n_used
    close(bench, sequence)


def test_idle_sequences_are_evicted_for_running_requests() -> None:
    bench = Bench(n_blocks=8, block_size=8)
    older, newer = bench.sequence([1] * 16), bench.sequence([2] * 16)
    go_on(bench, older)
    go_on(bench, newer)
    request = bench.submit([3] * 8, 30)
    bench.finish(request)
    assert request.generated_ids == answer([3] * 8, 30)
    assert older.table is None
    assert newer.table is not None
    assert bench.core.counters.preemptions == 0
    assert bench.core.counters.evicted_sequences == 1
    go_on(bench, older)
    go_on(bench, newer)
    close(bench, older, newer)
    bench.assert_idle()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("n_swap_blocks", [0, 3, 100])
def test_an_evicted_sequence_resumes(share: bool, n_swap_blocks: int) -> None:
    bench = Bench(n_blocks=6, block_size=8, share=share, n_swap_blocks=n_swap_blocks)
    bench.core.costs.favour_swap = lambda n_blocks, n_tokens: True  # type: ignore[method-assign]
    sequences = [bench.sequence([i + 1] * 20) for i in range(3)]
    for _ in range(3):
        for sequence in sequences:
            go_on(bench, sequence)
    assert bench.core.counters.evicted_sequences > 0
    if n_swap_blocks == 100:
        assert fed(bench) == 3 * (20 + 3 + 2 * 4), "nothing is computed twice"
    close(bench, *sequences)
    bench.assert_idle()


def test_a_sequence_is_swapped_out_while_a_request_on_it_is_submitted() -> None:
    """Another thread submits while a step is planned: the request is known, but not seen yet."""
    bench = Bench(n_blocks=6, block_size=8, n_swap_blocks=100)
    sequence = bench.sequence([1] * 20)
    go_on(bench, sequence)
    submitted: list[Request] = []

    def favour_swap(n_blocks: int, n_tokens: int) -> bool:
        if not submitted:
            sequence.tokens.extend([2, 3])
            submitted.append(bench.go_on(sequence, 4))
        return True

    bench.core.costs.favour_swap = favour_swap  # type: ignore[method-assign]
    other = bench.submit([3] * 8, 24)
    wanted = answer([*sequence.tokens, 2, 3], 4)
    before = fed(bench)
    bench.finish(other)
    bench.finish(*submitted)
    assert bench.manager.counts.swapped_out > 0
    assert submitted[0].generated_ids == wanted
    assert fed(bench) - before == (8 + 23) + (3 + 3), "nothing is computed again"
    close(bench, sequence)
    bench.assert_idle()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("n_tokens", [39, 40, 41, 47, 48])
def test_a_sequence_that_fills_the_pool_continues(n_tokens: int, share: bool) -> None:
    """If its last block must be copied, no block is free."""
    bench = Bench(n_blocks=6, block_size=8, share=share)
    sequence = bench.sequence(range(1, n_tokens + 1))
    bench.finish(bench.go_on(sequence, 0))
    twin = fork(bench, sequence)
    go_on(bench, sequence, 49 - n_tokens)
    go_on(bench, twin, 49 - n_tokens)
    close(bench, sequence, twin)
    bench.assert_idle()


def test_a_waiting_sequence_is_evicted_for_an_earlier_request() -> None:
    bench = Bench(n_blocks=6, block_size=8, max_seqs=1)
    sequence = bench.sequence([1] * 20)
    go_on(bench, sequence)
    first = bench.submit([2] * 40, 4)
    wanted = answer(sequence.tokens, 4)
    second = bench.go_on(sequence, 4)
    bench.finish(first, second)
    assert first.generated_ids == answer([2] * 40, 4)
    assert second.generated_ids == wanted
    close(bench, sequence)
    bench.assert_idle()


@pytest.mark.parametrize("share", [True, False])
def test_a_sequence_keeps_its_recurrent_state(share: bool) -> None:
    bench = Bench(n_states=2, state_blocks=3, max_seqs=2, share=share)
    sequence = bench.sequence(PROMPT)
    go_on(bench, sequence, 10)
    before = fed(bench)
    twin = fork(bench, sequence, 5)
    go_on(bench, twin, 1)
    go_on(bench, sequence, 1)
    assert fed(bench) - before == 2 + 1
    close(bench, sequence, twin)
    bench.assert_idle()


@pytest.mark.parametrize("share", [True, False])
def test_a_computed_prompt_keeps_the_state_before_its_last_token(share: bool) -> None:
    bench = Bench(n_states=2, state_blocks=2, max_seqs=2, share=share)
    sequence = bench.sequence(PROMPT)
    bench.finish(bench.go_on(sequence, 0))
    assert sequence.computed
    before = fed(bench)
    twin = fork(bench, sequence)
    go_on(bench, twin, 1)
    go_on(bench, sequence, 1)
    assert fed(bench) - before == 2
    close(bench, sequence, twin)
    bench.assert_idle()


def test_a_state_that_cannot_be_saved_is_computed_again() -> None:
    bench = Bench(n_states=1, max_seqs=1, n_blocks=8, state_blocks=2, share=False)
    other = bench.sequence([1] * 32)
    go_on(bench, other, 2)
    sequence = bench.sequence([2] * 100)  # 4 blocks, as many as the other one has
    go_on(bench, sequence, 2)
    assert (sequence.table, other.table is not None) == (None, True)
    go_on(bench, sequence, 2)
    close(bench, sequence, other)
    bench.assert_idle()


def test_a_cancelled_answer_keeps_its_blocks() -> None:
    bench = Bench(n_blocks=16, max_batch_tokens=16)
    sequence = bench.sequence(PROMPT)
    request = bench.go_on(sequence, 10)
    bench.step()
    bench.core.inbox.cancel([request])
    bench.core.settle()
    assert request.finish_reason == "abort"
    assert sequence.table is not None
    assert sequence.table.n_tokens == 16
    before = fed(bench)
    go_on(bench, sequence, 1)
    assert fed(bench) - before == len(PROMPT) - 16
    close(bench, sequence)
    bench.assert_idle()


def test_closing_a_sequence_ends_its_request() -> None:
    bench = Bench()
    sequence, other = bench.sequence(PROMPT), bench.sequence(PROMPT)
    request, waiting = bench.go_on(sequence, 100), bench.go_on(other, 100)
    bench.step()
    bench.core.inbox.release(other)
    bench.core.inbox.release(sequence)
    bench.core.inbox.release(sequence)
    bench.core.settle()
    assert request.finish_reason == waiting.finish_reason == "abort"
    bench.assert_idle()


def test_the_end_of_the_engine_takes_all() -> None:
    bench = Bench(n_blocks=8, block_size=8, n_swap_blocks=8)
    sequences = [bench.sequence([i + 1] * 20) for i in range(3)]
    for sequence in sequences:
        go_on(bench, sequence)
    bench.go_on(sequences[0])
    bench.step()
    bench.core.cancel_all()
    close(bench, *sequences)
    bench.assert_idle()


@settings(max_examples=80, deadline=None)
@given(data=st.data(), share=st.booleans(), swap=st.integers(0, 9), n_states=st.sampled_from([0, 0, 0, 3]))
def test_any_operations_on_sequences(data: st.DataObject, share: bool, swap: int, n_states: int) -> None:
    """Turns, forks, ends and others' requests at once in a pool that is too small: all answers are right."""
    size, n_blocks = 8, 8
    bench = Bench(
        n_blocks=n_blocks, block_size=size, share=share, n_swap_blocks=swap, n_states=n_states,
        max_seqs=3, max_batch_tokens=data.draw(st.integers(3, 40)),
    )  # fmt: skip
    sequences = [bench.sequence([1])]
    asked: list[tuple[Any, tuple[int, ...]]] = []

    def ask(tokens: list[int], max_new: int, sequence: Sequence | None = None) -> None:
        request = bench.submit(tokens, max_new, sequence=sequence, priority=data.draw(st.integers(0, 1)))
        asked.append((request, answer(tokens, max_new)))

    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(
            st.sampled_from(["new", "turn", "turn", "fork", "close", "request", "cancel", "step"])
        )
        idle = [sequence for sequence in sequences if not sequence.busy]
        if what == "new" and len(sequences) < 6:
            sequences.append(bench.sequence([data.draw(st.integers(1, 3))] * data.draw(st.integers(1, 20))))
        elif what == "turn" and idle:
            sequence = data.draw(st.sampled_from(idle))
            sequence.tokens.extend(data.draw(st.lists(st.integers(1, 3), max_size=10)))
            room = size * n_blocks + 1 - len(sequence.tokens)
            if room > 0:
                ask(list(sequence.tokens), data.draw(st.integers(1, min(12, room))), sequence)
            else:
                close(bench, sequence)
                sequences.remove(sequence)
        elif what == "fork" and idle:
            sequences.append(
                fork(bench, data.draw(st.sampled_from(idle)), *data.draw(st.sampled_from([[], [4]])))
            )
        elif what == "close" and sequences:
            sequence = sequences.pop(data.draw(st.integers(0, len(sequences) - 1)))
            asked = [pair for pair in asked if pair[0].sequence is not sequence]
            close(bench, sequence)
        elif what == "request":
            ask([data.draw(st.integers(1, 3))] * data.draw(st.integers(1, 30)), data.draw(st.integers(1, 20)))
        elif what == "cancel" and asked:
            request, _ = asked.pop(data.draw(st.integers(0, len(asked) - 1)))
            bench.core.inbox.cancel([request])
            bench.core.settle()
        else:
            bench.step()
    bench.finish(*[request for request, _ in asked])
    for request, wanted in asked:
        assert request.generated_ids == wanted
    close(bench, *sequences)
    bench.assert_idle()


def test_a_sequence_shares_its_prefix_with_a_request() -> None:
    """The first request shares its blocks in the step in which the second needs what it frees."""
    bench = Bench(n_blocks=8, block_size=8, max_batch_tokens=256)
    common = list(range(1, 25))
    sequence = bench.sequence(common)
    go_on(bench, sequence, 2)
    prompts = [[*common, 90], list(range(30, 75))]
    requests = [bench.submit(prompt, 1) for prompt in prompts]
    bench.finish(*requests)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.generated_ids == answer(prompt, 1)
    close(bench, sequence)
    bench.assert_idle()


def test_the_work_to_evict_grows_with_the_number_of_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(n_blocks=80, block_size=8, max_batch_tokens=512, width=80)
    sequences = [bench.sequence([n + 1] * 16) for n in range(40)]
    for sequence in sequences:
        bench.finish(bench.go_on(sequence, 1))
    n_freed = [0]
    free = AllocationPlan.free

    def count(plan: AllocationPlan, *table: Any) -> None:
        n_freed[0] += 1
        free(plan, *table)

    monkeypatch.setattr(AllocationPlan, "free", count)
    large = bench.submit([99] * 600, 4)
    bench.step()
    assert (len(bench.core.idle), large.sequence.table is not None) == (2, True)
    assert n_freed[0] < 4 * len(sequences)
    bench.finish(large)
    assert large.generated_ids == answer([99] * 600, 4)
    close(bench, *sequences)
    bench.assert_idle()


def test_only_idle_sequences_share_their_blocks() -> None:
    """A request that runs on a sequence writes to its last block."""
    bench = Bench(n_blocks=8, block_size=8)
    sequence = bench.sequence([1] * 12)
    request = bench.go_on(sequence, 20)
    bench.step()
    assert sequence.table is not None
    twin = sequence.fork(sequence.tokens, 12)
    bench.core.idle.fork(sequence, twin)
    assert twin.table is None
    assert len(bench.core.idle) == 0
    bench.finish(request)
    bench.core.idle.fork(sequence, twin)
    assert twin.table is not None
    close(bench, sequence, twin)
    bench.assert_idle()


def test_sequences_that_need_not_go_stay_idle() -> None:
    """The third one alone has enough blocks, so the two before it keep theirs."""
    bench = Bench(n_blocks=8, block_size=8, share=False)
    sequences = [bench.sequence([n] * n_tokens) for n, n_tokens in ((1, 6), (2, 6), (3, 30))]
    for sequence in sequences:
        go_on(bench, sequence, 1)
    assert [len(sequence.table.blocks) for sequence in sequences if sequence.table] == [1, 1, 4]
    request = bench.submit([4] * 40, 2)
    bench.step()
    assert [sequence.table is None for sequence in sequences] == [False, False, True]
    bench.finish(request)
    close(bench, *sequences)
    bench.assert_idle()


def test_a_request_that_was_cancelled_before_its_submission_replaces_no_other() -> None:
    bench = Bench()
    sequence = bench.sequence([2] * 10)
    late = bench.request(sequence.tokens, sequence=sequence)
    bench.core.inbox.cancel([late])
    bench.core.settle()
    running = bench.go_on(sequence, 20)
    bench.step()
    bench.core.inbox.submit([late])
    assert sequence.busy
    bench.core.inbox.release(sequence)
    bench.core.settle()
    assert (late.finish_reason, running.finish_reason) == ("abort", "abort")
    bench.assert_idle()
