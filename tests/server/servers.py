"""Servers in threads of this process, and clients that read their answers byte by byte."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyvelo.config import EngineConfig
from pyvelo.demo import DEMO_MODEL
from pyvelo.engine.async_loop import open_engine_loop
from pyvelo.engine.stats import EngineStats
from pyvelo.server.app import App
from pyvelo.server.http import Receive, Scope, Send
from pyvelo.server.run import HttpServer, listen, uvicorn_config
from pyvelo.server.serving import Serving
from pyvelo.server.settings import Settings

WAIT = 20.0
"""Seconds after which something is taken to hang."""

SETTINGS: dict[str, Any] = {
    "n_ctx": 512,
    "kv_cache_bytes": 4 << 20,
    "n_threads": 1,
    "deterministic": True,
}
"""Settings of the engines of servers and of the oracle."""

Condition = Callable[[EngineStats], bool]


@dataclass
class Answer:
    """Answer to a request."""

    status: int
    headers: Mapping[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def error(self) -> Any:
        return self.json["error"]


def events_of(data: bytes) -> list[Any]:
    """Return the objects of a whole stream of events, which ends with [DONE]."""
    blocks = data.decode().split("\n\n")
    assert blocks.pop() == ""
    blocks = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), blocks
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def body_of(chunks: bytes) -> bytes:
    """Return the body of an answer in chunks."""
    head, _, rest = chunks.partition(b"\r\n\r\n")
    assert b"chunked" in head
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            return body
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


class Client:
    """Connection to a server that sends and receives bytes."""

    def __init__(self, port: int, receive_buffer: int = 0) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(WAIT)
        self.socket.connect(("127.0.0.1", port))
        self._file = self.socket.makefile("rb")

    def send(
        self,
        path: str,
        body: Any,
        headers: Mapping[str, str] | None = None,
        length: int | None = None,
    ) -> None:
        """Send a request; with a `length` above the body's, the rest is missing."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        every = {
            "Host": "localhost",
            "Content-Length": len(data) if length is None else length,
            **(headers or {}),
        }
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in every.items()), "", ""]
        self.socket.sendall("\r\n".join(lines).encode() + data)

    def until(self, text: bytes) -> bytes:
        """Return the lines up to one that contains `text`."""
        found = b""
        for line in self._file:
            found += line
            if text in line:
                return found
        raise AssertionError(f"the server has closed the connection after {found!r}")

    def answer(self) -> bytes:
        """Return an answer with a Content-Length."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += self._file.readline()
        [length] = re.findall(rb"content-length: ([0-9]+)", head)
        return head + self._file.read(int(length))

    def rest_of_stream(self) -> bytes:
        """Return what arrives up to the last chunk of an answer."""
        return self.until(b"[DONE]") + b"".join(self._file.readline() for _ in range(4))

    def rest(self) -> bytes:
        """Return what arrives until the server closes the connection."""
        with suppress(ConnectionError):
            return self._file.read()
        return b""

    def close(self, reset: bool = False) -> None:
        """Close the connection; with `reset`, without the usual farewell of TCP."""
        if reset:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self._file.close()
        self.socket.close()


class _Watched(App):
    """Application that counts its requests in progress, and keeps what it should not raise."""

    def __init__(
        self,
        serving: Serving,
        settings: Settings,
        count: Callable[[int], None],
        errors: list[BaseException],
    ) -> None:
        super().__init__(serving, settings)
        self._count = count
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._count(1)
        try:
            await super().__call__(scope, receive, send)
        except BaseException as error:
            self._errors.append(error)
            raise
        finally:
            self._count(-1)


class Server:
    """Server with an engine of its own in a thread, whose engine a test can pause after a step.

    Args:
        send_buffer: bytes of the kernel for what a client has not read; 0: as many as it likes.
        config: settings of the engine, beside SETTINGS.
    """

    def __init__(self, settings: Settings, send_buffer: int = 0, **config: Any) -> None:
        self.config = EngineConfig(**{"model": DEMO_MODEL, **SETTINGS, **config})
        self.settings = settings
        self.serving: Serving
        self.app: App
        self._listener = listen("127.0.0.1", 0)
        if send_buffer:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._changed = threading.Condition()
        self._n_open = 0
        self.stats: EngineStats
        self._pause: Condition | None = None
        self._paused, self._go_on = threading.Event(), threading.Event()
        self._started = threading.Event()
        self._errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="server")
        self._thread.start()
        assert self._started.wait(WAIT)
        if self._errors:
            raise self._errors[0]

    # ---- requests ----

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a request and return the whole answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, dict(headers or {}))
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        return self.request("POST", path, body, headers)

    def ask(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        """Return the object of an answer of status 200."""
        answer = self.post(path, body, headers)
        assert answer.status == 200, answer.data
        return answer.json

    def stream(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """Return the events of an answer."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status == 200, answer.data
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events_of(answer.data)

    @contextmanager
    def client(self, receive_buffer: int = 0) -> Iterator[Client]:
        """Open a connection."""
        found = Client(self.port, receive_buffer)
        try:
            yield found
        finally:
            found.close()

    # ---- the engine ----

    @contextmanager
    def paused_at(self, condition: Condition) -> Iterator[Callable[[], None]]:
        """Pause the engine in the first step that fulfils a condition; yield a function that waits for it.

        Its tokens are sampled, but not sent. The engine goes on at the end of the block.
        """
        self._paused.clear()
        self._go_on.clear()
        self._pause = condition

        def wait() -> None:
            assert self._paused.wait(WAIT)

        try:
            yield wait
        finally:
            self._pause = None
            self._go_on.set()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds that depends on steps and on the ends of requests."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT)

    def until_open(self, n: int) -> None:
        """Wait until so many requests are in progress."""
        self.until(lambda: self._n_open == n)

    def until_idle(self) -> None:
        """Wait until no request is open; then nothing of them may be left but the sessions of responses."""
        self.until_open(0)
        self.call(self._close_kept_sessions)
        assert len(self.serving.admission) == 0
        assert self.serving.admission.queued_tokens() == 0
        stats = self.serving.engine.stats()  # after the step in progress
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)

    def _close_kept_sessions(self) -> None:
        kept = self.serving.kept_sessions
        for tenant, response in kept.by_sequence().values():
            kept.close(tenant, response)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function in the event loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(WAIT)

    def drain(self, seconds: float) -> Any:
        """Begin to drain; return the future of its end."""
        return asyncio.run_coroutine_threadsafe(self.app.drain(seconds), self._loop)

    # ---- its thread ----

    def close(self) -> None:
        """End the server, its engine and its thread."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(WAIT)
        assert not self._thread.is_alive()
        if self._errors:
            raise self._errors[0]

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._errors.append(error)
        finally:
            self._listener.close()
            self._started.set()

    async def _main(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(self._failed)
        loop = await open_engine_loop(self.config, threading.Event())
        try:
            self.serving = Serving(loop, self.config, self.settings)
            publish = self.serving._publish
            self.serving._publish = partial(self._publish, publish)  # type: ignore[method-assign]
            self._watch_admission()
            if self.serving.generates:
                self._watch_steps()
            await self.serving.start()
            self.app = _Watched(self.serving, self.settings, self._count, self._errors)
            server = HttpServer(uvicorn_config(self.app))
            server.started_hook = self._started.set
            running = asyncio.ensure_future(server.serve([self._listener]))
            await self._ended.wait()
            await self.app.drain(0.0)
            running.cancel()
            await asyncio.wait([running])
            for opened in server.servers:
                opened.close()
            for connection in list(server.server_state.connections):
                connection.shutdown()
            await asyncio.sleep(0)  # closes them, without the time that uvicorn gives them
        finally:
            await asyncio.to_thread(loop.close)

    def _watch_admission(self) -> None:
        """Wake `until` when a request is admitted, and when it has joined the queue."""
        admission = self.serving.admission

        def watched(call: Callable[..., Any], *arguments: Any) -> Any:
            result = call(*arguments)
            self._count(0)
            return result

        admission.enter = partial(watched, admission.enter)  # type: ignore[method-assign]
        admission.queue = partial(watched, admission.queue)  # type: ignore[method-assign]

    def _count(self, n: int) -> None:
        with self._changed:
            self._n_open += n
            self._changed.notify_all()

    def _publish(self, publish: Callable[[EngineStats], None], stats: EngineStats) -> None:
        publish(stats)
        with self._changed:
            self.stats = stats
            self._changed.notify_all()

    def _watch_steps(self) -> None:
        """Pause the engine within a step, when it has done its work and holds no lock."""
        core = self.serving.engine.core
        step = core.step

        def watched() -> bool:
            done = step()
            if self._pause is not None and self._pause(self.serving.engine._picture()):
                self._paused.set()
                assert self._go_on.wait(WAIT)
            return done

        core.step = watched  # type: ignore[method-assign]

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Fail the test after what asyncio only logs."""
        self._errors.append(context.get("exception") or RuntimeError(context["message"]))
