"""Engine of a server: model, templates, statistics after each step, and what every endpoint shares."""

from __future__ import annotations

import hashlib
import time
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING

from pyvelo._version import __version__
from pyvelo.chat.conversation import Chats
from pyvelo.chat.meter import Limits
from pyvelo.engine.async_loop import AsyncEngineLoop
from pyvelo.engine.stats import EngineStats
from pyvelo.server.admission import Admission
from pyvelo.server.errors import HttpError
from pyvelo.server.kept_sessions import KeptSessions
from pyvelo.server.live import LiveBlocks
from pyvelo.server.metrics import Metrics
from pyvelo.server.response_store import ResponseStore
from pyvelo.server.session_store import SessionStore
from pyvelo.threads import in_thread

if TYPE_CHECKING:
    from pyvelo.config import EngineConfig
    from pyvelo.server.settings import Settings

__all__ = ["Serving"]

ANY = "*"
"""Name of a model that stands for every name."""
MAX_RESPONSES = 1024
"""Responses of a key that later requests may continue."""
MAX_RESPONSE_CHARACTERS = 64 << 20
"""Characters of their conversations."""
MAX_KEPT_SESSIONS = 64
"""Responses whose sessions are kept for the next turn, of all keys."""
KEPT_SHARE = 4
"""The pool has as many times the tokens of these sessions."""

OF_REQUESTS = Limits(max_work=4 << 20, seconds=2.0)
"""Limits of a chat template that a request gives: a client that leaves does not end its rendering."""


class Serving:
    """Model that a server answers with.

    stats: published after each step, so that no reader waits for one.
    """

    def __init__(self, loop: AsyncEngineLoop, config: EngineConfig, settings: Settings) -> None:
        engine = loop.engine
        self.loop, self.engine = loop, engine
        self.chats = Chats(engine.model, settings.chat_template, OF_REQUESTS)
        self.created = int(time.time())
        own = (_name_of(config.model),)
        self.names = settings.model_names or own
        self.shown_names = tuple(name for name in self.names if name != ANY) or own
        self.model_name = self.shown_names[0]
        self.model_file = PurePath(str(config.model)).name
        self.fingerprint = _fingerprint(config)
        self.generates = engine.parts is not None
        self.stats: EngineStats | None = None
        self.metrics = Metrics(self.model_name, with_vllm=settings.vllm_metrics)
        max_running, pool_tokens = (
            (engine.limits.max_seqs, engine.pool.n_tokens) if self.generates else (1, 1 << 20)
        )
        self.admission = Admission(
            max_running, settings.max_queue, settings.max_queued_tokens or 4 * pool_tokens
        )
        self.sessions = SessionStore(
            settings.max_sessions,
            settings.max_session_tokens or 4 * pool_tokens,
            time.monotonic,
            settings.new_id,
        )
        self.responses = ResponseStore(MAX_RESPONSES, MAX_RESPONSE_CHARACTERS, time.monotonic)
        self.keeps_sessions = settings.max_sessions > 0
        self.kept_sessions = KeptSessions(MAX_KEPT_SESSIONS, pool_tokens // KEPT_SHARE, time.monotonic)
        self.live = LiveBlocks(
            *(engine, self.model_name, self.admission),
            lambda: self.sessions.by_sequence() | self.kept_sessions.by_sequence(),
            self.metrics.rates,
        )
        self.new_id = settings.new_id
        self.token_bytes = cache(lambda token: engine.model.token_bytes(token, special=True))
        self.text_bytes = cache(engine.model.token_bytes)  # none of control tokens
        self.token_text = cache(lambda token: self.token_bytes(token).decode("utf-8", "replace"))

    async def start(self) -> None:
        """Let the engine publish its statistics."""
        if self.generates:
            await in_thread(lambda: self.engine.publish_stats(self._publish))

    async def expire(self) -> None:
        """Close what has expired."""
        self.responses.expire()
        self.kept_sessions.expire()
        await self.sessions.expire()

    async def close(self) -> None:
        """Close all sessions."""
        await self.sessions.close()

    def _publish(self, stats: EngineStats) -> None:
        self.admission.throughput.watch(stats)
        self.stats = stats

    @property
    def adapters(self) -> list[str]:
        """Names of the LoRA adapters, which are models for clients."""
        return list(self.engine.loras.infos)

    @property
    def all_names(self) -> list[str]:
        """Names of the model and of its adapters."""
        return [*self.shown_names, *self.adapters]

    def check_model(self, name: str | None) -> str | None:
        """Return the adapter that the name of a model selects, None without one; raise HttpError 404."""
        if not name or name in self.names or name == "default":
            return None
        if name in self.adapters:
            return name
        if ANY in self.names:
            return None
        known = " and ".join(map(repr, self.all_names))
        raise HttpError(
            404,
            f"the model {name[:200]!r} is not served here; this server has {known}",
            "model",
            "model_not_found",
        )


def _name_of(model: object) -> str:
    """Return the name of a model for clients: of its file, or as on the hub."""
    name = str(model)
    return PurePath(name).stem if name.endswith(".gguf") else name


def _fingerprint(config: EngineConfig) -> str:
    """Return a digest of what the bits of an answer depend on: version, model and settings of the engine."""
    settings = (__version__, config.model, config.kv_type, config.block_size, config.deterministic)
    return "pv_" + hashlib.sha256(repr(settings).encode()).hexdigest()[:12]
