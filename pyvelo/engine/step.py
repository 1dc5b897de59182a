"""Engine step: a plan, its blocks, its arrays, one forward pass, one call that samples.

One request's failure ends that request only. While one thread steps, others may put things into the inbox.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from pyvelo.engine.output import Batch, OutputProcessor, Scored, score_prompts, score_rows
from pyvelo.engine.prefill_budget import MANY_TOKENS, Costs, PrefillBudget
from pyvelo.engine.queues import ActiveRequests, IdleSequences, Inbox
from pyvelo.engine.request import Request, Sequence
from pyvelo.engine.scheduler import Chunk, StepPlan, schedule
from pyvelo.engine.states import RecurrentStates
from pyvelo.engine.stats import Counters, QueueLengths
from pyvelo.errors import Cancelled, InternalError
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.pool import BlockTable
from pyvelo.kv.prefix import BlockLayout
from pyvelo.kv.records import Moves
from pyvelo.memory.budget import Limits

if TYPE_CHECKING:
    from pyvelo.native import Context, Sampler, StepArrays
    from pyvelo.native.arrays import Int32Array

__all__ = ["EngineCore"]

NAN_BYTE = 0xFF


class EngineCore:
    """Scheduler and executor of requests over one context. Not thread-safe, except `inbox` and `has_work`.

    Args:
        arrays: room for a step within `limits`.
        new_sampler: makes a request's sampler when it starts.
        is_end: whether the model ends answers with a token.
        debug: audit every step, and fill freed blocks with NaN.
        call_run: calls a forward pass; `check_files` before it raises ModelError if the weights changed.
        clock: returns seconds.
        costs: decides whether a preempted sequence is swapped out or computed again.
        n_states: recurrent states; 0: the model has none. The manager is a `StateManager` if it has some.
    """

    def __init__(
        self,
        *,
        context: Context,
        arrays: StepArrays,
        manager: BlockManager,
        limits: Limits,
        new_sampler: Callable[[Request], Sampler],
        is_end: Callable[[int], bool],
        debug: bool,
        call_run: Callable[[Callable[[], None]], None] | None = None,
        check_files: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = perf_counter,
        costs: Costs | None = None,
        n_states: int = 0,
    ) -> None:
        self.clock = clock
        self.observer: Callable[[abc.Sequence[Request], abc.Sequence[Request]], None] | None = None
        """Callback with the waiting and the running requests after each `settle`; must not raise."""
        self.schedule: Callable[..., StepPlan] = schedule
        self.before_run: list[Callable[[StepPlan], None]] = []  # their errors end the requests
        self.inbox = Inbox(clock)
        self.manager = manager
        self.limits = limits
        self.counters = Counters()
        self._context = context
        self._arrays = arrays
        self._batches = BatchBuilder(arrays, manager.layout, has_states=n_states > 0)
        self._call_run = call_run or (lambda run: run())
        self._check_files = check_files
        self.idle = IdleSequences(manager)
        self.costs = costs or Costs()
        self._states = RecurrentStates.of(context, manager, n_states, self.costs, clock)
        self._active = ActiveRequests(manager, self.idle, self.counters, new_sampler, self._states, clock)
        self._output = OutputProcessor(context, manager, self._active, limits, self.counters, is_end, clock)
        self.prefill_budget = PrefillBudget()
        self._mover = BlockMover(context, manager, self.costs, clock)
        self._debug = debug
        self.in_doubt = False
        """Whether a step was interrupted: then only `recover` makes the core usable again."""

    @property
    def n_waiting(self) -> int:
        held = sum(len(request.followers) for request in (*self._active.waiting, *self._active.running))
        return len(self._active.waiting) + self.inbox.n_new + self.inbox.n_held + held

    @property
    def running(self) -> abc.Sequence[Request]:
        """Requests that take part in steps."""
        return self._active.running

    @property
    def n_running(self) -> int:
        return len(self._active.running)

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended. Thread-safe."""
        return bool(self._active.open or self.inbox.n_new)

    def count(self, which: Callable[[Request], bool]) -> int:
        """Return how many requests that have not ended match."""
        return sum(map(which, self._active.open.values()))

    @property
    def queues(self) -> QueueLengths:
        """Numbers of requests and idle sequences."""
        n_swapped = sum(request.sequence.swapped is not None for request in self._active.waiting)
        return QueueLengths(self.n_running, self.n_waiting, n_swapped, len(self.idle))

    def settle(self) -> bool:
        """Drain the inbox; return whether that ended a request."""
        n_ended = self.counters.n_ended
        for request in self.inbox.arrivals():
            self._active.arrive(request)
            if request.parent.aborted or request.sequence.closed:  # while the request was prepared
                self.inbox.cancel([request])
        if self.inbox.some_aborted:
            self.inbox.some_aborted = False
            self.inbox.cancel([request for request in self._active.open.values() if request.parent.aborted])
        for request, reason in self.inbox.to_end():
            self._active.end_early(request, reason)
        for sequence in self.inbox.released():
            self._close(sequence)
        self._active.drop_left()
        self.manager.raise_observer_error()
        if self.observer is not None:
            self.observer(self._active.waiting, self._active.running)
        return self.counters.n_ended > n_ended

    def cancel_all(self) -> None:
        """End every request and free the blocks of idle sequences."""
        self.settle()
        while self._active.open:
            self.inbox.cancel(list(self._active.open.values()))
            self.settle()
        for sequence in list(self.idle):
            self.idle.free(sequence)

    def recover(self, error: Exception) -> None:
        """End every request with `error` and continue with an empty pool, because blocks may be wrong.

        Sequences keep their tokens, which are computed again.
        """
        requests = [*self._active.open.values(), *self.inbox.drain()]
        self._active.clear()
        for request in requests:  # before calls that may fail again
            self._active.break_off(request, error)
        self.idle.clear()
        self.manager.clear()
        self.in_doubt = False

    def step(self) -> bool:
        """Run one step; return False if there was no request to run or to end."""
        start = self.clock()
        self.in_doubt = True
        ended = self.settle()
        plan = self._begin(self._schedule())
        if not plan.decodes and not plan.chunks:
            self.in_doubt = False
            changed = bool(ended or plan.starts or plan.preempted or plan.evicted)
            if self._active.waiting and not self._active.running and not changed:
                raise InternalError("requests wait although nothing runs")
            return changed
        try:
            batch = self._batches.build(plan)
            self.counters.schedule_seconds += self.clock() - start
            self._compute(plan, batch)
        except Cancelled:
            self._set_back()
        except BaseException:
            self._set_back()
            self.in_doubt = False
            raise
        self.in_doubt = False
        if self._debug:
            self.manager.audit()
            self._mover.poison()
        return True

    def _schedule(self) -> StepPlan:
        queues, budget = (self._active.waiting, self._active.running), self.prefill_budget.tokens
        return self.schedule(*queues, self.manager, self.limits, self.costs.favour_swap, self.idle, budget)

    # ---- from plan to run ----

    def _begin(self, plan: StepPlan) -> StepPlan:
        """Allocate the plan's blocks and start its requests. Return the plan without requests that fail."""
        self._mover.move(self.manager.commit(plan.allocation))
        for sequence, swapped in plan.evicted:
            self.idle.evict(sequence, swapped)
            self.counters.evicted_sequences += 1
        for request, swapped in plan.preempted:
            self._active.preempt(request, swapped)
        self._active.drop_left()
        for chunk in plan.starts:
            self._active.start(chunk.request, chunk.table)
            try:
                self._active.equip(chunk.request)
            except Exception as error:
                self._active.fail([chunk.request], error)
        if any(chunk.request.finished for chunk in plan.starts):
            return plan._replace(chunks=[chunk for chunk in plan.chunks if not chunk.request.finished])
        return plan

    def _compute(self, plan: StepPlan, batch: Batch) -> None:
        run = partial(self._context.run, self._arrays, batch.n_tokens, batch.n_seqs)
        start = self.clock()
        try:
            self._check_files()
            for prepare in self.before_run:
                prepare(plan)
            if self._states is not None:
                self._states.lose()
            self._call_run(run)
        except Cancelled:
            raise
        except Exception as error:
            self._active.fail(plan.requests, error)
            self._set_back()
            return
        done = self.clock()
        if self._states is not None:
            self._states.ran(plan)
        if batch.n_tokens >= MANY_TOKENS and self.counters.steps:  # the first one packs weights, too
            self.costs.computed(batch.n_tokens, done - start)
        self.counters.steps += 1
        self.counters.run_seconds += done - start
        if plan.decodes or plan.limited:
            self.prefill_budget.stepped(batch.n_tokens - len(plan.decodes), done - start)
        score_prompts(self._context, batch.scored, self._active.fail)
        for request, _, n_tokens, last in plan.chunks:
            if not last:
                self._active.advance(request, request.n_computed + n_tokens)
        if batch.drawing:
            self._output.draw(batch)
        self.counters.sample_seconds += self.clock() - done

    def _set_back(self) -> None:
        """Repeat the tokens of an interrupted step; requests that lost their state start at a snapshot."""
        self._active.drop_left()
        self._active.restart_lost()

    def _close(self, sequence: Sequence) -> None:
        sequence.closed = True
        if sequence.request is not None and sequence.busy:
            self.inbox.cancel([sequence.request])
            self.settle()
        self.idle.free(sequence)


