"""Choice of a replica for a request: by the prefix of its prompt and by load. Plain Python without Ray.

A policy knows the requests that it sent itself, and the reports of the replicas. With several routers, each
sees the requests of the others in the reports alone.

The load of a replica is its number of open requests: the policy's own ones, and the ones of other routers,
which the last report counts. A replica is overloaded
for one more request if `load + 1 > max(slack, ceil(factor * (total + 1) / n))`; `total` is the load of all
`n` replicas. With `factor` from 1 on, the replica with the least load is never overloaded, so the bound holds
always.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from pyvelo.errors import ConfigError, shown

__all__ = [
    "DIGEST_BYTES",
    "POLICIES",
    "LeastLoaded",
    "Policy",
    "PrefixAffinity",
    "Report",
    "RoundRobin",
    "make_policy",
    "short",
]

DIGEST_BYTES = 8
"""Bytes of a block hash in a report: two hashes with the same ones cost a prefix hit, nothing else."""
MAX_RECENT = 4096
"""Digests of own requests that a policy remembers for each replica."""

MAX_FACTOR = 1e6
"""Largest load over the mean: more than replicas there are makes no difference."""


def short(block_hash: bytes) -> bytes:
    """Return the digest of a block hash."""
    return block_hash[:DIGEST_BYTES]


@dataclass(frozen=True)
class Report:
    """State of a replica.

    held: digests of the prefixes in its pool, a bounded number.
    n_open: requests that run or wait; n_running: of these, the running ones.
    n_others: requests of other routers than the one that reads the report, of any kind.
    queued_tokens: prompt tokens that wait.
    free_blocks: blocks that hold nothing.
    """

    held: frozenset[bytes] = frozenset()
    n_open: int = 0
    n_running: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    n_others: int = 0

    def packed(self, of_routers: Mapping[str, int]) -> dict[str, Any]:
        """Return the report as plain values, for `unpack`.

        of_routers: open requests that each router sent; they take the place of `n_others`.
        """
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {"held": b"".join(sorted(self.held)), "of_routers": dict(of_routers), **numbers}

    @staticmethod
    def unpack(values: Mapping[str, Any], router: str) -> Report:
        """Return the report of plain values; an empty mapping is a replica that has not reported yet.

        router: that reads it.
        """
        held: bytes = values.get("held", b"")
        digests = (held[at : at + DIGEST_BYTES] for at in range(0, len(held), DIGEST_BYTES))
        numbers = {name: int(values.get(name, 0)) for name in _NUMBERS}
        of_others = {**values.get("of_routers", {}), router: 0}
        return Report(frozenset(digests), **numbers, n_others=sum(of_others.values()))


_NUMBERS = ("n_open", "n_running", "queued_tokens", "free_blocks")


class Policy(Protocol):
    """Order of the replicas for a request. It belongs to one thread."""

    def order(self, digests: Sequence[bytes], replicas: Iterable[str]) -> list[str]:
        """Return the replicas, the best one first. Change nothing.

        Args:
            digests: of the full blocks of the prompt, from its start; none: they are unknown.
            replicas: that are alive.
        """

    def sent(self, replica: str, digests: Sequence[bytes]) -> None:
        """Record that a request goes to a replica."""

    def ended(self, replica: str) -> None:
        """Record that a request of a replica has ended, or was not sent after all."""

    def report(self, replica: str, report: Report) -> None:
        """Take the newest report of a replica."""

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all other replicas."""


@dataclass
class _Known:
    """Knowledge of a policy about a replica.

    n_own: open requests of this policy; n_others: of others, at the last report.
    n_new: blocks of the requests that were sent since.
    last: number of the last request that was sent to it.
    recent: times at which digests of own requests are forgotten, the oldest first.
    """

    report: Report = field(default_factory=Report)
    n_own: int = 0
    n_others: int = 0
    n_new: int = 0
    last: int = 0
    recent: OrderedDict[bytes, float] = field(default_factory=OrderedDict)

    @property
    def load(self) -> int:
        return self.n_own + self.n_others


class LeastLoaded:
    """Policy: the replica with the fewest open requests, then the fewest queued tokens."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._n_sent = 0

    def order(self, digests: Sequence[bytes], replicas: Iterable[str]) -> list[str]:
        """Return the replicas by load, then by the time since their last request."""
        return sorted(replicas, key=lambda name: (*self._pressure(name), self._of(name).last, name))

    def held(self, replica: str, digests: Sequence[bytes]) -> int:
        """Return the blocks of the longest prefix that a replica is known to hold; here none is known."""
        return 0

    def load(self, replica: str) -> int:
        """Return the open requests of a replica."""
        return self._of(replica).load

    def sent(self, replica: str, digests: Sequence[bytes]) -> None:
        """Count a request."""
        known = self._known.setdefault(replica, _Known())
        self._n_sent += 1
        known.n_own += 1
        known.n_new += max(0, len(digests) - self.held(replica, digests))
        known.last = self._n_sent

    def ended(self, replica: str) -> None:
        """Count the end of a request; a replica that was forgotten stays so."""
        if (known := self._known.get(replica)) is not None:
            known.n_own = max(0, known.n_own - 1)

    def report(self, replica: str, report: Report) -> None:
        """Take the newest report of a replica."""
        known = self._known.setdefault(replica, _Known())
        known.report, known.n_others, known.n_new = report, report.n_others, 0

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget all other replicas."""
        for name in self._known.keys() - set(replicas):
            del self._known[name]

    def _of(self, replica: str) -> _Known:
        return self._known.get(replica, _NOTHING)

    def _pressure(self, replica: str) -> tuple[int, int, int]:
        """Return what to compare replicas by: open requests, queued tokens, and how few blocks are free."""
        known = self._of(replica)
        return known.load, known.report.queued_tokens, known.n_new - known.report.free_blocks


