"""The computing thread: a single caller itself, or one compute thread for several callers."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import TypeVar

import pytest

from pyvelo.native import compute as module
from pyvelo.native.compute import compute, release_team

T = TypeVar("T")

WAIT = 60.0  # seconds after which a test is taken to hang
COMPUTE_THREAD = "pyvelo-compute"


class Impatient(Exception):
    """Exception of a user's own signal handler."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Reset the module to a process without any computation."""
    monkeypatch.setattr(module, "_owner", None)
    monkeypatch.setattr(module, "_shared", False)
    return module


@pytest.fixture
def shared(fresh: ModuleType) -> None:
    """Set the module to a process in which several threads have computed."""
    fresh._shared = True


def name() -> str:
    return compute(lambda: threading.current_thread().name, lambda: None)


def elsewhere(function: Callable[[], T]) -> T:
    """Return the result of `function` in another thread, which ends then."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(function()), name="elsewhere")
    thread.start()
    thread.join(WAIT)
    return results[0]


def test_a_single_thread_computes_itself() -> None:
    here = threading.current_thread().name
    assert [name(), name()] == [here, here]


def test_two_threads_use_the_compute_thread() -> None:
    assert name() == threading.current_thread().name
    assert elsewhere(name) == COMPUTE_THREAD
    assert name() == COMPUTE_THREAD


def test_after_a_release_another_thread_may_compute() -> None:
    for _ in range(2):
        assert name() == threading.current_thread().name
        release_team()
        assert elsewhere(lambda: (name(), release_team())[0]) == "elsewhere"


def test_only_the_owner_releases_the_team() -> None:
    name()
    elsewhere(release_team)
    assert elsewhere(name) == COMPUTE_THREAD


def test_a_thread_that_has_ended_owns_no_team() -> None:
    assert elsewhere(name) == "elsewhere"
    assert name() == threading.current_thread().name


@pytest.mark.usefixtures("shared")
def test_every_caller_gets_the_same_thread() -> None:
    seen = {elsewhere(lambda: compute(threading.get_ident, lambda: None)) for _ in range(4)}
    assert len(seen) == 1
    assert threading.get_ident() not in seen


@pytest.mark.parametrize("several", [False, True])
def test_errors_reach_the_caller(fresh: ModuleType, several: bool) -> None:
    fresh._shared = several

    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        compute(fail, lambda: None)


@pytest.mark.usefixtures("shared")
def test_an_exception_of_a_handler_is_raised_after_the_end() -> None:
    """The arrays of a step belong to the forward pass until it has ended."""
    stop, events = threading.Event(), []

    def handler(signum: int, frame: FrameType | None) -> None:
        raise Impatient

    def run() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(WAIT)
        events.append("ended")

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(Impatient):
            compute(run, stop.set)
        events.append("raised")
    finally:
        signal.signal(signal.SIGINT, before)
    assert events == ["ended", "raised"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("several", [False, True])
def test_a_forked_child_computes_in_its_own_thread(fresh: ModuleType, several: bool) -> None:
    """A child has neither the compute thread nor the team of its parent."""
    fresh._shared = several
    name()
    child = os.fork()
    if child == 0:
        os._exit(0 if name() == COMPUTE_THREAD else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("shared")
@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there are no timers on this system")
def test_an_interrupted_job_that_has_not_begun_is_dropped() -> None:
    """A caller that is interrupted during another caller's job does not wait for it."""
    begun, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def work() -> None:
        begun.set()
        assert go_on.wait(WAIT)

    def handler(signum: int, frame: FrameType | None) -> None:
        raise Impatient

    other = threading.Thread(target=compute, args=(work, lambda: None))
    other.start()
    assert begun.wait(WAIT)
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Impatient):
            compute(lambda: ran.append(1), lambda: pytest.fail("no job has begun"))
    finally:
        signal.signal(signal.SIGALRM, before)
        go_on.set()
    other.join(WAIT)
    compute(lambda: None, lambda: None)
    assert not ran


@pytest.mark.usefixtures("shared")
def test_an_error_keeps_nothing_alive() -> None:
    class Thing:
        pass

    def fail() -> None:
        thing = Thing()
        seen.append(weakref.ref(thing))
        raise ValueError("no")

    seen: list[weakref.ref[Thing]] = []
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no") as caught:
            compute(fail, lambda: None)
        del caught
        compute(lambda: None, lambda: None)
        assert seen[0]() is None
    finally:
        gc.enable()
