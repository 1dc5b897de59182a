"""Requests are prepared in threads, so that no prompt and no grammar holds up an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from pyvelo.engine.engine import Engine
from pyvelo.errors import ClosedError
from pyvelo.sampling import SamplingParams

__all__ = ["Preparer"]

T = TypeVar("T")

MAX_THREADS = 4


class Preparer:
    """A few threads for tokenization, of which grammars that compile take none. Dropping it ends them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._threads = ThreadPoolExecutor(MAX_THREADS, "pyvelo-prepare")

    async def run(self, make: Callable[[], T], params: Iterable[SamplingParams] = ()) -> T:
        """Return what `make` makes in a thread, once everything is compiled that `params` name.

        A task that is cancelled meanwhile stops to wait at once; what was made is dropped.

        Raises:
            ClosedError: `close` was called.
        """
        await self._compile(params)
        try:
            turn = self._threads.submit(make)
        except RuntimeError:
            raise ClosedError("this engine was closed") from None
        return await asyncio.wrap_future(turn)

    def close(self) -> None:
        """End the threads when they have nothing left to do."""
        self._threads.shutdown(wait=False)

    async def _compile(self, params: Iterable[SamplingParams]) -> None:
        """Wait for compiled grammars, each up to its deadline; `Intake` finds them kept."""
        intake = self._engine.intake
        waits: list[tuple[asyncio.Future[Any], float | None]] = []
        try:
            for each in {id(each): each for each in params}.values():
                future: Future[Any] | None = intake.compiling(each)
                if future is not None:
                    waits.append((asyncio.wrap_future(future), each.timeout))
            start = intake.clock()
            for wait, timeout in waits:
                left = None if timeout is None else max(0.0, start + timeout - intake.clock())
                await asyncio.wait([wait], timeout=left)
                if wait.done():
                    wait.result()
        finally:
            for wait, _ in waits:
                if not wait.cancel() and not wait.cancelled():
                    wait.exception()  # seen