class BatchBuilder:
    """Writer of the arrays of a step, into buffers that are reused.

    Rows of the table arrays stay from step to step: while the same sequences decode, only new blocks are
    written. A row is written again when its table's version has changed, and in a group with a window when
    the window has freed blocks.
    """

    def __init__(self, arrays: StepArrays, layout: BlockLayout, has_states: bool) -> None:
        max_seqs = len(arrays.seqs)
        self._arrays, self._has_states = arrays, has_states
        self._groups = list(zip(arrays.slots, arrays.tables, arrays.firsts, strict=True))
        self._block_size, self._is_windowed = layout.block_size, layout.is_windowed
        self._count = np.arange(max_seqs, dtype=np.int32)
        self._owners: list[BlockTable | None] = [None] * max_seqs
        self._filled = [(0, 0, 0)] * max_seqs  # blocks, version and slides of the table in the row
        self._lengths = [[0] * max_seqs for _ in layout.windows]  # blocks in the row of each group
        for array, value in (arrays.tables, -1), (arrays.firsts, 0), (arrays.seqs, 0):
            array.fill(value)

    def build(self, plan: StepPlan) -> Batch:
        """Fill the arrays: a row for each sequence that decodes, then one for each prompt chunk."""
        n_tokens = n_seqs = len(plan.decodes)
        drawing = list(plan.decodes)
        if plan.decodes:
            self._write_decodes(plan.decodes)
        n_rows, drawn = n_seqs, []  # rows of logits, and the rows that prompts sample from
        scored: list[Scored] = []
        for chunk in plan.chunks:
            self._write_chunk(n_seqs, n_tokens, chunk)
            if chunk.request.scores:
                scored.append(score_rows(self._arrays.outputs, n_tokens, n_rows, chunk))
                n_rows += scored[-1].n_tokens
            n_tokens += chunk.n_tokens
            n_seqs += 1
            if chunk.last:
                drawing.append(chunk.request)
                drawn.append(n_rows)
                n_rows += 1
        rows = self._count[: len(drawing)]
        if scored:
            rows = np.concatenate((self._count[: len(plan.decodes)], np.array(drawn, np.int32)))
        return Batch(n_tokens, n_seqs, rows, drawing, scored)

    def _write_decodes(self, requests: list[Request]) -> None:
        arrays, n, owners, filled = self._arrays, len(requests), self._owners, self._filled
        for row, request in enumerate(requests):
            table = request.sequence.table
            if table is not None and (
                owners[row] is not table or filled[row] != (table.n_blocks, table.version, table.n_slides)
            ):
                self._write_table(row, table)
        positions = np.array([request.n_computed for request in requests], dtype=np.int32)
        rows = self._count[:n]
        arrays.tokens[:n] = [request.tokens[-1] for request in requests]
        arrays.positions[:n] = positions
        self._write_slots(rows, 0, positions)
        arrays.seqs[:n, 0] = rows
        arrays.seqs[:n, 1] = arrays.outputs[:n] = 1
        arrays.seqs[:n, 2] = positions + 1
        if self._has_states:
            arrays.states[:n] = [request.recurrent_state for request in requests]

    def _write_chunk(self, row: int, first: int, chunk: Chunk) -> None:
        arrays, request, n = self._arrays, chunk.request, chunk.n_tokens
        self._write_table(row, chunk.table)
        start, end = request.n_computed, request.n_computed + n
        positions = np.arange(start, end, dtype=np.int32)
        arrays.tokens[first : first + n] = request.tokens[start:end]
        arrays.positions[first : first + n] = positions
        self._write_slots(row, first, positions)
        arrays.outputs[first : first + n] = 0
        arrays.outputs[first + n - 1] = chunk.last
        arrays.seqs[row, :3] = first, n, end
        if self._has_states:
            arrays.states[row] = request.recurrent_state

    def _write_slots(self, rows: int | Int32Array, first: int, positions: Int32Array) -> None:
        """Write the slots of the tokens from `first` on, at `positions` of the sequences in `rows`."""
        size, end = self._block_size, first + len(positions)
        blocks = positions // size
        offsets = positions - blocks * size
        for slots, tables, firsts in self._groups:
            places = blocks - firsts[rows] if self._is_windowed else blocks
            slots[first:end] = tables[rows, places] * size + offsets

    def _write_table(self, row: int, table: BlockTable) -> None:
        """Update a row of each group. A table of the same version has only grown, and lost leading blocks."""
        same = self._owners[row] is table and self._filled[row][1] == table.version
        for group, (first, blocks) in enumerate(zip(table.firsts, table.groups, strict=True)):
            filled, before = self._arrays.tables[group, row], self._lengths[group][row]
            start = before if same and first == self._arrays.firsts[group, row] else 0
            filled[start : len(blocks)] = blocks[start:]
            if len(blocks) < before:
                filled[len(blocks) : before] = -1
            self._arrays.firsts[group, row] = first
            self._lengths[group][row] = len(blocks)
        self._owners[row], self._filled[row] = table, (table.n_blocks, table.version, table.n_slides)


