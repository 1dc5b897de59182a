"""Screens of a chat: a terminal that edits lines and renders markdown, or plain text in and out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from pyvelo.cli.markdown import LastRows, last_lines, make_markdown, split_blocks
from pyvelo.cli.terminal import make_console, print_error, print_out, visible

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["PlainScreen", "RichScreen", "Screen", "best_screen"]

PROMPT = "> "


class Screen(Protocol):
    """Screen of a conversation."""

    def ask(self) -> str | None:
        """Read a line of the user; None: the end. KeyboardInterrupt: the line was discarded."""

    def show(self, text: str) -> None:
        """Show the next piece of the answer."""

    def finish(self) -> None:
        """End the answer."""

    def note(self, text: str) -> None:
        """Show a note about the conversation."""


def best_screen() -> Screen:
    """Return the best screen for this terminal and the installed packages; plain if piped."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return PlainScreen()
    try:
        return RichScreen()
    except ImportError:  # without the extra `cli`
        return PlainScreen()


class PlainScreen:
    """Lines from standard input, text to standard output; prompts and notes on terminals only."""

    def __init__(self) -> None:
        self._tty = sys.stdin.isatty()
        self._open = False  # the answer's last line has no line end yet

    def ask(self) -> str | None:
        """See `Screen.ask`."""
        return _joined(self._line)

    def show(self, text: str) -> None:
        """See `Screen.show`."""
        print_out(text, end="", flush=True)
        self._open = not text.endswith("\n")

    def finish(self) -> None:
        """See `Screen.finish`."""
        if self._open:
            print_out(flush=True)
        self._open = False

    def note(self, text: str) -> None:
        """Print a note to standard error."""
        self.finish()
        print_error(text)

    def _line(self) -> str | None:
        try:
            return input(PROMPT if self._tty else "")
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            self.note(f"this is not UTF-8 text: {error}")
            return ""


class RichScreen:
    """Terminal with prompt-toolkit's editor and rich's markdown; ImportError if one of them is missing."""

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import InMemoryHistory
        from rich.live import Live

        self._session: Any = PromptSession(history=InMemoryHistory(), multiline=False)
        self._console = make_console()
        self._make_live: Callable[[], Any] = lambda: Live(
            console=self._console, refresh_per_second=8, transient=True, get_renderable=self._growing
        )
        self._live: Any = None
        self._text = ""  # of the block that may still change

    def ask(self) -> str | None:
        """See `Screen.ask`. Escape, then Enter, inserts a line break."""
        return _joined(self._line)

    def show(self, text: str) -> None:
        """Print complete blocks for good, and redraw only the last one."""
        done, self._text = split_blocks(self._text + visible(text))
        if done:
            self._print(done)
        if self._live is None:
            self._live = self._make_live()
            self._live.start()

    def finish(self) -> None:
        """See `Screen.finish`."""
        rest, self._text = self._text, ""
        self._print(rest)

    def note(self, text: str) -> None:
        """Print a note in another style than the answer."""
        self.finish()
        self._console.print(text, style="dim", markup=False)

    def _growing(self) -> RenderableType:
        """Return what fits on the screen of the block that may still change: its end."""
        return LastRows(make_markdown(last_lines(self._text, self._console.size.height)))

    def _print(self, text: str) -> None:
        """Print markdown in place of the block that was drawn anew."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if text:
            self._console.print(make_markdown(text))

    def _line(self) -> str | None:
        try:
            line: str = self._session.prompt(PROMPT)
            return line
        except EOFError:
            return None


def _joined(line: Callable[[], str | None]) -> str | None:
    """Read one line, or several joined ones if they end with a backslash."""
    lines: list[str] = []
    while (text := line()) is not None:
        if not text.endswith("\\"):
            return "\n".join([*lines, text])
        lines.append(text[:-1])
    return "\n".join(lines) if lines else None
