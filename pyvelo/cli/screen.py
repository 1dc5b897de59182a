"""Screens of a chat: a terminal that edits lines and renders markdown, or plain text in and out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pyvelo.cli.markdown import last_lines, make_markdown, split_blocks
from pyvelo.cli.terminal import hide_typing, make_console, print_error, print_out, visible
from pyvelo.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["PlainScreen", "RichScreen", "Screen", "best_screen", "fitting", "history_file", "state_folder"]

PROMPT = "> "


class Screen(Protocol):
    """Screen of a conversation."""

    def ask(self) -> str | None:
        """Read a line of the user; None: the end. KeyboardInterrupt: the line was discarded."""

    def show(self, text: str) -> None:
        """Show the next piece of the answer."""

    def show_reasoning(self, text: str) -> None:
        """Show the next piece of what the model thinks before the answer."""

    def finish(self) -> None:
        """End the answer."""

    def note(self, text: str) -> None:
        """Show a note about the conversation."""

    def status(self, text: str) -> None:
        """Show figures of the last answer beside the next question."""

    def control(self, sequence: str) -> bool:
        """Send a control sequence to the terminal; return False if there is none."""


def best_screen(*, status: bool = True, history: bool = True) -> Screen:
    """Return the best screen for this terminal and the installed packages; plain if piped or on a dumb one.

    status, history: of a terminal, whether it has a status line and keeps the lines of the user in a file.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        return PlainScreen()
    try:
        return RichScreen(status=status, history=history)
    except ImportError:  # without the extra `cli`
        return PlainScreen()


class PlainScreen:
    """Lines from standard input, text to standard output; prompts and notes on terminals only."""

    def __init__(self) -> None:
        self._open = False  # the answer's last line has no line end yet
        self._reasons = False  # the last piece was of the reasoning

    def ask(self) -> str | None:
        """See `Screen.ask`."""
        return _joined(self._line)

    def show(self, text: str) -> None:
        """See `Screen.show`."""
        self._end_reasoning()
        self._open = not text.endswith("\n")  # before Ctrl-C can end the writing
        print_out(text, end="", flush=True)

    def show_reasoning(self, text: str) -> None:
        """Write it where notes go, so that an answer in a pipe is without it."""
        self._reasons = True
        print_error(text, end="")

    def finish(self) -> None:
        """See `Screen.finish`."""
        self._end_reasoning()
        if self._open:
            print_out(flush=True)
        self._open = False

    def status(self, text: str) -> None:
        """Show nothing: there is no status line."""

    def control(self, sequence: str) -> bool:
        """Write it if standard output is a terminal."""
        if sys.stdout.isatty():
            sys.stdout.write(sequence)
            sys.stdout.flush()
        return sys.stdout.isatty()

    def note(self, text: str) -> None:
        """Print a note to standard error."""
        self.finish()
        print_error(text)

    def _end_reasoning(self) -> None:
        if self._reasons:
            print_error("\n")
        self._reasons = False

    def _line(self) -> str | None:
        try:
            if sys.stdin.isatty() and not sys.stdout.isatty():
                print_error(PROMPT, end="")
            return input(PROMPT if sys.stdin.isatty() and sys.stdout.isatty() else "")
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            self.note(f"this is not UTF-8 text: {error}")
            return ""


