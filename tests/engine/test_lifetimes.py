"""Nothing waits for ever: after errors of no request, Ctrl+C, `close`, and calls within a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyvelo.engine.request import Request
from pyvelo.errors import Cancelled, ClosedError, EngineError
from pyvelo.trace.format import read_trace
from pyvelo.trace.recorder import recording

from .fakes import answer
from .test_loop import WAIT, Stand, in_thread, join


class Broken(Exception):
    """Exception of a defect."""


class Hard(BaseException):
    """Exception that no code catches."""


@pytest.fixture
def stand() -> Stand:
    return Stand(n_blocks=128)


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
    """The next call of a method raises, after it has done its work."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(owner, name, method)
        method(*args, **kwargs)
        raise error

    monkeypatch.setattr(owner, name, wrapped)


def check_serves(stand: Stand) -> None:
    """The engine answers another thread and holds nothing."""

    def work() -> None:
        request = stand.hand_over([1, 2], 5)
        stand.run(request)
        assert request.generated_ids == answer([1, 2], 5)
        found.append(request)

    found: list[Request] = []
    join(in_thread(work))
    assert found
    stand.assert_idle()


# ---- errors of no request ----


@pytest.mark.parametrize("place", ["settle", "commit", "move", "build", "schedule"])
def test_an_error_of_no_request_ends_all_of_them_once(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    running = stand.hand_over([1] * 40, 20)
    stand.loop.run_until(lambda: running.n_generated > 3)
    waiting = stand.hand_over([2] * 40, 20)
    error, core = Broken(place), stand.core
    owners = {"commit": core.manager, "move": core._mover, "build": core._batches}
    fail_once(monkeypatch, owners.get(place, core), f"_{place}" if place == "schedule" else place, error)
    threads = [in_thread(lambda request=request: stand.run(request)) for request in (running, waiting)]  # type: ignore[misc]
    join(*threads)
    assert [request.finish_reason for request in (running, waiting)] == ["error"] * 2
    assert running.error is waiting.error is error
    check_serves(stand)


def test_an_error_in_settle_without_a_step_leaves_the_engine_free(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = stand.hand_over([1] * 40, 20)
    fail_once(monkeypatch, stand.core, "settle", Broken())
    stand.loop.cancel([])
    assert isinstance(request.error, Broken)
    check_serves(stand)
    fail_once(monkeypatch, stand.core, "settle", Hard())
    with pytest.raises(Hard):
        stand.loop.cancel([])
    check_serves(stand)
    fail_once(monkeypatch, stand.core, "cancel_all", Broken())
    join(in_thread(lambda: stand.loop.close(stand.stop.set)))


@pytest.mark.parametrize("n_swap_blocks", [0, 8])
def test_sequences_are_computed_again_after_an_error(
    monkeypatch: pytest.MonkeyPatch, n_swap_blocks: int
) -> None:
    stand = Stand(n_blocks=4, n_swap_blocks=n_swap_blocks)
    stand.core.costs.favour_swap = lambda n_blocks, n_tokens: True  # type: ignore[method-assign]
    first, second = stand.sequence([1] * 70), stand.sequence([2] * 70)
    for sequence in (first, second):
        stand.run(stand.go_on(sequence, 0))
    assert (first.swapped is not None) == (n_swap_blocks > 0)
    assert second.table is not None
    fail_once(monkeypatch, stand.core, "settle", Broken())
    stand.loop.cancel([])
    assert second.table is None
    for sequence, token in ((first, 1), (second, 2)):
        request = stand.go_on(sequence, 4)
        stand.run(request)
        assert request.generated_ids == answer([token] * 70, 4)
        stand.loop.release(sequence)
    stand.assert_idle()


def test_an_engine_that_cannot_recover_refuses_every_call(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [stand.hand_over([number] * 40, 20) for number in (1, 2, 3)]

    fail_once(monkeypatch, stand.core.manager, "commit", Broken("first"))
    fail_once(monkeypatch, stand.core.manager, "clear", Broken("second"))
    join(*[in_thread(lambda request=request: stand.run(request)) for request in requests])  # type: ignore[misc]
    assert all(str(request.error) == "first" for request in requests)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"broken.*first"):
            stand.loop.submit([])
        with pytest.raises(EngineError, match="broken"):
            stand.loop.run_until(lambda: False)
    stand.loop.cancel(requests)
    join(in_thread(lambda: stand.loop.close(stand.stop.set)))
    with pytest.raises(ClosedError):
        stand.loop.submit([])


def test_an_uncaught_exception_ends_the_call_that_stepped(stand: Stand) -> None:
    """Such as SystemExit out of `progress`: the other requests run the same step again."""
    first, second = stand.hand_over([1] * 40, 5), stand.hand_over([2] * 40, 5)

    def fail() -> None:
        stand.context.before_run = lambda: None
        raise Hard

    stand.context.before_run = fail
    with pytest.raises(Hard):
        stand.run(first)
    stand.run(second)
    assert second.generated_ids == answer([2] * 40, 5)
    assert first.generated_ids == answer([1] * 40, 5)
    stand.assert_idle()


def test_an_uncaught_exception_in_the_middle_of_a_plan_ends_all(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = stand.hand_over([1] * 40, 5), stand.hand_over([2] * 40, 5)
    fail_once(monkeypatch, stand.core._mover, "move", Hard())
    with pytest.raises(Hard):
        stand.run(first)
    assert isinstance(second.error, EngineError)
    assert isinstance(second.error.__cause__, Hard)
    check_serves(stand)


def test_a_listener_that_raises_leaves_the_others_their_tokens(stand: Stand) -> None:
    def fail(piece: object) -> None:
        raise Hard

    first = stand.hand_over([1] * 4, 5, on_piece=fail)
    others = [stand.hand_over([number] * 4, 5) for number in (2, 3)]
    with pytest.raises(Hard):
        stand.run(first)
    assert first.finish_reason == "abort"
    assert [request.n_generated for request in others] == [1, 1]
    stand.run(*others)
    assert [request.generated_ids for request in others] == [answer([n] * 4, 5) for n in (2, 3)]
    stand.assert_idle()


# ---- close and Ctrl+C ----


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_while_close_waits_leaves_no_thread_waiting(stand: Stand) -> None:
    """The thread that has the core ends the requests when it leaves; another `close` does the rest."""
    stepping, go_on = stand.hold_steps()
    running, waiting = stand.hand_over([1], 50), stand.hand_over([2], 50)
    threads = [in_thread(lambda request=request: stand.run(request)) for request in (running, waiting)]  # type: ignore[misc]
    assert stepping.wait(WAIT)
    with pytest.raises(KeyboardInterrupt):
        stand.loop.close(lambda: signal.raise_signal(signal.SIGINT))
    go_on.set()
    join(*threads)
    assert {running.finish_reason, waiting.finish_reason} == {"abort"}
    stand.loop.close(stand.stop.set)
    stand.assert_idle()


@pytest.mark.usefixtures("sigint")
def test_ctrl_c_while_a_visitor_waits_leaves_no_thread_waiting(stand: Stand) -> None:
    """Steps let a visitor have its turn; one that leaves without it must notify the others."""
    stepping, go_on, release = threading.Event(), threading.Event(), threading.Lock()
    release.acquire()

    def block() -> None:
        if not stepping.is_set():
            stepping.set()
            assert go_on.wait(WAIT)

    stand.context.before_run = block
    request = stand.hand_over([1], 20)
    driving = in_thread(lambda: stand.run(request))
    assert stepping.wait(WAIT)
    threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), stand.loop.visit():
        raise AssertionError("the step is still in progress")
    go_on.set()
    join(driving)
    assert request.generated_ids == answer([1], 20)


def test_close_tells_a_run_to_stop_until_it_does(stand: Stand) -> None:
    """A forward pass that is cancelled just before it begins is cancelled again."""
    stepping, told = threading.Event(), threading.Semaphore(0)

    def run() -> None:
        stepping.set()
        for _ in range(3):
            assert told.acquire(timeout=WAIT)
        raise Cancelled("stopped")

    stand.context.before_run = run
    request = stand.hand_over([1], 50)
    driving = in_thread(lambda: stand.run(request))
    assert stepping.wait(WAIT)
    join(in_thread(lambda: stand.loop.close(told.release)), driving)
    assert request.finish_reason == "abort"


def test_a_wait_for_nothing_ends_with_close(stand: Stand) -> None:
    """No request would ever make it ready."""
    stand.loop.close(stand.stop.set)
    with pytest.raises(ClosedError):
        stand.loop.run_until(lambda: False)


# ---- calls within a step ----


@pytest.mark.parametrize("call", ["run_until", "visit", "close"])
def test_a_call_within_a_step_that_would_wait_for_it_is_refused(stand: Stand, call: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "run_until": lambda: stand.loop.run_until(lambda: False),
        "visit": lambda: stand.loop.visit().__enter__(),
        "close": lambda: stand.loop.close(stand.stop.set),
    }

    def within() -> None:
        stand.context.before_run = lambda: None
        with pytest.raises(EngineError, match="step"):
            calls[call]()
        refused.append(call)

    refused: list[str] = []
    stand.context.before_run = within
    request = stand.hand_over([1], 5)
    join(in_thread(lambda: stand.run(request)))
    assert refused == [call]
    assert request.generated_ids == answer([1], 5)
    check_serves(stand)


def test_the_compute_thread_never_waits_for_a_step(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that steps waits for it; a garbage collection may run there, too."""
    monkeypatch.setattr("pyvelo.native.compute._shared", True)

    def within() -> None:
        stand.context.before_run = lambda: None
        with pytest.raises(EngineError, match="step"), stand.loop.visit():
            pass
        refused.append(True)

    refused: list[bool] = []
    stand.context.before_run = within
    request = stand.hand_over([1], 5)
    join(in_thread(lambda: stand.run(request)))
    assert refused == [True]


@pytest.mark.parametrize("way", ["dropped", "closed"])
def test_a_recording_that_is_dropped_within_a_step_ends_with_it(
    stand: Stand, tmp_path: Path, way: str
) -> None:
    """As a garbage collection does it, which runs at any line."""
    run = recording(stand.loop, tmp_path / "run.trace", 64, 512)
    run.__enter__()

    def within() -> None:
        nonlocal run
        stand.context.before_run = lambda: None
        if way == "closed":
            run.__exit__(None, None, None)
        del run

    stand.context.before_run = within
    request = stand.hand_over([1], 5)
    join(in_thread(lambda: stand.run(request)))
    assert stand.core.observer is None
    assert read_trace(tmp_path / "run.trace").steps
    with recording(stand.loop, tmp_path / "next.trace", 64, 512):
        check_serves(stand)
