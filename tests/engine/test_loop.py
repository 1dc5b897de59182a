"""Several threads, one engine: turns, visitors, cancelling, closing, Ctrl+C."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from pyvelo.engine import interrupts, loop
from pyvelo.engine.interrupts import SIGNALS, HomeProcess, InterruptGuard
from pyvelo.engine.loop import EngineLoop, Stream, run_all
from pyvelo.engine.output import Submission
from pyvelo.engine.request import Request
from pyvelo.errors import Cancelled, ClosedError, EngineError, InternalError, RequestError
from pyvelo.native.compute import compute
from pyvelo.outputs import StreamPiece

from .fakes import Bench, answer, text_of

WAIT = 60.0  # seconds after which a test is taken to hang


class Stand(Bench):
    """A bench with a loop; `stop` is set when a forward pass is cancelled."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.stop = threading.Event()
        self.guard = InterruptGuard()
        self.loop = EngineLoop(self.core, self.guard)
        self.core._call_run = partial(compute, cancel=self.stop.set, at_ctrl_c=True)

    def hand_over(self, *args: Any, **kwargs: Any) -> Request:
        request = self.request(*args, **kwargs)
        self.loop.submit([request])
        return request

    def hold_steps(self) -> tuple[threading.Event, threading.Event]:
        """Let forward passes wait: the first event is set when one has begun; set the second to end them."""
        stepping, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            stepping.set()
            assert go_on.wait(WAIT)

        self.context.before_run = wait
        return stepping, go_on

    def run(self, *requests: Request) -> None:
        self.loop.run_until(lambda: all(request.finished for request in requests))


@pytest.fixture
def stand() -> Stand:
    return Stand(n_blocks=128)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def join(*threads: threading.Thread) -> None:
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive(), "a thread hangs"


def test_a_waiting_thread_steps(stand: Stand) -> None:
    request = stand.hand_over([1, 2], 5)
    stand.run(request)
    assert request.generated_ids == answer([1, 2], 5)
    stand.assert_idle()


def test_many_threads_one_step_at_a_time(stand: Stand) -> None:
    inside = threading.Lock()
    outputs: dict[int, list[tuple[int, ...]]] = {}

    def alone() -> None:
        assert inside.acquire(blocking=False), "two threads step at once"
        inside.release()

    def work(number: int) -> None:
        outputs[number] = []
        for n in range(1, 6):
            requests = [stand.hand_over([number, i], n) for i in range(1, 4)]
            stand.run(*requests)
            outputs[number] += [request.generated_ids for request in requests]

    stand.context.before_run = alone
    join(*[in_thread(lambda number=number: work(number)) for number in range(1, 9)])  # type: ignore[misc]
    for number in range(1, 9):
        assert outputs[number] == [answer([number, i], n) for n in range(1, 6) for i in range(1, 4)]
    stand.assert_idle()


def test_a_thread_may_leave_while_others_wait(stand: Stand) -> None:
    """A thread that steps leaves when its own request is done; another continues."""
    long, short = stand.hand_over([1], 400), stand.hand_over([2], 3)
    waiting = in_thread(lambda: stand.run(long))
    stand.run(short)
    join(waiting)
    assert long.generated_ids == answer([1], 400)


def test_cancelling_does_not_wait_for_a_step(stand: Stand) -> None:
    stepping, go_on = stand.hold_steps()
    kept, dropped = stand.hand_over([1], 3), stand.hand_over([2], 500)
    driving = in_thread(lambda: stand.run(kept))
    assert stepping.wait(WAIT)
    stand.loop.cancel([dropped])
    assert not dropped.finished
    go_on.set()
    join(driving)
    assert dropped.finish_reason == "abort"
    assert dropped.n_generated <= 1, "gone within a step"
    assert kept.generated_ids == answer([1], 3)
    stand.assert_idle()


def test_cancelling_while_no_thread_steps_frees_at_once(stand: Stand) -> None:
    request = stand.hand_over([1] * 40, 50)
    stand.loop.run_until(lambda: request.n_generated > 3)
    assert stand.manager.n_used > 0
    stand.loop.cancel([request])
    stand.assert_idle()


