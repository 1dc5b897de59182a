"""HTTP connections whose heads have bounds of bytes and time, and which can be closed at once."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["HEAD_BYTES", "HEAD_SECONDS", "BoundedProtocol"]

HEAD_BYTES = 1 << 16
"""Longest head of a request: its line and its headers."""
HEAD_SECONDS = 30.0
"""Time for a head to arrive, from the connection on or from the first byte of a later request."""


class BoundedProtocol(HttpToolsProtocol):
    """Connection that ends if the head of a request is too long or too slow.

    The scope's extension `pyvelo.abort` closes the connection at once, whatever waits to be written.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head."""
        super().connection_made(transport)
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes; refuse a head that is too long."""
        super().data_received(data)
        if self._timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._stop_timer()
                self.transport.write(
                    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n"
                )
                self.transport.close()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = {"pyvelo.abort": self.transport.abort}
        self._expect_head()

    def on_headers_complete(self) -> None:
        """End the head of a request."""
        self._stop_timer()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        if self._timer is None:
            self._head_bytes = 0
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
