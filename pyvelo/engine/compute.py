"""The one thread of this process that loads weights and runs forward passes.

OpenMP keeps a team of threads for every thread that ever computed (packing weights counts). Once the teams
together outnumber the cores it lets all of them sleep at every barrier: decode of a small model then runs at
half its speed. So whoever steps an engine, its forward pass runs here; and while it does, the caller waits
in Python, where signals are handled.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

__all__ = ["compute"]

T = TypeVar("T")

PATIENCE = 0.1  # seconds; a signal that comes just before a wait begins is handled after this

_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None


def compute(function: Callable[[], T], cancel: Callable[[], None]) -> T:
    """Runs `function`; returns what it returns, raises what it raises.

    What a signal handler raises meanwhile is raised too, but not before `function` has ended, which `cancel`
    asks it to do soon.
    """
    done: Future[T] = Future()
    try:
        _submit(done, function)
        while not done.done():
            wait([done], PATIENCE)
        return done.result()
    except BaseException:
        if not done.cancel() and not done.done():  # it has begun
            cancel()
            _outlast(done)
        raise


def _submit(done: Future[T], function: Callable[[], T]) -> None:
    global _executor
    with _lock:
        if _executor is None:
            _executor = ThreadPoolExecutor(1, thread_name_prefix="pyvelo-compute")
        _executor.submit(_run, done, function)


def _run(done: Future[T], function: Callable[[], T]) -> None:
    if done.set_running_or_notify_cancel():
        try:
            result = function()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)


def _outlast(done: Future[T]) -> None:
    """Waits, whatever else is raised."""
    while not done.done():
        try:
            wait([done])
        except BaseException:
            continue


def _forget() -> None:
    """A forked child has the executor, but not its thread."""
    global _executor, _lock
    _executor, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
