"""All that the command line writes: exact text into pipes and files, no control characters to a terminal.

Models, model files, traces, hubs and paths may contain escape sequences. If a stream is a terminal, control
characters appear as `\\x1b` there; only line ends and tabs pass.
"""

from __future__ import annotations

import codecs
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyvelo.cli.exits import UsageError, as_options

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "agreed",
    "hide_typing",
    "library_log",
    "make_console",
    "prepare_streams",
    "print_error",
    "print_json",
    "print_out",
    "visible",
]

# C0 but tab and line ends, DEL, C1; and lone surrogates, which no stream can encode
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]|\r(?!\n)")
_ERRORS = "pyvelo-output"


def visible(text: str) -> str:
    """Return the text with control characters spelled out, as in `\\x1b[2J`."""
    return _CONTROL.sub(_spelled, text)


def print_out(text: str = "", *, end: str = "\n", flush: bool = False) -> None:
    """Write to standard output."""
    print(visible(text) if sys.stdout.isatty() else text, end=end, flush=flush)


def print_error(text: str, *, end: str = "\n") -> None:
    """Write to standard error."""
    print(visible(text) if sys.stderr.isatty() else text, end=end, file=sys.stderr, flush=True)


def print_json(report: Any, *, indent: int | None = 2) -> None:
    """Write one JSON value to standard output; what the stream cannot show is escaped as JSON has it."""
    text = json.dumps(report, ensure_ascii=False, indent=indent)
    shown = visible(text) if sys.stdout.isatty() else text
    try:
        shown.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        shown = ""
    if shown != text:
        # json leaves DEL as it is
        text = json.dumps(report, indent=indent).replace("\x7f", r"\u007f")
    sys.stdout.write(text + "\n")


def hide_typing() -> Callable[[], None]:
    """Let a terminal not show what is typed while an answer comes; return the function that ends this.

    The typed text waits for the next prompt. A line end between the rows of an answer would tear them.
    """
    if sys.platform == "win32" or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return lambda: None
    import termios

    stream = sys.stdin.fileno()
    before = termios.tcgetattr(stream)
    hidden = [*before]
    hidden[3] &= ~termios.ECHO
    termios.tcsetattr(stream, termios.TCSANOW, hidden)
    return lambda: termios.tcsetattr(stream, termios.TCSANOW, before)


def agreed(question: str) -> bool:
    """Ask on a terminal whether to remove something; without a terminal, UsageError."""
    if not sys.stdin.isatty():
        raise UsageError("standard input is no terminal, so pyvelo cannot ask: give --yes to remove it")
    print_error(f"{question} [y/N] ", end="")
    try:
        answer = input()
    except EOFError:
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    print_error("pyvelo: nothing is removed")
    return False


def make_console(*, stderr: bool = False, width_without_terminal: int | None = None) -> Console:
    """Return a console of rich that writes strings as `print_out` does."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    is_terminal = stream.isatty()

    class SafeConsole(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str(visible(text) if is_terminal else text, **options)

    width = None if is_terminal else width_without_terminal
    return SafeConsole(stderr=stderr, highlight=False, emoji=False, width=width)


def prepare_streams() -> None:
    """Make the standard streams fit for any text, and the log messages of libraries fit for a terminal."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8"))  # noqa: SIM115
    codecs.register_error(_ERRORS, _encoded)
    _reconfigure(sys.stdout, errors=_ERRORS)
    encoding = getattr(sys.stdin, "encoding", None)
    is_ascii = encoding is not None and codecs.lookup(encoding).name == "ascii"
    _reconfigure(sys.stdin, encoding="utf-8" if is_ascii else encoding, errors="surrogateescape")
    if sys.stderr.isatty():
        logging.setLogRecordFactory(_VisibleRecord)


@contextmanager
def library_log() -> Iterator[None]:
    """Print the library's warnings to standard error, a line each, with options in place of arguments."""
    log, handler = logging.getLogger("pyvelo"), _LineHandler(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _LineHandler(logging.Handler):
    """Handler that prints log messages as the command line prints errors."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print_error(f"pyvelo: {as_options(record.getMessage())}")
        except Exception:
            self.handleError(record)


def _reconfigure(stream: object, **settings: str | None) -> None:
    """Change a stream that is a text file, and leave one that a caller put in its place."""
    reconfigure: Callable[..., object] | None = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(**settings)


class _VisibleRecord(logging.LogRecord):
    """A log record whose message has no control characters."""

    def getMessage(self) -> str:
        return visible(super().getMessage())


def _spelled(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _encoded(error: UnicodeError) -> tuple[str | bytes, int]:
    """Encode what a stream has no code for: bytes of file names as they were, the rest as `?`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    if all("\udc80" <= char <= "\udcff" for char in text):
        return text.encode("ascii", "surrogateescape"), error.end
    return "?" * len(text), error.end
