"""Engine loop for threads: a thread that waits for an answer steps the engine for all requests."""

from __future__ import annotations

import threading
from collections import abc, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from pyvelo.engine.interrupts import HomeProcess, InterruptGuard
from pyvelo.engine.output import Submission, outputs_of
from pyvelo.engine.request import Request, Sequence
from pyvelo.engine.step import EngineCore
from pyvelo.errors import ClosedError, EngineError, InternalError, RequestError
from pyvelo.finalizer import Finalizer
from pyvelo.keywords import NotCopied
from pyvelo.native.compute import is_compute_thread, release_team
from pyvelo.outputs import StreamPiece

__all__ = ["EngineLoop", "Read", "Stream", "run_all", "run_steps"]

T = TypeVar("T")
Read = Callable[[StreamPiece], StreamPiece]
"""Adds something to a piece of a stream."""

AGAIN = 0.05  # seconds; a forward pass that is cancelled just before it begins runs, so cancel it again


class EngineLoop:
    """Turns of threads at an engine core. Thread-safe.

    `_lock` protects the fields below it and is held for moments. `_owner` is the thread that uses the core
    alone, for a step or a visit. Visits and steps take turns, because the thread that stepped last tends to
    step again, and a visitor may return at once.

    An error of a whole step ends all requests, and the core continues with an empty pool
    (`EngineCore.recover`). If that fails too, the engine is broken: each later call except `close` raises
    EngineError. Each method runs under `guard`, so no signal leaves it in a partial state.
    """

    def __init__(self, core: EngineCore, guard: InterruptGuard) -> None:
        self.guard = guard
        self.home = HomeProcess()
        self._core = core
        self._lock = threading.RLock()  # a finalizer may cancel from within any line here
        self._turn = threading.Condition(self._lock)
        self._owner: int | None = None
        self._n_stepping = 0  # threads in `run_until`
        self._n_visiting = 0  # threads that wait in `visit`
        self._visited = False  # the last turn was a visitor's
        self._closed = False
        self._broken: BaseException | None = None
        self.submit_to: Callable[[list[Request]], None] = core.inbox.submit
        """Takes submitted requests; it may hold some until `submit_held`. Must not wait."""
        self.wake: Callable[[], object] = lambda: None
        """Called when held requests have arrived."""
        self.before_wait: Callable[[], object] = lambda: None
        """Called before a thread waits for its turn to step."""
        self.publishers: list[Callable[[], None]] = []
        """Called after each turn, while the core is locked; must not raise."""
        self.abandon, self.abandon_sequence = core.inbox.abandon, core.inbox.abandon_sequence
        """Cancel requests, and free a sequence, at the next turn; C calls, for finalizers must not wait."""

    def submit(self, requests: Iterable[Request]) -> None:
        """Submit requests; raise as `check_open` does."""
        self.home.check()  # in a forked process the lock may be held forever
        with self.guard, self._lock:
            self.check_open()
            self.submit_to(list(requests))

    def submit_held(self, requests: list[Request]) -> None:
        """Submit requests that `submit_to` has held."""
        with self._lock:
            self._core.inbox.submit_held(requests)
            self._turn.notify_all()
        self.wake()

    def check_open(self) -> None:
        """Raise ClosedError after `close`, EngineError in a forked process or if the engine is broken."""
        self.home.check()
        if self._closed:
            raise ClosedError("this engine was closed")
        if self._broken is not None:
            raise EngineError(f"this engine is broken, make a new one: {self._broken!r}") from self._broken

    def run_until(self, ready: Callable[[], object]) -> None:
        """Step the engine, or wait while another thread steps, until `ready()` or Ctrl+C.

        `ready` must become true when the requests that it checks have ended.
        """
        self.home.check()
        with self.guard:
            with self._lock:
                self._n_stepping += 1
            try:
                while self._enter_step(ready):
                    if not (self._step() or ready() or self._closed or self._core.inbox.n_held):
                        raise InternalError("a request is not finished, but nothing is left to do")
            finally:
                with self._lock:
                    self._n_stepping -= 1
                    self._turn.notify_all()

    def cancel(self, requests: Iterable[Request]) -> None:
        """End requests now, or right after the step in progress. Never wait for a step."""
        if not self.home.left:
            with self.guard, self._lock:
                self._core.inbox.cancel(requests)
                self._settle_if_idle()

    def cancel_aborted(self) -> None:
        """End the requests whose parents are aborted, as `cancel` does."""
        if not self.home.left:
            with self.guard, self._lock:
                self._core.inbox.some_aborted = True
                self._settle_if_idle()

    def release(self, sequence: Sequence) -> None:
        """Free what a sequence holds, now or right after the step in progress. Never wait for a step."""
        if not self.home.left:
            with self.guard, self._lock:
                self._core.inbox.release(sequence)
                self._settle_if_idle()

    @contextmanager
    def visit(self, wait: bool = True) -> Iterator[EngineCore]:
        """Lock the core between two steps; raise EngineError in a step if `wait` is False."""
        self.home.check()
        with self.guard:
            self._enter_visit(wait)
            try:
                self._settle()
                yield self._core
            finally:
                self._leave()

    def fail(self, error: BaseException) -> None:
        """End every request with `error`."""
        self.home.check()
        with self.guard:
            self._enter_visit(True)
            try:
                self._recover(error)
            finally:
                self._leave()

    def stop(self, stop_run: Callable[[], None]) -> None:
        """Refuse new requests and end all soon; `stop_run` cancels a forward pass."""
        if not self.home.left:
            with self.guard, self._lock:
                self._closed = True
                if self._owner is not None:
                    stop_run()
                self._settle_if_idle()

    def close(self, stop_run: Callable[[], None]) -> None:
        """Stop, and wait until every request has ended; may be called again."""
        if not self.home.left:
            with self.guard, self._lock:
                self._refuse_within_a_step()
                self.stop(stop_run)
                while self._owner is not None:
                    self.guard.raise_hit()  # the owner of the core ends the requests when it leaves
                    self._turn.wait(AGAIN)
                    if self._owner is not None:
                        stop_run()

    # ---- turns ----

    def _refuse_within_a_step(self) -> None:
        """Raise EngineError if this thread would wait for itself: a finalizer runs at any line of a step."""
        if self._owner == threading.get_ident() or is_compute_thread():
            raise EngineError("this call would wait for the step of the engine that it was made in")

    def _enter_step(self, ready: Callable[[], object]) -> bool:
        """Wait for the turn to step (True), or for `ready()` or Ctrl+C (False)."""
        with self._lock:
            self._refuse_within_a_step()
            while not (ready() or self.guard.hit):
                if self._owner is None:
                    self.check_open()
                    if self._may_step and (not self._n_visiting or self._visited):
                        self._owner, self._visited = threading.get_ident(), False
                        return True
                self.before_wait()
                self._turn.wait(self.guard.patience)
            return False

    @property
    def _may_step(self) -> bool:
        """Whether a step has something to do: not if all requests are held."""
        return not self._closed and (self._core.has_work or not self._core.inbox.n_held)

    def _enter_visit(self, wait: bool) -> None:
        """Wait for the turn to visit."""
        with self._lock:
            self._refuse_within_a_step()
            if self._owner is not None and not wait:
                raise EngineError("a step is in progress")
            self._n_visiting += 1
            try:
                while self._owner is not None or (self._visited and self._n_stepping and self._may_step):
                    self.guard.raise_hit()
                    self._turn.wait(self.guard.patience)
                self._owner, self._visited = threading.get_ident(), True
            finally:
                self._n_visiting -= 1
                self._turn.notify_all()

    def _step(self) -> bool:
        try:
            return self._core.step()
        except Exception as error:
            self._recover(error)
            return True
        except BaseException as error:
            if self._core.in_doubt:
                self._recover(error)
            raise
        finally:
            self._leave()

    def _settle_if_idle(self) -> None:
        if self._owner is None:
            self._owner = threading.get_ident()
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            try:
                self._settle()
            finally:
                self._owner = None
                self._turn.notify_all()

    def _settle(self) -> None:
        """Drain the inbox; end all requests once closed."""
        try:
            if self._broken is None:
                self._core.cancel_all() if self._closed else self._core.settle()
                for publish in self.publishers:
                    publish()
        except BaseException as error:
            self._recover(error)
            if not isinstance(error, Exception):
                raise

    def _recover(self, error: BaseException) -> None:
        """End every request after an error of a whole step; if that fails, the engine is broken."""
        cause = error
        if not isinstance(cause, Exception):
            cause = EngineError(f"the engine was interrupted: {error!r}")
            cause.__cause__ = error
        try:
            self._core.recover(cause)
        except BaseException:
            self._broken = error


