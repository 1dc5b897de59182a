"""C calls that report progress to Python, and the end of the process during such a call."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import ClosedError
from ._ffi import check, ffi

if TYPE_CHECKING:
    from ._velo import CData

__all__ = ["Watcher"]

_calls: list[int] = []
"""Threads of the calls in progress that may call Python."""

_ending = 0
"""The thread that ends the process, if one does."""


class Watcher:
    """Receiver of the progress of a load and of the first run, and of exceptions of its callback.

    Every object that may run the model has a reference, because C has the handle.
    """

    def __init__(self, callback: Callable[[float], bool | None] | None) -> None:
        self.callback = callback
        self.raised: BaseException | None = None
        self.handle: CData = ffi.new_handle(self)
        self.packed = callback is None
        """Whether all later runs make no callback."""

    def call(self, function: Callable[..., int], *args: Any) -> None:
        """Make a C call that may call back. Raise the exception of the callback, or else the error of the
        call.

        Raises:
            ClosedError: the process ends.
        """
        me = threading.get_ident()
        _calls.append(me)
        try:
            if _ending not in (0, me):
                raise ClosedError("the process is ending: no model can be loaded or run now")
            self._check(function(*args))
        finally:
            _calls.remove(me)

    def run(self, function: Callable[..., int], *args: Any) -> None:
        """Make a C call that runs the model, as `call` does until a run has packed all weights."""
        if self.packed:
            self._check(function(*args))
        else:
            self.call(function, *args)
            self.packed = True

    def _check(self, status: int) -> None:
        error, self.raised = self.raised, None
        if error is not None:
            raise error
        check(status)


def _keep(kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
    """Keep an exception from outside of the callback's `try`: a signal handler may run at its first line."""
    watcher: Watcher = ffi.from_handle(trace.tb_frame.f_locals["user"])
    watcher.raised = error


@ffi.def_extern(error=0, onerror=_keep)
def velo_py_progress(value: float, user: CData) -> int:
    watcher: Watcher = ffi.from_handle(user)
    if _ending not in (0, threading.get_ident()):
        return 0
    try:
        return int(watcher.callback is None or watcher.callback(value) is not False)
    except BaseException as error:
        watcher.raised = error
        return 0


def _end_calls() -> None:
    """Cancel the calls of other threads that may call back, and wait for them to end.

    After this, Python ends any thread that requests its lock. In a callback, this would unwind through C++
    and abort the process.
    """
    global _ending
    _ending = threading.get_ident()
    while any(thread != _ending for thread in _calls):
        time.sleep(0.001)


def _forget() -> None:
    """Remove the calls of threads that a forked child does not have."""
    me = threading.get_ident()
    _calls[:] = [thread for thread in _calls if thread == me]


atexit.register(_end_calls)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
