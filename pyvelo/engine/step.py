"""The step: a plan, its blocks, its arrays, one forward pass, one draw.

One request's failure ends that request only. While one thread steps, others may put things into the inbox.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from pyvelo.engine.batch import Batch, BatchBuilder
from pyvelo.engine.output import OutputProcessor, score_prompts
from pyvelo.engine.prefill_budget import Costs, PrefillBudget
from pyvelo.engine.queues import ActiveRequests, Counters, IdleSequences, Inbox
from pyvelo.engine.request import Request, RequestStatus, Sequence
from pyvelo.engine.scheduler import StepPlan, schedule
from pyvelo.engine.stats import QueueLengths
from pyvelo.errors import Cancelled, InternalError
from pyvelo.kv.manager import BlockManager, Moves
from pyvelo.memory.budget import Limits

if TYPE_CHECKING:
    from pyvelo.native import Context, Sampler, StepArrays

__all__ = ["EngineCore"]


NAN_BYTE = 0xFF

MANY_TOKENS = 32
"""Of a step whose time tells what a token of a prompt costs."""


class EngineCore:
    """Runs requests over one context.

    `arrays` has room for a step within `limits`; `n_states` is the number of recurrent states (0: the model
    has none); `new_sampler` makes a request's sampler when it starts; `is_end` tells the tokens that end an
    answer; `debug` audits every step and fills what becomes free with NaN; `call_run` calls a forward pass,
    before which `check_files` raises ModelError if the weights were changed; `clock` tells the time in
    seconds, and `costs` what to give up when blocks run out.
    """

    def __init__(
        self,
        *,
        context: Context,
        arrays: StepArrays,
        manager: BlockManager,
        limits: Limits,
        n_states: int,
        new_sampler: Callable[[Request], Sampler],
        is_end: Callable[[int], bool],
        debug: bool,
        call_run: Callable[[Callable[[], None]], None] | None = None,
        check_files: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = perf_counter,
        costs: Costs | None = None,
    ) -> None:
        self.clock = clock
        self.observer: Callable[[abc.Sequence[Request], abc.Sequence[Request]], None] | None = None
        """Is told who waits and who runs whenever both are settled; must not raise."""
        self.inbox = Inbox(clock)
        self.manager = manager
        self.limits = limits
        self.counters = Counters()
        self._context = context
        self._arrays = arrays
        self._batches = BatchBuilder(arrays, manager.block_size)
        self._call_run = call_run or (lambda run: run())
        self._check_files = check_files
        self.idle = IdleSequences(manager)
        self._active = ActiveRequests(
            context, manager, self.idle, self.counters, new_sampler, n_states, clock
        )
        self._output = OutputProcessor(context, manager, self._active, limits, self.counters, is_end, clock)
        self._costs = costs or Costs()
        self.prefill_budget = PrefillBudget()
        self._mover = BlockMover(context, manager, self._costs, clock)
        self._debug = debug
        self.in_doubt = False
        """Whether a step was left in the middle: then only `recover` makes the core usable again."""

    @property
    def n_waiting(self) -> int:
        held = sum(len(request.followers) for request in (*self._active.waiting, *self._active.running))
        return len(self._active.waiting) + self.inbox.n_new + held

    @property
    def n_running(self) -> int:
        return len(self._active.running)

    @property
    def has_work(self) -> bool:
        """Whether some request has not ended. Any thread may ask."""
        return bool(self._active.open or self.inbox.n_new)

    @property
    def queues(self) -> QueueLengths:
        """How many requests and idle sequences there are."""
        n_swapped = sum(request.sequence.swapped is not None for request in self._active.waiting)
        return QueueLengths(self.n_running, self.n_waiting, n_swapped, len(self.idle))

    def settle(self) -> bool:
        """Takes in what is in the inbox; whether that ended a request."""
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
        """Ends every request, and gives back what sequences hold."""
        self.settle()
        while self._active.open:
            self.inbox.cancel(list(self._active.open.values()))
            self.settle()
        for sequence in list(self.idle):
            self.idle.free(sequence)

    def recover(self, error: Exception) -> None:
        """End every request with `error` and start with an empty pool: after a defect no block is trusted.

        Sequences keep their tokens; what they held is computed again.
        """
        requests = [*self._active.open.values(), *self.inbox.drain()]
        self._active.clear()
        for request in requests:  # before anything that may fail again
            self._active.break_off(request, error)
        self.idle.clear()
        self.manager.clear()
        self.in_doubt = False

    def step(self) -> bool:
        """Runs one step; False when there was nothing to do, and no request to end either."""
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
            self._set_back(plan)
        except BaseException:
            self._set_back(plan)
            self.in_doubt = False
            raise
        self.in_doubt = False
        if self._debug:
            self.manager.audit()
            self._mover.poison()
        return True

    def _schedule(self) -> StepPlan:
        return schedule(
            self._active.waiting,
            self._active.running,
            self.manager,
            self.limits,
            self._costs.favour_swap,
            self.idle,
            self.prefill_budget.allowance,
        )

    # ---- from plan to run ----

    def _begin(self, plan: StepPlan) -> StepPlan:
        """Takes the plan's blocks and lets its sequences start; who cannot is left out of the step."""
        self._mover.move(self.manager.commit(plan.allocation))
        for sequence, swapped in plan.evicted:
            self.idle.evict(sequence, swapped)
            self.counters.evicted_sequences += 1
        del self._active.waiting[: len(plan.starts)]  # before preempted requests join them
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
            self._call_run(run)
        except Cancelled:
            raise
        except Exception as error:
            self._active.fail(plan.requests, error)
            return
        done = self.clock()
        if batch.n_tokens >= MANY_TOKENS and self.counters.steps:  # the first one packs weights, too
            self._costs.computed(batch.n_tokens, done - start)
        self.counters.steps += 1
        self.counters.run_seconds += done - start
        self.prefill_budget.stepped(len(plan.decodes), batch.n_tokens - len(plan.decodes), done - start)
        score_prompts(self._context, batch.scored, self._active.fail)
        for request, _, n_tokens, last in plan.chunks:
            if not last:
                self._active.advance(request, request.n_computed + n_tokens)
        if batch.drawing:
            self._output.draw(batch)
        self.counters.sample_seconds += self.clock() - done

    def _set_back(self, plan: StepPlan) -> None:
        """After a step that was cut short: whoever has not advanced runs the same tokens in the next one.

        But recurrent states are lost: their sequences go back to the head of the queue and begin anew.
        """
        if self._active.has_states:
            for request in reversed(plan.requests):
                if not request.finished:
                    self._active.release(request)
                    request.n_computed = 0
                    self._active.wait(request, RequestStatus.PREEMPTED)
        self._active.drop_left()

    def _close(self, sequence: Sequence) -> None:
        sequence.closed = True
        if sequence.request is not None and sequence.busy:
            self.inbox.cancel([sequence.request])
            self.settle()
        self.idle.free(sequence)


class BlockMover:
    """Does what the manager has decided; `costs` learns what moving takes.

    The context has as many swapped blocks as the manager counts; `clock` tells the time in seconds.
    """

    def __init__(
        self,
        context: Context,
        manager: BlockManager,
        costs: Costs,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._clock = clock
        self._context = context
        self._manager = manager
        self._costs = costs
        self._poisoned: set[int] = set()

    def move(self, moves: Moves) -> None:
        """At once: a step that is cut short is run again, but what moves may be overwritten by then."""
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
        """Fills what became unused with NaN: what nobody may read any more shows where somebody does."""
        unused = self._manager.unused_blocks()
        fresh = sorted(unused - self._poisoned)
        if fresh:
            self._context.fill_blocks(fresh, NAN_BYTE)
        self._poisoned = unused
