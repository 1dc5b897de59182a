"""Queue of submissions, cancellations and deadlines, drained between two steps.

A finalizer runs at any instruction of any thread, so it may neither wait nor take a lock: it only appends
here, by `abandon` and `abandon_branch`, which are calls of C.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush

from pyvelo.engine.request import Branch, Request
from pyvelo.outputs import FinishReason

__all__ = ["Deadlines", "Inbox"]

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


class Inbox:
    """`submit`, `cancel` and `let_go` are thread-safe; what takes things out belongs to the core.

    `clock` tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrivals: deque[Request] = deque()
        self._cancels: deque[Request] = deque()
        self._let_go: deque[Branch] = deque()
        self.abandon: Callable[[Iterable[Request]], None] = self._cancels.extend
        self.abandon_branch: Callable[[Branch], None] = self._let_go.append
        self.deadlines = Deadlines()
        self.n_arrived = 0

    @property
    def n_new(self) -> int:
        """Requests that the core has not seen yet."""
        return len(self._arrivals)

    def submit(self, requests: Iterable[Request]) -> None:
        """Lets requests that can fit wait for their turn."""
        for request in requests:
            if request.branch is not None:
                request.branch.request = request
            request.submitted = request.submitted or self._clock()
            self._arrivals.append(request)

    def cancel(self, requests: Iterable[Request]) -> None:
        """Ends requests; harmless for those that are done."""
        self._cancels.extend(request for request in requests if not request.finished)

    def let_go(self, branch: Branch) -> None:
        """Gives back what a branch holds, and ends what runs on it."""
        self._let_go.append(branch)

    # ---- for the core ----

    def drain(self) -> list[Request]:
        """Take out the requests that are new, and nothing else."""
        requests = list(self._arrivals)
        self._arrivals.clear()
        return requests

    def arrivals(self) -> Iterator[Request]:
        """Takes out those that are new, each with its number."""
        while self._arrivals:
            request = self._arrivals.popleft()
            self.n_arrived += 1
            request.arrival = request.arrival or self.n_arrived
            self.deadlines.note(request)
            yield request

    def to_end(self) -> Iterator[tuple[Request, FinishReason]]:
        """Take out the requests to end, and why: their time is up, or they were cancelled."""
        for request in self.deadlines.due(self._clock()):
            if not request.finished:
                yield request, "timeout"
        while self._cancels:
            request = self._cancels.popleft()
            if not request.finished:
                yield request, "abort"

    def dropped(self) -> Iterator[Branch]:
        """Takes out branches that nobody holds any more."""
        while self._let_go:
            yield self._let_go.popleft()
