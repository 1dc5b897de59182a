"""Signals and forks: Ctrl+C between two steps, never in the middle of one, and calls after a fork.

Python runs a signal handler at any instruction of the main thread, also between taking a block and noting
which table has it. While the main thread is inside the engine, what a handler raises is kept until the end.

A fork copies the memory of a process, but not the threads that hold locks: an engine belongs to the process
that made it (`HomeProcess`).
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from pyvelo.errors import EngineError
from pyvelo.native.compute import in_main_thread

__all__ = ["HomeProcess", "InterruptGuard"]

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
    those of several engines: the outermost one raises.
    """

    def __enter__(self) -> InterruptGuard:
        if in_main_thread():
            _signals.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if in_main_thread():
            _signals.leave(error)

    @property
    def hit(self) -> bool:
        """Whether a handler has raised in this thread, which should leave the guard soon."""
        return _signals.raised is not None and in_main_thread()

    def raise_hit(self) -> None:
        """Raise what a handler has raised in this thread."""
        if _signals.raised is not None and in_main_thread():
            raise _signals.raised

    @property
    def patience(self) -> float | None:
        """Seconds after which this thread should look at `hit` again when it waits; None: it need not."""
        return 0.1 if in_main_thread() else None
