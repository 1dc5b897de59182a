"""Requests to the application without a socket."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from pyvelo.errors import InternalError

if TYPE_CHECKING:
    from pyvelo.server.app import App

__all__ = ["InMemory", "post"]

_HOST = (b"host", b"localhost")


async def post(app: App, path: str, body: bytes, request_id: str) -> InMemory:
    """Send a POST request to the application; return its answer.

    Args:
        request_id: letters and digits, for the header X-Request-Id.
    """
    answer = InMemory()
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [_HOST, (b"x-request-id", request_id.encode())],
        "extensions": {"pyvelo.body": body},
    }
    await app(scope, _receive, answer.send)
    return answer


async def _receive() -> MutableMapping[str, Any]:
    raise InternalError("the application has the body, and its client never leaves")


class InMemory:
    """Answer to a request.

    status: 0 before it begins.
    """

    def __init__(self) -> None:
        self.status = 0
        self._parts: list[bytes] = []

    @property
    def body(self) -> bytes:
        """Body of the answer."""
        return b"".join(self._parts)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Take a part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self._parts.append(message.get("body", b""))
