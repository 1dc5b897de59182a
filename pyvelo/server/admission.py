"""Bounds on the requests that wait, and the time after which a refused client should try again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from pyvelo.server.auth import Tenant
from pyvelo.server.errors import HttpError

if TYPE_CHECKING:
    from pyvelo.engine.request import ParentRequest
    from pyvelo.engine.stats import EngineStats

__all__ = ["Admission", "Throughput", "Ticket"]

MAX_RETRY_SECONDS = 120
"""Clients wait no longer: openai-python ignores a Retry-After above it."""
MEMORY_SECONDS = 30.0
"""Half-life of what the throughput is computed from, in seconds of steps."""


class Throughput:
    """Prompt tokens, and requests, that the engine finishes in a second of steps."""

    def __init__(self) -> None:
        self._seconds = self._tokens = self._requests = 0.0
        self._last = (0.0, 0, 0)

    def watch(self, stats: EngineStats) -> None:
        """Take the totals after a step."""
        ended = stats.requests_finished + stats.requests_timed_out + stats.requests_aborted
        now = (stats.step_seconds, stats.prompt_tokens, ended)
        seconds, tokens, requests = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        kept = 0.5 ** (seconds / MEMORY_SECONDS)
        self._seconds = self._seconds * kept + seconds
        self._tokens = self._tokens * kept + tokens
        self._requests = self._requests * kept + requests

    def wait(self, n_tokens: int, n_requests: int) -> int:
        """Return whole seconds until so many prompt tokens and requests are done, 1 to MAX_RETRY_SECONDS."""
        if not self._seconds:
            return 1
        by_tokens = n_tokens * self._seconds / max(1.0, self._tokens)
        by_requests = n_requests * self._seconds / max(1.0, self._requests)
        return max(1, min(MAX_RETRY_SECONDS, math.ceil(max(by_tokens, by_requests))))


@dataclass(eq=False)
class Ticket:
    """One admitted request, from its headers to its end.

    n_tokens: of its prompts; 0 until they are known.
    """

    tenant: Tenant
    n_tokens: int = 0
    parents: Iterable[ParentRequest] = ()

    @property
    def waits(self) -> bool:
        """Whether it has no token yet."""
        return all(parent.first_token is None for parent in self.parents)


class Admission:
    """Open requests of all tenants.

    Args:
        max_running: requests that run at once.
        max_queue: requests that may wait beside them.
        max_tokens: prompt tokens that may wait.
    """

    def __init__(self, max_running: int, max_queue: int, max_tokens: int) -> None:
        self.throughput = Throughput()
        self.refusals: dict[str, int] = {"requests": 0, "tokens": 0, "key_requests": 0, "key_tokens": 0}
        self._max_open = max_running + max_queue
        self._max_tokens = max_tokens
        self._open: set[Ticket] = set()
        self._queue: set[Ticket] = set()  # open tickets, without some that have a token
        self._at_most = 0  # bound of the prompt tokens that wait: the last count, and all since then
        self._tenants: WeakKeyDictionary[ParentRequest, Tenant] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, tenant: Tenant) -> Ticket:
        """Count a request that arrives; `leave` must follow.

        Raises: HttpError 429 above the tenant's limit, 503 above the server's.
        """
        if tenant.requests is not None and tenant.n_requests >= tenant.requests:
            raise self._refuse(
                429, "key_requests", f"this key has {tenant.requests} requests already", tenant
            )
        if len(self._open) >= self._max_open:
            raise self._refuse(503, "requests", f"{self._max_open} requests run or wait already", None)
        ticket = Ticket(tenant)
        self._open.add(ticket)
        self._queue.add(ticket)
        tenant.n_requests += 1
        return ticket

    def queue(self, ticket: Ticket, n_tokens: int, parents: Iterable[ParentRequest]) -> None:
        """Count the prompt tokens of a request.

        A request that waits alone is never refused, however long it is.

        Raises: HttpError 429 above the tenant's limit, 503 above the server's.
        """
        if ticket.tenant.tokens is not None or self._at_most + n_tokens > self._max_tokens:
            self._check_tokens(ticket.tenant, n_tokens)
        self._at_most += n_tokens
        ticket.n_tokens, ticket.parents = n_tokens, tuple(parents)
        for parent in ticket.parents:
            self._tenants[parent] = ticket.tenant

    def _check_tokens(self, tenant: Tenant, n_tokens: int) -> None:
        """Count the prompt tokens that wait; raise HttpError if so many more are too many."""
        waiting = self._waiting()
        of_tenant = sum(other.n_tokens for other in waiting if other.tenant is tenant)
        if tenant.tokens is not None and of_tenant and of_tenant + n_tokens > tenant.tokens:
            raise self._refuse(
                429,
                "key_tokens",
                f"{of_tenant} prompt tokens of this key wait; its limit is {tenant.tokens}",
                tenant,
            )
        of_all = sum(other.n_tokens for other in waiting)
        if of_all and of_all + n_tokens > self._max_tokens:
            raise self._refuse(
                503, "tokens", f"{of_all} prompt tokens wait; the limit is {self._max_tokens}", None
            )
        self._at_most = of_all

    def leave(self, ticket: Ticket) -> None:
        """Count a request that has ended; may be called again."""
        if ticket in self._open:
            self._open.discard(ticket)
            self._queue.discard(ticket)
            ticket.tenant.n_requests -= 1

    def tenant_of(self, parent: ParentRequest | None) -> Tenant | None:
        """Return the tenant of an admitted request, also after its end; None if it is unknown."""
        return None if parent is None else self._tenants.get(parent)

    def queued_tokens(self) -> int:
        """Return the prompt tokens that wait."""
        return sum(ticket.n_tokens for ticket in self._waiting())

    def _waiting(self) -> set[Ticket]:
        self._queue = {ticket for ticket in self._queue if ticket.waits}
        return self._queue

    def _refuse(self, status: int, reason: str, message: str, tenant: Tenant | None) -> HttpError:
        """Return the refusal, with the time after which the requests that wait are done."""
        self.refusals[reason] += 1
        waiting = self._waiting()
        if tenant is not None:
            waiting = {ticket for ticket in waiting if ticket.tenant is tenant}
        seconds = self.throughput.wait(sum(ticket.n_tokens for ticket in waiting), len(waiting))
        return HttpError(
            status,
            f"{message}: try again in {seconds} s",
            code="queue_full" if status == 503 else "rate_limit_exceeded",
            headers={"Retry-After": str(seconds)},
        )
