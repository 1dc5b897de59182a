"""Exit codes and last output of commands."""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["BROKEN_PIPE", "ERROR", "INTERRUPTED", "USAGE", "drop_unwritten", "explain", "silence_stdout"]

ERROR = 1
USAGE = 2
INTERRUPTED = 130  # a shell's code for SIGINT
BROKEN_PIPE = 141  # and for SIGPIPE


def silence_stdout() -> None:
    """Redirect standard output to nowhere, so that Python prints no error at exit about a closed pipe."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def drop_unwritten() -> None:
    """Drop what standard output has buffered if it cannot be written, so that Python does not try at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        silence_stdout()


def explain(error: OSError) -> str:
    """Return a sentence for an error of the operating system: what it is about, and what is wrong."""
    if error.filename is None:
        return error.strerror or str(error)
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
    if isinstance(error, FileNotFoundError):
        return f"there is no file or folder {name}"
    if isinstance(error, IsADirectoryError):
        return f"{name} is a folder, not a file"
    if isinstance(error, PermissionError):
        return f"{name} may not be opened by this user: change its permissions, or name another"
    return f"{name}: {error.strerror or error}"
