"""Choice of the one thread that loads weights and runs forward passes, and its cancellation at Ctrl+C.

OpenMP keeps a team of threads for every thread that has ever computed, also for packing weights. If all teams
have more threads than the machine has cores, GCC's OpenMP sleeps at every barrier, and a small model decodes
at half its speed. So only one team exists. The thread that computes first owns it until it releases it, and
calls C itself. If another thread computes before that, a compute thread runs all work from then on: a team
that changes its owner in every step would be created again each time.

While the main thread is in C, Python runs signal handlers only after C returns. But Python writes the
signal's number to a descriptor at once. A thread reads it and tells C to stop (`on_ctrl_c`).

Every step uses this code, so it uses plain locks: a Future takes three times as long to pass work on.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from ..errors import OutOfMemory
from .library import release_threads

__all__ = ["compute", "in_main_thread", "is_compute_thread", "on_ctrl_c", "release_team", "start_thread"]

RETRY_SECONDS = 0.05  # seconds; a run that starts just after a cancel ignores it

T = TypeVar("T")

WAIT_SECONDS = 0.1  # seconds; a signal just before a wait is handled after this


class _Job(Generic[T]):
    """Call for the compute thread. A thread that locks `claim` runs or drops it. The end unlocks `ended`."""

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

    def wait_for_end(self) -> None:
        """Wait for the end, even if a signal handler raises."""
        while not self.done:
            try:
                self.ended.acquire(timeout=WAIT_SECONDS)
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
_owner: threading.Thread | None = None  # owns the team
_shared = False  # the compute thread runs all work
_jobs: SimpleQueue[_Job[Any]] | None = None  # its queue, once it runs
_worker: threading.Thread | None = None


def compute(function: Callable[[], T], cancel: Callable[[], None], *, at_ctrl_c: bool = False) -> T:
    """Call `function` in this thread or in the compute thread. Return or raise its result.

    An exception of a signal handler is raised after `function` has ended. In the compute thread, `cancel`
    asks it to end soon.

    Args:
        function: makes the C call.
        cancel: makes `function` end soon.
        at_ctrl_c: call `cancel` at Ctrl+C, too, if this is the main thread.
    """
    with on_ctrl_c(cancel) if at_ctrl_c and in_main_thread() else nullcontext():
        if _take_team():
            return function()
        job = _Job(function)
        try:
            _queue().put(job)
            while not job.ended.acquire(timeout=WAIT_SECONDS):
                pass
        except BaseException:
            if not job.claim.acquire(blocking=False) and not job.done:  # it has begun
                cancel()
                job.wait_for_end()
            raise
        return job.outcome()


def in_main_thread() -> bool:
    """Return whether this is the main thread, the only one that runs signal handlers."""
    return threading.get_ident() == threading.main_thread().ident


def release_team() -> None:
    """Release the team, if this thread owns it, for another thread."""
    global _owner
    if _owner is threading.current_thread():
        release_threads()
        _owner = None


def is_compute_thread() -> bool:
    """Return whether this is the compute thread. A thread waits for it, so it must not wait for a step."""
    return _worker is not None and _worker.ident == threading.get_ident()


def _take_team() -> bool:
    """Return whether this thread owns the team and computes itself."""
    global _owner, _shared
    me = threading.current_thread()
    with _lock:
        if not _shared:
            if _owner is None or _owner is me or not _owner.is_alive():
                _owner = me
                return True
            _start_worker()  # if it cannot be started, the owner goes on
            _shared = True
    release_team()
    return False


def start_thread(thread: threading.Thread) -> None:
    """Start a thread; raise OutOfMemory if the system gives none."""
    try:
        thread.start()
    except RuntimeError as error:
        raise OutOfMemory(
            f"the thread {thread.name} cannot be started: raise the limits of memory and processes"
        ) from error


def _queue() -> SimpleQueue[_Job[Any]]:
    """Return the queue of the compute thread."""
    with _lock:
        return _start_worker()


def _start_worker() -> SimpleQueue[_Job[Any]]:
    """Start the compute thread on first use, with `_lock` held; return its queue."""
    global _jobs, _worker
    if _jobs is None:
        jobs: SimpleQueue[_Job[Any]] = SimpleQueue()
        # a daemon: each caller waits for its job, so nothing runs here when the process ends
        worker = threading.Thread(target=_work, args=(jobs,), name="pyvelo-compute", daemon=True)
        start_thread(worker)
        _jobs, _worker = jobs, worker
    return _jobs


def _work(jobs: SimpleQueue[_Job[Any]]) -> None:
    while True:
        jobs.get().run()


def _forget() -> None:
    """Forget the compute thread and the team: a forked child has neither, and OpenMP would wait for them."""
    global _jobs, _lock, _owner, _shared
    _shared = _shared or _owner is not None
    _jobs, _owner, _lock = None, None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class _SignalThread:
    """Thread that runs the current `action` at Ctrl+C."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._action: Callable[[], None] | None = None
        self._turn = 0
        self._reader, self.writer = socket.socketpair()
        with ExitStack() as opened:
            opened.enter_context(self._reader)
            opened.enter_context(self.writer)
            self._ready = opened.enter_context(selectors.DefaultSelector())
            self._reader.setblocking(False)
            self.writer.setblocking(False)
            self._ready.register(self._reader, selectors.EVENT_READ)
            threading.Thread(target=self._read, name="pyvelo-ctrl-c", daemon=True).start()
            opened.pop_all()

    def begin(self, action: Callable[[], None]) -> None:
        with self._lock:
            self._turn += 1
            self._action = action

    def end(self) -> None:
        """Remove the action. Discard a signal that has come, so the next action does not get it."""
        with self._lock:
            self._action = None
            self._signals()

    def _read(self) -> None:
        while self._ready.select():
            with self._lock:  # a signal belongs to the current turn
                hit, turn = signal.SIGINT in self._signals(), self._turn
            while hit and self._act(turn):
                time.sleep(RETRY_SECONDS)

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


_signal_thread: _SignalThread | None = None


@contextmanager
def on_ctrl_c(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` at Ctrl+C, at once and in another thread, and again until the context ends.

    Use it in the main thread. Python's handler runs as usual, when it can. Nothing is called if an event loop
    already has the wakeup descriptor, which it keeps, or if no thread or no descriptor is left.
    """
    thread = _started_signal_thread()
    if thread is None:
        yield
        return
    thread.begin(action)  # before the descriptor is set: a signal in between finds the action
    other = signal.set_wakeup_fd(thread.writer.fileno(), warn_on_full_buffer=False)
    if other != -1:
        signal.set_wakeup_fd(other)
    try:
        yield
    finally:
        if other == -1:
            signal.set_wakeup_fd(-1)
        thread.end()


def _started_signal_thread() -> _SignalThread | None:
    global _signal_thread
    if _signal_thread is None:
        with suppress(OSError, RuntimeError):
            _signal_thread = _SignalThread()
    return _signal_thread


def _forget_signal_thread() -> None:
    """Forget the thread, which a forked child does not have."""
    global _signal_thread
    _signal_thread = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_signal_thread)
