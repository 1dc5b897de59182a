"""Requests of an engine that arrive, wait, run and end, and the idle sequences that keep blocks.

A `Finalizer` runs at any line of any thread, so it must neither wait nor take a lock: it only appends to the
inbox, by `abandon` and `abandon_sequence`, which are calls of C.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from pyvelo.engine.request import Request, RequestStatus, Sequence
from pyvelo.engine.stats import Counters
from pyvelo.errors import InternalError
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.pool import BlockTable, SwappedBlocks
from pyvelo.outputs import FinishReason

if TYPE_CHECKING:
    from pyvelo.engine.states import RecurrentStates
    from pyvelo.native import Sampler

__all__ = ["ActiveRequests", "Deadlines", "IdleSequences", "Inbox"]

NEW, RUNNING, WAITING = RequestStatus.NEW, RequestStatus.RUNNING, RequestStatus.WAITING
PREEMPTED = RequestStatus.PREEMPTED


FEWEST = 64
"""Deadlines that are stored before the ones of finished requests are removed."""


class Deadlines:
    """Deadlines by the clock of `Request.submitted`, the earliest first."""

    def __init__(self) -> None:
        self._times: list[tuple[float, int, Request]] = []
        self._look_at = FEWEST

    def __len__(self) -> int:
        return len(self._times)

    def note(self, request: Request) -> None:
        """Store the deadline of a numbered request, if it has one."""
        if request.params.timeout is None:
            return
        heappush(self._times, (request.submitted + request.params.timeout, request.number, request))
        if len(self._times) > self._look_at:
            self._times = [entry for entry in self._times if not entry[2].finished]
            heapify(self._times)
            self._look_at = FEWEST + 2 * len(self._times)

    def due(self, now: float) -> Iterator[Request]:
        """Remove and yield the requests whose deadline has passed."""
        while self._times and self._times[0][0] <= now:
            yield heappop(self._times)[2]


class Inbox:
    """Submissions, cancellations and closed sequences, drained between two steps.

    `submit`, `cancel` and `release` are thread-safe. The other methods belong to the thread that steps.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrivals: deque[Request] = deque()
        self._cancels: deque[Request] = deque()
        self._released: deque[Sequence] = deque()
        self.abandon: Callable[[Iterable[Request]], None] = self._cancels.extend
        self.abandon_sequence: Callable[[Sequence], None] = self._released.append
        self.deadlines = Deadlines()
        self.n_arrived = 0
        self.n_held = 0  # requests that `submit_held` will submit
        self.some_aborted = False
        """Whether a parent was aborted since its requests were cancelled last."""

    @property
    def n_new(self) -> int:
        """Requests that the core has not seen yet."""
        return len(self._arrivals)

    def submit(self, requests: Iterable[Request]) -> None:
        """Submit requests that fit into the empty pool; they arrive all at once."""
        self.hold(arriving := list(requests))
        self.submit_held(arriving)

    def hold(self, requests: Collection[Request]) -> None:
        """Accept requests for `submit_held`."""
        self.n_held += len(requests)
        for request in requests:
            if request.keeps_blocks and not request.sequence.busy:  # else it was cancelled before
                request.sequence.request = request
            request.submitted = request.submitted or self._clock()

    def submit_held(self, requests: Collection[Request]) -> None:
        """Submit requests that are held, unless they were cancelled meanwhile."""
        self._arrivals.extend(request for request in requests if not request.finished)
        self.n_held -= len(requests)

    def cancel(self, requests: Iterable[Request]) -> None:
        """Cancel requests; finished ones are ignored."""
        self._cancels.extend(request for request in requests if not request.finished)

    def release(self, sequence: Sequence) -> None:
        """Close a sequence: cancel its request and free its blocks."""
        self._released.append(sequence)

    # ---- for the core ----

    def drain(self) -> list[Request]:
        """Remove and return the new requests, and nothing else; others may arrive meanwhile."""
        requests = []
        while self._arrivals:
            requests.append(self._arrivals.popleft())
        return requests

    def arrivals(self) -> Iterator[Request]:
        """Remove, number and yield the new requests."""
        while self._arrivals:
            request = self._arrivals.popleft()
            self.n_arrived = request.number = self.n_arrived + 1
            request.arrival = request.arrival or request.number
            self.deadlines.note(request)
            yield request

    def to_end(self) -> Iterator[tuple[Request, FinishReason]]:
        """Remove and yield the requests that are late or cancelled, with the reason."""
        for request in self.deadlines.due(self._clock()):
            if not request.finished:
                yield request, "timeout"
        while self._cancels:
            request = self._cancels.popleft()
            if not request.finished:
                yield request, "abort"

    def released(self) -> Iterator[Sequence]:
        """Remove and yield the sequences to close."""
        while self._released:
            yield self._released.popleft()


