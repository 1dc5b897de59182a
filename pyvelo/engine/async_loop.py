"""Engine loop for asyncio: a thread that steps the engine, threads that prepare requests, and streams."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import abc, deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from pyvelo.config import EngineConfig
from pyvelo.engine.engine import Engine, open_engine
from pyvelo.engine.output import Submission, outputs_of
from pyvelo.engine.request import Request, Sequence
from pyvelo.errors import Cancelled, ClosedError, InternalError, OutOfMemory, VeloError
from pyvelo.finalizer import Finalizer
from pyvelo.native.compute import release_team, start_thread
from pyvelo.outputs import StreamPiece
from pyvelo.sampling import SamplingParams

__all__ = ["AsyncEngineLoop", "Prepare", "Preparer", "in_thread", "open_engine_loop", "run_in_thread"]

T = TypeVar("T")

MAX_THREADS = 4
"""Threads that prepare requests."""

Prepare = Callable[[Callable[[StreamPiece], None]], Submission]
"""Function that makes requests; it receives the callback for their pieces."""


async def in_thread(call: Callable[[], T]) -> T:
    """Run a call in a thread, as asyncio.to_thread; raise as `_submitted` does."""
    submit = partial(asyncio.get_running_loop().run_in_executor, None)
    return await asyncio.wrap_future(_submitted(submit, partial(contextvars.copy_context().run, call)))


async def run_in_thread(call: Callable[[], T]) -> T:
    """Run a call in a thread, to its end however often the task is cancelled meanwhile."""
    turn = asyncio.ensure_future(in_thread(call))
    try:
        return await asyncio.shield(turn)
    except asyncio.CancelledError:
        while not turn.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([turn])
        if not turn.cancelled():
            turn.exception()  # asyncio would log one that is never looked at
        raise


def _submitted(submit: Callable[..., object], call: Callable[[], T], has_thread: bool = False) -> Future[T]:
    """Submit a call to an executor.

    Args:
        submit: submits a function with its arguments.
        has_thread: the executor has a thread already, so no other one is needed.

    Raises:
        OutOfMemory: no thread can be started.
        ClosedError: the executor was shut down, or the interpreter ends.
    """
    future: Future[T] = Future()
    try:
        submit(_run, future, call)
    except RuntimeError as error:
        refused = "start new thread" in str(error)
        if not (refused and has_thread):
            future.cancel()  # the executor may keep the call for its next thread
            if not refused:
                raise ClosedError(f"no thread takes this call any more: {error}") from error
            raise OutOfMemory(
                "no thread can be started for this call: raise the limits of memory and processes"
            ) from error
    return future


def _run(future: Future[T], call: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
            del future, call  # the error keeps this frame


class AsyncEngineLoop:
    """Thread that steps the engine while it has requests, and wakes the event loop once a step.

    The `async` methods belong to the event loop; the others are thread-safe. A task that is cancelled or a
    stream that is closed ends its requests within a step. Closing or dropping the loop ends the thread and
    closes the engine.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.preparer = Preparer(engine)
        self._worker = _Worker(self.preparer, engine, loop)
        self._thread = threading.Thread(target=self._worker.run, name="pyvelo-engine", daemon=True)
        start_thread(self._thread)
        Finalizer(self, partial(self._worker.wake.put, False))

    # ---- in the event loop ----

    async def run(self, submissions: abc.Sequence[Submission]) -> None:
        """Run requests until all have ended."""
        streams = [_Stream(self._worker, submission) for submission in submissions]
        try:
            self._submit(streams)
            for stream in streams:
                while await stream.next() is not None:
                    pass
        finally:
            self._cancel(streams)

    async def pieces(self, prepare: Prepare, params: SamplingParams) -> AsyncGenerator[StreamPiece, None]:
        """Yield the pieces of requests; raise the error of a request that failed."""
        outbox = self._worker.outbox
        make = partial(prepare, lambda piece: outbox.append((stream, piece)))
        stream: _Stream = _Stream(self._worker, await self.preparer.run(make, [params]))
        try:
            self._submit([stream])
            while (piece := await stream.next()) is not None:
                yield piece
        finally:
            self._cancel([stream])
        outputs_of([stream.submission])

    async def run_steps(self, steps: Generator[abc.Sequence[Submission], None, T]) -> T:
        """Run the submissions that `steps` yields, one after the other; return its result."""
        try:
            while True:
                # in a thread, because it may wait for the core
                outcome = await run_in_thread(partial(_next, steps))
                if isinstance(outcome, _Done):
                    return outcome.result
                await self.run(outcome)
        finally:
            steps.close()

    def _submit(self, streams: abc.Sequence[_Stream]) -> None:
        requests = [request for stream in streams for request in stream.submission.requests]
        with self.engine.loop.guard:
            self._worker.streams.update(streams)
            self.engine.loop.submit(requests)
            self._worker.wake.put(True)

    def _cancel(self, streams: abc.Sequence[_Stream]) -> None:
        requests = [r for stream in streams for r in stream.submission.requests if not r.finished]
        with self.engine.loop.guard:
            self._worker.streams.difference_update(streams)
            if requests:
                self.engine.loop.cancel(requests)
                self._worker.deliver_soon()

    # ---- in any thread ----

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End the requests of these ids, as `Engine.abort` does."""
        self.engine.abort(request_ids)
        self._worker.deliver_soon()

    def release(self, sequence: Sequence) -> None:
        """Cancel the request of a sequence and free its blocks, after the step in progress."""
        self.engine.loop.release(sequence)
        self._worker.deliver_soon()

    def close(self) -> None:
        """End every request and wait for the thread."""
        self.preparer.close()
        try:
            self.engine.close()
        finally:
            self._worker.wake.put(False)
        self._thread.join()


class _Worker:
    """State of the thread, apart from the AsyncEngineLoop, which the user may drop."""

    def __init__(self, preparer: Preparer, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.preparer = preparer
        self.engine = engine
        self.outbox: deque[tuple[_Stream, StreamPiece | None]] = deque()
        self.streams: set[_Stream] = set()  # streams that wait; changed in the event loop only
        self.wake: SimpleQueue[bool] = SimpleQueue()  # True: there is work; False: end
        self._loop = loop
        self._loop_closed = False  # the loop is closed

    def run(self) -> None:
        """Step while there is work, until the end; then close the engine and end the preparer's threads."""
        try:
            while self._wait():
                self._drive()
        finally:
            self.preparer.close()
            self.engine.close()
            self.deliver_soon(self._wake_all)

    def deliver_soon(self, deliver: Callable[[], None] | None = None) -> None:
        """Let the event loop deliver the pieces in the outbox."""
        if self.outbox or deliver is not None:
            try:
                self._loop.call_soon_threadsafe(deliver or self._deliver)
            except RuntimeError:  # the event loop is closed
                self._loop_closed = True
                self.outbox.clear()

    def _wait(self) -> bool:
        """Wait for work; return False at the end of the thread."""
        if self.wake.empty():
            release_team()
        go_on = self.wake.get()
        while go_on and not self.wake.empty():
            go_on = self.wake.get()
        return go_on

    def _drive(self) -> None:
        loop = self.engine.loop
        try:
            loop.run_until(self._ready)
            if self._loop_closed:
                with loop.visit() as core:
                    core.cancel_all()
            loop.check_open()
        except ClosedError:
            pass  # every request has ended
        except BaseException as error:
            self._fail(error)
        self.deliver_soon()

    def _fail(self, error: BaseException) -> None:
        """End every request with `error`, so that no task waits forever."""
        loop = self.engine.loop
        try:
            loop.check_open()
            loop.fail(error)
            loop.check_open()
        except VeloError:
            self.deliver_soon(self._wake_all)

    def _ready(self) -> bool:
        self.deliver_soon()
        return self._loop_closed or not self.wake.empty() or not self.engine.core.has_work

    def _deliver(self) -> None:
        while self.outbox:
            stream, piece = self.outbox.popleft()
            stream.take(piece)

    def _wake_all(self) -> None:
        """Wake the streams that wait, when the engine is closed or broken."""
        self._deliver()
        for stream in self.streams:
            stream.take(None)


