"""Settings of a server, apart from the settings of its engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from secrets import token_hex

from pyvelo.server.auth import Keys

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits of a server.

    model_names: for clients, the first of them in answers ("*": any name is the model's); none: the name of
        the model's file.
    chat_template: Jinja source that replaces the model's.
    keys: of the clients; none: no key is needed.
    origins: of web pages that may call the server ("*": any); none: CORS is off.
    hosts: names of the server in the header Host ("*": any); needed only without keys, see `check_page`.
    max_body: longest body in bytes.
    max_queue: requests that may wait while others run.
    max_queued_tokens: prompt tokens that may wait; None: four times the pool.
    max_sessions: sessions of a key.
    max_session_tokens: tokens in the sessions of a key, from which on it gets no more; None: four pools.
    vllm_metrics: also name metrics as vLLM does.
    local: it listens at addresses of this machine alone.
    page: a page at / shows the block map and has a chat.
    replica: name of this server among several; the ids of its sessions and responses end with it.
    """

    model_names: tuple[str, ...] = ()
    chat_template: str | None = None
    keys: Keys = field(default_factory=Keys)
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    max_body: int = 8 << 20
    max_queue: int = 256
    max_queued_tokens: int | None = None
    max_sessions: int = 64
    max_session_tokens: int | None = None
    vllm_metrics: bool = False
    local: bool = False
    page: bool = False
    replica: str = ""

    def new_id(self, kind: str) -> str:
        """Return a random id of a session ("sess") or a response ("resp")."""
        return "_".join(filter(None, (kind, token_hex(16), self.replica)))
