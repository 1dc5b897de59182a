"""HTTP over ASGI: one request with its body and answer, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from pyvelo.server.auth import ANYBODY, Tenant
from pyvelo.server.errors import HttpError, openai_error

__all__ = [
    "PING_SECONDS",
    "STUCK_SECONDS",
    "ClientGone",
    "EventStream",
    "Exchange",
    "Receive",
    "Scope",
    "Send",
    "encoded",
    "encoded_list",
]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_SECONDS = 60.0
"""Time for a body to arrive."""
PING_SECONDS = 15.0
"""Longest silence of a stream; proxies close connections that are silent for longer."""
STUCK_SECONDS = 60.0
"""Time after which a stream is cut whose client reads nothing."""
EVENTS = "text/event-stream; charset=utf-8"
PING = b": ping\n\n"

AT_ONCE = 4096
"""Values of a list that are encoded at once: no other thread runs Python meanwhile."""

encoded = msgspec.json.Encoder().encode


def encoded_list(values: Iterable[Any], at_once: int = AT_ONCE) -> msgspec.Raw:
    """Return a long list as JSON, encoded piece by piece, for a thread beside the event loop."""
    left = iter(values)
    pieces = iter(lambda: list(islice(left, at_once)), [])
    return msgspec.Raw(b"[" + b",".join(encoded(piece)[1:-1] for piece in pieces) + b"]")


class ClientGone(Exception):
    """The client closed the connection before its body had arrived."""


class Exchange:
    """One request: what the client sent, and the answer.

    id: of the header X-Request-Id, or a new one; also the engine's request id.
    status: of the answer; 0 before it begins.
    route: pattern of the path, such as /v1/sessions/{id}; "" if it is unknown.
    path_id: part of the path at {id}.
    fields: of the body, once it is known.
    tenant: owner of the API key, once that is known.
    error_body: returns the body of an error, in the shape of the endpoint.
    more_headers: of the answer, whatever it is.
    stream: of the answer, if it is one.
    abort: closes the connection, whatever waits to be written.
    may_leave: whether the client may leave before the answer; one in this process has sent its whole body.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self.method: str = scope["method"]
        self.path = scope["path"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.id = request_id
        self.status = 0
        self.received = time.perf_counter()
        self.route = self.path_id = ""
        self.fields: Mapping[str, Any] = {}
        self.tenant: Tenant = ANYBODY
        self.error_body: Callable[[HttpError], Any] = openai_error
        self.more_headers: Mapping[str, str] = {}
        self.stream: EventStream | None = None
        extensions = scope.get("extensions") or {}
        self.abort: Callable[[], None] = extensions.get("pyvelo.abort", lambda: None)
        self._body: bytes | None = extensions.get("pyvelo.body")
        self.may_leave = self._body is None
        self._receive = receive
        self._send = send

    def header(self, name: str) -> str:
        """Return the value of a header by its lowercase name, "" if there is none."""
        return self.headers.get(name.encode(), b"").decode("latin-1")

    async def body(self, limit: int) -> bytes:
        """Return the body.

        Raises:
            HttpError: it is compressed, has more than `limit` bytes, or is too slow.
            ClientGone: the client has left.
        """
        encoding = self.header("content-encoding")
        if encoding.lower() not in ("", "identity"):
            raise HttpError(415, f"Content-Encoding: {encoding[:64]!r} is not supported: send a plain body")
        length = self.header("content-length")
        if length.isdigit() and int(length) > limit:
            raise _too_long(limit)
        if self._body is not None:
            if len(self._body) > limit:
                raise _too_long(limit)
            return self._body
        parts, size = [], 0
        deadline = time.monotonic() + BODY_SECONDS
        while True:
            try:
                message = await asyncio.wait_for(self._receive(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                raise HttpError(
                    408,
                    f"the body did not arrive within {BODY_SECONDS:g} seconds",
                    headers={"Connection": "close"},
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_long(limit)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def gone(self) -> None:
        """Wait until the client has gone; call it after `body`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send an object as JSON, or bytes as they are."""
        raw = isinstance(content, bytes)
        data, given = content if raw else encoded(content), dict(headers or {})
        if status != 204:  # which has no body
            given = {"content-type": "application/json", **given, "content-length": str(len(data))}
        await self._start(status, given)
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else data})

    def events(self, media_type: str = EVENTS, ping: bytes = PING) -> EventStream:
        """Return a stream of events; its first write or ping begins the answer.

        ping: event that clients ignore; b"": there is none.
        """
        headers = {"content-type": media_type, "cache-control": "no-cache", "x-accel-buffering": "no"}
        self.stream = EventStream(self._send, partial(self._start, 200, headers), ping)
        return self.stream

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        every = {**self.more_headers, **headers}
        pairs = [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in every.items()]
        pairs.append((b"x-request-id", self.id.encode("latin-1", "replace")))
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


class EventStream:
    """Server-sent events of one answer; `App` pings silent ones, and cuts one whose client reads nothing.

    touched: time of the last write, or of the start of the one that waits for the client.
    backlog: returns the pieces that wait to be written.
    failed: returns the last events of a stream that breaks off.
    """

    def __init__(self, send: Send, start: Callable[[], Awaitable[None]], ping: bytes) -> None:
        self._send = send
        self._start = start
        self._ping_event = ping
        self._ping: asyncio.Task[None] | None = None
        self.started = False
        self.touched = time.monotonic()
        self.writing = False
        self.backlog: Callable[[], int] = lambda: 0
        self.failed: Callable[[HttpError], bytes] = lambda error: b""

    async def write(self, data: bytes) -> None:
        """Write events; wait while the client reads too slowly."""
        if self._ping is not None:
            await self._ping
        await self._write(data)

    async def end(self, data: bytes) -> None:
        """Write the last events and end the answer."""
        if self._ping is not None:
            await self._ping
        await self._write(data, more=False)

    async def fail(self, error: HttpError) -> None:
        """Write an error and end the answer."""
        await self.end(self.failed(error))

    def ping(self) -> None:
        """Write an event that clients ignore, soon."""
        if self._ping_event and self._ping is None and not self.writing:
            self._ping = asyncio.ensure_future(self._write(self._ping_event))
            self._ping.add_done_callback(self._pinged)

    def _pinged(self, task: asyncio.Task[None]) -> None:
        self._ping = None
        if not task.cancelled():
            task.exception()  # the client has gone

    async def _write(self, data: bytes, more: bool = True) -> None:
        self.touched, self.writing = time.monotonic(), True
        try:
            if not self.started:
                self.started = True
                await self._start()
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self.writing = False


def _too_long(limit: int) -> HttpError:
    return HttpError(413, f"the body is longer than {limit} bytes", code="body_too_large")
