"""How a thread waits for answers: it steps the engine, for everybody, until its own are there."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, TypeVar

from pyvelo.engine.compute import rest
from pyvelo.engine.driver import Driver
from pyvelo.engine.engine import Engine
from pyvelo.engine.intake import Submission
from pyvelo.errors import RequestError
from pyvelo.outputs import StreamPiece, raise_first_error

__all__ = ["Stream", "run_all", "run_steps"]

T = TypeVar("T")


def run_all(driver: Driver, submissions: Sequence[Submission]) -> None:
    """Returns when all have ended; where that is cut short, by Ctrl+C, they are cancelled."""
    requests = [request for submission in submissions for request in submission.requests]
    pending = requests[::-1]

    def ready() -> bool:
        while pending and pending[-1].finished:
            pending.pop()
        return not pending

    with driver.guard:
        try:
            driver.submit(requests)
            driver.drive(ready)
        finally:
            if pending:
                driver.cancel(requests)
            rest()


def run_steps(driver: Driver, steps: Generator[Sequence[Submission], None, T]) -> T:
    """Runs what `steps` asks for, one after the other, and returns what it returns."""
    with driver.guard, closing(steps):
        while True:
            try:
                submissions = next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            run_all(driver, submissions)
            driver.guard.raise_hit()


class Stream(Generator[StreamPiece, None, None]):
    """A generator of what requests append to `pieces`; closing or dropping it cancels them.

    `begin` makes the requests when the first piece is asked for; `release` is called when they have ended, if
    they began. It may run within a garbage collection, so it is a call of C, which takes no lock.
    """

    def __init__(
        self,
        engine: Engine,
        begin: Callable[[], Submission],
        pieces: deque[StreamPiece],
        release: Callable[[], object] | None = None,
    ) -> None:
        self._engine = engine
        self._begin = begin
        self._pieces = pieces
        self._release = release
        self._submission: Submission | None = None
        self._dropped: list[weakref.finalize[..., Stream]] = []
        self._ended = False
        self._turn = threading.Lock()

    def send(self, value: None) -> StreamPiece:
        """Return the next piece.

        Raises:
            StopIteration: the last piece was returned before.
            RequestError: another thread waits for a piece.
            VeloError: the request failed.
        """
        with self._engine.driver.guard:  # whatever is left out of it may be cut short at any line
            if not self._turn.acquire(blocking=False):
                self._engine.driver.home.check()
                raise RequestError("another thread waits for a piece of this stream: use a stream each")
            try:
                return self._next()
            finally:
                self._turn.release()

    def throw(
        self, kind: Any, error: BaseException | object = None, trace: TracebackType | None = None, /
    ) -> StreamPiece:
        """Ends the stream and raises the error."""
        self.close()
        return super().throw(kind, error, trace)

    def close(self) -> None:
        """Cancels what has not ended; may be called again."""
        with self._engine.driver.guard:
            self._end()

    def _next(self) -> StreamPiece:
        driver, pieces = self._engine.driver, self._pieces
        if self._ended:
            raise StopIteration
        try:
            driver.home.check()
            submission = self._submission or self._start()
            if not pieces:
                driver.drive(lambda: pieces or submission.finished)
            driver.guard.raise_hit()
            if pieces:
                return pieces.popleft()
        except BaseException:
            self._end()
            raise
        self._end()
        raise_first_error([submission.output()])
        raise StopIteration

    def _start(self) -> Submission:
        submission = self._submission = self._begin()
        calls: list[tuple[Any, ...]] = [(self._engine.driver.abandon, submission.requests)]
        if self._release is not None:
            calls.append((self._release,))
        for call in calls:
            self._dropped.append(weakref.finalize(self, *call))
            self._dropped[-1].atexit = False
        self._engine.driver.submit(submission.requests)
        return submission

    def _end(self) -> None:
        self._ended = True
        dropped, self._dropped = self._dropped, []
        if self._submission is not None and dropped:
            for finalizer in dropped:
                finalizer.detach()
            self._engine.driver.cancel(self._submission.requests)
            rest()
            if self._release is not None:
                self._release()
