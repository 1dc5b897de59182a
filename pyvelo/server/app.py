"""ASGI application: routes, keys, errors, cancellation, pings and the end."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from pyvelo.server import pages, tokens
from pyvelo.server.auth import Tenant
from pyvelo.server.bodies import parse_json
from pyvelo.server.errors import HttpError, not_found, of_exception, openai_error
from pyvelo.server.http import (
    PING_SECONDS,
    STUCK_SECONDS,
    ClientGone,
    Exchange,
    Receive,
    Scope,
    Send,
)
from pyvelo.server.ollama import ollama_error
from pyvelo.server.openapi import openapi
from pyvelo.server.origins import check_page, cors_headers, preflight_headers
from pyvelo.server.routes import ENDPOINTS, Read, Router, Work
from pyvelo.server.turns import Turns
from pyvelo.threads import in_thread

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.server.serving import Serving
    from pyvelo.server.settings import Settings

__all__ = ["App"]

_log = logging.getLogger("pyvelo.server")

MAX_READING = 1024
"""Bodies that may arrive at once."""
MAX_BACKLOG = 4096
"""Pieces that may wait for a slow client, about 1 MiB of events."""
TICK_SECONDS = 1.0
"""Time between two looks at the streams."""
IN_THREAD = 1 << 16
"""Bodies from this length on are parsed in a thread."""
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_random = Random()  # of ids, which are no secrets: the system's own numbers take a call that lets others run

Simple = Callable[["App", Exchange], Awaitable[None]]


def _new_id() -> str:
    return f"{_random.getrandbits(64):016x}"


class App:
    """Server over one engine.

    draining: no new requests are taken; set by `drain`.
    """

    def __init__(self, serving: Serving, settings: Settings) -> None:
        self.serving = serving
        self.settings = settings
        self.draining = False
        self._turns = Turns()
        self._reading: Counter[Tenant] = Counter()  # requests whose body arrives
        self._open: dict[asyncio.Task[Any], _Progress] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._schema: dict[str, Any] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1003})
            return
        if self._ticker is None:
            self._ticker = asyncio.ensure_future(self._tick())
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        exchange = Exchange(scope, receive, send, given if _ID.fullmatch(given) else _new_id())
        await self._answer(exchange)

    async def drain(self, seconds: float) -> None:
        """Take no new requests, wait for requests in progress, and cancel what is left after `seconds`."""
        self.draining = True
        self.serving.live.end()
        tasks = [task for task in self._open if task is not asyncio.current_task()]
        if tasks:
            _log.info("requests in progress: %d; they have %g s, or until a signal", len(tasks), seconds)
            await asyncio.wait(tasks, timeout=seconds)
        self.cancel_all()
        tasks = [task for task in tasks if not task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)
        if self._ticker is not None:
            self._ticker.cancel()
        await self.serving.close()

    def cancel_all(self) -> None:
        """Cancel the requests in progress."""
        for task, progress in self._open.items():
            progress.cancelled = True
            task.cancel()

    async def _answer(self, exchange: Exchange) -> None:
        """Answer; a client that has gone, or is too slow, cancels the answer."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("an ASGI server calls its application in a task")
        progress = self._open[task] = _Progress(exchange)
        note = ""
        try:
            note = await self._route(exchange, progress)
        except asyncio.CancelledError:
            if not progress.cancelled and not progress.gone:
                raise
            note = "cancelled"
            if not progress.gone:
                await self._break_off(exchange)
        except ClientGone:
            note = "cancelled"
        except Exception as error:
            note = await self._refuse(exchange, error)
        finally:
            progress.unwatch()
            exchange.stream = None  # it refers to the exchange: cycles are left to the garbage collector
            del self._open[task]
            self.serving.metrics.answered(exchange.route or "other", exchange.status or 499)
            self._log(exchange, progress, note)

    async def _refuse(self, exchange: Exchange, error: Exception) -> str:
        """Answer with an error, if no answer has begun; return its message."""
        found = of_exception(error, exchange.fields)
        if found.status == 500:
            _log.error("request %s failed", exchange.id, exc_info=error)
        if not exchange.status:
            await exchange.answer(exchange.error_body(found), found.status, found.headers)
        return found.message

    async def _break_off(self, exchange: Exchange) -> None:
        """Tell the client that the server ends."""
        error = HttpError(503, "the server ends before the answer is complete", code="draining")
        if exchange.stream is not None and exchange.stream.started:
            await exchange.stream.fail(error)
        elif not exchange.status:
            await exchange.answer(exchange.error_body(error), error.status)

    async def _route(self, exchange: Exchange, progress: _Progress) -> str:
        exchange.more_headers = cors = cors_headers(exchange, self.settings)
        if exchange.method == "OPTIONS" and cors:
            await exchange.answer(b"", 204, preflight_headers(exchange))
            return ""
        exchange.route, exchange.path_id = _route_of(exchange.path)
        if exchange.route != "/health":
            check_page(exchange, self.settings)
        if not exchange.route:
            if exchange.path.startswith("/api/"):
                exchange.error_body = ollama_error
            raise not_found(f"there is no {exchange.path[:200]}: see /openapi.json")
        methods = ROUTES[exchange.route]
        exchange.error_body = next(iter(methods.values())).error_body
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            allowed = ", ".join(methods)
            raise HttpError(405, f"{exchange.route} takes {allowed}", headers={"Allow": allowed})
        if exchange.route not in WITHOUT_KEY:
            exchange.tenant = self.settings.keys.tenant(
                exchange.header("authorization"), exchange.header("x-api-key")
            )
        if isinstance(handler, _Simple):
            await handler.call(self, exchange)
            return ""
        if isinstance(handler, Read):
            await handler.call(self.serving, exchange)
            return ""
        if self.draining:
            raise _ending()
        return await self._work(exchange, progress, handler)

    async def _work(self, exchange: Exchange, progress: _Progress, handler: Work) -> str:
        """Read the body, and answer while the client listens."""
        await self._turns.wait()
        body = await self._body(exchange)
        if handler.optional and not body.strip():
            body = b"{}"
        admission = self.serving.admission
        ticket = admission.enter(exchange.tenant)
        try:
            if exchange.may_leave:
                progress.watch()
            if len(body) < IN_THREAD:
                fields = exchange.fields = parse_json(body)
            else:
                fields = exchange.fields = await in_thread(lambda: parse_json(body))
            stream = await handler.call(self.serving, exchange, ticket, fields)
            return "" if stream is None else progress.account(self.serving, stream)
        finally:
            admission.leave(ticket)

    async def _body(self, exchange: Exchange) -> bytes:
        """Return the body; a tenant whose bodies trickle leaves room for others.

        Raises: HttpError, as `Exchange.body`, and 503 if too many bodies arrive already.
        """
        own, reading = exchange.tenant, self._reading
        if reading.total() >= MAX_READING or reading[own] >= MAX_READING * 3 // 4:
            message, headers = "too many bodies arrive: try again in 1 s", {"Retry-After": "1"}
            raise HttpError(503, message, code="queue_full", headers=headers)
        reading[own] += 1
        try:
            return await exchange.body(self.settings.max_body)
        finally:
            reading[own] -= 1

    async def _tick(self) -> None:
        """Look at the streams and the sessions again and again, whatever fails."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            try:
                self._look_at_streams(now)
                if self.serving.stats is not None:
                    self.serving.metrics.rates.sample(self.serving.stats, now)
                await self.serving.expire()
            except Exception:
                _log.exception("a periodic task failed")

    def _look_at_streams(self, now: float) -> None:
        """Ping silent streams; cut a stream if its client does not read."""
        for progress in list(self._open.values()):
            stream = progress.exchange.stream
            if stream is None:
                continue
            silent = now - stream.touched
            # without a write in progress, pieces wait for this loop, not for the client
            if stream.writing and (silent > STUCK_SECONDS or stream.backlog() > MAX_BACKLOG):
                progress.cut()
            elif silent > PING_SECONDS:
                stream.ping()

    def _log(self, exchange: Exchange, progress: _Progress, note: str) -> None:
        if exchange.path in ("/health", "/metrics") or not _log.isEnabledFor(logging.INFO):
            return
        milliseconds = 1000 * (time.perf_counter() - exchange.received)
        _log.info(
            "%s %s %s %s %d %.0f ms %s",
            exchange.id,
            exchange.tenant.name,
            exchange.method,
            exchange.route or "(unknown path)",
            exchange.status or 499,
            milliseconds,
            "".join(c if c.isprintable() else " " for c in note[:300]),
        )

    # ---- answers without work ----

    async def health(self, exchange: Exchange) -> None:
        """Answer whether requests are taken."""
        ready = not self.draining
        await exchange.answer({"status": "ok" if ready else "draining"}, 200 if ready else 503)

    async def metrics(self, exchange: Exchange) -> None:
        """Answer with metrics for Prometheus."""
        serving = self.serving
        text = serving.metrics.text(serving.stats, serving.admission)
        await exchange.answer(text, headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    async def models(self, exchange: Exchange) -> None:
        """Answer with the model and its adapters."""
        await exchange.answer(
            {"object": "list", "data": [self._model(name) for name in self.serving.all_names]}
        )

    async def model(self, exchange: Exchange) -> None:
        """Answer with the model of a name."""
        name, serving = exchange.path_id, self.serving
        serving.check_model(name)
        await exchange.answer(self._model(name if name in serving.all_names else serving.model_name))

    def _model(self, name: str) -> dict[str, Any]:
        """Return the fields of the model by one of its names, or of an adapter."""
        serving = self.serving
        common = {"object": "model", "created": serving.created, "owned_by": "pyvelo"}
        parent = {} if name in serving.shown_names else {"parent": serving.model_name}
        more = {"root": serving.model_name, "max_model_len": serving.engine.n_ctx}
        return {"id": name, **common, **parent, **more}

    async def version(self, exchange: Exchange) -> None:
        """Answer with the version."""
        from pyvelo._version import __version__

        await exchange.answer({"version": __version__})

    async def schema(self, exchange: Exchange) -> None:
        """Answer with the description of the interface."""
        if self._schema is None:
            self._schema = openapi()
        await exchange.answer(self._schema)

    async def page(self, exchange: Exchange) -> None:
        """Answer with a file of the page, unless it is off."""
        if not self.settings.page:
            raise not_found("the page is off, because other machines may reach this server: give --page")
        content, headers = pages.file_of(exchange.route)
        await exchange.answer(content, headers=headers)

    async def tokenizer_info(self, exchange: Exchange) -> None:
        """Answer with the vocabulary's special tokens and the chat template."""
        await exchange.answer(tokens.tokenizer_info(self.serving))


