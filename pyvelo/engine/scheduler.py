"""Plan of the next step: the requests that run and the tokens of each. Planning changes no state."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import islice, takewhile
from typing import NamedTuple

from pyvelo.engine.request import Request, Sequence
from pyvelo.errors import InternalError
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.plan import AllocationPlan
from pyvelo.kv.pool import BlockTable, Never, NotNow, Start, SwappedBlocks
from pyvelo.kv.states import tokens_to_snapshot
from pyvelo.memory.budget import SCORED_TOKENS, Limits

__all__ = ["Chunk", "StepPlan", "schedule"]


class Chunk(NamedTuple):
    """The next `n_tokens` tokens of a sequence; `last`: a token is sampled after them."""

    request: Request
    table: BlockTable
    n_tokens: int
    last: bool


class StepPlan(NamedTuple):
    """Plan of one step.

    starts: first chunks of the requests that start; in `chunks`, too.
    decodes: requests that compute one token.
    chunks: prompt chunks.
    evicted, preempted: idle sequences and running requests that free their blocks; None: not swapped out.
    limited: streams limit its prompt tokens, even if they decode in the steps of another adapter.
    """

    starts: list[Chunk]
    decodes: list[Request]
    chunks: list[Chunk]
    evicted: list[tuple[Sequence, SwappedBlocks | None]]
    preempted: list[tuple[Request, SwappedBlocks | None]]
    allocation: AllocationPlan
    limited: bool

    @property
    def requests(self) -> list[Request]:
        """Requests of the step."""
        return self.decodes + [chunk.request for chunk in self.chunks]


def schedule(
    waiting: abc.Sequence[Request],
    running: abc.Sequence[Request],
    manager: BlockManager,
    limits: Limits,
    favour_swap: Callable[[int, int], bool] = lambda n_blocks, n_tokens: True,
    idle: Iterable[Sequence] = (),
    prefill_budget: Callable[[int, int, int], int] | None = None,
    *,
    paused: Collection[Request] = (),
) -> StepPlan:
    """Plan a step of at most `max_batch_tokens` tokens: decodes first, then prompts.

    If blocks run out, idle sequences are evicted, the longest idle first. Then running requests of the last
    rank are preempted, so the request of the first rank always advances. Waiting requests start by rank, if
    there are blocks for all their tokens and some more; they preempt running requests with a higher value of
    `priority`.

    Args:
        waiting, running: in the order of rank.
        favour_swap: (blocks, tokens) → whether swapping out and in is faster than computing again.
        prefill_budget: (decodes, streaming, waiting) → prompt tokens of a step with so many decodes, requests
            that stream, and requests whose prompt is not computed.
        paused: running requests that compute nothing in this step, and keep their blocks.
    """
    planner = _Planner(running, manager, limits, favour_swap, idle)
    n_streaming = sum(r.on_piece is not None and r.n_generated > 0 for r in running)
    if prefill_budget is not None and n_streaming:
        n_decodes = sum(r.n_computed + 1 == len(r.tokens) for r in running)
        if n_decodes:  # a stream may be computed again
            planner.limited = True
            planner.prefill_budget = prefill_budget(
                n_decodes, n_streaming, len(waiting) + len(running) - n_decodes
            )
    urgent = planner.start_urgent(waiting)
    planner.grow([request for request in running if request not in paused] if paused else running)
    planner.feed()
    if not planner.preempted:
        planner.start(islice(waiting, urgent, None))
    return planner.plan()


_Victim = Sequence | Request
"""Sequence to evict, or request to preempt."""


class _Planner:
    """Plan in progress."""

    def __init__(
        self,
        running: abc.Sequence[Request],
        manager: BlockManager,
        limits: Limits,
        favour_swap: Callable[[int, int], bool],
        idle: Iterable[Sequence],
    ) -> None:
        self.running = list(running)  # without the preempted ones
        self.idle = idle
        self.allocation = manager.plan()
        self.limits = limits
        self.favour_swap = favour_swap
        self.layout, self.takes_snapshots = manager.layout, manager.takes_snapshots
        self.budget = limits.max_batch_tokens
        self.prefill_budget = limits.max_batch_tokens  # prompt tokens
        self.limited = False
        self.scored = 0
        self.starts: list[Chunk] = []
        self.decodes: list[Request] = []
        self.prefills: list[Request] = []
        self.chunks: list[Chunk] = []
        self.evicted: list[tuple[Sequence, SwappedBlocks | None]] = []
        self.preempted: list[tuple[Request, SwappedBlocks | None]] = []
        self.gone: set[Request] = set()  # preempted ones

    def plan(self) -> StepPlan:
        chunks = self.chunks + self.starts
        return StepPlan(
            self.starts, self.decodes, chunks, self.evicted, self.preempted, self.allocation, self.limited
        )

    def start_urgent(self, waiting: abc.Sequence[Request]) -> int:
        """Start waiting requests that outrank running ones; return how many.

        They preempt those if there is no room for both, and if preempting makes enough room.
        """
        left = self.prefill_budget
        for number, request in enumerate(waiting):
            outranked = list(takewhile(partial(_outranks, request), reversed(self.running)))
            # each running request may decode; tokens that earlier starts took are free in the next step
            n_too_many = self._n_sequences + 1 - self.limits.max_seqs
            n_forced = max(n_too_many, len(self.running) + 1 - self.limits.max_batch_tokens, 0)
            is_full = self.budget <= len(self.running) - n_forced
            if left == 0 or is_full or not outranked or n_forced > len(outranked):
                return number
            table = self._place(request, outranked, n_forced)
            if table is None:
                return number
            left -= self._add_start(request, table, min(left, self.budget - len(self.running)))
        return len(waiting)

    def grow(self, running: Iterable[Request]) -> None:
        """Plan the decodes of requests; preempt requests if blocks run out."""
        grow, decodes = self.allocation.grow, self.decodes
        for request in running:
            if request in self.gone:
                continue
            n_next = request.n_computed + 1
            if n_next < len(request.tokens):
                if self._feeds(request, n_next):
                    self.prefills.append(request)
            elif grow(_table(request.sequence), n_next) or self._make_room(request, n_next):
                decodes.append(request)
        n_started = sum(chunk.n_tokens for chunk in self.starts)
        self.budget = min(self.budget - len(self.decodes), self.prefill_budget - n_started)

    def _feeds(self, request: Request, n_next: int) -> bool:
        """Return whether a running prompt can advance. Its blocks are reserved, unless a window frees some.

        Other sequences may hold the blocks that a window has left.
        """
        if not self.layout.is_windowed:
            return True
        return self.allocation.grow(_table(request.sequence), n_next) or self._make_room(request, n_next)

    def feed(self) -> None:
        """Plan the next chunks of running prompts."""
        for request in self.prefills:
            if self.budget == 0:
                break
            self.chunks.append(
                self._chunk(request, _table(request.sequence), self.budget, request.n_computed)
            )
            self.budget -= self.chunks[-1].n_tokens

    def start(self, waiting: Iterable[Request]) -> None:
        """Start waiting requests in the order of rank."""
        for request in waiting:
            if self.budget <= 0 or self._n_sequences >= self.limits.max_seqs:
                break
            table = self._place(request, [], 0)
            if table is None:
                break
            self._add_start(request, table, self.budget)

    @property
    def _n_sequences(self) -> int:
        return len(self.running) + len(self.starts)

    def _add_start(self, request: Request, table: BlockTable, budget: int) -> int:
        """Add the first chunk of a request; return its number of tokens."""
        self.starts.append(self._chunk(request, table, budget, table.n_tokens))
        self.budget -= self.starts[-1].n_tokens
        return self.starts[-1].n_tokens

    def _place(self, request: Request, outranked: list[Request], n_forced: int) -> BlockTable | None:
        """Return the block table for a request that starts, or None if there is no room.

        Evict idle sequences and preempt requests of `outranked` if that is enough; the first `n_forced` of
        the requests in any case.
        """
        held = request.sequence.table  # it continues an idle sequence
        if held is not None and self.allocation.names(held):
            return None  # its sequence is evicted in this step
        if not n_forced:
            outcome = self._start_in(self.allocation, request, held, 0)
            if isinstance(outcome, Start):
                return outcome.table

        def lacks(allocation: AllocationPlan, gone: abc.Sequence[_Victim]) -> int:
            outcome = self._start_in(
                allocation, request, held, sum(isinstance(victim, Request) for victim in gone)
            )
            return outcome.needed - outcome.available if isinstance(outcome, NotNow) else 0

        idle = [victim for victim in self._idle() if victim.table is not held]
        victims = choose_victims(
            self.allocation, [*outranked[:n_forced], *idle, *outranked[n_forced:]], n_forced, lacks
        )
        if victims is None:
            if held is not None and not self._n_sequences:
                self._evict([request.sequence])  # its last block may have to be copied
            return None
        self._evict(victims)
        outcome = self._start_in(self.allocation, request, held, 0)
        if isinstance(outcome, NotNow):
            raise InternalError("a sequence does not start although there is room")
        return outcome.table

    def _start_in(
        self, allocation: AllocationPlan, request: Request, held: BlockTable | None, n_gone: int
    ) -> Start | NotNow:
        """Start the request in the allocation, with blocks to grow: its own and one for each that runs.

        n_gone: running requests that are preempted, but still counted.
        """
        n_tokens = min(request.max_stored, len(request.tokens) + self.layout.block_size)
        spare = self._n_sequences - n_gone
        if held is not None:
            return allocation.resume(held, n_tokens, spare)
        outcome = allocation.start(
            n_tokens, request.hashes, spare, request.sequence.swapped, request.max_cached
        )
        if isinstance(outcome, Never):
            raise InternalError(f"a request for {outcome.needed} of {outcome.total} blocks was let in")
        return outcome

    def _chunk(self, request: Request, table: BlockTable, budget: int, n_there: int) -> Chunk:
        pending = len(request.tokens) - n_there
        n_tokens = min(pending, budget)
        if self.layout.state_blocks:
            n_tokens = min(n_tokens, self._tokens_to_snapshot(request, table, n_there))
        n_tokens = self._chunk_size(request, n_there, n_tokens)
        if not self.allocation.grow(table, n_there + n_tokens):
            n_left = self.layout.block_size - n_there % self.layout.block_size
            n_tokens = min(n_tokens, n_left)  # other sequences hold what a window has left
            if not self.layout.is_windowed or not self.allocation.grow(table, n_there + n_tokens):
                raise InternalError("a sequence has no blocks for the tokens that it started with")
        return Chunk(request, table, n_tokens, n_tokens == pending)

    def _tokens_to_snapshot(self, request: Request, table: BlockTable, n_there: int) -> int:
        """Return the tokens after which the recurrent state of a request is saved, or all of its tokens.

        Its sequence keeps the state before the last token if no token is sampled after it.
        """
        pending, before_last = len(request.tokens) - n_there, request.max_new == 0 and request.keeps_blocks
        if before_last and pending > 1:
            pending -= 1
        if not self.takes_snapshots:
            return pending
        return min(pending, tokens_to_snapshot(table, n_there, len(request.tokens), self.layout.block_size))

    def _chunk_size(self, request: Request, n_there: int, n_tokens: int) -> int:
        """Return how many of the next `n_tokens` tokens the step computes, at least one.

        A prompt with logprobs is limited by the rows of logits. Each request has a row to sample from.
        """
        n_rows = n_there + n_tokens - len(request.prompt_logprobs)
        if not request.scores or n_rows <= 0:  # tokens that it computes again are scored
            return n_tokens
        fewer = max(0, n_rows - 1 - (SCORED_TOKENS - self.scored))
        self.scored += n_rows - 1 - fewer
        return n_tokens - fewer

    # ---- eviction and preemption ----

    def _make_room(self, request: Request, n_tokens: int) -> bool:
        """Evict and preempt others so that a request can grow; if that is not enough, preempt it (False)."""
        table = _table(request.sequence)
        outranked = self.running[: self.running.index(request) : -1]
        victims = choose_victims(
            self.allocation,
            [*self._idle(), *outranked],
            0,
            lambda allocation, _: not allocation.grow(table, n_tokens),
        )
        if victims is None:
            self._evict([request])
            return False
        self._evict(victims)
        return self.allocation.grow(table, n_tokens)

    def _idle(self) -> list[Sequence]:
        """Return the idle sequences that the allocation does not use, the longest idle first."""
        names = self.allocation.names
        return [
            sequence for sequence in self.idle if sequence.table is not None and not names(sequence.table)
        ]

    def _evict(self, victims: abc.Sequence[_Victim]) -> None:
        for victim in victims:
            swapped = self._free_or_swap(_table_of(victim))
            if isinstance(victim, Request):
                self.running.remove(victim)
                self.gone.add(victim)
                self.preempted.append((victim, swapped))
            else:
                self.evicted.append((victim, swapped))

    def _free_or_swap(self, table: BlockTable) -> SwappedBlocks | None:
        if table.n_tokens and self.favour_swap(len(table.blocks), table.n_tokens):
            swapped = self.allocation.swap_out(table)
            if swapped is not None:
                return swapped
        self.allocation.free(table)
        return None


def _outranks(request: Request, other: Request) -> bool:
    """Return whether `request` may preempt `other`: by its priority, not by its earlier arrival alone."""
    return request.params.priority < other.params.priority and request.rank < other.rank


def _table_of(victim: _Victim) -> BlockTable:
    return _table(victim.sequence if isinstance(victim, Request) else victim)


def _table(sequence: Sequence) -> BlockTable:
    if sequence.table is None:
        raise InternalError("a request runs without a block table")
    return sequence.table


def choose_victims(
    allocation: AllocationPlan,
    candidates: abc.Sequence[_Victim],
    n_first: int,
    lacks: Callable[[AllocationPlan, abc.Sequence[_Victim]], int],
) -> list[_Victim] | None:
    """Return the first candidates whose blocks give enough room when they are freed.

    Candidates whose room is not needed are left out, but for the first `n_first`. None: all are not enough.
    `lacks` tells how many blocks an allocation lacks when some are gone; it may change the allocation.
    """
    if not candidates:
        return None
    trial, chosen = allocation.copy(), list[_Victim]()
    lacking, available, n_gone = lacks(trial.copy(), ()), trial.available, 0
    for candidate in candidates:
        trial.free(_table_of(candidate))
        chosen.append(candidate)
        # freeing a candidate may also save its last block and a copy, in each group
        most = trial.available - available + 2 * allocation.n_groups * (len(chosen) - n_gone)
        if len(chosen) >= n_first and most >= lacking:
            lacking, available, n_gone = lacks(trial.copy(), chosen), trial.available, len(chosen)
            if lacking <= 0:
                break
    else:
        return None
    for candidate in reversed(chosen[n_first:-1]):
        trial.keep(_table_of(candidate))
        others = [other for other in chosen if other is not candidate]
        if lacks(trial.copy(), others) <= 0:
            chosen = others
        else:
            trial.free(_table_of(candidate))
    return chosen
