"""Who computes: the first thread by itself, several through one compute thread."""

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
    """What a user's own handler may raise."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As in a process where nobody has computed yet."""
    monkeypatch.setattr(module, "_owner", None)
    monkeypatch.setattr(module, "_shared", False)
    return module


@pytest.fixture
def shared(fresh: ModuleType) -> None:
    """As in a process where several threads have computed."""
    fresh._shared = True


def name() -> str:
    return compute(lambda: threading.current_thread().name, lambda: None)


def elsewhere(function: Callable[[], T]) -> T:
    """What `function` returns in a thread that is then gone."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(function()), name="elsewhere")
    thread.start()
    thread.join(WAIT)
    return results[0]


def test_a_thread_alone_computes_itself() -> None:
    here = threading.current_thread().name
    assert [name(), name()] == [here, here]


def test_when_a_second_one_comes_both_hand_over() -> None:
    assert name() == threading.current_thread().name
    assert elsewhere(name) == COMPUTE_THREAD
    assert name() == COMPUTE_THREAD


def test_after_a_rest_another_may_compute() -> None:
    for _ in range(2):
        assert name() == threading.current_thread().name
        release_team()
        assert elsewhere(lambda: (name(), release_team())[0]) == "elsewhere"


def test_resting_is_for_the_one_who_computes() -> None:
    name()
    elsewhere(release_team)
    assert elsewhere(name) == COMPUTE_THREAD


def test_who_has_ended_needs_no_rest() -> None:
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
def test_what_a_handler_raises_waits_for_the_end() -> None:
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
@pytest.mark.parametrize("several", [False, True])
def test_a_forked_child_computes_in_a_thread_of_its_own(fresh: ModuleType, several: bool) -> None:
    """Neither the compute thread nor the team of whoever forked comes along."""
    fresh._shared = several
    name()
    child = os.fork()
    if child == 0:
        os._exit(0 if name() == COMPUTE_THREAD else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.usefixtures("shared")
@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there are no timers on this system")
def test_what_has_not_begun_is_dropped() -> None:
    """A caller that is interrupted while another one's work runs does not wait for it."""
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
            compute(lambda: ran.append(1), lambda: pytest.fail("there is nothing to cancel"))
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
