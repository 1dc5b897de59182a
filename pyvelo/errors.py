"""Every error that PyVelo raises on purpose, and how their messages show what was given.

Each is a `VeloError` and also the built-in that people would catch.
"""

from __future__ import annotations

import os

__all__ = [
    "ArgumentError",
    "Cancelled",
    "ClosedError",
    "ComputeError",
    "ConfigError",
    "EngineError",
    "InternalError",
    "LibraryError",
    "ModelError",
    "OutOfBlocks",
    "OutOfMemory",
    "RequestError",
    "TemplateError",
    "TraceError",
    "UnsupportedError",
    "VeloError",
    "one_line",
    "shown",
]

_MAX_SHOWN = 120


class VeloError(Exception):
    """The root of the tree."""


class ModelError(VeloError, ValueError):
    """A model file cannot be read, or is damaged."""


class ArgumentError(VeloError, TypeError):
    """A call has an argument that the function does not take; the message names the nearest one."""


class UnsupportedError(VeloError, ValueError):
    """This architecture, KV type or device cannot do what was asked."""


class ConfigError(VeloError, ValueError):
    """A setting is out of range or contradicts another."""


class RequestError(VeloError, ValueError):
    """A prompt or its sampling parameters cannot be served; the message gives the numbers."""


class TemplateError(RequestError):
    """A chat template cannot be read or rendered; the message names it and, where there is one, the line."""


class TraceError(VeloError, ValueError):
    """A recorded run cannot be read; the message names the line."""


class OutOfBlocks(VeloError, MemoryError):
    """The pool has too few blocks for what was asked."""


class OutOfMemory(VeloError, MemoryError):
    """The machine has too little memory."""


class Cancelled(VeloError, RuntimeError):
    """The work was cancelled before it was done."""


class ComputeError(VeloError, RuntimeError):
    """The forward pass or the sampler failed."""


class ClosedError(VeloError, RuntimeError):
    """The object was closed before."""


class EngineError(VeloError, RuntimeError):
    """The engine cannot serve this call: it is broken, belongs to another process or event loop, or is in the
    middle of a step of the calling thread."""


class LibraryError(VeloError, ImportError):
    """The compiled part cannot be loaded; the message says what is missing."""


class InternalError(VeloError, RuntimeError):
    """A defect of PyVelo itself; please report it."""


def shown(value: object) -> str:
    """What a message says of a value that somebody gave: its repr, in one line that is not long."""
    try:
        return one_line(repr(value), _MAX_SHOWN)
    except Exception:  # whatever its class does; of a number, that it has thousands of digits
        return f"some {type(value).__name__}"


def one_line(text: str, longest: int = 500) -> str:
    """The text without line ends, cut where it is longer."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[:longest]}..."


def check_path(path: str | os.PathLike[str]) -> str:
    """Return a path as text.

    Raises:
        ArgumentError: it is no path.
        ConfigError: no file can have it: it has a NUL or a lone surrogate.
    """
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise ArgumentError(f"path={shown(path)}: give the path of a file")
    name = os.fspath(path)
    try:
        nul = b"\0" in os.fsencode(name)
    except UnicodeEncodeError as error:
        raise ConfigError(f"the path {shown(name)} is not valid Unicode: {error.reason}") from None
    if nul:
        raise ConfigError(f"the path {shown(name)} has a NUL character in it: no file can have this name")
    return name