class _Stream:
    """Pieces of requests in the event loop; None ends them."""

    def __init__(self, worker: _Worker, submission: Submission) -> None:
        self.submission = submission
        self._pieces: asyncio.Queue[StreamPiece | None] = asyncio.Queue()
        self._worker = worker
        self._n_open = len(submission.requests)
        for request in submission.requests:
            request.on_end = self._end

    def _end(self, request: Request) -> None:
        self._n_open -= 1
        if self._n_open == 0:
            self._worker.outbox.append((self, None))

    def take(self, piece: StreamPiece | None) -> None:
        self._pieces.put_nowait(piece)

    async def next(self) -> StreamPiece | None:
        """Return the next piece, or None after the last; raise the error that broke or closed the engine."""
        piece = await self._pieces.get()
        if piece is None and not self.submission.finished:
            self._worker.engine.loop.check_open()
            raise InternalError("a stream has ended before its requests")
        return piece


@dataclass(frozen=True)
class _Done(Generic[T]):
    """A generator has returned."""

    result: T


def _next(steps: Generator[abc.Sequence[Submission], None, T]) -> abc.Sequence[Submission] | _Done[T]:
    """Return the next submissions of `steps`; a StopIteration cannot leave a thread of asyncio."""
    try:
        return next(steps)
    except StopIteration as end:
        return _Done(end.value)


