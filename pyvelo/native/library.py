"""Functions of the library as a whole: its log, devices, memory and threads."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from ..errors import ConfigError
from ._ffi import CPUS_BEFORE, check, ffi, int32, interrupt, lib, read_bytes

if TYPE_CHECKING:
    from ._velo import CData

__all__ = [
    "Device",
    "DeviceKind",
    "LogLevel",
    "allowed_cpus",
    "count_cores",
    "devices",
    "follow_logger",
    "product_rate",
    "release_threads",
    "reserved_memory",
    "set_log",
    "system_info",
]

LogLevel = Literal["debug", "info", "warning", "error"]
DeviceKind = Literal["cpu", "gpu", "igpu", "accelerator"]

_KINDS: tuple[DeviceKind, ...] = ("cpu", "gpu", "igpu", "accelerator")  # by C's numbers
_LEVELS: tuple[LogLevel, ...] = ("debug", "info", "warning", "error")  # C counts from 1

_log: Callable[[LogLevel, str], object] | None = None

_logger = logging.getLogger("pyvelo.llama")
_logger.addHandler(logging.NullHandler())  # else Python would print lines that no handler takes
if _logger.level == logging.NOTSET:
    _logger.setLevel(logging.CRITICAL)  # llama.cpp has no such lines: quiet, until a user sets a level


@dataclass(frozen=True)
class Device:
    """Device that can compute, with its memory in bytes.

    `kind`: "gpu" has memory of its own, "igpu" shares the host's, "accelerator" does some of the CPU's work.
    """

    name: str
    description: str
    kind: DeviceKind
    memory_total: int
    memory_free: int


def devices() -> tuple[Device, ...]:
    """Return the devices that this build can use, the CPU included."""
    count = ffi.new("int32_t *")
    capacity = 16
    while True:
        found = ffi.new("velo_device[]", capacity)
        status = lib.velo_devices(found, capacity, count)
        if status != lib.VELO_BUFFER_TOO_SMALL:
            check(status)
            return tuple(_device(found[i]) for i in range(count[0]))
        capacity = count[0]


def _device(found: CData) -> Device:
    return Device(
        ffi.string(found.name).decode("utf-8", "replace"),
        ffi.string(found.description).decode("utf-8", "replace"),
        _KINDS[found.kind],
        found.memory_total,
        found.memory_free,
    )


def reserved_memory() -> int:
    """Return the bytes that loaded models reserve for weights until their first run packs them.

    They are allocated but untouched, so the system still counts them as free.
    """
    return int(lib.velo_reserved_memory())


def allowed_cpus() -> frozenset[int] | None:
    """Return the numbers of the CPUs that this process may use; None if the system does not tell.

    OpenMP's library binds the thread that loads it to a core, if the environment says so. The answer is what
    was allowed before, then.
    """
    if sys.platform != "linux":
        return None
    binds = any(name in os.environ for name in ("GOMP_CPU_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND"))
    return CPUS_BEFORE if binds else frozenset(os.sched_getaffinity(0))


def count_cores() -> tuple[int, int]:
    """Return the numbers of physical cores and of performance cores among them.

    Both are 0 where the system does not tell the library, as on Linux, whose files tell.
    """
    physical, performance = ffi.new("int32_t *"), ffi.new("int32_t *")
    check(lib.velo_cores(physical, performance))
    return physical[0], performance[0]


def product_rate(kind: str, n_threads: int, seconds: float = 1.0) -> float:
    """Return the products of a weight and an activation that a prompt's steps compute in a second.

    Args:
        kind: quantized type of the weights, as ggml names it, such as "q4_K".
        n_threads: threads that compute; 0: one for each logical core.
        seconds: duration of the measurement, which has at least three rounds.

    Raises:
        ConfigError: an argument is outside its range.
        OutOfMemory: there is no memory for a matrix, or for the threads.
    """
    rate = ffi.new("double *")
    check(lib.velo_product_rate(kind.encode(), int32("n_threads", n_threads), seconds, rate))
    return float(rate[0])


def system_info() -> str:
    """Return the instruction sets and build options of the backends."""
    return read_bytes(lib.velo_system_info, 1024).decode("utf-8", "replace")


def set_log(callback: Callable[[LogLevel, str], object] | None, level: LogLevel = "warning") -> None:
    """Pass lines of the library's log, of `level` and above, to `callback(level, line)`.

    None passes them to the logger "pyvelo.llama", as at the start. Any thread may log. An exception of the
    callback is printed to standard error, and the call that logged the line goes on.

    Raises:
        ConfigError: the level does not exist.
    """
    global _log
    if level not in _LEVELS:
        raise ConfigError(f"the log has no level {level!r}: use one of {', '.join(_LEVELS)}")
    _log = callback
    if callback is None:
        follow_logger()
    else:
        _listen(level)


def follow_logger() -> None:
    """Hand over the lines that the logger "pyvelo.llama" takes now, unless `set_log` has a callback."""
    if _log is None:
        taken = (level for level in _LEVELS if _logger.isEnabledFor(getattr(logging, level.upper())))
        _listen(next(taken, None))


def _listen(level: LogLevel | None) -> None:
    """Have C call back for lines of `level` and above; None: for none."""
    callback, least = (ffi.NULL, 1) if level is None else (lib.velo_py_log, _LEVELS.index(level) + 1)
    check(lib.velo_log_set(callback, ffi.NULL, least))


def _tell_logger(level: LogLevel, line: str) -> None:
    _logger.log(getattr(logging, level.upper()), "%s", line)


def release_threads() -> None:
    """End the OpenMP worker threads of the calling thread. Its next run starts them again."""
    lib.velo_threads_release()


def _leave(_kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
    """Print an exception of a log callback. Keep an interrupt, which ends the C call in progress instead."""
    if not isinstance(error, Exception):
        interrupt.error = error
        return
    with suppress(Exception):  # standard error may be closed
        print("an exception of a callback for log lines:", file=sys.stderr)
        traceback.print_exception(error)


@ffi.def_extern(onerror=_leave)
def velo_py_log(level: int, text: CData, _user: CData) -> None:
    callback = _log or _tell_logger
    callback(_LEVELS[level - 1], ffi.string(text).decode("utf-8", "replace"))


atexit.register(_listen, None)  # threads of the library may outlive the interpreter; waits for their lines
