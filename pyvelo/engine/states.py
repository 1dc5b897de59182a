"""Recurrent states of running requests, and when snapshots of them are taken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from pyvelo.engine.prefill_budget import Costs
from pyvelo.engine.request import Request
from pyvelo.engine.scheduler import StepPlan
from pyvelo.errors import InternalError
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.pool import BlockTable, SwappedBlocks
from pyvelo.kv.states import SNAPSHOT_TOKENS, StateManager, is_regular_place, last_place

if TYPE_CHECKING:
    from pyvelo.native import Context

__all__ = ["RecurrentStates"]

_log = logging.getLogger("pyvelo")


class RecurrentStates:
    """Recurrent states of a context, one for each running request.

    A state has no parts: it is of exactly the tokens that were computed in it. After a step that fails, no
    request may go on with its state.

    Args:
        n_states: states of the context.
        costs: decides whether a snapshot is worth its time.
        clock: returns seconds.
    """

    def __init__(
        self, context: Context, manager: StateManager, n_states: int, costs: Costs, clock: Callable[[], float]
    ) -> None:
        self._context = context
        self._manager = manager
        self._n_states = n_states
        self._costs = costs
        self._clock = clock
        self.clear()

    @staticmethod
    def of(
        context: Context, manager: BlockManager, n_states: int, costs: Costs, clock: Callable[[], float]
    ) -> RecurrentStates | None:
        """Return the states of a context, None if it has none."""
        if not n_states:
            return None
        if not isinstance(manager, StateManager):
            raise InternalError("a model with recurrent states needs a manager of snapshots")
        return RecurrentStates(context, manager, n_states, costs, clock)

    def clear(self) -> None:
        """Make every state unused."""
        self.free = list(range(self._n_states))[::-1]
        self._tokens: list[int | None] = [None] * self._n_states  # computed in each state; None: unknown
        self._before = self._tokens  # before the step that runs

    # ---- requests ----

    def start(self, request: Request) -> None:
        """Give a request that starts a state, of the tokens that its block table has already."""
        state, table = self._take(request), _table(request)
        if table.snapshot:
            self._context.load_state(state, table.snapshot)
            if not _keeps_state(request, table.n_tokens):
                self._manager.loaded(table)
        elif table.state:
            self._context.load_state(state, table.state, swapped=True)
            table.state = []
            if _keeps_state(request, table.n_tokens):
                self._tokens[state] = table.n_tokens
                self.keep(request)
        elif table.n_tokens:
            raise InternalError(f"a sequence starts after {table.n_tokens} tokens without their state")
        else:
            self._context.clear_state(state)
        self._tokens[state] = table.n_tokens

    def fork(self, request: Request, twin: Request) -> None:
        """Give `twin`, which starts with the same tokens, a copy of the state of a running request."""
        state = self._take(twin)
        self._context.copy_state(request.recurrent_state, state)
        self._tokens[state] = self._tokens[request.recurrent_state]

    def release(self, request: Request) -> None:
        """Make the state of a request unused."""
        if request.recurrent_state >= 0:  # it failed before it had one
            self.free.append(request.recurrent_state)
        request.recurrent_state = -1

    def _take(self, request: Request) -> int:
        state = request.recurrent_state = self.free.pop()
        self._tokens[state] = None
        return state

    def _tokens_of(self, request: Request) -> int | None:
        """Return the tokens that were computed in the state of a request; None: unknown, or it has none."""
        return self._tokens[request.recurrent_state] if request.recurrent_state >= 0 else None

    # ---- steps ----

    def lose(self) -> None:
        """Count all states as unknown before a step: it may move other states than it changes."""
        self._before, self._tokens = self._tokens, [None] * self._n_states

    def is_lost(self, request: Request) -> bool:
        """Return whether the state of a request is not of its computed tokens."""
        return self._tokens_of(request) != request.n_computed

    def ran(self, plan: StepPlan) -> None:
        """Note that a step has computed its tokens, before its requests advance."""
        self._tokens = self._before
        for request in plan.decodes:
            self._tokens[request.recurrent_state] = request.n_computed + 1
        for chunk in plan.chunks:
            self._tokens[chunk.request.recurrent_state] = chunk.request.n_computed + chunk.n_tokens

    def advanced(self, request: Request) -> None:
        """Take a snapshot if a request has reached a place for one; see `tokens_to_snapshot`.

        Generated text has one snapshot, which moves from block to block.
        """
        table, n = request.sequence.table, request.n_computed
        if table is None or self._tokens_of(request) != n:
            return
        if _keeps_state(request, n):
            self.keep(request)
        elif n % self._manager.block_size == 0:
            at_end = n == len(request.tokens)
            needed = at_end or n in (table.branch, last_place(len(request.tokens), self._manager.block_size))
            if needed or (is_regular_place(n) and self._costs.favour_snapshot(SNAPSHOT_TOKENS)):
                self._snapshot(request, table, rolling=at_end, spare=not needed)

    def _snapshot(self, request: Request, table: BlockTable, *, rolling: bool, spare: bool) -> None:
        blocks = self._manager.take(table, rolling=rolling, spare=spare)
        if not blocks:
            return
        start = self._clock()
        try:
            self._context.save_state(request.recurrent_state, blocks)
        except Exception as error:
            self._manager.discard(blocks)
            _log.warning("a recurrent state was not saved: %s", error)
        except BaseException:
            self._manager.discard(blocks)
            raise
        self._costs.saved(self._clock() - start)

    # ---- between requests ----

    def keep(self, request: Request) -> bool:
        """Save the state of a request in blocks of its table. Return whether the table has its state."""
        table = _table(request)
        if table.snapshot or self._tokens_of(request) != table.n_tokens:
            return bool(table.snapshot)
        blocks = self._manager.hold(table)
        if not blocks:
            return False
        try:
            self._context.save_state(request.recurrent_state, blocks)
        except BaseException as error:
            self._manager.loaded(table)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    def swap_out(self, request: Request, swapped: SwappedBlocks) -> None:
        """Save the state of a preempted request in host memory, beside its blocks."""
        self._context.save_state(request.recurrent_state, swapped.state, swapped=True)


def _keeps_state(request: Request, n_tokens: int) -> bool:
    """Return whether a request without samples leaves its sequence the state after `n_tokens` tokens."""
    return request.max_new == 0 and request.keeps_blocks and n_tokens == len(request.tokens) - 1


def _table(request: Request) -> BlockTable:
    if request.sequence.table is None:
        raise InternalError("a request with a recurrent state has no block table")
    return request.sequence.table
