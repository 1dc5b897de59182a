"""ASGI application in front of the replicas: it sends each request to one, and its answer to the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from secrets import token_hex
from typing import Any

import msgspec

from pyvelo.cluster.forwarded import Forwarded, Message, replica_of
from pyvelo.cluster.gather import GATHERED, Whole, merged
from pyvelo.server.anthropic_form import anthropic_error
from pyvelo.server.errors import HttpError, openai_error
from pyvelo.server.http import ClientGone, Exchange, Receive, Scope, Send
from pyvelo.server.ollama import ollama_error
from pyvelo.server.routes import ENDPOINTS, Router

__all__ = ["ATTEMPTS", "Ingress", "ReplicaLost"]

ATTEMPTS = 6
"""Replicas that a request may lose, one after the other, before it is given up."""
PAUSE = 0.05
"""Seconds before the second attempt; each further pause is twice as long."""

_log = logging.getLogger("pyvelo")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode

Call = Callable[[Forwarded], AsyncGenerator[list[Message], None]]
Hash = Callable[[Forwarded], Awaitable[tuple[bytes, ...]]]
CallAll = Callable[[Forwarded], Awaitable[Sequence[Whole]]]


class ReplicaLost(Exception):
    """The replica of a request has ended."""


class Ingress:
    """Application that forwards requests.

    A request whose replica is lost goes to another one, unless its answer has begun: then the client gets an
    error as the last event. A request of a session or a stored response goes to the replica that has it.

    Args:
        call: runs a request on a replica; closing the generator cancels it. It raises ReplicaLost.
        hashes: returns the block hashes of a request's prompt.
        call_all: runs a request on all replicas.
        max_body: longest body in bytes.
    """

    def __init__(self, call: Call, hashes: Hash, call_all: CallAll, max_body: int) -> None:
        self._call, self._call_all = call, call_all
        self._hashes, self._max_body = hashes, max_body
        self._route_of = Router(ENDPOINTS)
        self._name = token_hex(8)  # of its router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, _id_of(scope))
        exchange.error_body = self._error_body(exchange.path)
        try:
            request = await self._read(exchange, scope)
        except ClientGone:
            return
        except HttpError as error:
            await exchange.answer(exchange.error_body(error), error.status, error.headers)
            return
        if request.path in GATHERED and request.method == "GET":
            await self._while_connected(exchange, self._answer_for_all(exchange, send, request))
        else:
            await self._while_connected(exchange, self._answer(exchange, send, request))

    def _error_body(self, path: str) -> Callable[[HttpError], Any]:
        """Return the function that shapes the errors of an endpoint."""
        methods = ENDPOINTS.get(self._route_of(path)[0], {})
        return next((handler.error_body for handler in methods.values()), openai_error)

    async def _read(self, exchange: Exchange, scope: Scope) -> Forwarded:
        """Return the request with its body and its hashes; raise HttpError if its body is refused."""
        body = await exchange.body(self._max_body)
        headers = {**exchange.headers, b"x-request-id": exchange.id.encode("latin-1")}
        headers.pop(b"transfer-encoding", None)
        request = Forwarded(
            method=exchange.method,
            path=exchange.path,
            query=scope.get("query_string", b""),
            headers=tuple(headers.items()),
            body=body,
            router=self._name,
        )
        is_response = exchange.path.endswith("/responses")
        owner = replica_of(exchange.path, _previous(body) if is_response else None)
        if owner:
            return replace(request, replica=owner)
        return replace(request, hashes=await self._hashes(request))

    async def _while_connected(self, exchange: Exchange, answer: Awaitable[None]) -> None:
        """Wait for an answer; cancel it when the client leaves."""
        task, gone = asyncio.ensure_future(answer), asyncio.ensure_future(exchange.gone())
        try:
            await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _answer(self, exchange: Exchange, send: Send, request: Forwarded) -> None:
        """Forward a request until a replica has answered it."""
        for attempt in range(ATTEMPTS):
            begun: list[Message] = []
            try:
                async with aclosing(self._call(request)) as batches:
                    async for batch in batches:
                        for message in batch:
                            begun = begun or [message]
                            await send(message)
                return
            except ReplicaLost as error:
                _log.warning("request %s lost its replica: %s", exchange.id, error)
            except Exception:
                _log.exception("request %s failed", exchange.id)
                if not begun:
                    failed = HttpError(500, "the request failed: the server's log says why")
                    await exchange.answer(exchange.error_body(failed), failed.status, failed.headers)
                    return
            if begun:
                await _break_off(send, exchange.path, begun[0])
                return
            await asyncio.sleep(PAUSE * 2**attempt)
        lost = HttpError(
            503,
            f"{ATTEMPTS} replicas were lost one after the other: try again in 5 s",
            code="replica_lost",
            headers={"Retry-After": "5"},
        )
        await exchange.answer(exchange.error_body(lost), lost.status, lost.headers)

    async def _answer_for_all(self, exchange: Exchange, send: Send, request: Forwarded) -> None:
        """Send the answers of all replicas as one."""
        answers = await self._call_all(request)
        if not answers:
            lost = HttpError(503, "no replica answers: try again in 5 s", headers={"Retry-After": "5"})
            await exchange.answer(lost.body, lost.status, lost.headers)
            return
        answer = merged(request.path, answers)
        await send({"type": "http.response.start", "status": answer.status, "headers": list(answer.headers)})
        await send({"type": "http.response.body", "body": answer.body})


async def _break_off(send: Send, path: str, start: Message) -> None:
    """End a stream with an error; raise ReplicaLost if the answer is no stream."""
    kind = dict(start["headers"]).get(b"content-type", b"")
    error = HttpError(
        503, "the replica was lost before the answer is complete: send it again", code="replica_lost"
    )
    if kind.startswith(b"text/event-stream"):
        last = _last_event(path, error)
    elif kind.startswith(b"application/x-ndjson"):
        last = _encode(ollama_error(error)) + b"\n"
    else:
        raise ReplicaLost(error.message)
    await send({"type": "http.response.body", "body": last, "more_body": False})


def _last_event(path: str, error: HttpError) -> bytes:
    """Return an error as the event that the clients of an endpoint read."""
    if path.endswith("/messages"):
        return b"event: error\ndata: " + _encode(anthropic_error(error)) + b"\n\n"
    if path.endswith("/responses"):
        fields = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return b"event: error\ndata: " + _encode(fields) + b"\n\n"
    return b"data: " + _encode(error.body) + b"\n\ndata: [DONE]\n\n"


def _previous(body: bytes) -> Any:
    """Return the id of the response that a body continues, if any."""
    if b'"previous_response_id"' not in body and b"\\u" not in body:  # a name may have escapes
        return None
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None  # the replica tells the client
    return fields.get("previous_response_id") if isinstance(fields, dict) else None


def _id_of(scope: Scope) -> str:
    """Return the id that the client gave, or a new one."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    return given.decode("latin-1")[:128] or token_hex(8)


async def _lifespan(receive: Receive, send: Send) -> None:
    """Agree to the start and to the end of the server."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
