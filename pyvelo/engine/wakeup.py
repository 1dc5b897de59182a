"""Ctrl+C while the main thread is in C, where Python runs no handler before C returns.

Python notes the signal's number in a descriptor at once, whatever the main thread does; a thread that reads
there tells C to stop.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["on_ctrl_c"]

AGAIN = 0.05  # seconds; what is told to stop just before it begins does not hear it


class _Watch:
    """A thread that runs `action`, while there is one, when the signal has come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._action: Callable[[], None] | None = None
        self._turn = 0
        self._reader, self.writer = socket.socketpair()
        self._reader.setblocking(False)
        self.writer.setblocking(False)
        threading.Thread(target=self._read, name="pyvelo-ctrl-c", daemon=True).start()

    def begin(self, action: Callable[[], None]) -> None:
        with self._lock:
            self._turn += 1
            self._action = action

    def end(self) -> None:
        """Nothing is called from now on; a signal that came is not left for the next turn."""
        with self._lock:
            self._action = None
            self._signals()

    def _read(self) -> None:
        ready = selectors.DefaultSelector()
        ready.register(self._reader, selectors.EVENT_READ)
        while ready.select():
            with self._lock:  # a signal is taken in the turn that it came in
                hit, turn = signal.SIGINT in self._signals(), self._turn
            while hit and self._act(turn):
                time.sleep(AGAIN)

    def _act(self, turn: int) -> bool:
        with self._lock:
            if self._action is None or self._turn != turn:
                return False
            self._action()
            return True

    def _signals(self) -> bytes:
        try:
            return self._reader.recv(4096)
        except BlockingIOError:
            return b""


_watch: _Watch | None = None


@contextmanager
def on_ctrl_c(action: Callable[[], None]) -> Iterator[None]:
    """Within it, Ctrl+C has `action` called at once, in another thread, and again until it is left.

    For the main thread. Python's handler runs as ever, when it can. Where an event loop already listens for
    signals, it stays, and nothing is called.
    """
    global _watch
    if _watch is None:
        _watch = _Watch()
    watch = _watch
    watch.begin(action)  # before the descriptor is set, or a signal in between would find nothing to do
    other = signal.set_wakeup_fd(watch.writer.fileno(), warn_on_full_buffer=False)
    if other != -1:
        signal.set_wakeup_fd(other)
    try:
        yield
    finally:
        if other == -1:
            signal.set_wakeup_fd(-1)
        watch.end()


def _forget() -> None:
    """A forked child has the descriptors, but not the thread."""
    global _watch
    _watch = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