class IdleSequences:
    """Sequences that keep blocks while no request runs on them, the longest idle first."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that has a block table, if it is not idle already."""
        self._sequences[id(sequence)] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, which keeps its blocks, if it is idle."""
        self._sequences.pop(id(sequence), None)

    def fork(self, sequence: Sequence, twin: Sequence) -> None:
        """Share the blocks of an idle sequence with `twin`, whose tokens start with the computed ones."""
        if sequence.table is not None and id(sequence) in self._sequences:
            twin.table = self._manager.fork(sequence.table, twin.hashes)
            self.add(twin)

    def evict(self, sequence: Sequence, swapped: SwappedBlocks | None) -> None:
        """Remove a sequence whose blocks were swapped out, or freed (None)."""
        self.remove(sequence)
        sequence.table, sequence.swapped = None, swapped

    def free(self, sequence: Sequence) -> None:
        """Free all blocks of a sequence, in the pool and in host memory."""
        self.remove(sequence)
        table, sequence.table = sequence.table, None
        if table is not None:
            self._manager.free(table)
        swapped, sequence.swapped = self.swapped(sequence), None
        if swapped is not None:
            self._manager.free_swapped(swapped)

    def swapped(self, sequence: Sequence) -> SwappedBlocks | None:
        """Return the blocks of a sequence in host memory; None: it has none, or they are invalid."""
        swapped = sequence.swapped
        return swapped if swapped is not None and self._manager.has_swapped(swapped) else None

    def clear(self) -> None:
        """Forget all sequences after the pool was cleared; they keep their tokens."""
        for sequence in self._sequences.values():
            sequence.table = None
        self._sequences.clear()


class ActiveRequests:
    """Queues of the requests that have not ended. Sets the status of every request.

    Args:
        new_sampler: makes the sampler of a request when it first starts.
        states: recurrent states of the running requests; None: the model has none.
    """

    def __init__(
        self,
        manager: BlockManager,
        idle: IdleSequences,
        counters: Counters,
        new_sampler: Callable[[Request], Sampler],
        states: RecurrentStates | None,
        clock: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._idle = idle
        self._counters = counters
        self._new_sampler = new_sampler
        self._states = states
        self._clock = clock
        self.clear()

    def clear(self) -> None:
        """Forget all requests without freeing their blocks."""
        self.waiting: list[Request] = []  # both in the order of rank
        self.running: list[Request] = []
        self.open: dict[int, Request] = {}  # all that have not ended, by id
        if self._states is not None:
            self._states.clear()

    def arrive(self, request: Request) -> None:
        """Take in a new request: queue it, unless it is held or was cancelled before its submission."""
        if not request.finished:
            self.open[id(request)] = request
            request.sequence.swapped = self._idle.swapped(request.sequence)
            if request.status is NEW:
                self.wait(request)

    def wait(self, request: Request, status: RequestStatus = WAITING) -> None:
        """Queue a request; PREEMPTED: again."""
        request.status = status
        insort(self.waiting, request, key=_rank)

    def start(self, request: Request, table: BlockTable) -> None:
        """Run a request with a block table that stores its first tokens."""
        if request.status in (WAITING, PREEMPTED):
            self.waiting.remove(request)
        self._idle.remove(request.sequence)
        swapped = request.sequence.swapped
        request.sequence.table, request.sequence.swapped = table, None
        request.n_computed = table.n_tokens
        if request.n_cached is None:
            request.n_cached = table.n_tokens
            if request.parent.n_cached is None:
                request.parent.n_cached = table.n_tokens
                if swapped is not None:  # behind the blocks that were a prefix hit
                    n_hit = table.n_published * self._manager.block_size
                    request.parent.n_host += table.n_tokens - n_hit
        request.status = RUNNING
        insort(self.running, request, key=_rank)

    def preempt(self, request: Request, swapped: SwappedBlocks | None) -> None:
        """Queue a request again whose blocks were swapped out, or freed (None)."""
        if self._states is not None and swapped is not None:
            self._states.swap_out(request, swapped)
        self._requeue(request, swapped)
        request.parent.n_preempted += 1
        self._counters.preemptions += 1
        self._counters.swaps += swapped is not None

    def restart_lost(self) -> None:
        """Queue the running requests again whose recurrent state is not of their computed tokens."""
        for request in self.running if self._states is not None else ():
            if self._states is not None and self._states.is_lost(request):
                self._idle.free(request.sequence)
                self._requeue(request, None)
        self.drop_left()

    def _requeue(self, request: Request, swapped: SwappedBlocks | None) -> None:
        self._vacate(request)
        request.sequence.table, request.sequence.swapped = None, swapped
        request.n_computed = 0
        self.wait(request, PREEMPTED)

    def equip(self, request: Request, first: Request | None = None) -> None:
        """Give a request that starts its sampler and a recurrent state, perhaps a copy of `first`'s."""
        if self._states is not None:
            if first is None:
                self._states.start(request)
            else:
                self._states.fork(first, request)
        if request.sampler is not None:
            return  # it was preempted: its draws continue
        request.sampler = self._new_sampler(request)
        if request.params.repetition_penalty != 1.0:
            request.sampler.see_prompt(request.tokens)  # nothing is generated yet

    def advance(self, request: Request, n_computed: int) -> None:
        """Note that K and V of the first `n_computed` tokens are in the pool."""
        request.n_computed = n_computed
        table = request.sequence.table
        if table is not None:
            self._manager.advance(table, n_computed)
            if self._states is not None:
                self._states.advanced(request)

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
        """End a request without freeing its blocks."""
        request.sequence.table, request.sequence.swapped, request.followers = None, None, []
        if request.sampler is not None:
            with suppress(Exception):
                request.sampler.close()
            request.sampler = None
        request.error = error
        self._finish(request, "error")

    def fail(self, requests: Iterable[Request], error: Exception) -> None:
        """End requests with `error`."""
        if not isinstance(error, InternalError):
            error.__traceback__ = None  # its frames hold the requests, which will hold the error
        for request in requests:
            request.error = error
            self.end(request, "error")
        self.drop_left()

    def end(self, request: Request, reason: FinishReason) -> None:
        """End a request and free its blocks, or leave them to its sequence."""
        self.release(request)
        if request.sampler is not None:
            request.sampler.close()
            request.sampler = None
        self.open.pop(id(request), None)
        self._finish(request, reason)
        self._promote(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Set the final status, last: other threads look at it."""
        self._counters.ended(reason)
        request.parent.ended(self._clock())
        request.status = RequestStatus.finished(reason)
        # without its callbacks nothing leads back to it: cycles are left to the garbage collector
        on_end, request.on_end, request.on_piece = request.on_end, None, None
        if on_end is not None:
            on_end(request)

    def _promote(self, request: Request) -> None:
        """Queue the next sample of a prompt if the first ended before the prompt was computed."""
        followers, request.followers = [f for f in request.followers if not f.finished], []
        if followers:
            followers[0].followers = followers[1:]
            self.wait(followers[0])

    def release(self, request: Request) -> None:
        """Remove a request from its queue. Free its blocks, or leave them to its sequence."""
        sequence, runs = request.sequence, request.status is RUNNING
        if request.status in (WAITING, PREEMPTED):
            self.waiting.remove(request)
        if not request.keeps_blocks:
            self._idle.free(sequence)
        elif runs and sequence.table is not None:
            # compute a token again for its logits if no token was drawn after it
            self.advance(request, min(request.n_computed, len(request.tokens) - 1))
            self._manager.trim(sequence.table)
            if self._states is None or self._states.keep(request):
                self._idle.add(sequence)
            else:
                self._idle.free(sequence)
        if runs:
            self._vacate(request)

    def _vacate(self, request: Request) -> None:
        """Free the place in the batch of a request that ran."""
        if self._states is not None:
            self._states.release(request)

    def drop_left(self) -> None:
        """Remove from `running` the requests that do not run any more."""
        self.running = [request for request in self.running if request.status is RUNNING]


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
