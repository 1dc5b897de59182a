"""Commands whose standard streams are a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence

PYVELO = (sys.executable, "-m", "pyvelo.cli")
LIMIT = 120.0  # seconds


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


def in_a_terminal(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, typed: bytes = b"", rows: int = 40
) -> tuple[int, bytes]:
    """Exit code of a command, and all bytes that came to its terminal of 120 columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 120, 0, 0))
    process = subprocess.Popen(
        [os.fsencode(word) for word in command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **(env or {})},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(slave)
    watchdog = threading.Timer(LIMIT, process.kill)
    watchdog.start()
    if typed:
        os.write(master, typed)
    try:
        shown = drain(master)
        return process.wait(), shown
    finally:
        watchdog.cancel()
        os.close(master)
