"""Block maps rebuilt from a trace equal the manager's state at every moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyvelo.engine.request import Request
from pyvelo.engine.step import EngineCore
from pyvelo.errors import ConfigError
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.prefix import FULL, Window
from pyvelo.kv.records import Event
from pyvelo.trace.blockmap import replay, summarize
from pyvelo.trace.format import Arrived, Evicted, Finished, Preempted, Started, Trace, TraceEvent, read_trace
from pyvelo.trace.recorder import Tracer
from tests.engine.fakes import Bench

BLOCK_BYTES = 256
N_CTX = 512
EFFORT = float(os.environ.get("VELO_TEST_EFFORT", "1"))


class Recorded(Bench):
    """Bench that also stores a snapshot of the manager's own tables at every moment."""

    def __init__(self, path: Path, **settings: Any) -> None:
        super().__init__(**settings)
        self.path = path
        self.seen: list[tuple[list[tuple[tuple[int, ...], int]], set[int], int, int]] = []
        self.tracer = Tracer(self.core, path, BLOCK_BYTES, N_CTX)
        observer = self.core.observer
        assert observer is not None

        def look(waiting: Any, running: Any) -> None:
            before = path.stat().st_size if self.tracer else 0
            observer(waiting, running)
            self.tracer._writer._file.flush()
            if path.stat().st_size > before:  # no change, no line
                self.seen.append(snapshot(self.manager))

        self.tracer._writer._file.flush()
        self.seen += [snapshot(self.manager)] * (len(path.read_bytes().splitlines()) - 1)
        self.tracer._record = look  # type: ignore[method-assign]
        self.core.observer = look

    def stop(self) -> Trace:
        self.tracer.detach()
        self.tracer.close()
        return read_trace(self.path)


def snapshot(manager: BlockManager) -> tuple[list[tuple[tuple[int, ...], int]], set[int], int, int]:
    size, live = manager.block_size, manager._tables.values()  # a token counts once in each group
    stored = [sum(table.n_tokens - size * first for first in table.firsts) for table in live]
    tables = sorted((tuple(table.blocks), n) for table, n in zip(live, stored, strict=True))
    n_swapped = sum(len(swapped.blocks) for swapped in manager._swapped.values())
    return tables, manager.published(), n_swapped, manager.n_used


def check(bench: Recorded, trace: Trace) -> None:
    steps = 0
    for (_, blocks), (tables, published, n_swapped, n_used) in zip(replay(trace), bench.seen, strict=True):
        assert sorted((tuple(t.blocks), t.n_tokens) for t in blocks.tables.values()) == tables
        assert blocks.published == published
        assert blocks.n_swapped == n_swapped
        assert blocks.n_used == n_used
        assert min(blocks.n_free, blocks.n_cached) >= 0
        steps += 1
    assert steps == len(trace.steps)


Asked = st.tuples(
    st.integers(1, 100),  # tokens of the prompt
    st.integers(0, 2),  # the number of its shared start
    st.integers(1, 60),  # tokens to generate
    st.integers(1, 3),  # samples
    st.integers(0, 6),  # steps before the next request
    st.booleans(),  # whether it is cancelled then
)