def test_requests_of_an_aborted_parent_end_at_once_while_no_thread_steps(stand: Stand) -> None:
    aborted, other = stand.hand_over([1] * 40, 50), stand.hand_over([2], 5)
    stand.loop.run_until(lambda: aborted.n_generated > 1)
    aborted.parent.aborted = True
    stand.loop.cancel_aborted()
    assert aborted.finish_reason == "abort"
    stand.run(other)
    assert other.generated_ids == answer([2], 5)
    stand.assert_idle()


def test_cancelling_from_within_a_step(stand: Stand) -> None:
    """As the finalizer of a forgotten stream does, whenever the garbage collector runs."""
    other = stand.hand_over([2], 500)
    request = stand.hand_over([1], 3, on_piece=lambda piece: stand.loop.cancel([other]))
    stand.run(request)
    assert other.finish_reason == "abort"
    assert request.generated_ids == answer([1], 3)
    stand.assert_idle()


def test_a_visit_while_a_cancelled_request_ends_is_refused(stand: Stand) -> None:
    """A finalizer may make one at any line. The thread that cancels has the core meanwhile."""
    request = stand.hand_over([1], 3)
    seen: list[str] = []

    def visit(ended: Request) -> None:
        try:
            with stand.loop.visit():
                seen.append("inside")
        except EngineError as error:
            seen.append(str(error))

    request.on_end = visit
    stand.loop.cancel([request])
    assert seen == ["this call would wait for the step of the engine that it was made in"]
    with stand.loop.visit():
        pass
    stand.assert_idle()


def test_a_visitor_gets_in_between_two_steps(stand: Stand) -> None:
    started, visited = threading.Event(), threading.Event()

    def watch() -> None:
        if len(stand.context.steps) == 5:
            started.set()

    stand.context.before_run = watch
    request = stand.hand_over([1], 1900)
    driving = in_thread(lambda: stand.loop.run_until(visited.is_set))
    assert started.wait(WAIT)
    counts = []
    for _ in range(20):
        with stand.loop.visit() as core:
            counts.append(core.counters.steps)
            assert core.manager.n_stored == request.n_computed
            core.manager.audit()
    visited.set()
    join(driving)
    assert counts == sorted(counts)
    assert not request.finished, "visitors did not have to wait for the request"


def test_repeated_visits_let_steps_happen(stand: Stand) -> None:
    request = stand.hand_over([1], 50)
    driving = in_thread(lambda: stand.run(request))
    while not request.finished:
        with stand.loop.visit() as core:
            before = core.counters.steps
        with stand.loop.visit() as core:
            assert core.counters.steps > before or core.counters.steps in (0, 50)
    join(driving)


def test_a_visitor_that_must_not_wait_is_refused_during_a_step(stand: Stand) -> None:
    stepping, refused = threading.Event(), threading.Event()

    def pause() -> None:
        stepping.set()
        assert refused.wait(WAIT)

    stand.context.before_run = pause
    request = stand.hand_over([1], 1)
    driving = in_thread(lambda: stand.run(request))
    assert stepping.wait(WAIT)
    with pytest.raises(EngineError, match="a step is in progress"), stand.loop.visit(wait=False):
        pass
    refused.set()
    join(driving)
    with stand.loop.visit(wait=False) as core:
        assert core is stand.core
    stand.assert_idle()


def test_failing_waits_for_the_step_in_progress(stand: Stand) -> None:
    stepping, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        stepping.set()
        assert go_on.wait(WAIT)

    stand.context.before_run = pause
    request = stand.hand_over([1], 1000)
    driving = in_thread(lambda: stand.run(request))
    assert stepping.wait(WAIT)
    failing = in_thread(lambda: stand.loop.fail(ValueError("a defect")))
    while not stand.loop._n_visiting:
        failing.join(0.001)
        assert failing.is_alive(), "it does not wait"
    assert not request.finished
    go_on.set()
    join(failing, driving)
    assert (request.finish_reason, str(request.error)) == ("error", "a defect")
    assert request.n_generated > 0
    stand.assert_idle()


