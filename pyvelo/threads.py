"""Calls in threads for asyncio, and calls from threads in its event loop."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

from pyvelo.errors import ClosedError, OutOfMemory

__all__ = ["Outbox", "in_thread", "run_in_thread", "submit_to"]

T = TypeVar("T")

FEW = 16
"""Calls that an event loop runs in a fraction of a millisecond."""
LATER = 0.001  # seconds


async def in_thread(call: Callable[[], T]) -> T:
    """Run a call in a thread, as asyncio.to_thread; raise as `submit_to` does."""
    submit = partial(asyncio.get_running_loop().run_in_executor, None)
    return await asyncio.wrap_future(submit_to(submit, partial(contextvars.copy_context().run, call)))


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


def submit_to(submit: Callable[..., object], call: Callable[[], T], has_thread: bool = False) -> Future[T]:
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
        submit(_run, [(future, call)])
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


def _run(job: list[tuple[Future[T], Callable[[], T]]]) -> None:
    """Run the job, and remove it from the list: the executor's frames keep the list as long as an error."""
    future, call = job.pop()
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
            del future, call  # the error keeps this frame


class Outbox:
    """Calls on the way from a thread to an event loop, which runs all of them after one wake-up.

    closed: the event loop is closed, and the calls are dropped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.closed = False
        self._loop = loop
        self._calls: deque[Callable[[], object]] = deque()

    def put(self, call: Callable[[], object]) -> None:
        """Append a call. Thread-safe."""
        self._calls.append(call)

    def deliver_soon(self) -> None:
        """Wake the event loop if there are calls. Thread-safe."""
        if self._calls:
            self._call(self._deliver)

    def deliver_in_c(self) -> None:
        """Wake the event loop, as the thread is about to make a long C call. Thread-safe.

        Many calls run a little later: at once, they would take the processor of the thread before its call
        has begun, and the threads that compute in it would wait.
        """
        if len(self._calls) > FEW:
            self._call(partial(self._loop.call_later, LATER, self._deliver))
        else:
            self.deliver_soon()

    def deliver_then(self, call: Callable[[], object]) -> None:
        """Wake the event loop, which runs the calls and then this one. The outbox does not keep it."""
        self.deliver_soon()
        self._call(call)

    def _call(self, call: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the event loop is closed
            self.closed = True
            self._calls.clear()

    def _deliver(self) -> None:
        while self._calls:
            self._calls.popleft()()
