"""Limits of a rendering, and the meter that counts work before it is done."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pyvelo.chat.marked import is_marked

__all__ = ["NODE", "TEXT", "Limits", "Meter", "Refused"]

NODE = 8  # units for a value
TEXT = 16  # units for a string, beside its characters: a unit is ten bytes at most, mostly one
MAX_DEPTH = 100  # of lists in lists: C recurses over them
CLOCK_EVERY = 4096  # units of work or nodes of a body
LISTS: tuple[type[Collection[Any]], ...] = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))
STEP_PER_INPUT = 8  # units; upstream's templates take up to 1.1 in an operation, and up to 35 in all


class Refused(Exception):
    """An operation of a template that is not allowed."""


@dataclass(frozen=True)
class Limits:
    """Limits of one rendering.

    max_output: characters of output.
    max_work: units of work: one for every operation and for every character that it makes, eight for every
        other value. Each unit of messages, tools and arguments adds `work_per_input`.
    max_step: units of work of one operation, during which no other thread of Python runs. Each unit of
        messages, tools and arguments adds 8.
    seconds: time from start to end. The clock is read between operations, every 4096 units or nodes.
    """

    max_output: int = 8 << 20
    max_work: int = 32 << 20
    work_per_input: int = 64
    max_step: int = 4 << 20
    seconds: float = 10.0


class Meter:
    """Work, output and time that are left; Refused if one of them runs out."""

    def __init__(self, limits: Limits, input_units: int = 0, leaves: tuple[type, ...] = ()) -> None:
        self._limits = limits
        self._work = limits.max_work + limits.work_per_input * input_units
        self._max_step = limits.max_step + STEP_PER_INPUT * input_units
        self._end = time.monotonic() + limits.seconds
        self._output = limits.max_output
        self.left = self._work
        self._look_at = self.left
        self._leaves: tuple[type, ...] = (float, range, type(None), *leaves)
        self.depth = 0

    def charge(self, units: int) -> None:
        """Count units of work; call it before the work is done.

        Raises:
            Refused: less work is left, one operation may not take so much, or the number is negative and
                would add to what is left.
        """
        if not 0 <= units <= self._max_step:
            raise Refused(f"it has an operation of {units} units of work; at most {self._max_step} may be")
        self.left -= units
        if self.left < self._look_at:
            self._look(units)

    def retry(self) -> None:
        """Start the output again; work and time go on."""
        self._output, self.depth = self._limits.max_output, 0

    def tick(self, nodes: int) -> None:
        """Count nodes that are executed until the next look at the clock; they take no work."""
        self._look_at += nodes
        if self.left < self._look_at:
            self._look(0)

    def _look(self, units: int) -> None:
        if self.left < 0:
            self.left += units  # nothing of it is done
            raise Refused(
                f"it wants more work than the {self._work} units that messages of this size may take "
                "(an endless loop, or a value that grows without end)"
            )
        self._look_at = self.left - CLOCK_EVERY
        if time.monotonic() > self._end:
            raise Refused(f"it takes longer than {self._limits.seconds:g} seconds")

    def write(self, text: str) -> None:
        """Count a piece of output."""
        self._output -= len(text)
        if self._output < 0:
            raise Refused(f"its output is longer than {self._limits.max_output} characters")
        self.charge(1)

    def charge_value(self, value: Any) -> bool:
        """Charge for every item of a value, as often as it occurs; return whether a user's text is in it.

        Raises:
            Refused: lists are nested too deep, a value has no text, or it is too much for one operation.
        """
        marked, enough = False, self.left - self._max_step
        stack: list[tuple[Any, int]] = [(value, 0)]
        while stack:
            item, depth = stack.pop()
            if isinstance(item, str):
                self.charge(NODE + len(item))
                marked = marked or is_marked(item)
            elif isinstance(item, int):
                self.charge(NODE + item.bit_length() // 3)
            elif isinstance(item, self._leaves):
                self.charge(NODE)
            elif children := _children(item):
                self.charge(NODE * (1 + len(children)))
                if depth >= MAX_DEPTH:
                    raise Refused(f"it nests lists or dictionaries more than {MAX_DEPTH} deep")
                stack += [(child, depth + 1) for child in children]
            if self.left < enough:
                raise Refused(f"a value of more than {self._max_step} units is too large for one operation")
        return marked


def _children(item: Any) -> list[Any]:
    """Return the items of a container."""
    if isinstance(item, LISTS):
        return list(item)
    if isinstance(item, Mapping):
        return [*item.keys(), *item.values()]
    raise Refused(f"a {type(item).__name__} has no value: pipe it through list, or name what of it you want")
