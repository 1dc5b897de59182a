"""Common part of a server and a batch as processes: event loop, signals, collections, the engine."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

from pyvelo.config import EngineConfig
from pyvelo.engine.async_loop import AsyncEngineLoop, open_engine_loop
from pyvelo.engine.interrupts import InterruptGuard
from pyvelo.threads import in_thread

__all__ = ["Signals", "engine_until_signal", "freeze_loaded", "rare_collections", "run_loop"]

GC_THRESHOLDS = (1_000, 100, 100)
"""A request leaves no cycles to the garbage collector, whose older generations take up to 100 ms: rarely."""

T = TypeVar("T")


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop of its own, of uvloop if that is installed."""
    run: Callable[[Any], Any] = asyncio.run
    with suppress(ImportError):
        import uvloop

        run = uvloop.run
    found: T = run(main)
    return found


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the garbage collector run less often within a block. What a caller froze stays frozen."""
    before, n_frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not n_frozen:
            gc.unfreeze()


def freeze_loaded() -> None:
    """Let no collection look at what is loaded, because it stays."""
    gc.collect()
    gc.freeze()


class Signals:
    """SIGINT, SIGTERM and SIGHUP: the first sets `ended`, each later one calls `again`.

    SIGHUP stays ignored where it is, as under nohup.
    """

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.again: Callable[[], None] = lambda: None

    @contextmanager
    def handled(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Handle the signals within a block."""
        handled = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handled.append(signal.SIGHUP)
        before = {each: signal.getsignal(each) for each in handled}
        for each in handled:
            try:
                loop.add_signal_handler(each, self._hit)
            except NotImplementedError:  # Windows
                signal.signal(each, lambda *_: loop.call_soon_threadsafe(self._hit))
        try:
            yield
        finally:
            for each, handler in before.items():
                with suppress(NotImplementedError):
                    loop.remove_signal_handler(each)
                signal.signal(each, handler)

    def _hit(self) -> None:
        if self.ended.is_set():
            self.again()
        self.ended.set()


@asynccontextmanager
async def engine_until_signal(
    config: EngineConfig, signals: Signals
) -> AsyncIterator[tuple[AsyncEngineLoop, asyncio.Task[Any]] | None]:
    """Open an engine, and close it at the end; handle the signals meanwhile.

    Yields: the engine's loop and a task that ends at the first signal; None if that came during the load.

    Raises: VeloError as `LLM` raises them.
    """
    closed = threading.Event()
    signals.again = closed.set
    # the guard is entered once, and not anew in each call of the engine: nothing but `signals` raises here
    with InterruptGuard(), signals.handled(asyncio.get_running_loop()):
        stopped = asyncio.ensure_future(signals.ended.wait())
        opening = asyncio.ensure_future(open_engine_loop(config, closed))
        await asyncio.wait([opening, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            closed.set()
            await asyncio.wait([opening])
        if closed.is_set() and opening.exception() is not None:
            yield None
            return
        loop = await opening
        try:
            yield loop, stopped
        finally:
            stopped.cancel()
            loop.engine.stop()
            await in_thread(loop.close)
