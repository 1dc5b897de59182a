"""Ctrl+C between two steps, never in the middle of one.

Python runs a signal handler at any instruction of the main thread, also between taking a block and noting
which table has it. While the main thread is inside the engine, what a handler raises is kept until the end.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from pyvelo.engine.compute import compute
from pyvelo.engine.wakeup import on_ctrl_c

__all__ = ["InterruptGuard"]

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