@pytest.mark.parametrize(
    "call",
    [
        lambda stand: stand.hand_over([1], 1),
        lambda stand: stand.loop.check_open(),
        lambda stand: stand.run(),
        lambda stand: stand.loop.fail(ValueError()),
        lambda stand: stand.loop.visit().__enter__(),
    ],
)
def test_calls_in_a_child_process_are_refused(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, call: Callable[[Stand], object]
) -> None:
    """At once: a thread of the first process may have held the lock."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with stand.loop._lock:
            held.set()
            assert done.wait(WAIT)

    holding = in_thread(hold)
    assert held.wait(WAIT)
    monkeypatch.setattr(HomeProcess, "left", property(lambda home: True))
    try:
        with pytest.raises(EngineError, match="fork"):
            call(stand)
    finally:
        done.set()
        join(holding)
    assert not stand.core.has_work


def test_closing_ends_what_runs(stand: Stand) -> None:
    stepping = threading.Event()

    def stop() -> None:
        stepping.set()
        assert stand.stop.wait(WAIT), "the forward pass is told to stop"
        raise Cancelled("stopped")

    stand.context.before_run = stop
    running, waiting = stand.hand_over([1], 50), stand.hand_over([2] * 500, 12)
    threads = [in_thread(lambda: stand.run(running)), in_thread(lambda: stand.run(waiting))]
    assert stepping.wait(WAIT)
    stand.loop.close(stand.stop.set)
    join(*threads)
    assert {running.finish_reason, waiting.finish_reason} == {"abort"}
    stand.assert_idle()
    stand.loop.close(stand.stop.set)
    with pytest.raises(ClosedError, match="closed"):
        stand.loop.submit([stand.request([1], 1)])


def test_stopping_cuts_the_step_in_progress_short(stand: Stand) -> None:
    stepping, go_on = stand.hold_steps()
    stopped = threading.Event()
    request = stand.hand_over([1], 3)
    driving = in_thread(lambda: stand.run(request))
    assert stepping.wait(WAIT)
    stand.loop.stop(stopped.set)
    assert stopped.is_set()
    go_on.set()
    join(driving)
    assert request.finish_reason == "abort"
    stand.assert_idle()


def test_closing_right_after_a_visit(stand: Stand) -> None:
    """A visitor lets a step happen before it comes again; but once closed there are no more steps."""
    request = stand.hand_over([1], 1000)
    driving = in_thread(lambda: stand.run(request))
    with stand.loop.visit():
        closing = in_thread(lambda: stand.loop.close(stand.stop.set))
        while not stand.loop._closed:
            closing.join(0.001)
    join(closing, driving)
    stand.assert_idle()


def test_what_comes_right_after_a_deadline_is_answered(stand: Stand) -> None:
    """A step that only ends a request whose time is up; the next one comes before the loop looks again."""
    requests = [stand.hand_over([1, 2], 100, timeout=0)]

    def ready() -> bool:
        if requests[-1].finished and len(requests) == 1:
            requests.append(stand.hand_over([3, 4], 5))
        return requests[-1].finished

    stand.loop.run_until(ready)
    assert requests[0].finish_reason == "timeout"
    assert requests[1].generated_ids == answer([3, 4], 5)
    stand.assert_idle()


def test_what_comes_right_after_an_error_of_the_engine_is_answered(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [stand.hand_over([1, 2], 100)]
    step = stand.core.step

    def fail_once() -> bool:
        monkeypatch.setattr(stand.core, "step", step)
        raise ValueError("a defect")

    def ready() -> bool:
        if requests[-1].finished and len(requests) == 1:
            requests.append(stand.hand_over([3, 4], 5))
        return requests[-1].finished

    monkeypatch.setattr(stand.core, "step", fail_once)
    stand.loop.run_until(ready)
    assert [request.finish_reason for request in requests] == ["error", "length"]
    stand.assert_idle()


def test_waiting_for_nothing_is_a_defect_and_not_a_hang(stand: Stand) -> None:
    with pytest.raises(InternalError, match="nothing is left to do"):
        stand.loop.run_until(lambda: False)


def test_an_error_of_the_engine_ends_every_request_and_the_engine_goes_on(stand: Stand) -> None:
    requests = [stand.hand_over([1], 3), stand.hand_over([2], 3)]
    step = stand.core.step
    stand.core.step = lambda: 1 // 0  # type: ignore[method-assign, assignment]
    stand.run(*requests)
    assert [request.finish_reason for request in requests] == ["error"] * 2
    assert all(isinstance(request.error, ZeroDivisionError) for request in requests)
    stand.assert_idle()
    stand.core.step = step  # type: ignore[method-assign]
    request = stand.hand_over([1], 3)
    stand.run(request)
    assert request.generated_ids == answer([1], 3)


# ---- calls that run to their end, and streams ----


def submission(stand: Stand, *args: Any, **kwargs: Any) -> Submission:
    return Submission(None, (stand.request(*args, **kwargs),), 1)


def stream_of(stand: Stand, pieces: deque[StreamPiece], begin: Callable[[], Submission]) -> Stream:
    return Stream(stand.loop, begin, pieces, engine=None)


def test_a_thread_releases_its_team_when_its_requests_have_ended(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may compute then."""
    released: list[bool] = []
    monkeypatch.setattr(loop, "release_team", lambda: released.append(stand.core.has_work))
    run_all(stand.loop, [submission(stand, [1], 3)])
    assert released == [False]
    pieces: deque[StreamPiece] = deque()
    asked = submission(stand, [2], 3, on_piece=pieces.append)
    assert "".join(piece.text for piece in stream_of(stand, pieces, lambda: asked)) == text_of(answer([2], 3))
    assert released == [False, False]
    stand.assert_idle()


