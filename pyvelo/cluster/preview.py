"""Block hashes of a request's prompt, computed where the request arrives, before a replica is chosen.

The handlers of the server itself make the prompt: `Preview` calls them with an engine that stops where the
real one would submit the tokens. So each endpoint, template and tenant's salt gives the hashes that the
replica will publish. The engine has only the vocabulary of the model's file.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from pyvelo.cluster.forwarded import Forwarded, Message, scope_of
from pyvelo.config import EngineConfig
from pyvelo.engine.async_loop import Prepare
from pyvelo.engine.input_processor import tokens_of
from pyvelo.errors import VeloError
from pyvelo.kv.prefix import BlockHashes
from pyvelo.models.hub import locate
from pyvelo.native import Model
from pyvelo.server.admission import Ticket
from pyvelo.server.bodies import parse_json
from pyvelo.server.errors import HttpError
from pyvelo.server.http import Exchange
from pyvelo.server.routes import ENDPOINTS, Router, Work
from pyvelo.server.serving import Serving
from pyvelo.server.settings import Settings
from pyvelo.threads import in_thread

__all__ = ["MAX_BLOCKS", "Preview"]

_log = logging.getLogger("pyvelo")

T = TypeVar("T")

MAX_BLOCKS = 1024
"""Blocks of a prompt that are hashed, from its start."""
PROMPTED = {
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"),
    *("/completion", "/api/chat", "/api/generate", "/v1/sessions"),
}
"""Endpoints whose prompts a replica may hold."""


class Preview:
    """Maker of block hashes.

    Args:
        config: of the replicas' engines.
        settings: of their servers.

    Raises:
        ModelError: the file of the model cannot be read.
    """

    def __init__(self, config: EngineConfig, settings: Settings) -> None:
        self._model = Model(locate(config.model), vocab_only=True)
        self._block_size, self._keys = config.block_size, settings.keys
        self._serving = Serving(cast(Any, _Loop(self._model)), config, settings)
        self._route_of = Router(ENDPOINTS)

    async def hashes(self, request: Forwarded) -> tuple[bytes, ...]:
        """Return the block hashes of the first prompt of a request; none if the request will be refused."""
        route, _ = self._route_of(request.path)
        handler = ENDPOINTS[route].get(request.method) if route in PROMPTED else None
        if not isinstance(handler, Work):
            return ()
        exchange = Exchange(scope_of(request), _receive, _send, "preview")
        exchange.route = route
        try:
            exchange.tenant = self._keys.tenant(
                exchange.header("authorization"), exchange.header("x-api-key")
            )
            fields = await in_thread(lambda: parse_json(request.body))
            await handler.call(self._serving, exchange, Ticket(exchange.tenant), fields)
        except _Prompted as found:
            return await in_thread(partial(self._hashes, found))
        except (HttpError, VeloError):
            pass  # the replica tells the client
        except Exception:
            _log.warning("no block hashes of a request to %s", route, exc_info=True)
        return ()

    def _hashes(self, found: _Prompted) -> tuple[bytes, ...]:
        tokens = array("i", found.tokens)
        hashes = BlockHashes(tokens, self._block_size, found.salt.encode("utf-8", "surrogatepass"))
        return tuple(map(hashes.block_hash, range(min(MAX_BLOCKS, len(tokens) // self._block_size))))


class _Prompted(Exception):
    """Tokens of a prompt, and the salt of its hashes; ends a handler."""

    def __init__(self, tokens: Sequence[int], salt: str) -> None:
        self.tokens, self.salt = tokens, salt


class _Loop:
    """Engine loop and engine without an engine."""

    def __init__(self, model: Model) -> None:
        self.engine = SimpleNamespace(
            model=model,
            parts=None,
            n_ctx=(1 << 31) - 1,
            loras=SimpleNamespace(infos={}),
            persistence=None,
            processor=_Processor(model),
        )
        self.preparer = self

    async def run(self, make: Callable[[], T], params: Iterable[Any] = ()) -> T:
        """Return the result of `make`, in a thread."""
        return await in_thread(make)

    async def prepare(self, prepares: Sequence[Prepare], params: Sequence[Any]) -> None:
        """Make the first prompt, which raises _Prompted."""
        await in_thread(lambda: prepares[0](lambda piece: None))


class _Processor:
    """Input processor that stops at the tokens."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def ask_all(self, n: int, params: Any, request_id: str | None = None) -> list[Any]:
        """Return the parameters of each prompt."""
        return [(params, None)] * n

    def ask(self, params: Any, request_id: str | None = None) -> None:
        """Return nothing: no request is made of a session."""

    def prepare(self, prompt: Any, params: Any, *_: Any) -> None:
        """Raise _Prompted."""
        raise _Prompted(tokens_of(self._model, prompt), params.cache_salt)

    def sequence(self, prompt: Any, cache_salt: str, *_: Any) -> None:
        """Raise _Prompted, for a session."""
        raise _Prompted(tokens_of(self._model, prompt), cache_salt)


async def _receive() -> Message:
    return {"type": "http.disconnect"}


async def _send(message: Message) -> None:
    """Drop an answer: the replica gives it."""
