"""Every error that PyVelo raises on purpose.

Each is a `VeloError` and also the built-in that people would catch.
"""

from __future__ import annotations

__all__ = [
    "Cancelled",
    "ClosedError",
    "ComputeError",
    "ConfigError",
    "InternalError",
    "ModelError",
    "OutOfBlocks",
    "OutOfMemory",
    "RequestError",
    "TemplateError",
    "TraceError",
    "UnsupportedError",
    "VeloError",
]


class VeloError(Exception):
    """The root of the tree."""


class ModelError(VeloError, ValueError):
    """A model file cannot be read, or is damaged."""


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


class InternalError(VeloError, RuntimeError):
    """A defect of PyVelo itself; please report it."""
