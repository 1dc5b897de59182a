"""Who loads weights and runs forward passes: one thread at a time, so that one team of OpenMP threads lives.

OpenMP keeps a team for every thread that ever computed (packing weights counts). Once the teams together
outnumber the cores, GCC's lets all of them sleep at every barrier: decode of a small model then runs at half
its speed. So the thread that computes first has the team, until it rests, and calls C itself. Where another
one comes meanwhile, both hand their work to a compute thread from then on, for a team that changed hands at
every step would be made anew each time.

While the main thread is in C, Python runs no handler before C returns. But it notes the signal's number in a
descriptor at once; a thread that reads there tells C to stop (`on_ctrl_c`).

A step passes through here, so it is made of bare locks: a Future takes three times as long to hand work over.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from .library import release_threads

__all__ = ["compute", "in_main_thread", "is_compute_thread", "on_ctrl_c", "rest"]

AGAIN = 0.05  # seconds; what is told to stop just before it begins does not hear it

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


def compute(function: Callable[[], T], cancel: Callable[[], None], *, at_ctrl_c: bool = False) -> T:
    """Call `function`, here or in the compute thread; return or raise what it does.

    What a signal handler raises meanwhile is raised too, but not before `function` has ended; in the compute
    thread, `cancel` asks it to do so soon.

    Args:
        at_ctrl_c: call `cancel` at Ctrl+C, too, if this is the main thread.
    """
    with on_ctrl_c(cancel) if at_ctrl_c and in_main_thread() else nullcontext():
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


def in_main_thread() -> bool:
    """Whether this is the main thread, which alone runs signal handlers."""
    return threading.get_ident() == threading.main_thread().ident


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


def _forget_watch() -> None:
    """A forked child has the descriptors, but not the thread."""
    global _watch
    _watch = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_watch)
