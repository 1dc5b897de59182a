"""Ctrl+C reaches the current action, and no later one."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from pyvelo.native.compute import RETRY_SECONDS, on_ctrl_c

WAIT = 60.0  # seconds after which a test is taken to hang


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    """Handle the signal in Python without an exception."""
    before = signal.signal(signal.SIGINT, lambda signum, frame: None)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_action_is_called_until_the_context_ends() -> None:
    calls = threading.Semaphore(0)
    with on_ctrl_c(calls.release):
        signal.raise_signal(signal.SIGINT)
        for _ in range(3):
            assert calls.acquire(timeout=WAIT)


def test_a_signal_does_not_reach_the_next_action() -> None:
    called, late = threading.Event(), threading.Event()
    with on_ctrl_c(called.set):
        signal.raise_signal(signal.SIGINT)
        assert called.wait(WAIT)
    with on_ctrl_c(late.set):
        time.sleep(4 * RETRY_SECONDS)
    assert not late.is_set()


def test_a_signal_at_the_end_of_an_action_is_discarded() -> None:
    late: list[None] = []
    for _ in range(300):
        with on_ctrl_c(lambda: None):
            signal.raise_signal(signal.SIGINT)
        with on_ctrl_c(lambda: late.append(None)):
            time.sleep(0.0005)
    assert not late


def test_a_context_that_raises_ends_too() -> None:
    with pytest.raises(ZeroDivisionError), on_ctrl_c(lambda: None):
        raise ZeroDivisionError
    called = threading.Event()
    with on_ctrl_c(called.set):
        signal.raise_signal(signal.SIGINT)
        assert called.wait(WAIT)


def test_an_existing_wakeup_descriptor_stays() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    called = threading.Event()
    before = signal.set_wakeup_fd(theirs.fileno())
    try:
        with on_ctrl_c(called.set):
            signal.raise_signal(signal.SIGINT)
            assert ours.recv(16) == bytes([signal.SIGINT])
        assert signal.set_wakeup_fd(before) == theirs.fileno()
    finally:
        signal.set_wakeup_fd(before)
        ours.close()
        theirs.close()
    assert not called.is_set()
