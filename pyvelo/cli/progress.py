"""Progress bars and spinners on standard error, if it is a terminal.

Rich is imported with the first bar: most models load before it is shown.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from pyvelo.cli.terminal import make_console, visible

__all__ = ["Bar", "LoadingBar", "RichBar", "loading", "waiting"]

SHOW_AFTER = 0.5
"""Seconds of loading before a bar is shown."""


class Bar(Protocol):
    """Progress bar, shown from its construction on."""

    def show(self, share: float) -> None:
        """Show the completed share, 0..1."""

    def close(self) -> None:
        """Remove the bar from the terminal."""


class LoadingBar:
    """Callback for the progress of loading or packing, which shows a bar if that takes long.

    The share goes from 0 to 1 in each wait, and there may be several waits. `open_bar` makes a bar; `clock`
    returns seconds.
    """

    def __init__(self, open_bar: Callable[[], Bar], clock: Callable[[], float] = time.perf_counter) -> None:
        self._open_bar = open_bar
        self._clock = clock
        self._start = clock()
        self._bar: Bar | None = None

    def __call__(self, share: float) -> None:
        if share == 0.0:
            self._start = self._clock()
        late = self._clock() - self._start >= SHOW_AFTER
        if self._bar is None and late and share < 1.0:
            self._bar = self._open_bar()
        if self._bar is not None:
            self._bar.show(share)
        if share >= 1.0:
            self.close()

    def close(self) -> None:
        """Remove the bar, if there is one."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()


class RichBar:
    """Bar of rich; `what` stands before it."""

    def __init__(self, what: str) -> None:
        from rich.markup import escape
        from rich.progress import Progress

        self._progress = Progress(console=make_console(stderr=True), transient=True, redirect_stdout=False)
        self._task = self._progress.add_task(escape(visible(what)), total=1.0)
        self._progress.start()

    def show(self, share: float) -> None:
        """Show the completed share, 0..1."""
        self._progress.update(self._task, completed=share)

    def name(self, what: str) -> None:
        """Change the words before the bar."""
        from rich.markup import escape

        self._progress.update(self._task, description=escape(visible(what)))

    def close(self) -> None:
        """Remove the bar from the terminal."""
        self._progress.stop()


@contextmanager
def loading(path: str | os.PathLike[str]) -> Iterator[LoadingBar | None]:
    """Yield the progress callback for `LLM`, to use up to its first answer; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = LoadingBar(partial(RichBar, f"loading {os.path.basename(path)}"))
    try:
        yield bar
    finally:
        bar.close()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a spinner while the context lasts."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.markup import escape

    console = make_console(stderr=True)
    spinner = "dots" if console.encoding.startswith("utf") else "line"
    with console.status(escape(visible(what)), spinner=spinner):
        yield
