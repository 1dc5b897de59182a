"""Signals and forks: Ctrl+C between two steps, never in the middle of one, and calls after a fork.

Python runs a signal handler at any instruction of the main thread, also between taking a block and noting
which table has it. While the main thread is inside the engine, what a handler raises is kept until the end.

While the main thread is in C, Python runs no handler before C returns. But it notes the signal's number in a
descriptor at once; a thread that reads there tells C to stop (`on_ctrl_c`).

A fork copies the memory of a process, but not the threads that hold locks: an engine belongs to the process
that made it (`HomeProcess`).
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
from types import FrameType, TracebackType
from typing import Any

from pyvelo.errors import EngineError
from pyvelo.native.compute import compute

__all__ = ["HomeProcess", "InterruptGuard", "on_ctrl_c"]

AGAIN = 0.05  # seconds; what is told to stop just before it begins does not hear it

_n_forks = 0  # between the first process and this one


class HomeProcess:
    """The process that made an object."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._n_forks = _n_forks

    @property
    def left(self) -> bool:
        """Whether this is a process that was forked from it."""
        return self._n_forks != _n_forks

    def check(self) -> None:
        """Raise EngineError in a forked process."""
        if self.left:
            raise EngineError(
                f"this engine belongs to process {self._pid}, and process {os.getpid()} was forked from it: "
                f'make an engine in this process, or start it with "spawn"'
            )


def _count() -> None:
    global _n_forks
    _n_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count)


SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))


class _Signals:
    """Handlers of the main thread, called as ever while it is inside an engine; what they raise is kept.

    One for all engines. Only the main thread changes it.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self._depth = 0  # guards that the main thread is inside
        self._thread = 0
        self._before: dict[int, Any] = {}
        self._handler = self._handle  # one object, to be recognised

    def enter(self) -> None:
        if not self._depth:
            self.raised = None  # left by a guard that another signal has ended
            self._thread = threading.get_ident()
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler) and handler is not self._handler:
                    self._before[number] = handler
                    signal.signal(number, self._handler)
        self._depth += 1

    def leave(self, error: BaseException | None) -> None:
        """Raise what a handler has raised, unless it is `error`, which is on its way already."""
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        raised, self.raised = self.raised, None
        self._restore()
        if raised is not None and raised is not error:
            raise raised from error

    def forget(self) -> None:
        """In a forked process: leave guards that the thread which forked was not inside."""
        if self._depth and self._thread != threading.get_ident():
            self._depth, self.raised = 0, None
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) is self._handler:  # else a handler has installed another one
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        handler = self._before[number]
        if not self._depth:  # a signal came while the guard was entered or left
            signal.signal(number, handler)
            handler(number, frame)
            return
        try:
            handler(number, frame)
        except BaseException as error:
            self.raised = self.raised or error.with_traceback(None)


_signals = _Signals()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_signals.forget)


class InterruptGuard:
    """A context manager that keeps what signal handlers raise, such as KeyboardInterrupt, until its end.

    It acts in the main thread only; other threads may use it at the same time. Guards may be nested, also
    those of several engines: the outermost one raises. What runs under `call` is ended by `cancel` at Ctrl+C.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel

    def __enter__(self) -> InterruptGuard:
        if _in_main():
            _signals.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _in_main():
            _signals.leave(error)

    @property
    def hit(self) -> bool:
        """Whether a handler has raised in this thread, which should leave the guard soon."""
        return _signals.raised is not None and _in_main()

    def raise_hit(self) -> None:
        """Raise what a handler has raised in this thread."""
        if _signals.raised is not None and _in_main():
            raise _signals.raised

    @property
    def patience(self) -> float | None:
        """Seconds after which this thread should look at `hit` again when it waits; None: it need not."""
        return 0.1 if _in_main() else None

    def call(self, function: Callable[[], None]) -> None:
        """Runs a forward pass; `cancel` ends it when the signal comes, if this is the main thread."""
        if not _in_main():
            compute(function, self._cancel)
            return
        with on_ctrl_c(self._cancel):
            compute(function, self._cancel)


def _in_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


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
