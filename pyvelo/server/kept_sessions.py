"""Sessions of the latest responses, whose blocks the next turns of their conversations share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyvelo.server.auth import Tenant
from pyvelo.session import AsyncSession

__all__ = ["KeptSessions"]

TTL = 600.0
"""Seconds from an answer to the end of its session."""


@dataclass(frozen=True)
class _Kept:
    session: AsyncSession
    expires: float


class KeptSessions:
    """Idle sessions by tenant and response. It belongs to the event loop.

    The cache evicts free blocks before idle sessions, so these have a small share of it: beyond, the session
    that was kept first is closed.

    Args:
        max_sessions: of all tenants.
        max_tokens: of all sessions.
        clock: returns seconds.
    """

    def __init__(self, max_sessions: int, max_tokens: int, clock: Callable[[], float]) -> None:
        self._max_sessions, self._max_tokens = max_sessions, max_tokens
        self._clock = clock
        self._kept: dict[tuple[Tenant, str], _Kept] = {}  # in the order of their answers

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, tenant: Tenant, response: str) -> AsyncSession | None:
        """Return the session of a response; None if it has none."""
        kept = self._kept.get((tenant, response))
        return None if kept is None else kept.session

    def keep(self, tenant: Tenant, response: str, session: AsyncSession) -> None:
        """Keep the session of a response that has ended, or close it if it is too long."""
        if len(session) > self._max_tokens:
            session._close()
            return
        self._kept[tenant, response] = _Kept(session, self._clock() + TTL)
        n_tokens = sum(len(kept.session) for kept in self._kept.values())
        while len(self._kept) > self._max_sessions or n_tokens > self._max_tokens:
            oldest = next(iter(self._kept))
            n_tokens -= len(self._kept[oldest].session)
            self.close(*oldest)

    def close(self, tenant: Tenant, response: str) -> None:
        """Close the session of a response, if it has one."""
        kept = self._kept.pop((tenant, response), None)
        if kept is not None:
            kept.session._close()

    def expire(self) -> None:
        """Close the sessions whose time is up."""
        now = self._clock()
        for key in [key for key, kept in self._kept.items() if kept.expires <= now]:
            self.close(*key)

    def by_sequence(self) -> dict[int, tuple[Tenant, str]]:
        """Return tenant and response of each session, by the identity of its sequence."""
        return {id(kept.session._sequence): key for key, kept in self._kept.items()}
