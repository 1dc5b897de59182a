"""Errors of PyVelo, and helpers for their messages.

Each is a `VeloError` and also the built-in exception that fits.
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
    "PromptTooLong",
    "RequestError",
    "StoreError",
    "TemplateError",
    "TraceError",
    "UnsupportedError",
    "VeloError",
    "check_path",
    "one_line",
    "shown",
]

_MAX_SHOWN = 120


class VeloError(Exception):
    """Base class of all errors of PyVelo."""


class ModelError(VeloError, ValueError):
    """A model file cannot be read, or is damaged."""


class ArgumentError(VeloError, TypeError):
    """A call has an argument that the function does not take; the message names the nearest one."""


class UnsupportedError(VeloError, ValueError):
    """An architecture, a KV type or a device does not support the request."""


class ConfigError(VeloError, ValueError):
    """A setting is out of range or contradicts another."""


class RequestError(VeloError, ValueError):
    """A prompt or its sampling parameters cannot be served; the message gives the numbers."""


class PromptTooLong(RequestError):
    """A prompt, or a session, leaves no room for an answer in the context."""


class StoreError(VeloError, RuntimeError):
    """A KV store does not answer, or cannot do what it was asked for."""


class TemplateError(RequestError):
    """A chat template cannot be read or rendered; the message names it and, if known, the line."""


class TraceError(VeloError, ValueError):
    """A recording cannot be written, or cannot be read; the message names the file and the line."""


class OutOfBlocks(VeloError, MemoryError):
    """The pool has too few free blocks."""


class OutOfMemory(VeloError, MemoryError):
    """The machine has too little memory."""


class Cancelled(VeloError, RuntimeError):
    """The work was cancelled before its end."""


class ComputeError(VeloError, RuntimeError):
    """The forward pass or the sampler failed."""


class ClosedError(VeloError, RuntimeError):
    """The object was closed."""


class EngineError(VeloError, RuntimeError):
    """The engine cannot serve this call: it is broken, belongs to another process or event loop, or the
    calling thread is in one of its steps.
    """


class LibraryError(VeloError, ImportError):
    """The compiled module cannot be loaded; the message says what is missing."""


class InternalError(VeloError, RuntimeError):
    """A defect of PyVelo; please report it."""


def shown(value: object) -> str:
    """Return the repr of a value for a message, in one short line."""
    try:
        return one_line(repr(value), _MAX_SHOWN)
    except Exception:  # of a user's class, or of an integer with thousands of digits
        return f"some {type(value).__name__}"


def one_line(text: str, longest: int = 500) -> str:
    """Return the text without line ends, cut to `longest` characters."""
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
