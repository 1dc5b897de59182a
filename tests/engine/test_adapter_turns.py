"""Turns of adapters: a step has requests of one adapter, and neither an adapter nor a request starves."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pyvelo.engine.adapters import AdapterTurns
from pyvelo.engine.request import Request, Sequence

from .fakes import Bench
from .toy_model import ToyAdapter

ADAPTERS = (None, ToyAdapter(b"a"), ToyAdapter(b"b"))


class Turns:
    """A bench with turns; `steps` has the adapter of each step and its requests."""

    def __init__(self, **settings: Any) -> None:
        self.bench = Bench(**settings)
        self.steps: list[tuple[ToyAdapter | None, list[Request]]] = []
        self.applied: list[Any] = []
        turns, core = AdapterTurns(self.applied.append), self.bench.core
        core.schedule = turns.schedule

        def before_run(plan: Any) -> None:
            self.steps.append((self.applied[-1], plan.requests))

        core.before_run += [turns.apply, before_run]

    def submit(self, n_prompt: int, adapter: Any, max_new: int = 4, first: int = 1, **params: Any) -> Request:
        prompt = [first + number % 7 for number in range(n_prompt)]
        sequence = Sequence(prompt, self.bench.manager.block_size, "", adapter)
        request = self.bench.request(prompt, max_new, sequence=sequence, **params)
        request.keeps_blocks = False
        self.bench.core.inbox.submit([request])
        return request

    def finish(self, *requests: Request) -> None:
        self.bench.finish(*requests)
        for adapter, step in self.steps:
            assert all(request.sequence.adapter is adapter for request in step)
        self.bench.assert_idle()


def test_adapters_take_turns() -> None:
    turns = Turns()
    requests = [turns.submit(5, adapter, 6) for adapter in ADAPTERS for _ in range(2)]
    turns.finish(*requests)
    assert [adapter for adapter, _ in turns.steps] == list(ADAPTERS) * 6
    assert all(len(step) == 2 for _, step in turns.steps), "all requests of an adapter run in its turn"


def test_one_adapter_has_every_step() -> None:
    turns = Turns()
    requests = [turns.submit(5, ADAPTERS[1], 6) for _ in range(3)]
    turns.finish(*requests)
    assert [adapter for adapter, _ in turns.steps] == [ADAPTERS[1]] * 6


def test_an_adapter_that_comes_later_joins_at_the_end() -> None:
    turns = Turns()
    early = [turns.submit(5, adapter, 20) for adapter in ADAPTERS[:2]]
    for _ in range(3):
        turns.bench.step()
    late = turns.submit(5, ADAPTERS[2], 4)
    turns.finish(*early, late)
    names = [adapter for adapter, _ in turns.steps]
    first = names.index(ADAPTERS[2])
    assert first <= 3 + 2
    assert names[first : first + 6] == [*ADAPTERS[2:], *names[first - 2 : first]] * 2


def test_a_long_prompt_does_not_stop_others() -> None:
    """While one adapter's prompt is computed in chunks, each other adapter gets every second step."""
    turns = Turns(n_blocks=64, max_batch_tokens=32)
    short = turns.submit(3, None, 12)
    turns.bench.step()
    long = turns.submit(600, ADAPTERS[1], 1)
    turns.finish(short, long)
    names = [adapter for adapter, _ in turns.steps]
    assert names[:20] == [None, *[None, ADAPTERS[1]] * 10][:20] or names[1:21] == [ADAPTERS[1], None] * 10


def test_a_prompt_beside_a_stream_of_another_adapter_learns_its_chunks() -> None:
    """No step has both, so the steps with the prompt alone must be measured, too."""
    turns = Turns(n_blocks=64, max_batch_tokens=32)
    stream = turns.submit(3, None, 400, on_piece=lambda piece: None)
    for _ in range(3):
        turns.bench.step()
    long = turns.submit(600, ADAPTERS[1], 1)
    turns.finish(stream, long)
    n_chunks = sum(adapter is ADAPTERS[1] for adapter, _ in turns.steps)
    assert n_chunks < 150, "2 tokens each would be 300"