class _Progress:
    """Request in progress: its task is cancelled when the client has gone.

    cancelled: by the server, which ends.
    gone: the client has left, or is cut off.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.cancelled = False
        self.gone = False
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None

    def watch(self) -> None:
        """Cancel the task when the client goes; call it after the body."""
        self._watcher = asyncio.ensure_future(self.exchange.gone())
        self._watcher.add_done_callback(self._left)

    def unwatch(self) -> None:
        """Stop to watch."""
        if self._watcher is not None:
            self._watcher.remove_done_callback(self._left)
            self._watcher.cancel()

    def cut(self) -> None:
        """Cancel the task, because its client does not read."""
        self.gone = True
        self.exchange.abort()
        if self._task is not None:
            self._task.cancel()

    def account(self, serving: Serving, stream: RequestStream) -> str:
        """Count ended requests in the metrics; return their line of the log."""
        lines = []
        for submission in stream.submissions:
            first, requests = submission.requests[0], submission.requests
            reasons = [str(request.finish_reason) for request in requests]
            usage, times = first.usage, first.times(first.parent.end)
            serving.metrics.ended(times, usage.prompt_tokens, usage.completion_tokens, reasons)
            wait = "-" if times.first_token is None else f"{1000 * (times.first_token - times.queued):.0f}"
            lines.append(
                f"in={usage.prompt_tokens} cached={usage.cached_tokens} out={usage.completion_tokens} "
                f"first={wait} ms {','.join(sorted(set(reasons)))}"
            )
        return lines[0] + (f" and {len(lines) - 1} more" if len(lines) > 1 else "")

    def _left(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled() and self._task is not None:
            self.gone = True
            self._task.cancel()


@dataclass(frozen=True)
class _Simple:
    """Handler that reads no body and never waits for the engine."""

    call: Simple
    error_body: Callable[[HttpError], Any] = openai_error


ROUTES: dict[str, Mapping[str, _Simple | Read | Work]] = {
    "/health": {"GET": _Simple(App.health)},
    "/metrics": {"GET": _Simple(App.metrics)},
    "/version": {"GET": _Simple(App.version)},
    "/openapi.json": {"GET": _Simple(App.schema)},
    "/v1/models": {"GET": _Simple(App.models)},
    "/v1/models/{id}": {"GET": _Simple(App.model)},
    "/tokenizer_info": {"GET": _Simple(App.tokenizer_info)},
    **{path: {"GET": _Simple(App.page)} for path in pages.FILES},
    **ENDPOINTS,
}
"""Handlers by pattern and method, see `ENDPOINTS`."""
WITHOUT_KEY = {"/health", *pages.FILES}
"""Paths that need no key."""
_route_of = Router(ROUTES)


def _ending() -> HttpError:
    return HttpError(503, "the server ends and takes no new requests", code="draining")