class Preparer:
    """Threads that prepare requests; waiting for a grammar takes none of them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._closed = False
        self._has_thread = False
        self._threads = ThreadPoolExecutor(MAX_THREADS, "pyvelo-prepare")

    async def run(self, make: Callable[[], T], params: Iterable[SamplingParams] = ()) -> T:
        """Wait until the grammars of `params` are compiled, then return the result of `make` in a thread.

        A task that is cancelled stops waiting at once; the result is dropped.

        Raises:
            ClosedError: `close` was called, or the interpreter ends.
            OutOfMemory: there is no thread, and none can be started.
        """
        await self._compile(params)
        if self._closed:
            raise ClosedError("this engine was closed")
        turn = _submitted(self._threads.submit, make, self._has_thread)
        self._has_thread = True
        return await asyncio.wrap_future(turn)

    def close(self) -> None:
        """End the threads when their work is done."""
        self._closed = True
        self._threads.shutdown(wait=False)

    async def _compile(self, params: Iterable[SamplingParams]) -> None:
        """Wait for compiled grammars, each up to its deadline; `InputProcessor` finds them in the cache."""
        processor = self._engine.processor
        waits: list[tuple[asyncio.Future[Any], float | None]] = []
        try:
            for each in {id(each): each for each in params}.values():
                future: Future[Any] | None = processor.compiling(each)
                if future is not None:
                    waits.append((asyncio.wrap_future(future), each.timeout))
            start = processor.clock()
            for wait, timeout in waits:
                left = None if timeout is None else max(0.0, start + timeout - processor.clock())
                await asyncio.wait([wait], timeout=left)
                if wait.done():
                    wait.result()
        finally:
            for wait, _ in waits:
                wait.cancel()  # also keeps asyncio from logging the error of one that has ended


async def open_engine_loop(config: EngineConfig, closed: threading.Event) -> AsyncEngineLoop:
    """Open the engine in a thread, for this event loop; raise ClosedError if `closed` is set meanwhile."""
    loop = asyncio.get_running_loop()
    engine = await in_thread(partial(_open, config, closed))
    try:
        return AsyncEngineLoop(engine, loop)
    except BaseException:
        engine.close()
        raise


def _open(config: EngineConfig, closed: threading.Event) -> Engine:
    try:
        engine = open_engine(config, closed)
    except Cancelled as error:
        if not closed.is_set():
            raise
        raise ClosedError("this engine was closed while it was loaded") from error
    if closed.is_set():
        engine.close()
        raise ClosedError("this engine was closed while it was loaded")
    return engine
