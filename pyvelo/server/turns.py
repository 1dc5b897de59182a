"""Turns of the event loop: one request begins its work in each."""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Turns"]


class Turns:
    """Queue of requests that begin their work, so that a burst of them does not delay /health and streams."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return in a turn of the event loop in which no other call returns, in the order of the calls."""
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken = True
            loop.call_soon(self._next)
            return
        waiter = loop.create_future()
        self._waiting.append(waiter)
        await waiter

    def _next(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # it is cancelled otherwise
                waiter.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._taken = False
