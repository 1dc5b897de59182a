"""The compute thread: one for all callers, and nobody leaves it before it is done."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from types import FrameType

import pytest

from pyvelo.engine.compute import compute

WAIT = 60.0  # seconds after which a test is taken to hang


class Impatient(Exception):
    """What a user's own handler may raise."""


def test_every_caller_gets_the_same_thread() -> None:
    seen: list[int] = []
    callers = [
        threading.Thread(target=compute, args=(lambda: seen.append(threading.get_ident()), lambda: None))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(WAIT)
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert seen[0] != threading.get_ident()


def test_errors_reach_the_caller() -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        compute(fail, lambda: None)


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
def test_a_forked_child_gets_a_thread_of_its_own() -> None:
    compute(lambda: None, lambda: None)
    child = os.fork()
    if child == 0:
        seen: list[int] = []
        compute(lambda: seen.append(1), lambda: None)
        os._exit(0 if seen else 1)
    assert os.waitpid(child, 0)[1] == 0


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
