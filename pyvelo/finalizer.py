"""Calls at the end of an object that no signal handler can prevent.

An object is dropped at any line of any thread. A handler that raises in Python code there (Ctrl+C) ends that
code, and Python only prints the exception. So neither `weakref.finalize` nor a callback in Python will do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from operator import methodcaller
from typing import Any

__all__ = ["Finalizer"]


class _Call(weakref.ref[Any]):
    """Weak reference with the call at the end of its object."""

    __slots__ = ("run",)

    run: Callable[[], object]


_run = methodcaller("run")  # itself a C function


class Finalizer(weakref.ref[Any]):
    """Calls that run when `owner` is dropped, each a function of C or a `partial` of one.

    They must not wait, as a garbage collection may make them within a step or under a lock.
    """

    __slots__ = ("_calls",)
    __eq__ = object.__eq__  # references to one object would be equal
    __hash__ = object.__hash__

    def __new__(cls, owner: object, *calls: Callable[[], object]) -> Finalizer:
        """Return a reference that removes itself from `_alive`, without bytecode."""
        return super().__new__(cls, owner, _alive.discard)

    def __init__(self, owner: object, *calls: Callable[[], object]) -> None:
        self._calls = [_Call(owner, _run) for _ in calls]
        for reference, call in zip(self._calls, calls, strict=True):
            reference.run = call
        _alive.add(self)

    @property
    def alive(self) -> bool:
        """Whether the calls have not run and were not detached."""
        return self in _alive

    def detach(self) -> bool:
        """Discard the calls; return whether they were alive."""
        try:
            _alive.remove(self)
        except KeyError:
            return False
        self._calls.clear()
        return True


_alive: set[weakref.ref[Any]] = set()
"""Finalizers of living objects. A garbage collection skips the calls of references that it frees, too."""
