"""Attributes that are computed at first use."""

from __future__ import annotations

import threading
from pathlib import Path

import pyvelo
from pyvelo.lazy import lazy_property

WAIT = 60  # seconds until something hangs


class Slow:
    """Object whose value waits until `go` is set."""

    def __init__(self, value: int) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.n_computed = 0
        self._value = value

    @lazy_property
    def value(self) -> int:
        """The value."""
        self.begun.set()
        assert self.go.wait(WAIT)
        self.n_computed += 1
        return self._value


def test_a_value_is_computed_once() -> None:
    one, other = Slow(1), Slow(2)
    one.go.set()
    other.go.set()
    assert [one.value, other.value, one.value] == [1, 2, 1]
    assert one.n_computed == 1
    assert Slow.value.__doc__ == "The value."


def test_no_object_waits_for_another() -> None:
    """A forked child would wait forever."""
    slow, other = Slow(1), Slow(2)
    computing = threading.Thread(target=lambda: slow.value, daemon=True)
    computing.start()
    assert slow.begun.wait(WAIT)
    other.go.set()
    seen: list[int] = []
    reading = threading.Thread(target=lambda: seen.append(other.value), daemon=True)
    reading.start()
    reading.join(WAIT)
    slow.go.set()
    assert seen == [2]
    computing.join(WAIT)


def test_the_package_uses_no_property_with_a_lock() -> None:
    files = Path(pyvelo.__file__).parent.rglob("*.py")
    assert [file.name for file in files if "import cached_property" in file.read_text(encoding="utf-8")] == []
