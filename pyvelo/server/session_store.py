"""Sessions of clients: their owners, quotas and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pyvelo.errors import ClosedError
from pyvelo.server.auth import Tenant
from pyvelo.server.dialogue import Dialogue
from pyvelo.server.errors import HttpError, not_found
from pyvelo.session import AsyncSession

__all__ = ["SessionStore", "StoredSession"]


@dataclass(eq=False)
class StoredSession:
    """Session of a client.

    ttl: seconds from the last use to the end; expires: the end, by the store's clock.
    dialogue: its messages; None if it was made of text.
    n_known: tokens that were computed at the last use; the rest is computed for the next answer.
    busy: a request uses it.
    """

    id: str
    tenant: Tenant
    session: AsyncSession
    ttl: float
    expires: float
    salt: str
    lora: str | None
    dialogue: Dialogue | None = None
    n_known: int = 0
    busy: bool = False


class SessionStore:
    """Open sessions of all tenants. It belongs to the event loop.

    Args:
        max_sessions: sessions of a tenant.
        max_tokens: tokens in the sessions of a tenant, from which on it gets no more.
        clock: returns seconds.
        new_id: returns an id of a kind.
    """

    def __init__(
        self, max_sessions: int, max_tokens: int, clock: Callable[[], float], new_id: Callable[[str], str]
    ) -> None:
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._clock, self._new_id = clock, new_id
        self._by_id: dict[str, StoredSession] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._by_id)

    def check_room(self, tenant: Tenant, n_new: int) -> None:
        """Raise HttpError 403 without sessions, 429 if a tenant may not have `n_new` more or more tokens."""
        if self._closed:
            raise HttpError(503, "the server ends and takes no new requests", code="draining")
        if not self._max_sessions:
            raise HttpError(403, "this server keeps no sessions: it was started with --max-sessions 0")
        own = self.of(tenant)
        if len(own) + n_new > self._max_sessions:
            raise _full(
                f"this key has {len(own)} sessions, and {n_new} more would exceed {self._max_sessions}: "
                f"delete some"
            )
        n_tokens = sum(len(each.session) for each in own)
        if n_tokens >= self._max_tokens:
            raise _full(
                f"the sessions of this key have {n_tokens} tokens; the limit is {self._max_tokens}: "
                f"delete some"
            )

    def add(
        self,
        tenant: Tenant,
        session: AsyncSession,
        *,
        ttl: float,
        salt: str,
        lora: str | None,
        dialogue: Dialogue | None,
    ) -> StoredSession:
        """Store a session under a new random id.

        Raises: HttpError, as `check_room`.
        """
        self.check_room(tenant, 1)
        name, expires = self._new_id("sess"), self._clock() + ttl
        stored = StoredSession(name, tenant, session, ttl, expires, salt, lora, dialogue)
        self._by_id[name] = stored
        return stored

    def find(self, tenant: Tenant, name: str) -> StoredSession:
        """Return a session; raise HttpError 404 if the tenant has none of this id."""
        stored = self._by_id.get(name)
        if stored is None or stored.tenant is not tenant or self._expired(stored):
            raise _missing(name)
        return stored

    def of(self, tenant: Tenant) -> list[StoredSession]:
        """Return the sessions of a tenant, the oldest first."""
        return [each for each in self._by_id.values() if each.tenant is tenant and not self._expired(each)]

    def by_sequence(self) -> dict[int, tuple[Tenant, str]]:
        """Return tenant and id of all sessions, by the identity of their sequences."""
        return {id(each.session._sequence): (each.tenant, each.id) for each in self._by_id.values()}

    @contextmanager
    def use(self, stored: StoredSession) -> Iterator[AsyncSession]:
        """Yield a session that no other request uses; its time starts again at the end.

        Raises: HttpError 409 if another request uses it, 404 if it was deleted meanwhile.
        """
        if stored.busy:
            raise HttpError(
                409,
                f"session {stored.id} is answering: wait for the end, or fork it before",
                code="session_busy",
                headers={"x-should-retry": "false"},
            )
        stored.busy = True
        try:
            yield stored.session
        except ClosedError:
            if stored.id in self._by_id:
                raise
            raise _missing(stored.id) from None
        finally:
            stored.busy = False
            stored.expires = self._clock() + stored.ttl

    async def remove(self, stored: StoredSession) -> None:
        """Close a session; an answer in progress ends."""
        self._by_id.pop(stored.id, None)
        await stored.session.close()

    async def expire(self) -> None:
        """Close the sessions whose time is up."""
        for stored in [each for each in self._by_id.values() if self._expired(each)]:
            await self.remove(stored)

    async def close(self) -> None:
        """Close all sessions and take no new ones."""
        self._closed = True
        for stored in list(self._by_id.values()):
            await self.remove(stored)

    def shown(self, stored: StoredSession) -> dict[str, Any]:
        """Return a session as clients see it; times are seconds since 1970."""
        left = stored.ttl if stored.busy else stored.expires - self._clock()
        return {
            "id": stored.id,
            "object": "session",
            "n_tokens": len(stored.session),
            "expires_at": int(time.time() + left),
            "status": "answering" if stored.busy else "idle",
        }

    def _expired(self, stored: StoredSession) -> bool:
        return not stored.busy and stored.expires <= self._clock()


def _missing(name: str) -> HttpError:
    return not_found(f"there is no session {name[:64]!r}: it was deleted, has expired, or never was")


def _full(message: str) -> HttpError:
    return HttpError(429, message, code="session_quota", headers={"x-should-retry": "false"})
