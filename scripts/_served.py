"""`pyvelo serve` in a process of its own, for scripts that are its clients."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from scripts._common import ROOT, ScriptError

__all__ = ["Address", "served"]


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
    command = [sys.executable, "-m", "pyvelo", "serve", "--port", "0", "--quiet", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        line = server.stdout.readline() if server.stdout is not None else ""
        found = re.search(r"http://([^:]+):(\d+)/v1", line)
        if found is None:
            raise ScriptError("pyvelo serve did not start: see above")
        yield Address(found[1], int(found[2]), server.pid)
    finally:
        server.terminate()
        server.wait(60)
