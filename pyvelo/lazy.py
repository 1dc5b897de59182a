"""Attributes that are computed at first use, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["lazy_property"]

T = TypeVar("T")


class lazy_property(Generic[T]):
    """Attribute that is computed at first use, as by `functools.cached_property`.

    That has one lock for all objects of a class before Python 3.12: a process that is forked while another
    thread holds it would wait forever. Here two threads may compute the value, and the first one counts.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        if instance is None:
            return self  # type: ignore[return-value]
        value: T = instance.__dict__.setdefault(self._name, self._compute(instance))
        return value
