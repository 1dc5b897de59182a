"""Requests whose time will be up."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from pyvelo.engine.request import Request

__all__ = ["Deadlines"]

FEWEST = 64
"""Times that are kept before those of requests that have ended are looked for."""


class Deadlines:
    """Times by the clock that `Request.submitted` is of, the earliest first."""

    def __init__(self) -> None:
        self._times: list[tuple[float, int, Request]] = []
        self._n_noted = 0
        self._look_at = FEWEST

    def __len__(self) -> int:
        return len(self._times)

    def note(self, request: Request) -> None:
        """Keeps the request's deadline, where it has one."""
        if request.params.timeout is None:
            return
        self._n_noted += 1
        heappush(self._times, (request.submitted + request.params.timeout, self._n_noted, request))
        if len(self._times) > self._look_at:
            self._times = [entry for entry in self._times if not entry[2].finished]
            heapify(self._times)
            self._look_at = FEWEST + 2 * len(self._times)

    def due(self, now: float) -> Iterator[Request]:
        """Takes out those whose time is up."""
        while self._times and self._times[0][0] <= now:
            yield heappop(self._times)[2]
