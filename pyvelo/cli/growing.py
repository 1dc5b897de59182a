"""Rows at the end of a terminal that are drawn anew while their text grows."""

from __future__ import annotations

import os
from collections.abc import Callable

from rich.console import Console, ConsoleRenderable, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType

from pyvelo.cli.markdown import LastRows, rows_on

__all__ = ["Growing"]


class Growing(Live):
    """Live display of the last rows of a text, which leaves no fragments behind if the terminal is resized.

    A terminal wraps rows that a smaller width no longer holds, so they take more rows than were drawn.
    """

    def __init__(self, console: Console, content: Callable[[], RenderableType]) -> None:
        self._widths: list[int] = []  # of the rows on the screen
        self._columns = console.width  # of the screen at that time
        super().__init__(
            console=console,
            refresh_per_second=8,
            transient=True,
            get_renderable=lambda: LastRows(content(), self._widths),
        )

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Replace rich's first renderable, which erases the rows as they were drawn."""
        processed = super().process_renderables(renderables)
        before, self._columns = self._columns, self.console.width
        if before != self._columns and self.console.is_interactive and self._widths and _wraps():
            processed[0] = _erase(min(rows_on(self._columns, self._widths), self.console.height))
        return processed


def _wraps() -> bool:
    """Return whether the terminal wraps its rows anew for another width: xterm and screen cut them."""
    return not any(name in os.environ for name in ("XTERM_VERSION", "STY"))


def _erase(n_rows: int) -> Control:
    line = (ControlType.ERASE_IN_LINE, 2)
    above = ((ControlType.CURSOR_UP, 1), line)
    return Control(ControlType.CARRIAGE_RETURN, line, *(above * (n_rows - 1)))
