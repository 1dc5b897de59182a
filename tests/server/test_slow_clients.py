"""Clients that do not read are cut, and streams that are silent are pinged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pyvelo.server import app as app_module
from pyvelo.server import http
from pyvelo.server.http import EventStream

from .conftest import Serve
from .servers import body_of, events_of

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"prompt": [8] * 20, "max_tokens": 450, "ignore_eos": True}
SHORT: dict[str, Any] = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}


def test_a_client_that_does_not_read_is_cut(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(send_buffer=4096, max_num_seqs=2)
    monkeypatch.setattr(app_module, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(app_module, "STUCK_SECONDS", 0.05)
    body = {**LONG, "logprobs": 20, "n": 2, "temperature": 1.0, "stream": True}
    with server.client(receive_buffer=4096) as client:
        client.send(COMPLETIONS, body)
        server.until_open(1)
        server.until_idle()  # though the client does not read
        assert b"[DONE]" not in client.rest()
    server.until_idle()


def test_a_backlog_is_bounded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(send_buffer=4096, max_num_seqs=2)
    monkeypatch.setattr(app_module, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(app_module, "MAX_BACKLOG", 10)
    with server.client(receive_buffer=4096) as client:
        client.send(COMPLETIONS, {**LONG, "logprobs": 20, "n": 2, "temperature": 1.0, "stream": True})
        server.until_open(1)
        server.until_idle()
        assert b"[DONE]" not in client.rest()
    server.until_idle()


async def fail() -> None:
    raise ZeroDivisionError


def test_a_silent_stream_is_pinged(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another periodic task fails."""
    server = serve(n_ctx=64)
    monkeypatch.setattr(server.serving, "expire", fail)
    monkeypatch.setattr(app_module, "TICK_SECONDS", 0.005)
    monkeypatch.setattr(app_module, "PING_SECONDS", 0.01)
    whole = server.ask(COMPLETIONS, {**SHORT, "max_tokens": 20, "temperature": 0})["choices"][0]["text"]
    with server.client() as client:
        with server.paused_at(lambda stats: stats.running == 1) as wait:
            client.send(COMPLETIONS, {**SHORT, "max_tokens": 20, "temperature": 0, "stream": True})
            wait()
            found = client.until(b": ping")
            assert b" 200 " in found.partition(b"\r\n")[0]
            assert found.count(b": ping") == 1
            found += client.until(b": ping")
        data = body_of(found + client.rest_of_stream())
    events = events_of(data)
    assert "".join(event["choices"][0]["text"] for event in events) == whole
    server.until_idle()


def test_a_ping_never_cuts_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes that wait for the client: the ping and the event come one after the other, the head first."""
    sent: list[str] = []

    async def main() -> None:
        free = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append("begin " + name(message))
            await free.wait()
            sent.append("end " + name(message))

        def name(message: Any) -> str:
            return str(message.get("body", b"head").decode() or "last") if "body" in message else "head"

        async def start() -> None:
            await send({"type": "http.response.start"})

        events = EventStream(send, start, b"ping")
        events.ping()
        events.ping()
        await asyncio.sleep(0)
        assert events.writing
        events.ping()
        task = asyncio.ensure_future(events.end(b"data"))
        await asyncio.sleep(0)
        assert sent == ["begin head"]
        free.set()
        await task
        events.ping()
        await asyncio.sleep(0)

    asyncio.run(main())
    order = [f"{when} {what}" for what in ("head", "ping", "data") for when in ("begin", "end")]
    assert sent[: len(order)] == order


def test_a_write_that_waits_for_its_client_is_not_pinged() -> None:
    sent: list[bytes] = []

    async def main() -> None:
        free = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message["body"])
            await free.wait()

        async def start() -> None:
            pass

        events = EventStream(send, start, b"ping")
        task = asyncio.ensure_future(events.write(b"data"))
        await asyncio.sleep(0)
        for _ in range(3):
            events.ping()
            await asyncio.sleep(0)
        free.set()
        await task

    asyncio.run(main())
    assert sent == [b"data"]


def test_constants_are_what_proxies_need() -> None:
    assert http.PING_SECONDS == 15.0
    assert http.STUCK_SECONDS == 60.0
    assert http.BODY_SECONDS == 60.0
    assert app_module.MAX_BACKLOG == 4096