def test_a_stream_that_was_closed_has_no_piece(stand: Stand) -> None:
    """It neither starts nor returns the pieces that are left."""
    pieces: deque[StreamPiece] = deque()
    asked = submission(stand, [1], 5, on_piece=pieces.append)
    unused = stream_of(stand, pieces, lambda: asked)
    unused.close()
    assert list(unused) == []
    assert not asked.finished
    begun = stream_of(stand, pieces, lambda: asked)
    next(begun)
    stand.loop.run_until(lambda: pieces)
    begun.close()
    assert list(begun) == []
    assert asked.requests[0].finish_reason == "abort"
    stand.assert_idle()


def test_a_stream_that_a_thread_read_at_a_fork_names_the_fork(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_of(stand, deque(), lambda: submission(stand, [1], 5))
    assert stream._turn.acquire(blocking=False)
    with pytest.raises(RequestError, match="another thread waits"):
        next(stream)
    monkeypatch.setattr(HomeProcess, "left", property(lambda home: True))
    with pytest.raises(EngineError, match="fork"):
        next(stream)


# ---- streams that another thread closes ----


def test_a_stream_that_is_closed_while_it_begins_submits_nothing(stand: Stand) -> None:
    released: list[int] = []

    def begin() -> Submission:
        join(in_thread(stream.close))
        return Submission(None, (stand.request([1, 2], 50),), 1)

    stream = Stream(stand.loop, begin, deque(), lambda: released.append(1), engine=stand)
    assert list(stream) == []
    assert released == [1]
    assert not stand.context.steps
    assert not stand.core.has_work
    stand.assert_idle()


def test_a_stream_that_is_closed_before_its_requests_are_submitted_leaves_none(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, released = deque[StreamPiece](), list[int]()
    submit = stand.loop.submit

    def close_and_submit(requests: Any) -> None:
        join(in_thread(stream.close))
        submit(requests)

    def begin() -> Submission:
        return Submission(None, (stand.request([1, 2], 50, pieces.append),), 1)

    monkeypatch.setattr(stand.loop, "submit", close_and_submit)
    stream = Stream(stand.loop, begin, pieces, lambda: released.append(1), engine=stand)
    assert [piece.finish_reason for piece in stream] == ["abort"]
    assert released == [1]
    assert not stand.context.steps
    stand.loop.cancel([])
    assert not stand.core.has_work
    stand.assert_idle()


# ---- Ctrl+C ----


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_comes_between_two_steps(stand: Stand) -> None:
    def interrupt() -> None:
        if len(stand.context.steps) == 3:
            signal.raise_signal(signal.SIGINT)

    stand.context.before_run = interrupt
    request, other = stand.hand_over([1], 50), stand.hand_over([2], 5)
    with pytest.raises(KeyboardInterrupt):
        stand.run(request)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(stand.context.steps) == 4, "the step was finished"
    assert request.generated_ids == answer([1], 4)
    stand.loop.cancel([request])
    stand.run(other)
    assert other.generated_ids == answer([2], 5)
    stand.assert_idle()


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_while_another_thread_steps(stand: Stand) -> None:
    """The main thread leaves; the step of the other is not touched."""
    stepping, waiting, go_on = threading.Event(), threading.Event(), threading.Event()

    def block() -> None:
        if not stepping.is_set():
            stepping.set()
            assert waiting.wait(WAIT)
            os.kill(os.getpid(), signal.SIGINT)
            assert go_on.wait(WAIT)

    stand.context.before_run = block
    request, other = stand.hand_over([1], 50), stand.hand_over([2], 5)
    driving = in_thread(lambda: stand.run(other))
    assert stepping.wait(WAIT)
    with pytest.raises(KeyboardInterrupt):
        stand.loop.run_until(waiting.set)
    assert not stand.stop.is_set()
    go_on.set()
    join(driving)
    stand.loop.cancel([request])
    assert other.generated_ids == answer([2], 5)
    stand.assert_idle()


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_reaches_a_long_forward_pass(stand: Stand) -> None:
    """The signal arrives while C computes a prompt, which is cancelled before it is done."""

    def compute() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert stand.stop.wait(WAIT)
        raise Cancelled("stopped")

    stand.context.before_run = compute
    request = stand.hand_over([1] * 40, 5)
    with pytest.raises(KeyboardInterrupt):
        stand.run(request)
    assert request.n_computed == 0
    stand.context.before_run = lambda: None
    stand.run(request)
    assert request.generated_ids == answer([1] * 40, 5)


def test_a_handler_of_the_users_own_is_called_at_once_and_stays() -> None:
    seen: list[int] = []

    def mine(signum: int, frame: FrameType | None) -> None:
        seen.append(signum)

    before = signal.signal(signal.SIGINT, mine)
    try:
        with InterruptGuard() as guard:
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]
            assert not guard.hit
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", SIGNALS)
def test_what_a_handler_raises_is_raised_at_the_end_of_the_outermost_guard(number: signal.Signals) -> None:
    def leave(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(signum)

    def nested() -> None:
        outer, inner = InterruptGuard(), InterruptGuard()
        with outer:
            with inner:
                signal.raise_signal(number)
                seen.append(inner.hit)
            seen.append(outer.hit)

    before, seen = signal.signal(number, leave), list[bool]()
    try:
        with pytest.raises(SystemExit) as caught:
            nested()
        assert signal.getsignal(number) is leave
    finally:
        signal.signal(number, before)
    assert seen == [True, True]
    assert caught.value.code == number


@pytest.mark.usefixtures("sigint")
def test_a_second_ctrl_c_while_a_guard_ends_reaches_no_later_call() -> None:
    n_lines = 0

    def run(interrupted: int) -> None:
        nonlocal n_lines
        n_lines = 0

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal n_lines
            if frame.f_code.co_filename == interrupts.__file__ and event == "line":
                n_lines += 1
                if n_lines == interrupted:
                    signal.raise_signal(signal.SIGINT)
            return trace

        before = sys.gettrace()
        with InterruptGuard():
            signal.raise_signal(signal.SIGINT)
            sys.settrace(trace)
        sys.settrace(before)

    for line in range(40):
        before = sys.gettrace()
        with pytest.raises(KeyboardInterrupt):
            run(line)
        sys.settrace(before)
        with InterruptGuard() as guard:
            assert not guard.hit
    assert n_lines < 40, "every line was interrupted"


def test_a_handler_that_installs_another_one_has_its_way() -> None:
    def once(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    before = signal.signal(signal.SIGINT, once)
    try:
        with InterruptGuard():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_signals_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    guard = InterruptGuard()
    seen = []

    def work() -> None:
        with guard:
            seen.append(signal.getsignal(signal.SIGINT))
            compute(lambda: seen.append(signal.getsignal(signal.SIGINT)), lambda: None, at_ctrl_c=True)

    thread = in_thread(work)
    join(thread)
    assert seen == [before, before]


@pytest.mark.usefixtures("sigint")
def test_an_error_under_ctrl_c_is_its_cause() -> None:
    def fail() -> None:
        with InterruptGuard():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("also")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail()
    assert isinstance(caught.value.__cause__, ValueError)