_NOTHING = _Known()


class RoundRobin(LeastLoaded):
    """Policy: the replicas in turn, whatever their load is."""

    def order(self, digests: Sequence[bytes], replicas: Iterable[str]) -> list[str]:
        """Return the replicas; the one whose last request is the oldest is first."""
        return sorted(replicas, key=lambda name: (self._of(name).last, name))


class PrefixAffinity(LeastLoaded):
    """Policy: the replica that holds the longest prefix of the prompt, unless it is overloaded.

    Replicas that are not overloaded come first, a longer prefix before a shorter one. Then less pressure
    decides: fewer open requests, fewer queued tokens, more free blocks. Then a hash of the first block
    decides, so routers without reports choose alike.

    A prefix is held if the last report has it. For `memory` seconds it is also held where an own request with
    it was sent, because its blocks are in no report before it was computed.

    Args:
        clock: returns seconds.
        factor: load that a replica may have over the mean load; at least 1.
        slack: open requests below which no replica is overloaded.
        memory: seconds.
    """

    def __init__(
        self, clock: Callable[[], float], *, factor: float = 1.25, slack: int = 4, memory: float = 30.0
    ) -> None:
        super().__init__()
        if not 1.0 <= factor <= MAX_FACTOR:
            raise ConfigError(f"factor={shown(factor)}: give a number from 1 to {MAX_FACTOR:g}")
        if slack < 1:
            raise ConfigError(f"slack={shown(slack)}: give at least 1")
        if not memory >= 0:
            raise ConfigError(f"memory={shown(memory)}: give at least 0")
        self._clock, self._factor, self._slack, self._memory = clock, factor, slack, memory

    def order(self, digests: Sequence[bytes], replicas: Iterable[str]) -> list[str]:
        """Return the replicas; overloaded ones are last."""
        names = list(replicas)
        if not digests:
            return super().order(digests, names)
        most, now = self.most(names), self._clock()

        def rank(name: str) -> tuple[Any, ...]:
            overloaded = self._of(name).load + 1 > most
            n_held = 0 if overloaded else self._held(name, digests, now)
            return (overloaded, -n_held, *self._pressure(name), _mix(digests[0], name))

        return sorted(names, key=rank)

    def most(self, replicas: Sequence[str]) -> int:
        """Return the open requests that a replica may have, with the one to come."""
        total = sum(self._of(name).load for name in replicas) + 1
        return max(self._slack, math.ceil(self._factor * total / max(1, len(replicas))))

    def sent(self, replica: str, digests: Sequence[bytes]) -> None:
        """Count a request, and remember its prompt."""
        super().sent(replica, digests)
        recent, until = self._known[replica].recent, self._clock() + self._memory
        for digest in digests:
            recent[digest] = until
            recent.move_to_end(digest)
        while len(recent) > MAX_RECENT:
            recent.popitem(last=False)

    def held(self, replica: str, digests: Sequence[bytes]) -> int:
        """Return the blocks of the longest prefix that a replica is known to hold, by reports and memory."""
        return self._held(replica, digests, self._clock())

    def _held(self, replica: str, digests: Sequence[bytes], now: float) -> int:
        """Return the place of the last digest that is known: a block hash stands for all blocks before."""
        known = self._of(replica)
        held, recent = known.report.held, known.recent
        for number in range(len(digests), 0, -1):
            digest = digests[number - 1]
            if digest in held or recent.get(digest, -math.inf) > now:
                return number
        return 0


def _mix(digest: bytes, replica: str) -> bytes:
    return blake2b(digest + replica.encode(), digest_size=8).digest()


POLICIES = ("affinity", "least-loaded", "round-robin")


def make_policy(name: str, clock: Callable[[], float], **options: Any) -> Policy:
    """Return a policy by its name in POLICIES; raise ConfigError for another one.

    options: of `PrefixAffinity`; the other policies have none.
    """
    if name == "affinity":
        return PrefixAffinity(clock, **options)
    if name not in POLICIES:
        raise ConfigError(f"policy={shown(name)}: choose from {', '.join(POLICIES)}")
    return LeastLoaded() if name == "least-loaded" else RoundRobin()
