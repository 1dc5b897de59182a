"""Baselines of bench/server.py: an application that only writes, and the time of Python in steps."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from pyvelo.engine.engine import Engine
from pyvelo.server.http import Receive, Scope, Send
from scripts._common import ScriptError

__all__ = ["Floor", "StepClock", "recorded"]


async def recorded(app: Any, path: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the ASGI messages of an application's answer to a request; ScriptError if it refuses it."""
    found: list[dict[str, Any]] = []
    given = [{"type": "http.request", "body": json.dumps(fields).encode()}]

    async def receive() -> dict[str, Any]:
        if not given:
            await asyncio.Event().wait()  # the client stays
        return given.pop()

    async def send(message: dict[str, Any]) -> None:
        found.append(message)

    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    await app({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)
    if found[0]["status"] != 200:
        raise ScriptError(f"{path} gave {found[1]['body']!r}")
    return found


class Floor:
    """ASGI application that answers each request with the same messages, one at each beat.

    As in a server over an engine, a beat wakes the event loop once for all streams.
    """

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.create_future()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read a request and answer it."""
        while (await receive()).get("more_body"):
            pass
        for message in self._messages:
            await self._next
            await send(message)

    def beat(self) -> None:
        """Let each answer write its next message; any thread may call this."""
        self._loop.call_soon_threadsafe(self._beat)

    def _beat(self) -> None:
        done, self._next = self._next, self._loop.create_future()
        done.set_result(None)


class StepClock:
    """Seconds of each step of an engine outside its C calls; waiting for the interpreter's lock counts.

    Steps with prompts do not count: then the event loop parses requests, and threads prepare them.
    """

    after_step: Callable[[], None] | None = None
    """Called in the engine's thread after each step."""

    def __init__(self, engine: Engine) -> None:
        self._seconds: list[float] = []
        core, step = engine.core, engine.core.step

        def timed() -> bool:
            before, begin = engine.context.timings, time.perf_counter()
            n_prompt = core.counters.prompt_tokens
            done = step()
            whole, after = time.perf_counter() - begin, engine.context.timings
            native = after.run_seconds - before.run_seconds + after.sample_seconds - before.sample_seconds
            if core.counters.prompt_tokens == n_prompt:
                self._seconds.append(whole - native)
            if self.after_step:
                self.after_step()
            return done

        core.step = timed  # type: ignore[method-assign]

    def taken(self) -> list[float]:
        """Return the times since the last call."""
        found, self._seconds = self._seconds, []
        return found
