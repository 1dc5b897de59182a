"""Lines of a file, and rows of an input, read in parts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from io import FileIO
from typing import Any

from pyvelo.batch.rows import MAX_LINE, Row, parse_row

__all__ = ["Lines", "read_rows"]

CHUNK = 1 << 18
"""Bytes of the input that are read at once."""


class Lines:
    """Lines of a file that is read in parts.

    Args:
        longest: bytes from which on a line is dropped.
    """

    def __init__(self, longest: int = MAX_LINE) -> None:
        self._longest = longest
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes | None]:
        """Return the lines that end in a part of the file, without their ends; None for one too long."""
        first, *more = data.split(b"\n")
        self._push(first)
        found = []
        for part in more:
            found.append(self._take())
            self._push(part)
        return found

    def end(self) -> list[bytes | None]:
        """Return the last line, if it has no end."""
        return [self._take()] if self._size else []

    def _push(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._longest:
            self._parts.clear()
        else:
            self._parts.append(part)

    def _take(self) -> bytes | None:
        line = None if self._size > self._longest else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        return line


async def read_rows(file: FileIO) -> AsyncGenerator[Row, None]:
    """Yield the rows of a file, a pipe or a terminal; a line of white space alone is none."""
    lines, number = Lines(), 0
    while data := await _in_daemon(lambda: file.read(CHUNK)):
        for line in lines.feed(data):
            number += 1
            if line is None or (line and not line.isspace()):
                yield parse_row(number, line)
    for line in lines.end():
        if line is None or not line.isspace():
            yield parse_row(number + 1, line)


async def _in_daemon(call: Callable[[], Any]) -> Any:
    """Run a call in a thread of its own, which does not keep the process from its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def finish(result: Any, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result = error = None
        try:
            result = call()
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, name="pyvelo-read", daemon=True).start()
    return await future
