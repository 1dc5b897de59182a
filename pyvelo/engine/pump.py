"""The engine's own thread, and how its answers reach an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pyvelo.engine.branch import Branch
from pyvelo.engine.compute import rest
from pyvelo.engine.engine import Engine
from pyvelo.engine.intake import Submission
from pyvelo.engine.request import Request
from pyvelo.outputs import StreamPiece, raise_first_error

__all__ = ["Prepare", "Pump"]

T = TypeVar("T")

Prepare = Callable[[Callable[[StreamPiece], None]], Submission]
"""Makes the requests whose pieces go to what it is given."""


class Pump:
    """Steps the engine while there are requests, and wakes the event loop once for each step.

    What is `async` here, and `n_submitted`, belongs to the event loop; the rest is thread-safe. Whoever stops
    to wait, or to listen, ends its requests within a step.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.outbox: deque[tuple[_Stream, StreamPiece | None]] = deque()
        self.failure: Exception | None = None
        self.n_ended = 0  # counted where requests end: by whoever has the core to itself
        self._n_submitted = 0  # counted in the event loop
        self._loop = loop
        self._work = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="pyvelo-engine", daemon=True)
        self._thread.start()

    # ---- in the event loop ----

    async def run(self, submissions: Sequence[Submission]) -> None:
        """Returns when all have ended."""
        streams = [_Stream(self, submission) for submission in submissions]
        try:
            self._submit(streams)
            for stream in streams:
                while await stream.next() is not None:
                    pass
        finally:
            self._cancel(streams)

    async def pieces(self, prepare: Prepare) -> AsyncGenerator[StreamPiece, None]:
        """What the requests generate, as it comes; raises the error of one that failed."""
        stream = _Stream(self, prepare(lambda piece: self.outbox.append((stream, piece))))
        try:
            self._submit([stream])
            while (piece := await stream.next()) is not None:
                yield piece
        finally:
            self._cancel([stream])
        raise_first_error([stream.submission.output()])

    async def run_steps(self, steps: Generator[Sequence[Submission], None, T]) -> T:
        """Runs what `steps` asks for, one after the other, and returns what it returns."""
        try:
            while True:
                # in a thread: between two steps it may wait for the core
                turn = asyncio.ensure_future(asyncio.to_thread(_next, steps))
                try:
                    outcome = await asyncio.shield(turn)
                except asyncio.CancelledError:
                    await asyncio.wait([turn])
                    raise
                if isinstance(outcome, _Done):
                    return outcome.result
                await self.run(outcome)
        finally:
            steps.close()

    def _submit(self, streams: Sequence[_Stream]) -> None:
        requests = [request for stream in streams for request in stream.submission.requests]
        self.engine.driver.submit(requests)
        self._n_submitted += len(streams)
        self._work.set()

    def _cancel(self, streams: Sequence[_Stream]) -> None:
        requests = [r for stream in streams for r in stream.submission.requests if not r.finished]
        if requests:
            self.engine.driver.cancel(requests)
            self._deliver_soon()

    # ---- in any thread ----

    def let_go(self, branch: Branch) -> None:
        """Ends what runs on a branch and gives back what it holds, after the step in progress."""
        self.engine.driver.let_go(branch)
        self._deliver_soon()

    def close(self) -> None:
        """Ends every request and waits for the thread."""
        self._stopping = True
        self.engine.close()
        self._work.set()
        self._thread.join()
        self._deliver_soon()  # what ended when the thread was gone

    def _run(self) -> None:
        while not self._stopping:
            self._work.wait()
            self._work.clear()
            if self._stopping:
                break
            try:
                self.engine.driver.drive(self._ready)
            except Exception as error:  # a defect: nobody must wait for ever
                self.failure = error
                with self.engine.driver.visit() as core:
                    core.cancel_all()
                self._deliver_soon()
            rest()

    def _ready(self) -> bool:
        self._deliver_soon()
        return self._stopping or self.n_ended >= self._n_submitted

    def _deliver_soon(self) -> None:
        if self.outbox:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody listens any more
                self.outbox.clear()

    def _deliver(self) -> None:
        while self.outbox:
            stream, piece = self.outbox.popleft()
            stream.take(piece)


class _Stream:
    """Requests on their way; their pieces arrive in the event loop. None says that there is no more."""

    def __init__(self, pump: Pump, submission: Submission) -> None:
        self.submission = submission
        self._pieces: asyncio.Queue[StreamPiece | None] = asyncio.Queue()
        self._pump = pump
        self._n_open = len(submission.requests)
        for request in submission.requests:
            request.on_end = self._end

    def _end(self, request: Request) -> None:
        self._n_open -= 1
        if self._n_open == 0:
            self._pump.outbox.append((self, None))
            self._pump.n_ended += 1

    def take(self, piece: StreamPiece | None) -> None:
        self._pieces.put_nowait(piece)

    async def next(self) -> StreamPiece | None:
        """The next piece, or None behind the last; what broke the engine is raised."""
        piece = await self._pieces.get()
        if piece is None and self._pump.failure is not None:
            raise self._pump.failure
        return piece


@dataclass(frozen=True)
class _Done(Generic[T]):
    """A generator has returned."""

    result: T


def _next(steps: Generator[Sequence[Submission], None, T]) -> Sequence[Submission] | _Done[T]:
    """What `steps` asks for next; a StopIteration cannot leave a thread of asyncio."""
    try:
        return next(steps)
    except StopIteration as end:
        return _Done(end.value)
