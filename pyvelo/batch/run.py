"""Run of a batch: rows of a file, answered by the application in this process, many at once."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from io import FileIO
from random import Random
from typing import Any

import msgspec

from pyvelo.batch.counts import Counts, count_result
from pyvelo.batch.flow import Room, Writer
from pyvelo.batch.lines import read_rows
from pyvelo.batch.output import Held, Numbers, Output
from pyvelo.batch.rows import Row, duplicate, result_line
from pyvelo.config import EngineConfig
from pyvelo.server.app import App
from pyvelo.server.in_memory import post
from pyvelo.server.process import (
    Signals,
    engine_until_signal,
    freeze_loaded,
    rare_collections,
    run_loop,
)
from pyvelo.server.serving import Serving
from pyvelo.server.settings import Settings

__all__ = ["Batch", "Run", "rows_at_once", "rows_to_answer"]

SHOW_SECONDS = 0.1
"""Time between two looks at the progress."""

_random = Random()
_encode = msgspec.json.Encoder().encode


@dataclass
class Batch:
    """One run of a batch.

    source: the input.
    output, held: the file of the results, and what it holds.
    ordered: results are written in the order of the input.
    show: called with the counts now and then; None: never.
    """

    config: EngineConfig
    settings: Settings
    source: FileIO
    output: Output
    held: Held
    ordered: bool = False
    show: Callable[[Counts], None] | None = None
    counts: Counts = field(default_factory=Counts)

    def run(self) -> Counts:
        """Answer the rows until the input ends, or until SIGINT or SIGTERM.

        Raises:
            OSError: the input cannot be read, or the output cannot be written.
            VeloError: as `LLM` raises them; or the engine broke, and the rest of the rows has no results.
        """
        with rare_collections():
            run_loop(self._main())
        self.output.unwanted = self.counts.interrupted
        return self.counts

    async def _main(self) -> None:
        async with aclosing(rows_to_answer(self.source, self.held, self.counts)) as rows:
            first = await anext(rows, None)
            if first is not None:  # else no model is loaded
                await self._answer(_with_first(first, rows))

    async def _answer(self, rows: AsyncIterator[Row]) -> None:
        async with engine_until_signal(self.config, Signals()) as opened:
            if opened is None:
                self.counts.interrupted = True
                return
            loop, stopped = opened
            # the room is all that bounds the rows that wait
            settings = replace(
                self.settings, max_queue=rows_at_once(self.config), max_queued_tokens=sys.maxsize
            )
            loop.preparer.inline = True
            app = App(Serving(loop, self.config, settings), settings)
            freeze_loaded()
            start = time.monotonic()
            try:
                await Run(self, app, rows).until(stopped)
            finally:
                self.counts.seconds = time.monotonic() - start
                await app.drain(0.0)


async def rows_to_answer(source: FileIO, held: Held, counts: Counts) -> AsyncGenerator[Row, None]:
    """Yield the rows of an input that have no result yet, and count all of them.

    A row with the custom_id of an earlier row has a fault.
    """
    seen = Numbers()
    async with aclosing(read_rows(source)) as rows:
        async for given in rows:
            row = given
            counts.rows += 1
            if row.custom_id is not None:
                key = hash(row.custom_id)
                first = seen.get(key)
                if first is None:
                    seen.add(key, row.number)
                else:
                    row = duplicate(row, first)
            failed = held.failed(row.custom_id, row.number)
            if failed is None:
                yield row
                continue
            counts.skipped += 1
            counts.failed_before += failed
            counts.read_bytes += row.size + 1


async def _with_first(first: Row, rows: AsyncIterator[Row]) -> AsyncIterator[Row]:
    yield first
    async for row in rows:
        yield row


class Run:
    """Rows of a batch in progress."""

    def __init__(self, batch: Batch, app: App, rows: AsyncIterator[Row]) -> None:
        self._batch = batch
        self._rows = rows
        self._app = app
        self._counts = batch.counts
        self._room = Room(rows_at_once(batch.config))
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer = Writer(batch.output, self._room, batch.ordered, self._fail)
        self._tasks: set[asyncio.Task[None]] = set()

    async def until(self, stopped: asyncio.Future[Any]) -> None:
        """Answer all rows; stop when `stopped` is done. What has ended is written in any case."""
        feeding = asyncio.ensure_future(self._feed())
        showing = asyncio.ensure_future(self._show())
        try:
            await asyncio.wait([feeding, stopped, self._failed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = [feeding, showing, *self._tasks]
            for task in left:
                task.cancel()
            await asyncio.wait(left)
            self._writer.flush()
        if self._failed.done():
            self._failed.result()
        if feeding.cancelled():
            self._counts.interrupted = True
        else:
            feeding.result()

    async def _feed(self) -> None:
        """Start the rows as soon as they have room, and wait for them."""
        number = 0
        async for row in self._rows:
            await self._room.enter(row.size)
            task = asyncio.ensure_future(self._answer(number, row))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
            number += 1
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _answer(self, number: int, row: Row) -> None:
        """Answer a row, and pass its result to the writer; raise the error of an engine."""
        request_id = f"{_random.getrandbits(64):016x}"
        if row.fault is not None:
            status, body = row.fault.status, _encode(row.fault.body)
        else:
            answer = await post(self._app, row.url, row.body, request_id)
            status, body = answer.status, answer.body
            if status >= 500:  # of the engine and not of the row: it broke, or the model's file was changed
                self._app.serving.engine.loop.check_open()
                self._app.serving.engine.files.check()
        line = result_line(row, request_id, status, body)
        self._room.ended(row.size, len(line))
        count_result(self._counts, row, status, body)
        self._counts.read_bytes += row.size + 1
        self._writer.put(number, line)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End the run with an error; of several the first counts."""
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _show(self) -> None:
        """Show the progress again and again."""
        while self._batch.show is not None:
            self._batch.show(self._counts)
            await asyncio.sleep(SHOW_SECONDS)


def rows_at_once(config: EngineConfig) -> int:
    """Return the rows in progress: as many wait as can run, also when all that run end in one step."""
    return 2 * config.max_num_seqs