class BlockMover:
    """Executor of the manager's moves, which measures them for `costs`.

    The context has as many swapped blocks as the manager counts; `clock` returns seconds.
    """

    def __init__(
        self, context: Context, manager: BlockManager, costs: Costs, clock: Callable[[], float] = perf_counter
    ) -> None:
        self._clock = clock
        self._context = context
        self._manager = manager
        self._costs = costs
        self._poisoned: set[int] = set()

    def move(self, moves: Moves) -> None:
        """Move blocks now: after an interrupted step the sources may be overwritten."""
        context = self._context
        start = self._clock()
        if moves.outs:
            context.swap_out([m.source for m in moves.outs], [m.target for m in moves.outs])
        if moves.ins:
            context.swap_in([m.source for m in moves.ins], [m.target for m in moves.ins])
        if moves.outs or moves.ins:
            self._costs.moved(len(moves.outs) + len(moves.ins), self._clock() - start)
        if moves.copies:
            context.copy_blocks([m.source for m in moves.copies], [m.target for m in moves.copies])

    def poison(self) -> None:
        """Fill the blocks that became unused with NaN, so that a wrong read shows."""
        unused = self._manager.unused_blocks()
        fresh = list(unused - self._poisoned)
        if fresh:
            self._context.fill_blocks(fresh, NAN_BYTE)
        self._poisoned = unused
