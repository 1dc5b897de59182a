"""Server-sent events over loopback, with the standard library alone, and a client of `pyvelo serve`."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from scripts.bench._serving import Job, Refused

__all__ = ["HOST", "ask_pyvelo", "events", "free_port"]

HOST = "127.0.0.1"


def free_port() -> int:
    """Return a port that no program listens at now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


async def ask_pyvelo(port: int, job: Job, came: Callable[[int], None]) -> None:
    """Stream the answer to a job, greedy and of full length; raise Refused if it breaks off."""
    body = {
        "prompt": job.prompt,
        "max_tokens": job.n_new,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    n_seen = 0
    async for event in events(port, "/v1/completions", body):
        if "error" in event:
            raise Refused(str(event["error"]["message"]))
        n_new = len(event["choices"][0]["token_ids"])
        came(n_new)
        n_seen += n_new
    if n_seen != job.n_new:
        raise Refused(f"{n_seen} tokens of {job.n_new} came")


async def events(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the server-sent events of an answer.

    Raises: Refused if the server answers with an error, or closes the connection.
    """
    try:
        reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
    except OSError as error:
        raise Refused(f"no connection: {error}") from None
    try:
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + payload)
        status, length = await _head(reader)
        if status != 200:
            answer = await (reader.read() if length is None else reader.readexactly(length))
            raise Refused(f"status {status}: {answer.decode(errors='replace').strip()}")
        rest = b""
        async for piece in _chunks(reader):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith((b"data: {", b"error: {")):
                    yield json.loads(line.partition(b": ")[2])
    except (OSError, asyncio.IncompleteReadError) as error:
        raise Refused(f"the connection broke: {error}") from None
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, int | None]:
    """Return the status and the length of an answer, None if the length is not given."""
    first = (await reader.readline()).split()
    if len(first) < 2:
        raise Refused("the server closed the connection")
    length = None
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        if name.lower() == "content-length":
            length = int(value)
    return int(first[1]), length


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the pieces of a chunked body."""
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        yield await reader.readexactly(size)
        await reader.readline()
