"""Many threads, one engine: whoever waits for an answer steps it, one at a time, for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from pyvelo.engine.branch import Branch
from pyvelo.engine.core import EngineCore
from pyvelo.engine.interrupts import InterruptGuard
from pyvelo.engine.request import Request
from pyvelo.errors import ClosedError, InternalError

__all__ = ["Driver"]


class Driver:
    """Gives threads their turn at a core. Everything here is thread-safe.

    `_turn` protects the fields below it and is held for moments; `_busy` says that some thread has the core
    to itself, for a step or as a visitor. The thread that stepped last tends to step again, and a visitor may
    come back at once; so between two steps there is a turn for a visitor, and between two visits one for a
    step.
    """

    def __init__(self, core: EngineCore, guard: InterruptGuard) -> None:
        self._core = core
        self._guard = guard
        self._turn = threading.Condition()  # re-entrant: a finalizer may cancel from within any line here
        self._busy = False
        self._drivers = 0  # threads in `drive`
        self._visitors = 0  # threads that wait in `visit`
        self._visited = False  # the last turn was a visitor's
        self._closed = False

    def submit(self, requests: Iterable[Request]) -> None:
        """Hands requests over; ClosedError after `close`."""
        with self._turn:
            self.check_open()
            self._core.inbox.submit(requests)

    def check_open(self) -> None:
        """ClosedError after `close`."""
        if self._closed:
            raise ClosedError("this engine was closed")

    def drive(self, ready: Callable[[], object]) -> None:
        """Steps the engine, or waits while another thread does, until `ready()` or Ctrl+C.

        `ready` must become true once the requests that it looks at are finished.
        """
        with self._turn:
            self._drivers += 1
        try:
            with self._guard:
                while self._enter_step(ready):
                    try:
                        progress = self._core.step()
                    finally:
                        self._leave()
                    if not progress and not ready() and not self._closed:
                        raise InternalError("a request is not finished, but nothing is left to do")
        finally:
            with self._turn:
                self._drivers -= 1
                self._turn.notify_all()

    def cancel(self, requests: Iterable[Request]) -> None:
        """Ends requests now, or where a step is in progress, right after it. Never waits for a step."""
        with self._turn:
            self._core.inbox.cancel(requests)
            if not self._busy:
                self._busy = True
                self._leave()

    def let_go(self, branch: Branch) -> None:
        """Gives back what a branch holds, as soon as `cancel` would end a request. Never waits for a step."""
        with self._turn:
            self._core.inbox.let_go(branch)
            if not self._busy:
                self._busy = True
                self._leave()

    @contextmanager
    def visit(self) -> Iterator[EngineCore]:
        """The core between two steps, to oneself."""
        with self._guard:
            self._enter_visit()
            try:
                yield self._core
            finally:
                self._leave()

    def close(self, stop_run: Callable[[], None]) -> bool:
        """Ends every request; False where that was done before. `stop_run` cuts a forward pass short."""
        with self._turn:
            if self._closed:
                return False
            self._closed = True
            if self._busy:
                stop_run()
        with self.visit() as core:
            core.cancel_all()
        return True

    def _enter_step(self, ready: Callable[[], object]) -> bool:
        """Waits for the turn to step (True), or for `ready()` or Ctrl+C (False)."""
        with self._turn:
            while not (ready() or self._guard.hit):
                if not (self._busy or self._closed or (self._visitors and not self._visited)):
                    self._busy, self._visited = True, False
                    return True
                self._turn.wait(self._guard.patience)
            return False

    def _enter_visit(self) -> None:
        """Waits for a visitor's turn."""
        with self._turn:
            self._visitors += 1
            try:
                while self._busy or (self._visited and self._drivers and not self._closed):
                    if self._guard.hit:
                        raise KeyboardInterrupt
                    self._turn.wait(self._guard.patience)
                self._busy = self._visited = True
            finally:
                self._visitors -= 1

    def _leave(self) -> None:
        with self._turn:
            self._core.settle()
            self._busy = False
            self._turn.notify_all()
