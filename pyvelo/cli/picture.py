"""Checks before the work for a picture: a known format, a place for the file, and matplotlib."""

from __future__ import annotations

import os
from pathlib import Path

from pyvelo.cli.exits import UsageError
from pyvelo.errors import ConfigError

__all__ = ["FORMATS", "check_picture"]

FORMATS = (".svg", ".png", ".pdf")


def check_picture(option: str, path: Path) -> None:
    """Raise ConfigError if no picture can be drawn to `path`, the value of `option`."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"{option} {path}: give a name that ends with {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path}: this file cannot be written: give another name")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        raise ConfigError('a picture needs matplotlib: pip install "pyvelo[report]"') from None