def run_all(loop: EngineLoop, submissions: abc.Sequence[Submission]) -> None:
    """Run requests until all have ended; cancel them if Ctrl+C or an error ends the wait."""
    requests = [request for submission in submissions for request in submission.requests]
    pending = list(requests)

    def ready() -> bool:
        while pending and pending[-1].finished:
            pending.pop()
        return not pending

    with loop.guard:
        try:
            loop.submit(requests)
            loop.run_until(ready)
        finally:
            if pending:
                loop.cancel(requests)
            release_team()


def run_steps(loop: EngineLoop, steps: Generator[abc.Sequence[Submission], None, T]) -> T:
    """Run the submissions that `steps` yields, one after the other; return its result."""
    with loop.guard, closing(steps):
        while True:
            try:
                submissions = next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            run_all(loop, submissions)
            loop.guard.raise_hit()


class Stream(NotCopied, Generator[StreamPiece, None, None]):
    """Generator of the pieces that requests append to `pieces`; closing or dropping it cancels them.

    Args:
        begin: makes the requests at the first `next`.
        release: called when the requests have ended, if they began. It may run within a garbage collection,
            so it is a call of C that takes no lock.
        engine: kept alive as long as the stream.
        read: makes of each piece the one that is returned.
    """

    _instead = "its pieces come once; ask for another stream"

    def __init__(
        self,
        loop: EngineLoop,
        begin: Callable[[], Submission],
        pieces: deque[StreamPiece],
        release: Callable[[], object] | None = None,
        *,
        engine: object,
        read: Read | None = None,
    ) -> None:
        self._loop, self._engine = loop, engine
        self._begin = begin
        self._pieces = pieces
        self._release = release
        self._read = read
        self._submission: Submission | None = None
        self._dropped: Finalizer | None = None
        self._ended = False
        self._turn = threading.Lock()

    def send(self, value: None) -> StreamPiece:
        """Return the next piece.

        Raises:
            StopIteration: the last piece was returned before.
            RequestError: another thread waits for a piece.
            VeloError: the request failed.
        """
        with self._loop.guard:  # outside of it a signal may interrupt any line
            if not self._turn.acquire(blocking=False):
                self._loop.home.check()
                raise RequestError("another thread waits for a piece of this stream: use a stream each")
            try:
                return self._next()
            finally:
                self._turn.release()

    def throw(
        self, kind: Any, error: BaseException | object = None, trace: TracebackType | None = None, /
    ) -> StreamPiece:
        """End the stream and raise the error."""
        self.close()
        return super().throw(kind, error, trace)

    def close(self) -> None:
        """Cancel the requests that have not ended; may be called again."""
        with self._loop.guard:
            self._end()

    def _next(self) -> StreamPiece:
        piece = self._wait()
        if piece is not None:
            return piece
        self._end()
        if self._submission is not None:
            outputs_of([self._submission])
        raise StopIteration

    def _wait(self) -> StreamPiece | None:
        """Return the next piece when there is one; None after the last."""
        loop, pieces = self._loop, self._pieces
        if self._ended:
            raise StopIteration
        try:
            loop.home.check()
            submission = self._submission or self._start()
            if not pieces:
                loop.run_until(lambda: pieces or submission.finished)
            loop.guard.raise_hit()
            if pieces:
                return pieces.popleft() if self._read is None else self._read(pieces.popleft())
        except BaseException:
            self._end()
            raise
        return None

    def _start(self) -> Submission:
        submission = self._submission = self._begin()
        abandon = partial(self._loop.abandon, submission.requests)
        self._dropped = Finalizer(self, abandon, *([self._release] if self._release is not None else []))
        if self._ended:  # another thread closed it while the requests were made
            raise StopIteration
        self._loop.submit(submission.requests)
        return submission

    def _end(self) -> None:
        self._ended = True
        if self._submission is not None and self._dropped is not None and self._dropped.detach():
            self._loop.cancel(self._submission.requests)
            release_team()
            if self._release is not None:
                self._release()
