"""Ray Serve's router by the policies of `pyvelo.cluster.policy`. It needs `pip install 'pyvelo[ray]'`.

Ray copies this module's code to the processes that route; they import the rest of the package.
"""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pyvelo.cluster.forwarded import Forwarded
from pyvelo.cluster.policy import Policy, Report, make_policy, short

__all__ = ["PrefixRouter"]


class PrefixRouter(RequestRouter):
    """Router of requests whose first argument is a `Forwarded`.

    A request that names its replica goes there. If that replica has ended, any replica may refuse it.
    """

    _policy: Policy
    _name: str
    """Name in its requests, by which the reports count them."""
    _reports: dict[str, Any]
    """The newest report of each replica, as it came."""
    _sent: dict[str, str]
    """Replicas of open requests, by Ray's ids of requests."""

    def initialize_state(self, policy: str = "affinity", **options: Any) -> None:
        """Take the settings: the name of a policy, and its options."""
        self._policy = make_policy(policy, time.monotonic, **options)
        self._name, self._reports, self._sent = "", {}, {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas that are alive, and their reports."""
        names = {replica.replica_id.unique_id for replica in replicas}
        self._policy.keep(names)
        self._reports = {name: report for name, report in self._reports.items() if name in names}
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica at once."""
        super().on_replica_actor_died(replica_id)
        names = {each.unique_id for each in self.curr_replicas}
        self._policy.keep(names)
        self._reports.pop(replica_id.unique_id, None)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas for a request, the best one first; count the request at the best one."""
        alive = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        request = _request_of(pending_request)
        self._name = request.router or self._name
        for name, replica in alive.items():
            self._take_report(name, replica.routing_stats)
        digests = tuple(map(short, request.hashes))
        names = [request.replica] if request.replica in alive else self._policy.order(digests, alive)
        if pending_request is not None and names:
            self._count(pending_request, names[0], digests)
        return [[alive[name]] for name in names]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Move a request that another replica took."""
        key, name = pending_request.metadata.internal_request_id, replica_id.unique_id
        if self._sent.get(key) not in (None, name):
            self._end(key)
            self._sent[key] = name
            self._policy.sent(name, tuple(map(short, _request_of(pending_request).hashes)))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the end of a request."""
        if self._sent.get(internal_request_id) == replica_id.unique_id:
            self._end(internal_request_id)

    def _take_report(self, name: str, values: Any) -> None:
        if self._reports.get(name) is not values:
            self._reports[name] = values
            self._policy.report(name, Report.unpack(values, self._name))

    def _count(self, pending: PendingRequest, name: str, digests: tuple[bytes, ...]) -> None:
        """Count a request before it is sent, so that the choices for the next ones know of it."""
        key = pending.metadata.internal_request_id
        self._end(key)  # of an earlier choice
        self._sent[key] = name
        self._policy.sent(name, digests)
        pending.future.add_done_callback(lambda future: self._end(key) if future.cancelled() else None)

    def _end(self, key: str) -> None:
        name = self._sent.pop(key, None)
        if name is not None:
            self._policy.ended(name)


def _request_of(pending: PendingRequest | None) -> Forwarded:
    """Return the request to route; an empty one if it is another call of the deployment."""
    found = pending.args[0] if pending is not None and pending.args else None
    return found if isinstance(found, Forwarded) else Forwarded("", "")
