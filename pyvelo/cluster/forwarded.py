"""Requests on their way to a replica, and the answers of a replica's application as batches of messages."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from pyvelo.server.http import Receive, Scope, Send

__all__ = ["Application", "Forwarded", "Message", "answer_of", "replica_of", "scope_of"]

Message = MutableMapping[str, Any]
"""Message of ASGI from an application: http.response.start or http.response.body."""
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_PATH = re.compile(r"(?:/v1)?/(?:sessions|responses)/([^/]+)(?:/.*)?")
_OWNER = re.compile(r"(?:sess|resp)_[0-9a-f]{32}_([A-Za-z0-9-]{1,64})")


@dataclass(frozen=True)
class Forwarded:
    """A request with its whole body.

    hashes: block hashes of its prompt; none: they are unknown.
    replica: the only one that can answer, because it has the session or the response; "": any.
    router: name of the router that sends it.
    """

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    hashes: tuple[bytes, ...] = ()
    replica: str = ""
    router: str = ""


def replica_of(path: str, previous: object = None) -> str:
    """Return the replica that has the session or the response of a request; "" if any can answer.

    Args:
        path: it may have the id of a session or a response.
        previous: of the body, the id of the response to continue.
    """
    found = _PATH.fullmatch(path)
    name = found[1] if found is not None else previous
    owner = _OWNER.fullmatch(name) if isinstance(name, str) else None
    return "" if owner is None else owner[1]


def scope_of(request: Forwarded) -> Scope:
    """Return the scope of ASGI for a request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers),
        "extensions": {},
    }


async def answer_of(
    app: Application, request: Forwarded, pause: Callable[[], float] = lambda: 0.0
) -> AsyncGenerator[list[Message], None]:
    """Run an application on a request; yield the messages of its answer, all that are ready at a time.

    Closing or cancelling the generator tells the application that its client has left.

    Args:
        pause: returns the least seconds between two batches.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    left, body = asyncio.Event(), [request.body]

    async def receive() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if not left.is_set():
            messages.put_nowait(message)

    task = asyncio.ensure_future(app(scope_of(request), receive, send))
    task.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        ended, last = False, -math.inf
        while not ended:
            batch = [await messages.get()]
            left_of_pause = 0.0 if batch[0] is None else last + pause() - time.monotonic()
            if left_of_pause > 0.0:
                await asyncio.sleep(left_of_pause)
            while not messages.empty():
                batch.append(messages.get_nowait())
            ended, last = batch[-1] is None, time.monotonic()
            if found := [message for message in batch if message is not None]:
                yield found
        await task
    finally:
        left.set()
