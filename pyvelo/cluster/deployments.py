"""Deployments of Ray Serve: replicas with an engine each, and the ingress before them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from ray import serve
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RaySystemError,
    WorkerCrashedError,
)
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException

from pyvelo.cluster.forwarded import Forwarded, Message, answer_of
from pyvelo.cluster.gather import Whole, whole_answer
from pyvelo.cluster.ingress import Ingress, ReplicaLost
from pyvelo.cluster.options import Options
from pyvelo.cluster.preview import Preview
from pyvelo.cluster.report import Reporter
from pyvelo.config import EngineConfig
from pyvelo.engine.async_loop import open_engine_loop
from pyvelo.server.app import App
from pyvelo.server.errors import HttpError, openai_error
from pyvelo.server.http import Exchange
from pyvelo.server.run import HttpServer, listen, listeners, uvicorn_config
from pyvelo.server.serving import Serving
from pyvelo.server.settings import Settings
from pyvelo.threads import in_thread

__all__ = ["Front", "ListeningFront", "Replica", "application"]

REPORT_SECONDS = 1.0
"""Time between two reports of a replica."""
MESSAGE_SECONDS = 2e-3
"""Pause between two batches of events, for each open request: a message costs Ray a good part of it."""
LONGEST_PAUSE = 0.1
PATIENCE = 10.0
"""Seconds for a request that all replicas answer."""
ROUTER = "pyvelo.cluster.router:PrefixRouter"
LOST = (
    *(RayActorError, WorkerCrashedError, ObjectLostError, OutOfMemoryError, RaySystemError),
    RayServeException,
)
"""Errors of a call whose replica has ended, or that reaches none."""

_log = logging.getLogger("pyvelo")


class Replica:
    """Server with an engine, in a process of Ray."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, config: EngineConfig, settings: Settings
    ) -> None:
        self._name: str = serve.get_replica_context().replica_id.unique_id
        settings = replace(settings, replica=self._name)
        self._loop = await open_engine_loop(config, threading.Event())
        self._serving = Serving(self._loop, config, settings)
        await self._serving.start()
        self._app, self._reporter = App(self._serving, settings), Reporter(self._serving)
        if self._serving.generates and self._loop.engine.core.manager.block_size != config.block_size:
            _log.warning(
                "blocks have %d tokens here: give --block-size %d, or the ingress knows no prefix",
                *(self._loop.engine.core.manager.block_size,) * 2,
            )

    async def answer(self, request: Forwarded) -> AsyncGenerator[list[Message], None]:
        """Yield the messages of the answer to a request."""
        if request.replica not in ("", self._name):
            yield await _gone(request)
            return
        with self._reporter.answering(request):
            async with aclosing(answer_of(self._app, request, self._pause)) as batches:
                async for batch in batches:
                    for message in batch:
                        if message["type"] == "http.response.start":
                            message["headers"].append((b"x-pyvelo-replica", self._name.encode()))
                    yield batch

    def _pause(self) -> float:
        """Return the seconds between two batches of events, so that Ray can follow all streams."""
        return min(LONGEST_PAUSE, MESSAGE_SECONDS * len(self._serving.admission))

    async def whole_answer(self, request: Forwarded) -> Whole:
        """Return the whole answer to a request that all replicas get."""
        return await whole_answer(self._app, request, self._name)

    async def drain(self, seconds: float) -> None:
        """Take no more requests; return when the others have ended, or cancel them after `seconds`."""
        await self._app.drain(seconds)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return a report for the routers; Ray calls it every REPORT_SECONDS."""
        return await self._reporter.report()

    def check_health(self) -> None:
        """Raise the error of an engine that is broken; then Ray replaces the replica."""
        self._loop.engine.check_open()

    async def __del__(self) -> None:
        app, loop = getattr(self, "_app", None), getattr(self, "_loop", None)
        if app is not None:
            await app.drain(0.0)  # Ray has waited for the requests
        if loop is not None:
            await in_thread(loop.close)


class Front:
    """Ingress: it computes the block hashes of prompts, and forwards requests."""

    def __init__(self, replicas: Any, config: EngineConfig, settings: Settings) -> None:
        self._replicas, self._answer = replicas, replicas.options(stream=True).answer
        preview = Preview(config, settings)
        self._app = Ingress(self._call, preview.hashes, self._call_all, settings.max_body)

    def __serve_build_asgi_app__(self) -> Ingress:
        """Return the application, for Ray."""
        return self._app

    async def _call(self, request: Forwarded) -> AsyncGenerator[list[Message], None]:
        """Yield the messages of a replica's answer; raise ReplicaLost if the replica ends before."""
        batches = self._answer.remote(request)
        try:
            async for batch in batches:
                yield batch
        except LOST as error:
            raise ReplicaLost(type(error).__name__) from None
        finally:
            batches.cancel()

    async def drain(self, seconds: float) -> None:
        """Drain all replicas; return when they have, or soon after `seconds`."""
        calls = self._replicas.broadcast("drain", seconds)
        with suppress(TimeoutError):
            await calls.results_async(timeout_s=seconds + PATIENCE, return_exceptions=True)

    async def _call_all(self, request: Forwarded) -> list[Whole]:
        """Return the answers of the replicas that answer in time."""
        calls = self._replicas.broadcast("whole_answer", request)
        with suppress(TimeoutError):
            answers = await calls.results_async(timeout_s=PATIENCE, return_exceptions=True)
            return [answer for answer in answers if isinstance(answer, Whole)]
        return []


