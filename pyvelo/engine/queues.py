"""The requests of an engine: those that arrive, are cancelled or are late, and those that wait or run.

A finalizer runs at any instruction of any thread, so it may neither wait nor take a lock: it only appends
to the inbox, by `abandon` and `abandon_sequence`, which are calls of C.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from pyvelo.engine.request import IdleSequences, Request, Sequence
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.pool import SwappedBlocks
from pyvelo.outputs import FinishReason

if TYPE_CHECKING:
    from pyvelo.native import Context, Sampler

__all__ = ["ActiveRequests", "Counters", "Deadlines", "Inbox"]

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
    """`submit`, `cancel` and `release` are thread-safe; what takes things out belongs to the core.

    `clock` tells the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrivals: deque[Request] = deque()
        self._cancels: deque[Request] = deque()
        self._release: deque[Sequence] = deque()
        self.abandon: Callable[[Iterable[Request]], None] = self._cancels.extend
        self.abandon_sequence: Callable[[Sequence], None] = self._release.append
        self.deadlines = Deadlines()
        self.n_arrived = 0

    @property
    def n_new(self) -> int:
        """Requests that the core has not seen yet."""
        return len(self._arrivals)

    def submit(self, requests: Iterable[Request]) -> None:
        """Lets requests that can fit wait for their turn."""
        for request in requests:
            if request.sequence is not None:
                request.sequence.request = request
            request.submitted = request.submitted or self._clock()
            self._arrivals.append(request)

    def cancel(self, requests: Iterable[Request]) -> None:
        """Ends requests; harmless for those that are done."""
        self._cancels.extend(request for request in requests if not request.finished)

    def release(self, sequence: Sequence) -> None:
        """Gives back what a sequence holds, and ends what runs on it."""
        self._release.append(sequence)

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

    def dropped(self) -> Iterator[Sequence]:
        """Takes out sequences that nobody holds any more."""
        while self._release:
            yield self._release.popleft()


@dataclass
class Counters:
    """Totals since the engine was made."""

    steps: int = 0
    prompt_tokens: int = 0  # of prompts that were computed to their end
    completion_tokens: int = 0  # generated
    stopped: int = 0  # requests that ended with "stop"
    ran_out: int = 0  # with "length"
    aborted: int = 0
    timed_out: int = 0
    failed: int = 0
    preemptions: int = 0
    swaps: int = 0  # of those, to host memory
    evicted_sequences: int = 0  # that gave their blocks up while they rested
    schedule_seconds: float = 0.0  # from the start of a step to its forward pass
    run_seconds: float = 0.0  # in forward passes
    sample_seconds: float = 0.0  # from there to the end of the step

    @property
    def n_ended(self) -> int:
        """Requests that have ended, however."""
        return self.stopped + self.ran_out + self.aborted + self.timed_out + self.failed

    def ended(self, reason: FinishReason) -> None:
        """A request has ended so."""
        self.stopped += reason == "stop"
        self.ran_out += reason == "length"
        self.aborted += reason == "abort"
        self.timed_out += reason == "timeout"
        self.failed += reason == "error"


