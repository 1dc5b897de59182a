"""Who loads weights and runs forward passes: one thread at a time, so that one team of OpenMP threads lives.

OpenMP keeps a team for every thread that ever computed (packing weights counts). Once the teams together
outnumber the cores, GCC's lets all of them sleep at every barrier: decode of a small model then runs at half
its speed. So the thread that computes first has the team, until it rests, and calls C itself. Where another
one comes meanwhile, both hand their work to a compute thread from then on, for a team that changed hands at
every step would be made anew each time.

A step passes through here, so it is made of bare locks: a Future takes three times as long to hand work over.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from .library import release_threads

__all__ = ["compute", "is_compute_thread", "rest"]

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
_owner: threading.Thread | None = None  # has the team
_shared = False  # work goes to the compute thread
_jobs: SimpleQueue[_Job[Any]] | None = None  # its queue, once it runs
_worker: threading.Thread | None = None


def compute(function: Callable[[], T], cancel: Callable[[], None]) -> T:
    """Runs `function`, here or in the compute thread; returns what it returns, raises what it raises.

    What a signal handler raises meanwhile is raised too, but not before `function` has ended; in the compute
    thread, `cancel` asks it to do so soon.
    """
    if _take_team():
        return function()
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


def rest() -> None:
    """Says that this thread computes no more for now: another one may have the team."""
    global _owner
    if _owner is threading.current_thread():
        release_threads()
        _owner = None


def is_compute_thread() -> bool:
    """Whether the compute thread asks: another thread waits for it, so it must not wait for a step."""
    return _worker is not None and _worker.ident == threading.get_ident()


def _take_team() -> bool:
    """Whether this thread is to compute itself."""
    global _owner, _shared
    me = threading.current_thread()
    with _lock:
        if not _shared:
            if _owner is None or _owner is me or not _owner.is_alive():
                _owner = me
                return True
            _shared = True
    rest()
    return False


def _queue() -> SimpleQueue[_Job[Any]]:
    """Where jobs go; the thread is started with the first of them."""
    global _jobs, _worker
    with _lock:
        if _jobs is None:
            _jobs = SimpleQueue()
            # a daemon: whoever called waits for it, so nothing runs here when the process ends
            _worker = threading.Thread(target=_work, args=(_jobs,), name="pyvelo-compute", daemon=True)
            _worker.start()
        return _jobs


def _work(jobs: SimpleQueue[_Job[Any]]) -> None:
    while True:
        jobs.get().run()


def _forget() -> None:
    """A forked child has neither the thread of the queue nor those of a team, for which OpenMP would wait."""
    global _jobs, _lock, _owner, _shared
    _shared = _shared or _owner is not None
    _jobs, _owner, _lock = None, None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
