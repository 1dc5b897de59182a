"""Commands whose standard streams are a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from unittest.mock import patch

import pyte
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from pyvelo.cli.screen import RichScreen
from tests import forks

PYVELO = (sys.executable, "-m", "pyvelo.cli")


def drain(master: int) -> bytes:
    """Read what comes to a terminal until its other end is closed."""
    shown = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:  # Linux: the other end is closed
            return shown
        if not piece:
            return shown
        shown += piece


def rows_of(output: str, columns: int, rows: int) -> list[str]:
    """All rows of a terminal of this size after an output: first the ones that have left its screen."""
    screen = pyte.HistoryScreen(columns, rows, history=10_000)
    pyte.Stream(screen).feed(output)
    gone = ("".join(row[column].data for column in range(columns)) for row in screen.history.top)
    return [row.rstrip() for row in (*gone, *screen.display)]


def screen_on(terminal: Console) -> RichScreen:
    """The screen of a chat that draws on a console."""
    with (
        create_pipe_input() as keys,
        create_app_session(input=keys, output=DummyOutput()),
        patch("pyvelo.cli.screen.make_console", lambda: terminal),
    ):
        return RichScreen(history=False)


def in_a_terminal(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, typed: bytes = b"", rows: int = 40
) -> tuple[int, bytes]:
    """Exit code of a command, and all bytes that came to its terminal of 120 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 120, 0, 0))
    settings = {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **(env or {})}
    process = forks.start(
        command, (slave, slave, slave), env={**os.environ, **settings}, start_new_session=True
    )
    os.close(slave)
    watchdog = threading.Timer(forks.LIMIT, process.kill)
    watchdog.start()
    if typed:
        os.write(master, typed)
    try:
        shown = drain(master)
        return process.wait(), shown
    finally:
        watchdog.cancel()
        os.close(master)