@settings(max_examples=round(25 * EFFORT), deadline=None)
@given(
    asked=st.lists(Asked, min_size=1, max_size=8),
    n_blocks=st.integers(12, 24),
    n_swap=st.integers(0, 8),
    windows=st.sampled_from([(FULL,), (FULL, Window(20)), (FULL, Window(1), Window(1)), (Window(9),)]),
)
def test_the_block_map_at_every_moment(
    asked: list[Any],
    n_blocks: int,
    n_swap: int,
    windows: tuple[Window, ...],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("trace") / "run.trace"
    bench = Recorded(
        path,
        n_blocks=n_blocks * len(windows),
        block_size=8,
        n_swap_blocks=n_swap,
        width=n_blocks,
        windows=windows,
    )
    n_ctx = n_blocks * 8 - 60
    submitted: list[Request] = []
    for n_prompt, beginning, max_new, n, steps, cancel in asked:
        prompt = [beginning * 100 + i for i in range(min(n_prompt, n_ctx))]
        requests = [bench.request(prompt, max_new) for _ in range(n)]
        requests[0].hold(requests[1:])
        bench.core.inbox.submit(requests)
        submitted += requests
        for _ in range(steps):
            bench.step()
        if cancel:
            bench.core.inbox.cancel(requests[:1])
    while not all(request.finished for request in submitted):
        bench.step()
    trace = bench.stop()
    assert bench.core.observer is None
    check(bench, trace)
    events = [event for step in trace.steps for event in step.events]
    seen = {event.owner for event in events if isinstance(event, Arrived)}
    ended = {event.owner: event for event in events if isinstance(event, Finished)}
    assert seen == set(ended)
    for request in submitted:
        if request.number in ended:  # a request that is cancelled on arrival has no events
            finished = ended[request.number]
            assert (finished.n_generated, finished.reason) == (request.n_generated, request.finish_reason)
    # a request may be cancelled before its first snapshot
    assert len(ended) + sum(r.finish_reason == "abort" for r in submitted) >= len(submitted)
    counts, counters = bench.manager.counts, bench.core.counters
    assert sum(isinstance(event, Evicted) for event in events) == counts.evictions
    # a request that is preempted and cancelled between two snapshots has no event
    preempted = sum(isinstance(event, Preempted) for event in events)
    assert counters.preemptions - counters.aborted <= preempted <= counters.preemptions
    assert counters.swaps - counters.aborted <= summarize(trace).swaps <= counters.swaps


def of(trace: Trace, kind: type[TraceEvent]) -> list[TraceEvent]:
    return [event for step in trace.steps for event in step.events if isinstance(event, kind)]


def test_a_request_that_arrives_and_ends_in_one_step(tmp_path: Path) -> None:
    bench = Recorded(tmp_path / "run.trace")
    request = bench.submit([1, 2, 3], 1)
    bench.finish(request)
    trace = bench.stop()
    assert [type(event) for step in trace.steps for event in step.events] == [Arrived, Started, Finished]
    check(bench, trace)


def test_a_common_start_is_recorded_by_request_and_length(tmp_path: Path) -> None:
    """The length is in whole blocks. A next turn may start with an answer. Another salt is another text."""
    bench = Recorded(tmp_path / "run.trace", block_size=4)
    first = bench.submit(list(range(10)), 10)
    bench.finish(first)
    again = bench.submit(list(range(9)), 1)
    turn = bench.submit([*first.tokens, 7, 7, 7, 7], 1)
    other = bench.submit(list(range(10)), 1, cache_salt="other")
    bench.finish(again, turn, other)
    arrived = of(bench.stop(), Arrived)
    assert arrived == [(1, 10, 10, 0, 0), (2, 9, 1, 1, 8), (3, 24, 1, 1, 20), (4, 10, 1, 0, 0)]


def test_requests_of_one_rank_are_recorded_apart(tmp_path: Path) -> None:
    """Beams have the rank of their search."""
    bench = Recorded(tmp_path / "run.trace")
    beams = [bench.request([1, 2, 3, number], 3) for number in range(3)]
    for beam in beams:
        beam.arrival = 7
    bench.core.inbox.submit(beams)
    while not all(beam.finished for beam in beams):
        bench.step()
    trace = bench.stop()
    check(bench, trace)
    assert {event.owner for event in of(trace, Arrived)} == {1, 2, 3}
    assert {event.owner for event in of(trace, Finished)} == {1, 2, 3}


def test_a_recording_may_start_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """The first line has the whole state. The previous observer still gets every event."""
    events: list[Event] = []
    bench = Bench(block_size=4)
    bench.manager.set_observer(events.append)
    requests = [bench.submit([n] * 9, 12) for n in range(3)]
    for _ in range(4):
        bench.step()
    tracer = Tracer(bench.core, tmp_path / "run.trace", BLOCK_BYTES, N_CTX)
    expected = snapshot(bench.manager)
    n_events = len(events)
    bench.finish(*requests)
    tracer.detach()
    tracer.close()
    assert len(events) > n_events
    trace = read_trace(tmp_path / "run.trace")
    _, blocks = next(replay(trace))
    assert sorted((tuple(t.blocks), t.n_tokens) for t in blocks.tables.values()) == expected[0]
    assert blocks.published == expected[1]
    assert len(of(trace, Arrived)) == len(of(trace, Started)) == len(of(trace, Finished)) == 3
    assert bench.manager.set_observer(None) == events.append


def test_tables_of_no_request_have_owners_below_zero(tmp_path: Path) -> None:
    bench = Recorded(tmp_path / "run.trace", block_size=4)
    request = bench.submit(list(range(8)), 20)
    for _ in range(3):
        bench.step()
    assert request.sequence.table is not None
    fork = bench.manager.fork(request.sequence.table, None)
    bench.finish(request)
    bench.manager.free(fork)
    trace = bench.stop()
    check(bench, trace)
    assert {owner for step in trace.steps for owner, *_ in step.tables} == {1, -1}


def test_one_recording_at_a_time(tmp_path: Path) -> None:
    bench = Recorded(tmp_path / "run.trace")
    with pytest.raises(ConfigError, match="already"):
        Tracer(bench.core, tmp_path / "other.trace", BLOCK_BYTES, N_CTX)
    bench.stop()
    other = Tracer(bench.core, tmp_path / "other.trace", BLOCK_BYTES, N_CTX)
    other.detach()
    other.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full disk")
def test_a_full_disk_ends_the_recording_and_nothing_else() -> None:
    bench = Bench(n_blocks=512, block_size=4, width=128)
    tracer = Tracer(bench.core, "/dev/full", BLOCK_BYTES, N_CTX)
    requests = [bench.submit(list(range(n, n + 30)), 400) for n in range(3)]  # more than a buffer
    bench.finish(*requests)
    assert [request.n_generated for request in requests] == [400] * 3
    assert bench.core.observer is None, "the tracer has disconnected"
    with pytest.raises(OSError, match="space"):
        tracer.close()
    bench.assert_idle()


def test_a_closed_file_does_not_disturb_the_engine(tmp_path: Path) -> None:
    bench = Bench()
    tracer = Tracer(bench.core, tmp_path / "run.trace", BLOCK_BYTES, N_CTX)
    tracer.close()
    bench.finish(bench.submit([1, 2, 3], 5))
    assert bench.core.observer is None


def test_a_closed_recording_disconnects_for_the_next_one(tmp_path: Path) -> None:
    bench = Bench()
    Tracer(bench.core, tmp_path / "one.trace", BLOCK_BYTES, N_CTX).close()
    second = Tracer(bench.core, tmp_path / "two.trace", BLOCK_BYTES, N_CTX)
    bench.finish(bench.submit([1, 2, 3], 5))
    second.detach()
    second.close()
    assert bench.manager.set_observer(None) is None
    assert len(of(read_trace(tmp_path / "two.trace"), Finished)) == 1


def test_a_failed_start_of_a_recording_disconnects_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, settle = Bench(), EngineCore.settle

    def fail_once_observed(core: EngineCore) -> bool:
        if core.observer is not None:
            raise KeyboardInterrupt
        return settle(core)

    with monkeypatch.context() as patch:
        patch.setattr(EngineCore, "settle", fail_once_observed)
        with pytest.raises(KeyboardInterrupt):
            Tracer(bench.core, tmp_path / "first", BLOCK_BYTES, N_CTX)
    assert bench.core.observer is None
    tracer = Tracer(bench.core, tmp_path / "second", BLOCK_BYTES, N_CTX)
    tracer.detach()
    tracer.close()
