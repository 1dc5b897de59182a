"""Command line of PyVelo. It needs the extra `cli`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `pyvelo` command; always ends with SystemExit."""
    try:
        from pyvelo.cli.app import execute
    except KeyboardInterrupt:
        sys.exit(130)  # as `execute` does
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich"):
            raise
        print(f'pyvelo: the command line needs {error.name}: pip install "pyvelo[cli]"', file=sys.stderr)
        sys.exit(1)
    sys.exit(execute(argv))
