"""Waiting and open descriptors, for the tests of dropped objects."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

WAIT = 60.0  # seconds after which something is taken to hang


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < until, "it never happens"
        time.sleep(0.01)


def descriptors(path: Path) -> int:
    """Descriptors of this process that are open on a file."""
    folder, found = "/proc/self/fd", 0
    for name in os.listdir(folder):
        with suppress(OSError):
            found += os.path.samefile(os.path.join(folder, name), path)
    return found
