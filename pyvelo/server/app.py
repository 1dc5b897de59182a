"""ASGI application: routes, keys, errors, cancellation, pings and the end."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from pyvelo.server import chat, completions, embeddings, tokens
from pyvelo.server.auth import ANYBODY, Tenant
from pyvelo.server.errors import HttpError, not_found, of_exception
from pyvelo.server.http import PING_SECONDS, STUCK_SECONDS, Exchange, Receive, Scope, Send, parse_json
from pyvelo.server.openapi import openapi
from pyvelo.threads import in_thread

if TYPE_CHECKING:
    from pyvelo.engine.async_loop import RequestStream
    from pyvelo.server.admission import Ticket
    from pyvelo.server.serving import Serving
    from pyvelo.server.settings import Settings

__all__ = ["App"]

_log = logging.getLogger("pyvelo.server")

MAX_BACKLOG = 4096
"""Pieces that may wait for a slow client, about 1 MiB of events."""
IN_THREAD = 1 << 16
"""Bodies from this length on are parsed in a thread."""
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

Simple = Callable[["App", Exchange], Awaitable[None]]
Generating = Callable[["Serving", Exchange, "Ticket", dict[str, Any]], Awaitable["RequestStream | None"]]


class App:
    """Server over one engine.

    draining: no new requests are taken; set by `drain`.
    """

    def __init__(self, serving: Serving, settings: Settings) -> None:
        self.serving = serving
        self.settings = settings
        self.draining = False
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
        exchange = Exchange(scope, receive, send, given if _ID.fullmatch(given) else token_hex(8))
        await self._answer(exchange)

    async def drain(self, seconds: float) -> None:
        """Take no new requests, wait for those in progress, and cancel what is left after `seconds`."""
        self.draining = True
        tasks = [task for task in self._open if task is not asyncio.current_task()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        self.cancel_all()
        tasks = [task for task in tasks if not task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)
        if self._ticker is not None:
            self._ticker.cancel()

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
        except Exception as error:
            found = of_exception(error)
            if found.status == 500:
                _log.exception("request %s failed", exchange.id)
            note = found.message
            if not exchange.status:
                await exchange.answer(found.body, found.status, found.headers)
        finally:
            progress.unwatch()
            del self._open[task]
            path = exchange.path if exchange.path in ROUTES else "other"
            self.serving.metrics.answered(path, exchange.status or 499)
            self._log(exchange, progress, note)

    async def _route(self, exchange: Exchange, progress: _Progress) -> str:
        exchange.more_headers = cors = self._cors(exchange)
        if exchange.method == "OPTIONS" and cors:
            await exchange.answer(b"", 204, _preflight(exchange))
            return ""
        methods = ROUTES.get(exchange.path)
        if methods is None:
            raise not_found(f"there is no {exchange.path[:200]}: see /openapi.json")
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        if handler is None:
            allowed = ", ".join(methods)
            raise HttpError(405, f"{exchange.path} takes {allowed}", headers={"Allow": allowed})
        if exchange.path != "/health":
            progress.tenant = self.settings.keys.tenant(
                exchange.header("authorization"), exchange.header("x-api-key")
            )
        if isinstance(handler, _Simple):
            await handler.call(self, exchange)
            return ""
        if self.draining:
            raise HttpError(503, "the server ends and takes no new requests", code="draining")
        return await self._work(exchange, progress, handler)

    async def _work(self, exchange: Exchange, progress: _Progress, handler: _Work) -> str:
        """Read the body, and answer while the client is there."""
        admission = self.serving.admission
        ticket = admission.enter(progress.tenant)
        try:
            body = await exchange.body(self.settings.max_body)
            progress.watch()
            if len(body) < IN_THREAD:
                fields = parse_json(body)
            else:
                fields = await in_thread(lambda: parse_json(body))
            stream = await handler.call(self.serving, exchange, ticket, fields)
            return "" if stream is None else progress.account(self.serving, stream)
        finally:
            admission.leave(ticket)

    async def _tick(self) -> None:
        """Ping silent streams, and cut those whose clients do not read."""
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            for progress in list(self._open.values()):
                stream = progress.exchange.stream
                if stream is None:
                    continue
                silent = now - stream.touched
                if (stream.writing and silent > STUCK_SECONDS) or stream.backlog() > MAX_BACKLOG:
                    progress.cut()
                elif silent > PING_SECONDS:
                    stream.ping()

    def _cors(self, exchange: Exchange) -> dict[str, str]:
        """Return the headers for a web page of an allowed origin."""
        origin, allowed = exchange.header("origin"), self.settings.origins
        if not origin or not ("*" in allowed or origin in allowed):
            return {}
        return {
            "Access-Control-Allow-Origin": "*" if "*" in allowed else origin,
            "Access-Control-Expose-Headers": "X-Request-Id, Retry-After",
            "Vary": "Origin",
        }

    def _log(self, exchange: Exchange, progress: _Progress, note: str) -> None:
        if exchange.path in ("/health", "/metrics"):
            return
        milliseconds = 1000 * (time.perf_counter() - exchange.received)
        _log.info(
            "%s %s %s %s %d %.0f ms %s",
            exchange.id,
            progress.tenant.name,
            exchange.method,
            exchange.path[:100] if exchange.path in ROUTES else "(unknown path)",
            exchange.status or 499,
            milliseconds,
            note.replace("\n", " ")[:300],
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
        serving = self.serving
        common = {"object": "model", "created": serving.created, "owned_by": "pyvelo"}
        n_ctx = serving.engine.n_ctx
        found = [{"id": serving.model_name, **common, "max_model_len": n_ctx}]
        await exchange.answer({"object": "list", "data": found})

    async def version(self, exchange: Exchange) -> None:
        """Answer with the version."""
        from pyvelo import __version__

        await exchange.answer({"version": __version__})

    async def schema(self, exchange: Exchange) -> None:
        """Answer with the description of the interface."""
        if self._schema is None:
            self._schema = openapi()
        await exchange.answer(self._schema)

    async def tokenizer_info(self, exchange: Exchange) -> None:
        """Answer with the vocabulary's special tokens and the chat template."""
        await exchange.answer(tokens.tokenizer_info(self.serving))


class _Progress:
    """Request in progress: its task is cancelled when the client has gone."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.tenant: Tenant = ANYBODY
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
        self.cancelled = True
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


@dataclass(frozen=True)
class _Work:
    """Handler of a body, admitted and cancelled with its client."""

    call: Generating


ROUTES: dict[str, dict[str, _Simple | _Work]] = {
    "/health": {"GET": _Simple(App.health)},
    "/metrics": {"GET": _Simple(App.metrics)},
    "/version": {"GET": _Simple(App.version)},
    "/openapi.json": {"GET": _Simple(App.schema)},
    "/v1/models": {"GET": _Simple(App.models)},
    "/tokenizer_info": {"GET": _Simple(App.tokenizer_info)},
    "/tokenize": {"POST": _Work(tokens.tokenize)},
    "/detokenize": {"POST": _Work(tokens.detokenize)},
    "/v1/completions": {"POST": _Work(completions.complete)},
    "/v1/chat/completions": {"POST": _Work(chat.chat)},
    "/v1/embeddings": {"POST": _Work(embeddings.embed)},
}


def _preflight(exchange: Exchange) -> dict[str, str]:
    return {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": exchange.header("access-control-request-headers") or "*",
        "Access-Control-Max-Age": "600",
    }
