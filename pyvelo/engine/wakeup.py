"""Ctrl+C while the main thread is in C, where Python runs no handler before C returns.

Python notes the signal's number in a descriptor at once, whatever the main thread does; a thread that reads
there tells C to stop.
"""

from __future__ import annotations

import os
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
        self.lock = threading.Lock()
        self.action: Callable[[], None] | None = None
        self._reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        threading.Thread(target=self._read, name="pyvelo-ctrl-c", daemon=True).start()

    def _read(self) -> None:
        while signals := self._reader.recv(64):
            if signal.SIGINT in signals:
                while self._act():
                    time.sleep(AGAIN)

    def _act(self) -> bool:
        with self.lock:
            if self.action is not None:
                self.action()
            return self.action is not None


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
    other = signal.set_wakeup_fd(_watch.writer.fileno(), warn_on_full_buffer=False)
    if other != -1:
        signal.set_wakeup_fd(other)
        yield
        return
    _watch.action = action
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        with _watch.lock:
            _watch.action = None


def _forget() -> None:
    """A forked child has the descriptors, but not the thread."""
    global _watch
    _watch = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