class RichScreen:
    """Terminal with prompt-toolkit's editor and rich's markdown; ImportError if one of them is missing."""

    def __init__(self, *, status: bool = True, history: bool = True) -> None:
        from prompt_toolkit import PromptSession

        from pyvelo.cli.growing import Growing

        self._status = ""
        self._session: Any = PromptSession(
            history=_history(history),
            multiline=False,
            enable_suspend=True,
            bottom_toolbar=(lambda: fitting(self._status, self._console.width) or None) if status else None,
        )
        self._console = make_console()
        self._make_live: Callable[[], Any] = lambda: Growing(self._console, self._growing)
        self._live: Any = None
        self._text = ""  # of the block that may still change
        self._return = ""  # a carriage return at its end, which may be the first half of a line end
        self._enough = 0  # characters of it that are worth a try to print some for good
        self._reasons = False  # it is reasoning
        self._follows = False  # the next block follows one of the same answer
        self._show_typing: Callable[[], None] | None = None  # at the end of an answer

    def ask(self) -> str | None:
        """See `Screen.ask`. Escape, then Enter, inserts a line break."""
        return _joined(self._line)

    def show(self, text: str) -> None:
        """Print complete blocks for good, and redraw only the last one."""
        self._show(text, reasoning=False)

    def show_reasoning(self, text: str) -> None:
        """See `Screen.show_reasoning`."""
        self._show(text, reasoning=True)

    def _show(self, text: str, *, reasoning: bool) -> None:
        self._show_typing = self._show_typing or hide_typing()
        if reasoning != self._reasons:
            self._end_block()
            self._reasons = reasoning
        text = (self._return + text).replace("\r\n", "\n")
        self._return = "\r" if text.endswith("\r") else ""
        done, self._text = split_blocks(self._text + visible(text.removesuffix(self._return)))
        for block in done:
            self._print(block)
        self._settle()
        if self._live is None and self._text.strip():
            self._separate()
            self._live = self._make_live()
            self._live.start()

    def _settle(self) -> None:
        """Print the beginning of the block for good, if enough was added to it since the last try."""
        if len(self._text) < self._enough:
            return
        from pyvelo.cli.settled import split_settled

        settled, rest = split_settled(self._text, self._drawn, self._console, is_markdown=not self._reasons)
        if settled:
            self._print(settled)
            self._follows = False
            self._text = rest
        # all tries for a long block that cannot be split take no more time than drawing it a few times
        self._enough = len(self._text) + max(self._console.width // 2, len(self._text) // 4)

    def finish(self) -> None:
        """See `Screen.finish`."""
        self._end_block()
        self._reasons = self._follows = False
        if self._show_typing is not None:
            self._show_typing()
            self._show_typing = None

    def note(self, text: str) -> None:
        """Print a note in another style than the answer."""
        self.finish()
        self._console.print(text, style="dim", markup=False)

    def status(self, text: str) -> None:
        """See `Screen.status`."""
        self._status = text

    def control(self, sequence: str) -> bool:
        """See `Screen.control`."""
        self._console.file.write(sequence)
        self._console.file.flush()
        return True

    def _growing(self) -> RenderableType:
        """Return what may fit on the screen of the block that may still change: its end."""
        return self._drawn(last_lines(self._text, self._console.size.height))

    def _drawn(self, text: str) -> RenderableType:
        """Return an answer as markdown; reasoning as dimmed text, of which nothing is meant as markup."""
        from rich.text import Text

        return Text(text.rstrip("\n"), style="dim italic") if self._reasons else make_markdown(text)

    def _print(self, text: str) -> None:
        """Print markdown in place of the block that was drawn anew."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._enough = 0
        if text.strip():
            self._separate()
            self._console.print(self._drawn(text))
            self._follows = True

    def _end_block(self) -> None:
        rest, self._text, self._return = self._text + visible(self._return), "", ""
        self._print(rest)

    def _separate(self) -> None:
        """Print the empty line before a block that follows another one."""
        if self._follows:
            self._console.print()
        self._follows = False

    def _line(self) -> str | None:
        try:
            line: str = self._session.prompt(PROMPT)
            return line
        except EOFError:
            return None


def fitting(fields: str, width: int) -> str:
    """Return as many of the fields, which commas separate, as a line of this width shows."""
    while len(fields) > width and ", " in fields:
        fields = fields.rpartition(", ")[0]
    return fields


def history_file() -> Path:
    """Return the file that keeps the lines of earlier chats; raise as `state_folder`."""
    return state_folder() / "history"


def state_folder() -> Path:
    """Return this user's folder for what chats leave.

    Raises:
        ConfigError: the user has no home folder.
    """
    from platformdirs import user_state_path

    try:
        found: Path = user_state_path("pyvelo", appauthor=False)
    except RuntimeError:
        raise ConfigError("there is no home folder: set XDG_STATE_HOME to a folder for chats") from None
    return found


def _history(kept: bool) -> Any:
    """Return the lines of earlier chats from a file in the user's state folder, or an empty history."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Lines(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # its folder has gone, or the disk is full
                super().store_string(string)

    if kept:
        with suppress(OSError, ConfigError):  # without a home folder, or with one that is read-only
            file = history_file()
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(file, os.O_CREAT | os.O_APPEND, 0o600))  # for its owner alone
            return Lines(str(file))
    return InMemoryHistory()


def _joined(line: Callable[[], str | None]) -> str | None:
    """Read one line, or several joined ones if they end with a backslash."""
    lines: list[str] = []
    while (text := line()) is not None:
        if not text.endswith("\\"):
            return "\n".join([*lines, text])
        lines.append(text[:-1])
    return "\n".join(lines) if lines else None
