"""Recorder of a running engine: it takes the snapshots that `pyvelo.trace.format` writes."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain

from pyvelo.engine.loop import EngineLoop
from pyvelo.engine.request import Request, RequestStatus
from pyvelo.engine.step import EngineCore
from pyvelo.errors import ConfigError, EngineError, TraceError, shown
from pyvelo.kv.pool import BlockTable
from pyvelo.trace.format import (
    Arrived,
    Finished,
    Preempted,
    Started,
    TraceEvent,
    TraceHeader,
    TraceWriter,
)
from pyvelo.trace.observer import CoreObserver

__all__ = ["Tracer", "recording"]


@contextmanager
def recording(loop: EngineLoop, path: str | os.PathLike[str], block_bytes: int, n_ctx: int) -> Iterator[None]:
    """Record the engine to `path` within the context, whichever thread steps it.

    Raises:
        ConfigError: another recording is in progress, or no file can have this path.
        ClosedError: the engine was closed.
        TraceError: the file cannot be written; raised at the start or at the end.
    """
    loop.check_open()
    lifetime, tracer, wait = _Lifetime(), None, True
    try:
        with loop.guard, _writing(path), loop.visit() as core:
            loop.check_open()
            tracer = Tracer(core, path, block_bytes, n_ctx, lifetime)
        yield
    except GeneratorExit:  # perhaps from a garbage collection, at any line of any thread
        wait = False
        raise
    finally:
        with loop.guard, _writing(path):
            if tracer is not None:
                _end(loop, tracer, wait)


@contextmanager
def _writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise TraceError for an error of the operating system."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise TraceError(f"the recording cannot be written to {shown(path)}: {reason}") from error


class _Lifetime:
    """Object that exists as long as its recording is wanted."""


def _end(loop: EngineLoop, tracer: Tracer, wait: bool) -> None:
    """End a recording: now if `wait`, or else at the end of the step in progress."""
    try:
        with loop.visit(wait):
            tracer.detach()
    except EngineError:
        tracer.abandon()
        return
    except BaseException:
        tracer.close()
        raise
    tracer.close()


class Tracer:
    """Observer of a core that writes a trace to `path` until `detach`.

    It never raises within a step: an error of the disk ends the recording, and `close` raises it. Once
    closed, or after `lifetime` was deleted, it disconnects from the core with the next snapshot.
    """

    def __init__(
        self,
        core: EngineCore,
        path: str | os.PathLike[str],
        block_bytes: int,
        n_ctx: int,
        lifetime: object | None = None,
    ) -> None:
        core.settle()  # disconnects a tracer that has ended
        if core.observer is not None:
            raise ConfigError("this engine is being recorded already: end the other recording first")
        manager = core.manager
        header = TraceHeader(manager.n_blocks, manager.block_size, block_bytes, n_ctx, manager.swap.n_blocks)
        self._writer = TraceWriter(path, header)
        self._core = core
        self._start = core.clock()
        self._failure: Exception | None = None
        self._closed = False
        self._is_wanted: Callable[[], object] = (lambda: self) if lifetime is None else weakref.ref(lifetime)
        self._requests = _Requests()
        self._observer = CoreObserver(core, self._record)
        try:
            core.settle()
        except BaseException:
            self._observer.disconnect()
            self._writer.close()
            raise

    def detach(self) -> None:
        """Write the last snapshot and disconnect from the core. Call it between two steps."""
        self._core.settle()
        self._observer.disconnect()

    def abandon(self) -> None:
        """End the recording at the next snapshot, without writing it."""
        self._closed = True

    def close(self) -> None:
        """Close the file. Raise the error that ended the recording, if any."""
        self._closed = True
        self._writer.close()
        if self._failure is not None:
            raise self._failure

    def _record(self, waiting: Sequence[Request], running: Sequence[Request]) -> None:
        """Write a snapshot, unless the recording has ended."""
        if self._closed or self._failure is not None or self._is_wanted() is None:
            self._observer.disconnect()
            with suppress(OSError):  # `close` raises it
                self._writer.close()
            return
        published, evicted = self._observer.take()
        tables = self._observer.owned(running)
        try:
            self._writer.write(
                self._core.clock() - self._start,
                {owner: (table.blocks, self._stored(table)) for owner, table in tables},
                {r.number: host.blocks for r in waiting if (host := r.sequence.swapped) is not None},
                published,
                [*evicted, *self._requests.new_events(waiting, running)],
            )
        except (OSError, ValueError) as error:  # ValueError: the file was closed meanwhile
            self._failure = error

    def _stored(self, table: BlockTable) -> int:
        """Return the tokens in the blocks of a table; a token counts once in each group of layers."""
        size = self._core.manager.block_size
        return sum(max(0, table.n_tokens - first * size) for first in table.firsts)


class _Requests:
    """Requests of the last snapshot, for the events until the next."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Request, bool]] = {}  # not ended, and whether they run
        self._first: dict[bytes, int] = {}  # the first request with a block, by the block's hash

    def new_events(self, waiting: Iterable[Request], running: Iterable[Request]) -> list[TraceEvent]:
        """Return the events since the last call. Ends come first: a next turn may start alike."""
        events = [event for owner in list(self._open) for event in self._changes(owner)]
        for request in chain(waiting, running):
            for one in (request, *request.followers):
                if one.number not in self._open and not one.finished:
                    self._open[one.number] = one, False
                    events.append(self._arrived(one))
                    events += self._changes(one.number)
        return events

    def _changes(self, owner: int) -> list[TraceEvent]:
        request, ran = self._open[owner]
        runs = request.status is RequestStatus.RUNNING
        self._open[owner] = request, runs
        events: list[TraceEvent] = []
        if not ran and (runs or (request.finished and request.n_generated)):
            events.append(Started(owner, request.n_cached or 0))
        if request.finished:
            events.append(Finished(owner, request.n_generated, str(request.finish_reason)))
            self._remember(request, len(request.tokens))
            del self._open[owner]
        elif ran and not runs:
            events.append(Preempted(owner, request.sequence.swapped is not None))
        return events

    def _arrived(self, request: Request) -> Arrived:
        hashes, size = request.hashes, request.hashes.block_size
        like = n_alike = 0
        for index in range(request.n_prompt // size):
            first = self._first.get(hashes.block_hash(index))
            if first is None:
                break
            like, n_alike = first, index + 1
        self._remember(request, request.n_prompt)
        return Arrived(request.number, request.n_prompt, request.max_new, like, n_alike * size)

    def _remember(self, request: Request, n_tokens: int) -> None:
        for index in range(n_tokens // request.hashes.block_size):
            self._first.setdefault(request.hashes.block_hash(index), request.number)
