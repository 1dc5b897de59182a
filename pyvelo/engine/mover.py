"""Moves of blocks between the pool and host memory and within the pool, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from pyvelo.kv.manager import BlockManager, Moves

if TYPE_CHECKING:
    from pyvelo.native import Context

__all__ = ["BlockMover", "Costs"]

WEIGHT = 0.2
"""Of the newest measurement in a running average."""


class Costs:
    """Running averages of what was measured here; until both are known, moving is taken to be cheaper."""

    def __init__(self) -> None:
        self._per_block = 0.0  # seconds to move one between pool and host memory
        self._per_token = 0.0  # seconds to compute one of a prompt

    def moved(self, n_blocks: int, seconds: float) -> None:
        """That many blocks were moved one way."""
        self._per_block = _running_average(self._per_block, seconds / n_blocks, WEIGHT)

    def computed(self, n_tokens: int, seconds: float) -> None:
        """A step of many tokens took so long."""
        self._per_token = _running_average(self._per_token, seconds / n_tokens, WEIGHT)

    def favour_swap(self, n_blocks: int, n_tokens: int) -> bool:
        """Whether a sequence is better moved out and back than computed again."""
        return not self._per_token or 2 * n_blocks * self._per_block <= n_tokens * self._per_token


def _running_average(before: float, now: float, weight: float) -> float:
    """With the newest measurement; `before` is 0 where it is the first."""
    return now if before == 0.0 else before + weight * (now - before)


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
