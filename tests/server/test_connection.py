"""Connections: heads that are too long or too slow, and bodies that are neither."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from pyvelo.server import connection
from pyvelo.server.connection import BoundedProtocol

CLOSE = b"Connection: close\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the length of the body; abort the connection at /abort."""
    if scope["path"] == "/large":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * (1 << 25)})
        while (await receive())["type"] != "http.disconnect":
            pass
        scope["state"]["gone"].set()
        return
    if scope["path"] == "/abort":
        scope["extensions"]["pyvelo.abort"]()
        return
    if scope["path"] == "/pieces":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"one ", b"", b"two"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})
        return
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"%d" % size
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def served(gone: asyncio.Event | None = None) -> AsyncIterator[int]:
    """Serve `app`; yield the port. `gone` is set when the client of /large has gone."""
    config = uvicorn.Config(
        app, http=BoundedProtocol, host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none"
    )
    config.timeout_keep_alive = 1

    async def with_event(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["gone"] = gone
        await app(scope, receive, send)

    config.app = with_event
    server = uvicorn.Server(config)
    task = asyncio.ensure_future(server._serve())
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


def talk(*parts: bytes) -> bytes:
    """Send bytes one after the other; return what the server says until it closes the connection."""

    async def main() -> bytes:
        async with served() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            found = b""
            try:
                for part in parts:
                    writer.write(part)
                    await writer.drain()
                found = await asyncio.wait_for(reader.read(), 20)
            except ConnectionError:
                pass
            writer.close()
            return found

    return asyncio.run(main())


def test_a_body_longer_than_a_head_may_be_is_no_head() -> None:
    body = b"x" * (connection.HEAD_BYTES * 2)
    found = talk(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n%s" % (len(body), CLOSE), body)
    assert found.startswith(b"HTTP/1.1 200")
    assert found.endswith(b"%d" % len(body))


def test_two_requests_of_one_connection_have_a_head_each() -> None:
    head = b"GET / HTTP/1.1\r\nX: " + b"y" * (connection.HEAD_BYTES * 2 // 3) + b"\r\n"
    assert talk(head + b"\r\n", head + CLOSE).count(b"HTTP/1.1 200") == 2


def test_requests_that_wait_behind_others_are_answered_in_their_order() -> None:
    n = connection.MAX_PIPELINED * 3
    parts = [b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (size, b"x" * size) for size in range(n)]
    found = talk(b"".join(parts) + b"GET / HTTP/1.1\r\n" + CLOSE)
    answers = found.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert [int(answer.partition(b"\r\n\r\n")[2]) for answer in answers] == [*range(n), 0]


def test_a_flood_of_requests_ends_the_connection() -> None:
    """One read brings thousands of small requests, and each would take time of the event loop."""
    n, request = connection.MOST_OPEN, b"GET / HTTP/1.1\r\n\r\n"
    assert talk(request * (n - 1) + b"GET / HTTP/1.1\r\n" + CLOSE).count(b"HTTP/1.1 200") == n
    assert talk(request * 2 * n + CLOSE).count(b"HTTP/1.1") < n


@pytest.mark.parametrize("line", [b"X: " + b"y" * 1000 + b"\r\n", b"X: " + b"y" * (1 << 17) + b"\r\n"])
def test_a_long_head_of_one_read_is_refused(line: bytes) -> None:
    lines = line * (2 * connection.HEAD_BYTES // len(line) + 1)
    assert talk(b"GET / HTTP/1.1\r\n" + lines + CLOSE).startswith(b"HTTP/1.1 431")


def test_a_long_head_is_refused() -> None:
    line = b"X: " + b"y" * 1000 + b"\r\n"
    found = talk(b"GET / HTTP/1.1\r\n", *[line] * (connection.HEAD_BYTES // 1000 + 300))
    assert found == b"" or found.startswith(b"HTTP/1.1 431")  # a reset may overtake the answer


@pytest.mark.parametrize(
    "begun", [b"", b"GET / HTTP/1.1\r\nX: y", b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nX"]
)
def test_a_slow_head_ends_the_connection(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
    assert talk(begun).count(b"HTTP/1.1 200") == begun.count(b"\r\n\r\n")


def test_an_aborted_connection_says_nothing() -> None:
    assert talk(b"GET /abort HTTP/1.1\r\n\r\n") == b""


CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"


def test_a_long_chunked_body_is_read() -> None:
    chunks = [b"4000\r\n" + b"x" * 0x4000 + b"\r\n"] * 40
    assert talk(CHUNKED + CLOSE, *chunks, b"0\r\nA: trailer\r\n\r\n").endswith(b"%d" % (40 * 0x4000))


@pytest.mark.parametrize("line", [b"A: " + b"x" * 1000 + b"\r\n", b"x" * 1000])
def test_endless_trailers_end_the_connection(line: bytes) -> None:
    found = talk(CHUNKED + CLOSE, b"1\r\nx\r\n0\r\nA: ", *[line] * (connection.HEAD_BYTES // 1000 + 300))
    assert b" 200 " not in found


@pytest.mark.parametrize("keep_alive", [b"", b"Connection: keep-alive\r\n"])
def test_an_answer_to_an_old_client_ends_with_the_connection(keep_alive: bytes) -> None:
    """HTTP/1.0 has no chunks: such a client would read their sizes as text."""
    head, _, body = talk(b"GET /pieces HTTP/1.0\r\n" + keep_alive + b"\r\n").partition(b"\r\n\r\n")
    assert body == b"one two"
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert talk(b"HEAD /pieces HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\n")
    found = talk(b"POST / HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc")
    assert found.endswith(b"content-length: 1\r\nconnection: close\r\n\r\n3")


def test_a_client_that_reads_nothing_of_an_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "READ_SECONDS", 0.1)

    async def main() -> None:
        gone = asyncio.Event()
        async with served(gone) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.write(b"GET /large HTTP/1.1\r\n\r\n")
            await asyncio.wait_for(gone.wait(), 20)
            writer.transport.abort()

    asyncio.run(main())


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"


async def read_all(port: int, *pieces: bytes) -> bytes:
    """Return all that the server sends for pieces that arrive one after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.05)
    try:
        return await asyncio.wait_for(reader.read(), 5)
    except ConnectionError:
        return b"reset"
    finally:
        writer.close()


def test_another_protocol_is_not_offered_and_no_body_is_lost() -> None:
    """Java's client asks for HTTP/2 with each first request."""
    body = b"GET /abort HTTP/1.1\r\n\r\n"

    async def ask(*pieces: bytes) -> bytes:
        async with served() as port:
            return await read_all(port, *pieces)

    for upgrade in (UPGRADE, UPGRADE.upper(), UPGRADE.replace(b"h2c", b"websocket")):
        head = b"POST / HTTP/1.1\r\nHost: x\r\n" + upgrade + b"Content-Length: %d\r\n" % len(body)
        for pieces in ([head + b"\r\n" + body], [head + b"\r\n", body]):
            answer = asyncio.run(ask(*pieces, b"GET /pieces HTTP/1.1\r\n" + CLOSE))
            assert answer.startswith(b"HTTP/1.1 200")
            assert b"\r\n\r\n%d" % len(body) in answer
            assert answer.count(b"HTTP/1.1 200") == 2
    twice = (head + b"\r\n" + body) * 2  # the second one on a connection that is kept
    assert asyncio.run(ask(twice[: len(twice) // 2], twice[len(twice) // 2 :])).count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize("cut", range(-2, 12))
def test_another_protocol_is_offered_in_two_pieces(cut: int) -> None:
    async def ask(*pieces: bytes) -> bytes:
        async with served() as port:
            return await read_all(port, *pieces)

    request = b"POST / HTTP/1.1\r\n" + UPGRADE + b"Content-Length: 9\r\n" + CLOSE + b"GET /abcd"
    cut += request.index(b"\r\nUpgrade:")
    for first in (b"", b"GET / HTTP/1.1\r\n\r\n"):
        found = asyncio.run(ask(first, request[:cut], request[cut:]))
        assert found.count(b"HTTP/1.1 200") == 1 + bool(first)
        assert found.endswith(b"\r\n\r\n9")


def test_a_head_comes_in_any_pieces() -> None:
    head = b"GET / HTTP/1.1\r\nHost: x\r\n" + CLOSE

    async def ask() -> list[bytes]:
        async with served() as port:
            in_two = [read_all(port, head[:cut], head[cut:]) for cut in range(1, len(head))]
            in_bytes = read_all(port, *(head[at : at + 1] for at in range(len(head))))
            return await asyncio.gather(in_bytes, *in_two)

    assert all(answer.startswith(b"HTTP/1.1 200") for answer in asyncio.run(ask()))


@pytest.mark.parametrize("stray", [b"", b"\r\n", b"x"])
def test_a_connection_ends_some_time_after_its_last_answer(stray: bytes) -> None:
    async def ask() -> bytes:
        async with served() as port:
            head = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
            if stray == b"x":  # of a body that comes after its answer
                head = b"GET /pieces HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
            return await read_all(port, head, stray)

    assert asyncio.run(ask()).startswith(b"HTTP/1.1 200")
