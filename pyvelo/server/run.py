"""Start and end of a server: the engine, the socket, the signals."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn

from pyvelo.config import EngineConfig
from pyvelo.engine.async_loop import AsyncEngineLoop
from pyvelo.errors import ConfigError, shown
from pyvelo.hosts import is_loopback
from pyvelo.server.app import App
from pyvelo.server.origins import is_host
from pyvelo.server.process import Signals, engine_until_signal, freeze_loaded, rare_collections, run_loop
from pyvelo.server.serving import Serving
from pyvelo.server.settings import Settings

__all__ = ["HttpServer", "Serve", "check_address", "listen", "listeners", "uvicorn_config"]

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 30
N_LISTENERS = 24
"""Duplicates of the socket that listens: uvloop accepts one connection from each in a turn of its loop."""


def check_address(host: str, with_keys: bool, insecure: bool) -> None:
    """Raise ConfigError for what is no address, and if other machines could reach a server without keys."""
    if not is_host(host) or host == "*":
        raise ConfigError(
            f"host={shown(host)}: give an address or a name of this machine without port and brackets, such "
            f"as 127.0.0.1, ::1 or 0.0.0.0"
        )
    if with_keys or insecure or is_loopback(host):
        return
    raise ConfigError(
        f"host={host}: other machines could use a server without API keys there: give --api-key-file or "
        f"PYVELO_API_KEY, or --insecure if the network is trusted"
    )


@dataclass
class Serve:
    """One run of a server, from the load of the model to SIGINT or SIGTERM.

    drain: seconds for requests in progress after the first signal; a second one ends them.
    ready: called with the URL when requests are taken.
    """

    config: EngineConfig
    settings: Settings
    host: str
    port: int
    drain: float
    ready: Callable[[str, Serving], None]

    def run(self) -> None:
        """Serve until a signal.

        Raises:
            ConfigError: the address cannot be used.
            VeloError: as `LLM` raises them.
        """
        with listen(self.host, self.port) as listener, rare_collections():
            run_loop(self._main(listener))

    async def _main(self, listener: socket.socket) -> None:
        signals = Signals()
        async with engine_until_signal(self.config, signals) as opened:
            if opened is not None:
                await self._serve(opened[0], listener, signals, opened[1])

    async def _serve(
        self, loop: AsyncEngineLoop, listener: socket.socket, signals: Signals, stopped: asyncio.Task[Any]
    ) -> None:
        """Take requests until a signal; then drain."""
        serving = Serving(loop, self.config, self.settings)
        await serving.start()
        freeze_loaded()
        app = App(serving, self.settings)
        server = HttpServer(uvicorn_config(app))
        server.started_hook = partial(self.ready, _url(listener), serving)
        running = asyncio.ensure_future(server.serve(listeners(listener)))
        await asyncio.wait([running, stopped], return_when=asyncio.FIRST_COMPLETED)
        signals.again = app.cancel_all
        await app.drain(self.drain)
        server.should_exit = True
        await running


def uvicorn_config(app: Any) -> uvicorn.Config:
    """Return the settings of the HTTP server: no log of its own, no websockets, no lifespan."""
    return uvicorn.Config(
        app,
        http=_protocol(),
        log_config=None,
        access_log=False,
        ws="none",
        lifespan="off",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=5,
        backlog=BACKLOG,
    )


def _protocol() -> Any:
    """Return the class of connections; without httptools, uvicorn's own."""
    try:
        from pyvelo.server.connection import BoundedProtocol
    except ImportError:
        return "auto"
    return BoundedProtocol


class HttpServer(uvicorn.Server):
    """HTTP server that leaves signals to others; `started_hook` is called when it listens."""

    started_hook: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self.started_hook()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals as they are."""
        yield


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket that listens; raise ConfigError if the address cannot be used.

    shared: other processes of this user may listen there, too, if they say so; each gets some connections.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)  # asyncio sets TCP_NODELAY only if TCP is named
    except (OSError, OverflowError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"host={host}: {reason}: give an address or a name of this machine") from None
    try:
        if sys.platform != "win32":  # there another program could take the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        other = {errno.EADDRNOTAVAIL: "another --host", errno.EACCES: "a --port from 1024 on"}
        raise ConfigError(
            f"{host}, port {port}, cannot be used: {error.strerror or error}; give "
            f"{other.get(error.errno or 0, 'another --port')}"
        ) from None
    return listener


def listeners(listener: socket.socket) -> list[socket.socket]:
    """Return the sockets of a server that listens at one address."""
    return [listener, *(listener.dup() for _ in range(N_LISTENERS - 1))]


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
