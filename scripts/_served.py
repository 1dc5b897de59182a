"""`pyvelo serve` in a process of its own, for scripts that are its clients."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from scripts._common import ScriptError

__all__ = ["Address", "served"]


PROGRAM = f"import sys; sys.path[:] = {sys.path!r}; from pyvelo.cli import main; main()"
"""The command pyvelo of the package that this process imports: installed, or of the checkout."""


class Address(NamedTuple):
    """Place of a server, and its process id."""

    host: str
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


@contextmanager
def served(*options: str) -> Iterator[Address]:
    """Serve the demo model on a free port within a block.

    Args:
        options: of `pyvelo serve`.

    Raises: ScriptError if it does not start.
    """
    command = [sys.executable, "-c", PROGRAM, "serve", "--port", "0", "--quiet", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline() if server.stdout is not None else ""
        found = re.search(r"http://([^:]+):(\d+)/v1", line)
        if found is None:
            raise ScriptError("pyvelo serve did not start: see above")
        yield Address(found[1], int(found[2]), server.pid)
    finally:
        server.terminate()
        server.wait(60)
