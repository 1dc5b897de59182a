"""Conversations by response id, which later requests continue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyvelo.server.auth import Tenant

__all__ = ["ResponseStore", "Turn"]

TTL = 3600.0
"""Seconds from the last use of a response to its end."""


@dataclass(frozen=True)
class Turn:
    """Messages of a request and of its answer, after another turn.

    size: characters of all turns up to this one.
    """

    before: Turn | None
    own: tuple[Mapping[str, Any], ...]
    size: int

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """All messages up to this turn."""
        turns: list[tuple[Mapping[str, Any], ...]] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn.own)
            turn = turn.before
        return [message for own in reversed(turns) for message in own]


@dataclass(eq=False)
class _Stored:
    turn: Turn
    body: bytes
    expires: float

    @property
    def size(self) -> int:
        return self.turn.size + len(self.body)


class ResponseStore:
    """Responses of all tenants. It belongs to the event loop.

    A tenant that has too many loses the ones that it used least recently.

    Args:
        max_responses: of a tenant.
        max_size: bytes of the responses of a tenant and characters of their conversations; a turn counts in
            each response after it.
        clock: returns seconds.
    """

    def __init__(self, max_responses: int, max_size: int, clock: Callable[[], float]) -> None:
        self._max_responses = max_responses
        self._max_size = max_size
        self._clock = clock
        self._of: dict[Tenant, dict[str, _Stored]] = {}  # by id, in the order of their last use

    def __len__(self) -> int:
        return sum(len(own) for own in self._of.values())

    def add(
        self,
        tenant: Tenant,
        name: str,
        before: Turn | None,
        own: Sequence[Mapping[str, Any]],
        body: bytes,
    ) -> None:
        """Store a response, as JSON, and its messages."""
        size = (before.size if before is not None else 0) + sum(len(str(message)) for message in own)
        turn = Turn(before, tuple(own), size)
        self._of.setdefault(tenant, {})[name] = _Stored(turn, body, self._clock() + TTL)
        self._evict(self._of[tenant])

    def turn(self, tenant: Tenant, name: str) -> Turn | None:
        """Return a turn to continue; its time starts again. None if the tenant has none of this id."""
        stored = self._find(tenant, name)
        if stored is None:
            return None
        stored.expires = self._clock() + TTL
        own = self._of[tenant]
        own[name] = own.pop(name)
        return stored.turn

    def body(self, tenant: Tenant, name: str) -> bytes | None:
        """Return a response; None if the tenant has none of this id."""
        stored = self._find(tenant, name)
        return None if stored is None else stored.body

    def remove(self, tenant: Tenant, name: str) -> bool:
        """Remove a response; return whether the tenant had it."""
        return self._find(tenant, name) is not None and self._of[tenant].pop(name, None) is not None

    def expire(self) -> None:
        """Remove the responses whose time is up."""
        now = self._clock()
        for tenant, own in list(self._of.items()):
            while own and next(iter(own.values())).expires <= now:
                del own[next(iter(own))]
            if not own:
                del self._of[tenant]

    def _find(self, tenant: Tenant, name: str) -> _Stored | None:
        stored = self._of.get(tenant, {}).get(name)
        return stored if stored is not None and stored.expires > self._clock() else None

    def _evict(self, own: dict[str, _Stored]) -> None:
        """Remove the responses that were used least recently, but not the last one."""
        size = sum(stored.size for stored in own.values())
        while len(own) > 1 and (len(own) > self._max_responses or size > self._max_size):
            size -= own.pop(next(iter(own))).size
