"""What a rendering may use up: work, output and time; counted before it is spent."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pyvelo.chat.marked import is_marked

__all__ = ["NODE", "TEXT", "Limits", "Meter", "Refused"]

NODE = 8  # units for a value
TEXT = 16  # units for a string, beside its characters: a unit is ten bytes at most, mostly one
MAX_DEPTH = 100  # of lists in lists: C recurses over them
CLOCK_EVERY = 4096  # units


class Refused(Exception):
    """A template did what it may not do."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one rendering.

    max_output: characters of output.
    max_work: units of work: one for every step of the template and for every character that it makes, eight
        for every other value. To it comes `work_per_input` for each unit of messages, tools and arguments.
    seconds: from begin to end, looked at between two steps; no step is longer than the work that is left
        allows.
    """

    max_output: int = 8 << 20
    max_work: int = 32 << 20
    work_per_input: int = 64
    seconds: float = 10.0


class Meter:
    """Counts down what is left of the limits; Refused where something ends."""

    def __init__(self, limits: Limits, input_units: int = 0, leaves: tuple[type, ...] = ()) -> None:
        self._limits = limits
        self._work = limits.max_work + limits.work_per_input * input_units
        self._end = time.monotonic() + limits.seconds
        self._output = limits.max_output
        self.left = self._work
        self._look_at = self.left
        self._leaves: tuple[type, ...] = (float, range, type(None), *leaves)
        self.depth = 0

    def charge(self, units: int) -> None:
        """Count units of work; call it before the work is done.

        Raises:
            Refused: less work is left, or the number is negative and would add to it.
        """
        if units < 0:
            raise Refused(f"it has an operation of {units} units of work")
        self.left -= units
        if self.left < self._look_at:
            self._look(units)

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
        """Counts a piece of output."""
        self._output -= len(text)
        if self._output < 0:
            raise Refused(f"its output is longer than {self._limits.max_output} characters")
        self.charge(1)

    def weigh(self, value: Any) -> bool:
        """Charges for all that is in a value, as often as it is in it; whether a user's text is among it.

        Refused where lists are nested too deep, or something has no text.
        """
        marked = False
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
        return marked


def _children(item: Any) -> list[Any]:
    """What a container holds."""
    if isinstance(item, Mapping):
        return [*item.keys(), *item.values()]
    if isinstance(item, (list, tuple, type({}.keys()), type({}.values()), type({}.items()))):
        return list(item)
    raise Refused(f"a {type(item).__name__} has no value: pipe it through list, or name what of it you want")
