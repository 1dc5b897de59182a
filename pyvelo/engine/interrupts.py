"""Signals and forks: Ctrl+C acts between two steps, and an engine refuses calls after a fork.

Python runs a signal handler at any instruction of the main thread, even between the allocation of a block
and its entry in a table. While the main thread is in the engine, exceptions of handlers are deferred.

A fork copies the memory of a process, but not the threads that hold locks, so an engine belongs to the
process that opened it (`HomeProcess`).
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Protocol

from pyvelo.errors import EngineError
from pyvelo.native.compute import in_main_thread

__all__ = ["HomeProcess", "InterruptGuard", "Load", "keep_in_forks"]

_n_forks = 0  # between the first process and this one


class HomeProcess:
    """Process that made an object."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._n_forks = _n_forks

    @property
    def left(self) -> bool:
        """Whether this process was forked from it."""
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


NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM")
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))


class _Signals:
    """Signal handlers of the main thread, whose exceptions are deferred while it is in an engine.

    One object for all engines. Only the main thread changes it.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self._depth = 0  # guards that the main thread has entered
        self._thread = 0
        self._before: dict[int, Any] = {}
        self._handler = self._handle  # one object, to compare with

    def enter(self) -> None:
        if not self._depth:
            self.raised = None  # of a guard that another signal ended
            self._thread = threading.get_ident()
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler) and handler is not self._handler:
                    self._before[number] = handler
                    signal.signal(number, self._handler)
        self._depth += 1

    def leave(self, error: BaseException | None) -> None:
        """Raise the exception of a handler, unless it is `error`, which is being raised."""
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        raised, self.raised = self.raised, None
        self._restore()
        try:
            if raised is not None and raised is not error:
                raise raised from error
        finally:
            del raised, error  # or the exception would keep this frame, and the frame it

    def forget(self) -> None:
        """Leave the guards of other threads in a forked process."""
        if self._depth and self._thread != threading.get_ident():
            self._depth, self.raised = 0, None
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) is self._handler:  # else a handler installed another one
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        handler = self._before[number]
        if not self._depth:  # the guard was being entered or left
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
    """Context manager that defers exceptions of signal handlers, such as KeyboardInterrupt, to its end.

    It acts in the main thread only; other threads may use it at the same time. Guards of several engines may
    be nested: the outermost guard raises.
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
        """Whether a handler has raised in this thread, which should then leave the guard soon."""
        return _signals.raised is not None and in_main_thread()

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl+C has come in this thread; another signal lets it finish its work."""
        return isinstance(_signals.raised, KeyboardInterrupt) and in_main_thread()

    def hit_of_this_thread(self) -> Callable[[], bool]:
        """Return a function that any thread may call: whether a handler has raised in this thread."""
        mine = in_main_thread()
        return lambda: mine and _signals.raised is not None

    def raise_hit(self) -> None:
        """Raise the exception of a handler in this thread."""
        if _signals.raised is not None and in_main_thread():
            raise _signals.raised from None

    @property
    def patience(self) -> float | None:
        """Seconds after which a waiting thread should check `hit` again; None: never."""
        return 0.1 if in_main_thread() else None


class Load:
    """Conditions that end a load early: an event, or Ctrl+C in the thread that loads."""

    def __init__(self, guard: InterruptGuard, stop: threading.Event) -> None:
        self.guard, self.stop = guard, stop
        self._hit = guard.hit_of_this_thread()

    def ended(self) -> bool:
        """Return whether the load should end; any thread may ask."""
        return self.stop.is_set() or self._hit()


class _Keeps(Protocol):
    """Something with files that a forked process must not free: another thread may have used it."""

    files: Any


_engines: set[weakref.ref[_Keeps]] = set()
_kept: list[_Keeps] = []


def keep_in_forks(engine: _Keeps) -> None:
    """Keep an engine in each process that is forked, without its files."""
    _engines.add(weakref.ref(engine, _engines.discard))


def _keep() -> None:
    _kept.extend(engine for reference in _engines.copy() if (engine := reference()) is not None)
    for engine in _kept:
        engine.files.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep)
