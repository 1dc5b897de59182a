"""Ctrl+C between two steps, never in the middle of one.

Python raises KeyboardInterrupt at any instruction of the main thread, also between taking a block and noting
who took it. While the main thread drives the engine the signal is only remembered.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from pyvelo.engine.compute import compute
from pyvelo.engine.wakeup import on_ctrl_c

__all__ = ["InterruptGuard"]


class InterruptGuard:
    """A context manager that holds Ctrl+C back and raises KeyboardInterrupt at its end.

    It acts in the main thread only, and only where nobody has installed a handler of their own; other threads
    may use it at the same time. What runs under `call` is ended by `cancel` at the signal.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self._cancel = cancel
        self._active = False
        self._hit = False

    def __enter__(self) -> InterruptGuard:
        if _in_main():
            self._active = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if self._active:
                self._hit = False
                signal.signal(signal.SIGINT, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active and _in_main():
            self._active = False
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._hit:
                self._hit = False
                raise KeyboardInterrupt from error

    @property
    def hit(self) -> bool:
        """Whether the signal came to this thread, which should leave the guard soon."""
        return self._hit and _in_main()

    @property
    def patience(self) -> float | None:
        """Seconds after which this thread should look at `hit` again when it waits; None: it need not."""
        return 0.1 if self._active and _in_main() else None

    def call(self, function: Callable[[], None]) -> None:
        """Runs a forward pass; `cancel` ends it when the signal comes, if this is the main thread."""
        if not _in_main():
            compute(function, self._cancel)
            return
        with on_ctrl_c(self._cancel):
            compute(function, self._cancel)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self._hit = True


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()
