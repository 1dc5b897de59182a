"""Bounds on what a run holds in memory, and results on their way to the output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pyvelo.batch.output import Output

__all__ = ["Room", "Writer"]

MAX_BYTES = 32 << 20
"""Bytes of rows in progress and of results that are not written; one row may have more."""
MAX_UNWRITTEN = 1 << 20
"""Bytes of results that are written at once."""
WRITE_SECONDS = 0.1
"""Longest time until a result is written."""


class Room:
    """Bounds on the rows in progress, and on the bytes that they and unwritten results take.

    A row is never too long if it is alone.
    """

    def __init__(self, n_rows: int, n_bytes: int = MAX_BYTES) -> None:
        self._n_rows, self._n_bytes = n_rows, n_bytes
        self._rows = self._bytes = 0
        self._waiter: asyncio.Future[None] | None = None

    async def enter(self, size: int) -> None:
        """Wait until a row of so many bytes has room; one task may wait."""
        while self._rows >= self._n_rows or (self._bytes and self._bytes + size > self._n_bytes):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._rows += 1
        self._bytes += size

    def ended(self, size: int, result_size: int) -> None:
        """Count a row of so many bytes that has ended, whose result is not written."""
        self._rows -= 1
        self._changed(result_size - size)

    def written(self, size: int) -> None:
        """Count results that are written."""
        self._changed(-size)

    def _changed(self, n_bytes: int) -> None:
        self._bytes += n_bytes
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Writer:
    """Results on their way to the output. After a write that failed nothing more is written.

    Args:
        ordered: write them in the order of their numbers.
        fail: called with the error of a write that the timer began.
    """

    def __init__(
        self, output: Output, room: Room, ordered: bool, fail: Callable[[BaseException], None]
    ) -> None:
        self._output = output
        self._room = room
        self._ordered = ordered
        self._fail = fail
        self._early: dict[int, bytes] = {}  # results that wait for earlier ones
        self._next = 0
        self._lines: list[bytes] = []
        self._size = 0
        self._is_broken = False
        self._timer: asyncio.TimerHandle | None = None

    def put(self, number: int, line: bytes) -> None:
        """Take the result of a number, from 0 without gaps; it is written soon."""
        if not self._ordered:
            self._push(line)
        else:
            self._early[number] = line
            while (found := self._early.pop(self._next, None)) is not None:
                self._next += 1
                self._push(found)
        if self._size >= MAX_UNWRITTEN:
            self.flush()
        elif self._lines and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WRITE_SECONDS, self._flush_soon)

    def flush(self) -> None:
        """Write what can be written."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines and not self._is_broken:
            size, lines = self._size, b"".join(self._lines)
            self._lines.clear()
            self._size = 0
            try:
                self._output.append(lines)
            except OSError:
                self._is_broken = True
                raise
            self._room.written(size)

    def _push(self, line: bytes) -> None:
        self._lines.append(line)
        self._size += len(line)

    def _flush_soon(self) -> None:
        try:
            self.flush()
        except OSError as error:
            self._fail(error)