class ActiveRequests:
    """Requests that have not ended, by what they do: some wait, some run.

    `new_sampler` makes a request's sampler when it first starts; `n_states` is the number of recurrent states
    of `context` (0: the model has none).
    """

    def __init__(
        self,
        context: Context,
        manager: BlockManager,
        idle: IdleSequences,
        counters: Counters,
        new_sampler: Callable[[Request], Sampler],
        n_states: int,
        clock: Callable[[], float],
    ) -> None:
        self._context = context
        self._manager = manager
        self._idle = idle
        self._counters = counters
        self._new_sampler = new_sampler
        self._n_states = n_states
        self._clock = clock
        self.has_states = n_states > 0
        self.clear()

    def clear(self) -> None:
        """Forget all requests, without giving back what they hold."""
        self.waiting: list[Request] = []  # both in the order of rank
        self.running: list[Request] = []
        self._some_idle = False  # in `running` are requests that have ended
        self.open: dict[int, Request] = {}  # all that have not ended, by id
        self.free_states = list(range(self._n_states))[::-1]

    def run(self, request: Request) -> None:
        """Add a request that has a table to those that run."""
        insort(self.running, request, key=_rank)

    def wait(self, request: Request) -> None:
        """Queue a request that has not started, or was preempted."""
        insort(self.waiting, request, key=_rank)

    def preempt(self, request: Request, swapped: SwappedBlocks | None) -> None:
        """Queue a request that gave its blocks up; K and V are in `swapped`, or lost."""
        self.vacate(request)
        request.swapped = swapped
        request.n_computed = 0
        self._counters.preemptions += 1
        self._counters.swaps += swapped is not None
        self.wait(request)

    def equip(self, request: Request) -> None:
        """Give a request that starts its recurrent state and its sampler."""
        if self.has_states:
            request.state = self.free_states.pop()
            self._context.clear_state(request.state)
        if request.sampler is not None:
            return  # it begins anew, its draws go on
        request.sampler = self._new_sampler(request)
        if request.params.repetition_penalty != 1.0:
            request.sampler.see_prompt(request.tokens)  # nothing is generated yet

    def advance(self, request: Request, n_computed: int) -> None:
        """Note that the first `n_computed` tokens of a request are in the pool now."""
        request.n_computed = n_computed
        if request.table is not None:
            self._manager.advance(request.table, n_computed)

    def end_early(self, request: Request, reason: FinishReason) -> None:
        """End a request between two tokens, with the text that it has."""
        text = request.detokenizer.finish()
        request.text_parts.append(text)
        try:
            if request.on_piece is not None:
                request.on_piece(request.piece(text, (), reason, None, self._clock()))
        except Exception as error:
            request.error = error
        finally:
            self.end(request, reason)

    def break_off(self, request: Request, error: Exception) -> None:
        """End a request without giving back what it holds."""
        request.table, request.swapped, request.followers = None, None, []
        if request.sampler is not None:
            with suppress(Exception):
                request.sampler.close()
            request.sampler = None
        self._counters.ended("error")
        request.parent.ended(self._clock())
        request.error = error
        request.finish_reason = "error"
        if request.on_end is not None:
            request.on_end(request)

    def fail(self, requests: Iterable[Request], error: Exception) -> None:
        """End requests with `error`."""
        for request in requests:
            request.error = error
            self.end(request, "error")
        self.drop_idle()

    def end(self, request: Request, reason: FinishReason) -> None:
        """End a request and give back what it holds. `finish_reason` comes last: other threads look at it."""
        self.release(request)
        if request.sampler is not None:
            request.sampler.close()
            request.sampler = None
        self._counters.ended(reason)
        request.parent.ended(self._clock())
        self.open.pop(id(request), None)
        request.finish_reason = reason
        if request.on_end is not None:
            request.on_end(request)
        self._promote(request)

    def _promote(self, request: Request) -> None:
        """Queue the next sample of a prompt if the first ended before the prompt was computed."""
        followers, request.followers = [f for f in request.followers if not f.finished], []
        if followers:
            followers[0].followers = followers[1:]
            self.wait(followers[0])

    def release(self, request: Request) -> None:
        """Give back the blocks of a request, or leave them with its sequence."""
        sequence = request.sequence if not self.has_states else None  # a state does not rest
        if sequence is not None:
            sequence.swapped, request.swapped = request.swapped, None
        if request.swapped is not None:
            self._manager.free_swapped(request.swapped)
            request.swapped = None
        if request.table is not None:
            if sequence is not None:
                # a token behind which nothing was drawn is computed again, for its logits
                self.advance(request, min(request.n_computed, len(request.tokens) - 1))
                self._idle.take_back(sequence, request.table)
            else:
                self._manager.free(request.table)
            self.vacate(request)

    def vacate(self, request: Request) -> None:
        """Take its seat from a request whose blocks were given back."""
        request.table = None
        self._some_idle = True
        if self.has_states:
            self.free_states.append(request.state)

    def drop_idle(self) -> None:
        """Leave in `running` the requests that have a table."""
        if self._some_idle:
            self.running = [request for request in self.running if request.table is not None]
            self._some_idle = False


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
