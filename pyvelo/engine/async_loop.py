"""Engine loop for asyncio: a thread that steps the engine, threads that prepare requests, and streams."""

from __future__ import annotations

import asyncio
import threading
from collections import abc
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from pyvelo.config import EngineConfig
from pyvelo.engine.engine import Engine, open_engine
from pyvelo.engine.output import Submission, outputs_of
from pyvelo.engine.request import Request, Sequence
from pyvelo.errors import Cancelled, ClosedError, InternalError, VeloError
from pyvelo.finalizer import Finalizer
from pyvelo.native.compute import release_team, start_thread
from pyvelo.outputs import StreamPiece
from pyvelo.sampling import SamplingParams
from pyvelo.threads import Outbox, in_thread, run_in_thread, submit_to

__all__ = [
    "AsyncEngineLoop",
    "NumberedPiece",
    "Prepare",
    "Preparer",
    "RequestStream",
    "open_engine_loop",
]

T = TypeVar("T")

MAX_THREADS = 4
"""Threads that prepare requests."""

Prepare = Callable[[Callable[[StreamPiece], None]], Submission]
"""Function that makes requests; it receives the callback for their pieces."""

NumberedPiece = tuple[int, StreamPiece]
"""Piece, and the number of its prompt in the stream."""


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
        if engine.parts is not None:
            outbox = self._worker.outbox
            engine.loop.wake = partial(self._worker.wake.put, True)
            engine.loop.before_wait = outbox.deliver_soon
            # not before: the event loop would compete with the engine for the interpreter
            engine.core.before_run.append(lambda _: outbox.deliver_in_c())
        Finalizer(self, partial(self._worker.wake.put, False))

    # ---- in the event loop ----

    async def run(self, submissions: abc.Sequence[Submission]) -> None:
        """Run requests until all have ended."""
        stream = RequestStream(self._worker)
        stream.follow(submissions)
        async with aclosing(self.batches(stream)) as batches:
            async for _ in batches:
                pass

    async def pieces(self, prepare: Prepare, params: SamplingParams) -> AsyncGenerator[StreamPiece, None]:
        """Yield the pieces of requests; raise the error of a request that failed."""
        stream = await self.prepare([prepare], [params])
        async with aclosing(self.batches(stream)) as batches:
            async for batch in batches:
                for _, piece in batch:
                    yield piece
        outputs_of(stream.submissions)

    async def prepare(
        self, prepares: abc.Sequence[Prepare], params: abc.Sequence[SamplingParams]
    ) -> RequestStream:
        """Make the requests of several prompts, which `batches` submits."""
        put_out, stream = self._worker.outbox.put, RequestStream(self._worker)

        def make() -> list[Submission]:
            return [prepare(partial(put, number)) for number, prepare in enumerate(prepares)]

        def put(number: int, piece: StreamPiece) -> None:
            put_out(partial(stream.take, (number, piece)))

        stream.follow(await self.preparer.run(make, params))
        return stream

    async def batches(self, stream: RequestStream) -> AsyncGenerator[list[NumberedPiece], None]:
        """Submit requests; yield lists of all pieces that have arrived."""
        try:
            self._submit(stream)
            while batch := await stream.next():
                yield batch
        finally:
            self._cancel(stream)

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

    def _submit(self, stream: RequestStream) -> None:
        with self.engine.loop.guard:
            self._worker.streams.add(stream)
            self.engine.loop.submit(stream.requests)
            self._worker.wake.put(True)

    def _cancel(self, stream: RequestStream) -> None:
        requests = [request for request in stream.requests if not request.finished]
        with self.engine.loop.guard:
            self._worker.streams.discard(stream)
            if requests:
                self.engine.loop.cancel(requests)
                self._worker.outbox.deliver_soon()

    # ---- in any thread ----

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End the requests of these ids, as `Engine.abort` does."""
        self.engine.abort(request_ids)
        self._worker.outbox.deliver_soon()

    def release(self, sequence: Sequence) -> None:
        """Cancel the request of a sequence and free its blocks, after the step in progress."""
        self.engine.loop.release(sequence)
        self._worker.outbox.deliver_soon()

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
        self.outbox = Outbox(loop)
        self.streams: set[RequestStream] = set()  # streams that wait; changed in the event loop only
        self.wake: SimpleQueue[bool] = SimpleQueue()  # True: there is work; False: end

    def run(self) -> None:
        """Step while there is work, until the end; then close the engine and end the preparer's threads."""
        try:
            while self._wait():
                self._drive()
        finally:
            self.preparer.close()
            self.engine.close()
            self.outbox.deliver_then(self._wake_all)

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
            if self.outbox.closed:
                with loop.visit() as core:
                    core.cancel_all()
            loop.check_open()
        except ClosedError:
            pass  # every request has ended
        except BaseException as error:
            self._fail(error)
        self.outbox.deliver_soon()

    def _fail(self, error: BaseException) -> None:
        """End every request with `error`, so that no task waits forever."""
        loop = self.engine.loop
        try:
            loop.check_open()
            loop.fail(error)
            loop.check_open()
        except VeloError:
            self.outbox.deliver_then(self._wake_all)

    def _ready(self) -> bool:
        return self.outbox.closed or not self.wake.empty() or not self.engine.core.has_work

    def _wake_all(self) -> None:
        """Wake the streams that wait, when the engine is closed or broken."""
        for stream in self.streams:
            stream.take(None)


class RequestStream:
    """Requests of several prompts, and their pieces in the event loop; None ends them."""

    def __init__(self, worker: _Worker) -> None:
        self.submissions: abc.Sequence[Submission] = ()
        self._pieces: list[NumberedPiece | None] = []
        self._worker = worker
        self._waiter: asyncio.Future[None] | None = None
        self._n_open = 0

    def follow(self, submissions: abc.Sequence[Submission]) -> None:
        """Take the requests whose end is the stream's end."""
        self.submissions = submissions
        self._n_open = len(self.requests)
        for request in self.requests:
            request.on_end = self._end
        if not self._n_open:
            self._pieces.append(None)

    @property
    def requests(self) -> list[Request]:
        return [request for submission in self.submissions for request in submission.requests]

    @property
    def firsts(self) -> list[Request]:
        """First request of each prompt."""
        return [submission.requests[0] for submission in self.submissions]

    @property
    def backlog(self) -> int:
        """Number of pieces in the queue."""
        return len(self._pieces)

    def _end(self, request: Request) -> None:
        self._n_open -= 1
        if self._n_open == 0:
            self._worker.outbox.put(partial(self.take, None))

    def take(self, piece: NumberedPiece | None) -> None:
        """Append a piece and wake the task that waits."""
        self._pieces.append(piece)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> list[NumberedPiece]:
        """Return the pieces in the queue, [] after the last; raise the error that ended the engine."""
        while not self._pieces:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces = [piece for piece in self._pieces if piece is not None]
        self._pieces = self._pieces[-1:] if self._pieces[-1] is None else []
        if not pieces and not all(submission.finished for submission in self.submissions):
            self._worker.engine.loop.check_open()
            raise InternalError("a stream has ended before its requests")
        return pieces


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
    """Threads that prepare requests; waiting for a grammar takes none of them.

    inline: the event loop prepares them itself, because nothing that waits for it is urgent.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.inline = False
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
        if asked := list(params):
            await self._compile(asked)
        if self._closed:
            raise ClosedError("this engine was closed")
        if self.inline:
            return make()
        turn = asyncio.wrap_future(submit_to(self._threads.submit, make, self._has_thread))
        self._has_thread = True
        try:
            return await turn
        finally:
            del turn  # its error keeps this frame

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
