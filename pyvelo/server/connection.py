"""HTTP connections whose heads have bounds of bytes and time, and which can be closed at once."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["HEAD_BYTES", "HEAD_SECONDS", "READ_SECONDS", "BoundedProtocol"]

HEAD_BYTES = 1 << 16
"""Longest head of a request: its line and its headers."""
HEAD_SECONDS = 30.0
"""Time for a head to arrive, from the connection on or from the first byte of a later request."""
MAX_PIPELINED = 8
"""Requests of a connection that are read while the first is answered."""
MOST_OPEN = 128
"""Requests without a whole answer, one more than which ends the connection: one read may bring thousands."""

TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\r\n"
END = b"\r\n\r\n"
"""End of a head."""
UPGRADE = b"\r\nupgrade:"
_UPGRADE = re.compile(UPGRADE, re.IGNORECASE)
READ_SECONDS = 60.0
"""Time after which a connection ends whose client reads nothing of what waits for it."""


class BoundedProtocol(HttpToolsProtocol):
    """Connection that ends if the head of a request is too long or too slow, or if the client does not read.

    The scope's extension `pyvelo.abort` closes the connection at once, whatever waits to be written.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first head.

        uvicorn's own method asks the system for both addresses, which takes longer than all the rest, and
        gives up the interpreter's lock twice. No answer depends on them.
        """
        self.connections.add(self)
        self.transport, self.flow = transport, FlowControl(transport)
        self.server = self.client = None
        self.scheme = "http"
        self._open: deque[RequestResponseCycle] = deque()  # requests without a whole answer, in their order
        self._head_bytes = self._headers_bytes = 0
        self._in_head = True  # or between two requests
        self._held = b""  # end of what came, which may begin a header Upgrade
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._unread = 0
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers; tell the request that is answered, also if others wait behind it."""
        self._stop_timer()
        self._stop_watch()
        for cycle in self._open:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes; refuse a head, or the trailers behind a body, that are too long."""
        self._head_bytes += len(data)
        if self._in_head:
            data, self._held = _without_upgrade(self._held + data)
        if data:
            super().data_received(data)
        if self._head_bytes > HEAD_BYTES:
            if self._timer is not None:
                self.transport.write(TOO_LONG)
            self._stop_timer()
            self.transport.close()
        self._expect_more()

    def _expect_more(self) -> None:
        """End a connection some time after its last answer, also if bytes came that begin no request."""
        answered = self.cycle is not None and self.cycle.response_complete
        if answered and self._timer is None and self.timeout_keep_alive_task is None:
            wait, end = self.timeout_keep_alive, self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(wait, end)

    def _unsupported_upgrade_warning(self) -> None:
        """End a connection whose parser takes what follows for another protocol."""
        self.transport.abort()

    def on_body(self, body: bytes) -> None:
        """Take bytes of a body."""
        self._head_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request, unless the connection has ended."""
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def on_message_complete(self) -> None:
        """End a request."""
        self._head_bytes, self._in_head = 0, True
        super().on_message_complete()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._head_bytes = self._headers_bytes = 0
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = {"pyvelo.abort": self.transport.abort}
        self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header of the head; trailers behind a body are dropped."""
        if self._timer is not None:
            self._headers_bytes += len(name) + len(value)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the head of a request."""
        self._stop_timer()
        self._in_head = False
        while self._open and self._open[0].response_complete:
            self._open.popleft()
        if self._headers_bytes > HEAD_BYTES:  # of one read, which may bring more
            self.transport.write(TOO_LONG)
            self.transport.close()
        elif len(self._open) >= MOST_OPEN:
            self.transport.abort()
        if self.transport.is_closing():
            raise ConnectionAbortedError  # stops the parser
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is None or self.cycle is before:
            return
        self._open.append(self.cycle)
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[method-assign, assignment]
        if len(self._open) <= MAX_PIPELINED:
            self.flow.resume_reading()  # a disconnect is seen by reading only

    def on_response_complete(self) -> None:
        """Begin with the next request; read on unless many wait."""
        super().on_response_complete()
        if len(self.pipeline) >= MAX_PIPELINED:
            self.flow.pause_reading()

    def pause_writing(self) -> None:
        """Watch a client that reads more slowly than the server writes."""
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        """Stop to watch."""
        self._stop_watch()
        super().resume_writing()

    def _watch_reader(self) -> None:
        self._stop_watch()
        self._unread = self.transport.get_write_buffer_size()
        self._watch = self.loop.call_later(READ_SECONDS, self._check_reader)

    def _check_reader(self) -> None:
        """End the connection of a client that has read nothing since the last look."""
        if self.transport.get_write_buffer_size() >= self._unread:
            self.transport.abort()
        else:
            self._watch_reader()

    def _stop_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _expect_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _without_upgrade(data: bytes) -> tuple[bytes, bytes]:
    """Return bytes of a head whose header Upgrade has another name, and an end that may begin that header.

    A server may ignore the header, and this one speaks HTTP/1.1 alone. But the parser would end the request
    there, and take its body for another protocol. Java's client asks for HTTP/2 so.
    """
    head, end, rest = data.partition(END)
    held = 0 if end else _begun(head)
    return _UPGRADE.sub(b"\r\nx-grade:", head[: len(head) - held]) + end + rest, head[len(head) - held :]


def _begun(head: bytes) -> int:
    """Return how many bytes at the end may begin a header Upgrade, or the end of the head."""
    last = head[-len(UPGRADE) + 1 :].lower()
    lengths = range(len(last), 0, -1)
    return next((n for n in lengths if any(each.startswith(last[-n:]) for each in (UPGRADE, END))), 0)


def _without_chunks(cycle: RequestResponseCycle) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """Return `cycle.send` for HTTP/1.0, which has no chunks: the end of the connection ends an answer."""
    send, no_length = cycle.send, False

    async def send_unframed(message: Any) -> None:
        nonlocal no_length
        if message["type"] == "http.response.start":
            no_length = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if no_length:
                cycle.chunked_encoding = False
        elif no_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unframed
