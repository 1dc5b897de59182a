"""Moves of blocks between the pool and host memory, and within the pool."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from pyvelo.engine.pace import Costs
from pyvelo.kv.manager import BlockManager, Moves

if TYPE_CHECKING:
    from pyvelo.native import Context

__all__ = ["BlockMover"]

NAN_BYTE = 0xFF


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