@pytest.mark.parametrize("n_swap_blocks", [0, 32])
def test_a_large_request_is_not_passed_over_forever(n_swap_blocks: int) -> None:
    """Small requests of another adapter arrive all the time and would take each block that becomes free."""
    turns = Turns(n_blocks=8, block_size=32, share=False, n_swap_blocks=n_swap_blocks)
    small = [turns.submit(30, None, 20) for _ in range(4)]
    turns.bench.step()
    large = turns.submit(200, ADAPTERS[1], 4)
    for _ in range(200):
        if large.finished:
            break
        small = [request for request in small if not request.finished]
        while len(small) < 6:
            small.append(turns.submit(30, None, 20))
        turns.bench.step()
    assert large.finished
    turns.finish(large, *small)


def test_a_large_request_beside_running_ones_of_its_adapter() -> None:
    """Its adapter's turns have work each time, so other adapters must remember that it waits."""
    turns = Turns(n_blocks=12, block_size=32, share=False)
    decoding = turns.submit(20, ADAPTERS[1], 90)
    small = [turns.submit(30, adapter, 20) for adapter in (None, ADAPTERS[2]) for _ in range(3)]
    turns.bench.step()
    large = turns.submit(230, ADAPTERS[1], 2)
    late = None
    for _ in range(150):
        if large.n_generated:
            break
        small = [request for request in small if not request.finished]
        while len(small) < 8:
            small.append(turns.submit(30, (None, ADAPTERS[2])[len(small) % 2], 20))
        late = small[-1]
        turns.bench.step()
    assert large.n_generated
    assert not decoding.finished, "it started while its adapter had other work"
    assert late is not None
    turns.finish(decoding, large, *small)


def test_the_first_request_preempts_requests_of_other_adapters() -> None:
    turns = Turns(n_blocks=8, block_size=32, share=False)
    requests = [turns.submit(20, adapter, 120, first=2) for adapter in ADAPTERS]
    turns.finish(*requests)
    assert turns.bench.core.counters.preemptions > 0
    assert all(request.n_generated == 120 for request in requests)


def test_arrivals_of_one_adapter_start_in_order() -> None:
    """Beside others, requests start in the order of arrival as far as there is room."""
    turns = Turns(n_blocks=4, block_size=32, share=False)
    requests = [turns.submit(60, ADAPTERS[number % 3], 2) for number in range(9)]
    turns.finish(*requests)
    started = list(dict.fromkeys(request.number for _, step in turns.steps for request in step))
    assert started == sorted(started)


def test_an_error_of_an_adapter_ends_its_requests_only() -> None:
    turns = Turns()
    good, bad = turns.submit(5, None), turns.submit(5, ADAPTERS[1])

    def refuse(plan: Any) -> None:
        if plan.requests[0].sequence.adapter is not None:
            raise ValueError("unloaded")

    turns.bench.core.before_run.insert(0, refuse)
    turns.bench.finish(good, bad)
    assert (good.finish_reason, bad.finish_reason) == ("length", "error")
    assert isinstance(bad.error, ValueError)
    turns.bench.assert_idle()


def test_adapters_share_no_blocks() -> None:
    turns = Turns(n_blocks=16)
    prompt = list(range(1, 70))
    cached = []
    for adapter in (None, None, ADAPTERS[1], ADAPTERS[1], ADAPTERS[2], None):
        sequence = Sequence(prompt, turns.bench.manager.block_size, "", cast(Any, adapter))
        request = turns.bench.submit(prompt, sequence=sequence)
        request.keeps_blocks = False
        turns.bench.finish(request)
        cached.append(request.n_cached)
    assert cached == [0, 64, 0, 64, 0, 64]