class ListeningFront(Front):
    """Ingress that listens itself, for a Ray on one machine.

    Ray's proxies would be one more process that each event crosses.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, replicas: Any, options: Options
    ) -> None:
        super().__init__(replicas, options.config, options.settings)
        # other ingresses listen there, too, and so may the one that this one replaces
        listener = listen(options.host, options.port, shared=True)
        self._server = HttpServer(uvicorn_config(self._app))
        self._running = asyncio.ensure_future(self._server.serve(listeners(listener)))

    def check_health(self) -> None:
        """Raise RuntimeError if the server has ended; then Ray replaces the ingress."""
        if self._running.done():
            raise RuntimeError("the HTTP server of the ingress has ended")

    async def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            server.should_exit = True
            await self._running


def application(options: Options, *, listens: bool = False) -> Any:
    """Return the application for `serve.run`.

    listens: the ingress listens at the address of the options, and Ray needs no proxy.
    """
    config, settings = options.config, options.settings
    scaling: dict[str, Any] = {"num_replicas": options.replicas}
    if options.autoscale is not None:
        least, most = options.autoscale
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=least,
                max_replicas=most,
                target_ongoing_requests=options.target_requests,
                upscale_delay_s=options.upscale_delay,
                downscale_delay_s=options.downscale_delay,
                look_back_period_s=max(12.0, min(30.0, 2 * options.upscale_delay)),  # Ray samples every 10 s
            )
        }
    replicas = serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        # beyond this the server itself refuses, with Retry-After
        max_ongoing_requests=config.max_num_seqs + settings.max_queue + 64,
        graceful_shutdown_timeout_s=options.drain,
        health_check_period_s=2.0,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,
            request_router_kwargs=options.router,
            request_routing_stats_period_s=REPORT_SECONDS,
        ),
        **scaling,
    ).bind(config, settings)
    deployed = partial(
        serve.deployment,
        name="Front",
        num_replicas=options.ingresses,
        ray_actor_options={"num_cpus": options.ingress_cpus},
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=options.drain + 10.0,  # after its replicas
        health_check_period_s=2.0,
    )
    if listens:
        return deployed(ListeningFront).bind(replicas, options)
    return deployed(serve.ingress()(Front)).bind(replicas, config, settings)


async def _gone(request: Forwarded) -> list[Message]:
    """Return the answer to a request whose replica has ended, with its sessions and responses."""
    error = HttpError(
        404,
        f"the replica {request.replica!r} has ended, and what it kept with it: begin again",
        code="replica_gone",
        headers={"x-should-retry": "false"},
    )
    messages: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.append(message)

    headers = dict(request.headers)
    name = headers.get(b"x-request-id", b"-").decode("latin-1")
    scope = {"method": request.method, "path": request.path, "headers": request.headers}
    await Exchange(scope, receive, send, name).answer(openai_error(error), error.status, error.headers)
    return messages
