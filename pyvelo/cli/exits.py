"""How a command ends."""

from __future__ import annotations

import contextlib
import os
import sys

__all__ = ["BROKEN_PIPE", "ERROR", "INTERRUPTED", "USAGE", "silence_stdout"]

ERROR = 1
USAGE = 2
INTERRUPTED = 130  # as a shell tells of SIGINT
BROKEN_PIPE = 141  # and of SIGPIPE


def silence_stdout() -> None:
    """Lets standard output lead nowhere, so that nothing complains at exit that nobody reads any more."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
