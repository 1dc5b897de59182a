"""Root of the checkout, cache folder and error handling that all commands share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class ScriptError(Exception):
    """Error that the user can fix; the message is one sentence that says how."""


def cache_root() -> Path:
    """Return the folder of everything that can be fetched or built again; deleting it is safe."""
    if os.environ.get("XDG_CACHE_HOME"):
        base = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path.home() / ".cache"
    return base.absolute() / "pyvelo" / "upstream"


def positive(text: str) -> int:
    """Parse a number of 1 or more, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: give 1 or more")
    return number


def gguf_file(text: str) -> Path:
    """Parse the path of a GGUF file, for argparse."""
    try:
        with Path(text).open("rb") as file:
            found = file.read(4)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from error
    if found != b"GGUF":
        raise argparse.ArgumentTypeError(f"{text} is no GGUF file")
    return Path(text)


def run_main(main: Callable[[], int]) -> int:
    """Run a command's main function; print a ScriptError or OSError as one sentence and return 1."""
    name = Path(sys.argv[0]).name
    try:
        return main()
    except ScriptError as error:
        print(f"{name}: {error}", file=sys.stderr)
    except OSError as error:
        print(
            f"{name}: {error}; is the cache folder {cache_root()} writable? XDG_CACHE_HOME moves it",
            file=sys.stderr,
        )
    return 1
