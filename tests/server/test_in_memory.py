"""Requests to the application without a socket: the same answers, limits and errors."""

from __future__ import annotations

import asyncio
import json

import pytest

from pyvelo.server.in_memory import InMemory, post
from pyvelo.server.settings import Settings

from .servers import Server


def ask(server: Server, path: str, body: bytes, request_id: str = "1f") -> InMemory:
    """Post a body in the event loop of a server."""
    return asyncio.run_coroutine_threadsafe(post(server.app, path, body, request_id), server._loop).result(20)


def test_an_answer(server: Server) -> None:
    body = {"prompt": "The KV cache", "max_tokens": 4, "temperature": 0}
    answer = ask(server, "/v1/completions", json.dumps(body).encode())
    found = json.loads(answer.body)
    assert (answer.status, found["id"]) == (200, "cmpl-1f")
    assert found["choices"] == server.ask("/v1/completions", body)["choices"]
    server.until_idle()


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/nowhere", b"{}", 404, "there is no /nowhere"),
        ("/v1/models", b"{}", 405, "/v1/models takes GET"),
        ("/v1/completions", b"", 400, "the body is no JSON: it is empty"),
        ("/v1/completions", b" " * (Settings().max_body + 1), 413, "the body is longer than"),
    ],
    ids=["path", "method", "empty", "long"],
)
def test_errors(server: Server, path: str, body: bytes, status: int, says: str) -> None:
    answer = ask(server, path, body)
    assert answer.status == status
    assert json.loads(answer.body)["error"]["message"].startswith(says)
    server.until_idle()
