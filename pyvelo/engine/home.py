"""The process that an engine was made in. A fork copies its memory, but not the threads that hold locks."""

from __future__ import annotations

import os

from pyvelo.errors import EngineError

__all__ = ["HomeProcess"]

_n_forks = 0  # between the first process and this one


class HomeProcess:
    """The process that made an object."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._n_forks = _n_forks

    @property
    def left(self) -> bool:
        """Whether this is a process that was forked from it."""
        return self._n_forks != _n_forks

    def check(self) -> None:
        """Raise EngineError in a forked process."""
        if self.left:
            raise EngineError(
                f"this engine belongs to process {self._pid}, and process {os.getpid()} was forked from it: "
                f'make an engine in this process, or start it with "spawn"'
            )


def _count() -> None:
    global _n_forks
    _n_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count)
