"""The step loop: a plan, its blocks, its arrays, one forward pass, one draw, and what becomes of the tokens.

One request's failure ends that request only. While one thread steps, others may put things into the inbox.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pyvelo.engine.batch import Batch, BatchBuilder
from pyvelo.engine.inbox import Inbox
from pyvelo.engine.logprobs import logprobs_of, score_prompts
from pyvelo.engine.mover import BlockMover
from pyvelo.engine.pace import Costs, Pace
from pyvelo.engine.request import Branch, Request, Shelf
from pyvelo.engine.scheduler import Limits, StepPlan, schedule
from pyvelo.engine.stats import Counters
from pyvelo.errors import Cancelled, ComputeError, InternalError
from pyvelo.kv.draft import Swapped
from pyvelo.kv.manager import BlockManager
from pyvelo.outputs import FinishReason, TokenLogprob

if TYPE_CHECKING:
    from pyvelo.native import Context, Sampler, StepArrays

__all__ = ["EngineCore"]


MANY_TOKENS = 32
"""Of a step whose time tells what a token of a prompt costs."""


class EngineCore:
    """Runs requests over one context.

    `arrays` has room for a step within `limits`; `n_states` is the number of recurrent states (0: the model
    has none); `new_sampler` makes a request's sampler when it starts; `is_end` tells the tokens that end an
    answer; `debug` audits every step and fills what becomes free with NaN; `call_run` calls a forward pass;
    `clock` tells the time in seconds, and `costs` what to give up when blocks run out.
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
        clock: Callable[[], float] = perf_counter,
        costs: Costs | None = None,
    ) -> None:
        self.clock = clock
        self.watch: Callable[[Sequence[Request], Sequence[Request]], None] | None = None
        """Is told who waits and who runs whenever both are settled; must not raise."""
        self.inbox = Inbox(clock)
        self.manager = manager
        self.limits = limits
        self.counters = Counters()
        self._context = context
        self._arrays = arrays
        self._batches = BatchBuilder(arrays, manager.block_size)
        self._new_sampler = new_sampler
        self._is_end = is_end
        self._call_run = call_run or (lambda run: run())
        self._n_states = n_states
        self._free_states = list(range(n_states))[::-1]
        self._has_states = n_states > 0
        self._waiting: list[Request] = []  # both in the order of rank
        self._running: list[Request] = []
        self.shelf = Shelf(manager)
        self._costs = costs or Costs()
        self.pace = Pace()
        self._mover = BlockMover(context, manager, self._costs, clock)
        self._debug = debug
        self._some_idle = False  # in `_running` are requests that have ended
        self._open: dict[int, Request] = {}  # all that have not ended, by id
        self.in_doubt = False
        """Whether a step was left in the middle: then only `recover` makes the core usable again."""

    @property
    def n_waiting(self) -> int:
        held = sum(len(request.followers) for request in (*self._waiting, *self._running))
        return len(self._waiting) + self.inbox.n_new + held

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether some request has not ended. Any thread may ask."""
        return bool(self._open or self.inbox.n_new)

    @property
    def n_swapped(self) -> int:
        """Requests that wait in host memory."""
        return sum(request.swapped is not None for request in self._waiting)

    def settle(self) -> bool:
        """Takes in what is in the inbox; whether that ended a request."""
        n_ended = self.counters.n_ended
        for request in self.inbox.arrivals():
            self._open[id(request)] = request
            if request.branch is not None and request.branch.dropped:  # while the request was prepared
                self.inbox.cancel([request])
            # a branch that was swapped out since the request was submitted has given it its blocks already
            if request.branch is not None and request.branch.swapped is not None:
                request.swapped = self.shelf.take_swapped(request.branch)
            if not request.held:
                self._wait(request)
        for request, reason in self.inbox.to_end():
            if request in self._waiting:
                self._waiting.remove(request)
            self._end_early(request, reason)
        for branch in self.inbox.dropped():
            self._forget(branch)
        self._drop_idle()
        self.manager.raise_observer_error()
        if self.watch is not None:
            self.watch(self._waiting, self._running)
        return self.counters.n_ended > n_ended

    def cancel_all(self) -> None:
        """Ends every request, and gives back what branches hold."""
        self.settle()
        while self._open:
            self.inbox.cancel(list(self._open.values()))
            self.settle()
        for branch in list(self.shelf):
            self.shelf.forget(branch)

    def recover(self, error: Exception) -> None:
        """End every request with `error` and start with an empty pool: after a defect no block is trusted.

        Branches keep their tokens; what they held is computed again.
        """
        requests = [*self._open.values(), *self.inbox.drain()]
        self._open, self._waiting, self._running, self._some_idle = {}, [], [], False
        self._free_states = list(range(self._n_states))[::-1]
        for request in requests:  # before anything that may fail again
            self._break_off(request, error)
        self.shelf.clear()
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
            if self._waiting and not self._running and not changed:
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
            self._waiting,
            self._running,
            self.manager,
            self.limits,
            self._costs.favour_swap,
            self.shelf,
            self.pace.allowance,
        )

    # ---- from plan to run ----

    def _begin(self, plan: StepPlan) -> StepPlan:
        """Takes the plan's blocks and lets its sequences start; who cannot is left out of the step."""
        self._mover.move(self.manager.commit(plan.draft))
        for branch, swapped in plan.evicted:
            self.shelf.evict(branch, swapped)
            self.counters.evicted_branches += 1
        del self._waiting[: len(plan.starts)]  # before somebody comes back to stand among them
        for request, swapped in plan.preempted:
            self._preempt(request, swapped)
        self._drop_idle()
        for chunk in plan.starts:
            request = chunk.request
            request.table, request.swapped = chunk.table, None
            if request.branch is not None:
                self.shelf.lend(request.branch)
            request.n_computed = chunk.table.n_tokens
            if request.n_cached is None:
                request.n_cached = chunk.table.n_tokens
                if request.parent.n_cached is None:
                    request.parent.n_cached = request.n_cached
            insort(self._running, request, key=_rank)
            try:
                self._equip(request)
            except Exception as error:
                self._fail([request], error)
        if any(chunk.request.finished for chunk in plan.starts):
            return plan._replace(chunks=[chunk for chunk in plan.chunks if not chunk.request.finished])
        return plan

    def _wait(self, request: Request) -> None:
        insort(self._waiting, request, key=_rank)

    def _preempt(self, request: Request, swapped: Swapped | None) -> None:
        """It gave its blocks up, but keeps what it has generated; K and V are in host memory or lost."""
        self._vacate(request)
        request.swapped = swapped
        request.n_computed = 0
        self.counters.preemptions += 1
        self.counters.swaps += swapped is not None
        self._wait(request)

    def _equip(self, request: Request) -> None:
        if self._has_states:
            request.state = self._free_states.pop()
            self._context.clear_state(request.state)
        if request.sampler is not None:
            return  # it begins anew, its draws go on
        request.sampler = self._new_sampler(request)
        if request.params.repetition_penalty != 1.0:
            request.sampler.see_prompt(request.tokens[: request.n_prompt])

    def _compute(self, plan: StepPlan, batch: Batch) -> None:
        run = partial(self._context.run, self._arrays, batch.n_tokens, batch.n_seqs)
        start = self.clock()
        try:
            self._call_run(run)
        except Cancelled:
            raise
        except Exception as error:
            self._fail(plan.requests, error)
            return
        done = self.clock()
        if batch.n_tokens >= MANY_TOKENS and self.counters.steps:  # the first one packs weights, too
            self._costs.computed(batch.n_tokens, done - start)
        self.counters.steps += 1
        self.counters.run_seconds += done - start
        self.pace.stepped(len(plan.decodes), batch.n_tokens - len(plan.decodes), done - start)
        score_prompts(self._context, batch.scored, self._fail)
        for request, _, n_tokens, last in plan.chunks:
            if not last:
                self._advance(request, request.n_computed + n_tokens)
        if batch.drawing:
            self._draw(batch)
        self.counters.sample_seconds += self.clock() - done

    def _set_back(self, plan: StepPlan) -> None:
        """After a step that was cut short: whoever has not advanced runs the same tokens in the next one.

        But recurrent states are lost: their sequences go back to the head of the queue and begin anew.
        """
        if self._has_states:
            for request in reversed(plan.requests):
                if not request.finished:
                    self._release(request)
                    request.n_computed = 0
                    self._wait(request)
        self._drop_idle()

    # ---- from logits to text ----

    def _draw(self, batch: Batch) -> None:
        """A token for every row of logits; then for samples that start at a prompt that is computed now."""
        joined = self._draw_rows(batch.rows, batch.drawing)
        if joined:
            rows, followers = zip(*joined, strict=True)
            self._draw_rows(np.array(rows, np.int32), list(followers))
        self._drop_idle()

    def _draw_rows(self, rows: NDArray[np.int32], requests: list[Request]) -> list[tuple[int, Request]]:
        """Draws and accepts; returns who joined at one of these rows."""
        for request in requests:
            if request.guide is not None or request.params.min_tokens:
                self._mask(request)
        if any(request.finished for request in requests):  # its prompt or its guide failed
            left = [number for number, request in enumerate(requests) if not request.finished]
            rows, requests = rows[left], [requests[number] for number in left]
        samplers = [request.sampler for request in requests if request.sampler is not None]
        try:
            tokens, statuses = self._context.sample(rows, samplers)
            logprobs = logprobs_of(self._context, rows, tokens, requests)
        except Exception as error:
            self._fail(requests, error)
            return []
        except BaseException:  # samplers that have drawn a token cannot draw it again
            for request in requests:
                self._end(request, "abort")
            raise
        joined: list[tuple[int, Request]] = []
        interrupted: BaseException | None = None
        drawn = zip(requests, rows.tolist(), tokens.tolist(), statuses.tolist(), strict=True)
        for request, row, token, status in drawn:
            try:
                if status:
                    raise ComputeError("no token can be drawn: the logits are not finite, or all are banned")
                self._advance(request, len(request.tokens))
                joined += [(row, follower) for follower in self._fork(request)]
                self._accept(request, token, logprobs.get(id(request)))
            except Exception as error:
                self._fail([request], error)
            except BaseException as error:  # not before the others have their tokens
                self._end(request, "abort")
                interrupted = interrupted or error
        if interrupted is not None:
            raise interrupted
        return joined

    def _mask(self, request: Request) -> None:
        """Tell a sampler which tokens may come next; where that fails the request does."""
        try:
            bits = request.mask()
            if bits is not None and request.sampler is not None:
                request.sampler.mask(bits)
        except Exception as error:
            self._fail([request], error)

    def _fork(self, request: Request) -> list[Request]:
        """Lets the other samples of its prompt start beside it; who finds no place waits."""
        joined: list[Request] = []
        while request.followers:  # after an interrupt the rest starts when the request ends
            follower = request.followers.pop(0)
            if follower.finished:
                continue
            if request.table is None or len(self._running) >= self.limits.max_seqs:
                self._wait(follower)
                continue
            try:
                follower.table = self.manager.fork(request.table, follower.chain)
                insort(self._running, follower, key=_rank)
                # its last token counts as computed once a token is drawn behind it
                self._advance(follower, follower.n_prompt - 1)
                follower.n_cached = follower.n_prompt
                self._equip(follower)
                joined.append(follower)
            except Exception as error:
                self._fail([follower], error)
            except BaseException:
                self._end(follower, "abort")
                raise
        return joined

    def _advance(self, request: Request, n_computed: int) -> None:
        """Its first `n_computed` tokens are in the pool now."""
        request.n_computed = n_computed
        if request.table is not None:
            self.manager.advance(request.table, n_computed)

    def _accept(self, request: Request, token: int, logprob: TokenLogprob | None) -> None:
        """Appends a token, shows its text, and ends the request where it is due."""
        if request.max_new == 0:
            self._end(request, "length")
            return
        if request.n_computed == request.n_prompt:
            self.counters.prompt_tokens += request.n_prompt
        self.counters.completion_tokens += 1
        if logprob is not None:
            request.logprobs.append(logprob)
        if request.parent.first_token is None:
            request.parent.first_token = self.clock()
        text, reason = request.accept(token, self._is_end(token))
        if request.on_piece is not None:
            now = 0.0 if reason is None else self.clock()
            request.on_piece(request.piece(text, (token,), reason, logprob, now))
        if reason is not None:
            self._end(request, reason)

    # ---- ends ----

    def _end_early(self, request: Request, reason: FinishReason) -> None:
        """End a request between two tokens, with the text that it has."""
        text = request.detokenizer.finish()
        request.text_parts.append(text)
        try:
            if request.on_piece is not None:
                request.on_piece(request.piece(text, (), reason, None, self.clock()))
        except Exception as error:
            request.error = error
        finally:
            self._end(request, reason)

    def _break_off(self, request: Request, error: Exception) -> None:
        """End a request without giving back what it holds."""
        request.table, request.swapped, request.followers = None, None, []
        if request.sampler is not None:
            with suppress(Exception):
                request.sampler.close()
            request.sampler = None
        self.counters.ended("error")
        request.parent.ended(self.clock())
        request.error = error
        request.finish_reason = "error"
        if request.on_end is not None:
            request.on_end(request)

    def _fail(self, requests: Iterable[Request], error: Exception) -> None:
        for request in requests:
            request.error = error
            self._end(request, "error")
        self._drop_idle()

    def _end(self, request: Request, reason: FinishReason) -> None:
        """Gives back what the request holds. `finish_reason` comes last: other threads look at it."""
        self._release(request)
        if request.sampler is not None:
            request.sampler.close()
            request.sampler = None
        self.counters.ended(reason)
        request.parent.ended(self.clock())
        self._open.pop(id(request), None)
        request.finish_reason = reason
        if request.on_end is not None:
            request.on_end(request)
        self._promote(request)

    def _promote(self, request: Request) -> None:
        """Where a request ends before its prompt is computed, the next sample of it takes its place."""
        followers, request.followers = [f for f in request.followers if not f.finished], []
        if followers:
            followers[0].followers = followers[1:]
            self._wait(followers[0])

    def _release(self, request: Request) -> None:
        branch = request.branch if not self._has_states else None  # a state does not rest
        if branch is not None:
            branch.swapped, request.swapped = request.swapped, None
        if request.swapped is not None:
            self.manager.discard(request.swapped)
            request.swapped = None
        if request.table is not None:
            if branch is not None:
                # a token behind which nothing was drawn is computed again, for its logits
                self._advance(request, min(request.n_computed, len(request.tokens) - 1))
                self.shelf.take_back(branch, request.table)
            else:
                self.manager.free(request.table)
            self._vacate(request)

    def _forget(self, branch: Branch) -> None:
        branch.dropped = True
        if branch.request is not None and branch.busy:
            self.inbox.cancel([branch.request])
            self.settle()
        self.shelf.forget(branch)

    def _vacate(self, request: Request) -> None:
        """It runs no more; its blocks were given back."""
        request.table = None
        self._some_idle = True
        if self._has_states:
            self._free_states.append(request.state)

    def _drop_idle(self) -> None:
        """Those that run are those that have a table."""
        if self._some_idle:
            self._running = [request for request in self._running if request.table is not None]
            self._some_idle = False


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
