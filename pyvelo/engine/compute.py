"""The one thread of this process that loads weights and runs forward passes.

OpenMP keeps a team of threads for every thread that ever computed (packing weights counts). Once the teams
together outnumber the cores it lets all of them sleep at every barrier: decode of a small model then runs at
half its speed. So whoever steps an engine, its forward pass runs here; and while it does, the caller waits
in Python, where signals are handled.

A step passes through here, so it is made of bare locks: a Future takes three times as long to hand work over.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

__all__ = ["compute"]

T = TypeVar("T")

PATIENCE = 0.1  # seconds; a signal that comes just before a wait begins is handled after this


class _Job(Generic[T]):
    """A call on its way. Who gets hold of `claim` runs it, or drops it; `ended` is let go when it is done."""

    __slots__ = ("claim", "done", "ended", "error", "function", "result")

    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.claim = threading.Lock()
        self.ended = threading.Lock()
        self.ended.acquire()
        self.done = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        if self.claim.acquire(blocking=False):
            try:
                self.result = self.function()
            except BaseException as error:
                self.error = error
            self.done = True
            self.ended.release()

    def outlast(self) -> None:
        """Waits for the end, whatever a signal handler raises meanwhile."""
        while not self.done:
            try:
                self.ended.acquire(timeout=PATIENCE)
            except BaseException:
                continue

    def outcome(self) -> T:
        error, self.error = self.error, None
        if error is None:
            return self.result  # type: ignore[return-value]
        try:
            raise error
        finally:
            del error  # or it would keep this frame, and the frame it


_lock = threading.Lock()
_jobs: SimpleQueue[_Job[Any]] | None = None


def compute(function: Callable[[], T], cancel: Callable[[], None]) -> T:
    """Runs `function`; returns what it returns, raises what it raises.

    What a signal handler raises meanwhile is raised too, but not before `function` has ended, which `cancel`
    asks it to do soon.
    """
    job = _Job(function)
    try:
        _queue().put(job)
        while not job.ended.acquire(timeout=PATIENCE):
            pass
    except BaseException:
        if not job.claim.acquire(blocking=False) and not job.done:  # it has begun
            cancel()
            job.outlast()
        raise
    return job.outcome()


def _queue() -> SimpleQueue[_Job[Any]]:
    """Where jobs go; the thread is started with the first of them."""
    global _jobs
    with _lock:
        if _jobs is None:
            _jobs = SimpleQueue()
            # a daemon: whoever called waits for it, so nothing runs here when the process ends
            threading.Thread(target=_work, args=(_jobs,), name="pyvelo-compute", daemon=True).start()
        return _jobs


def _work(jobs: SimpleQueue[_Job[Any]]) -> None:
    while True:
        jobs.get().run()


def _forget() -> None:
    """A forked child has the queue, but not its thread."""
    global _jobs, _lock
    _jobs, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
