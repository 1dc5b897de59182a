"""Loading of the compiled module, and conversions around its calls."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from ..cpu import check_cpu
from ..errors import (
    Cancelled,
    ClosedError,
    ComputeError,
    ConfigError,
    InternalError,
    LibraryError,
    ModelError,
    OutOfMemory,
    UnsupportedError,
    VeloError,
    one_line,
)


def why_not_loaded(error: ImportError, root: Path = Path(__file__).parents[2]) -> str:
    """Return a message for an error of the loader; `root`: where the package lies."""
    said = one_line(str(error))
    if "libcu" in said:  # cuBLAS, CUDA's runtime
        remedy = "install NVIDIA's CUDA toolkit, or `pip install nvidia-cublas` of the CUDA it was built with"
    elif (root / "native" / "CMakeLists.txt").exists():
        remedy = (
            "Python imports the checkout here: run it from another folder, or install with pip install -e"
        )
    else:
        remedy = "install the package with pip, or build it in place as CONTRIBUTING.md says"
    return f"the compiled part of pyvelo cannot be loaded ({said}): {remedy}"


@contextlib.contextmanager
def symbols_kept_local() -> Iterator[None]:
    """Load extension modules with symbols that no other library can find, whatever the flags of the process
    are.

    Otherwise a stock llama.cpp that is loaded later would call our functions. On Windows all symbols are
    local, but the folder of our libraries must be named.
    """
    if sys.platform == "win32":
        with os.add_dll_directory(str(Path(__file__).parent / "lib")):
            yield
        return
    flags = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_LOCAL)
    try:
        yield
    finally:
        sys.setdlopenflags(flags)


CPUS_BEFORE: frozenset[int] | None = None
"""CPUs of this thread before OpenMP's library was loaded; None: the system does not tell."""
if sys.platform == "linux":
    CPUS_BEFORE = frozenset(os.sched_getaffinity(0))

check_cpu()
try:
    with symbols_kept_local():
        from ._velo import ffi, lib
except ImportError as error:
    raise LibraryError(why_not_loaded(error)) from None

if TYPE_CHECKING:
    from ._velo import CData

__all__ = [
    "CPUS_BEFORE",
    "check",
    "created",
    "ffi",
    "from_c",
    "int32",
    "interrupt",
    "ints",
    "lib",
    "read_bytes",
]

_ERRORS: dict[int, type[VeloError]] = {
    lib.VELO_INVALID: ConfigError,
    lib.VELO_MODEL_ERROR: ModelError,
    lib.VELO_UNSUPPORTED: UnsupportedError,
    lib.VELO_OUT_OF_MEMORY: OutOfMemory,
    lib.VELO_CANCELLED: Cancelled,
    lib.VELO_FAILED: ComputeError,
}


class _Interrupt(threading.local):
    """KeyboardInterrupt in a log callback of this thread. C cannot pass it on, so the C call raises it."""

    error: BaseException | None = None

    def take(self) -> BaseException | None:
        error, self.error = self.error, None
        return error


interrupt = _Interrupt()

if lib.velo_abi_version() != lib.VELO_ABI_VERSION:
    raise LibraryError(
        f"libvelo has interface {lib.velo_abi_version()}, but pyvelo was built for {lib.VELO_ABI_VERSION}: "
        "install pyvelo again"
    )


def check(status: int) -> None:
    """Raise the error of a C call, or else the interrupt of a log callback during it."""
    if status:
        _raise(status)
    if interrupt.error is not None and (error := interrupt.take()):
        raise error


def created(status: int, out: CData, free: Callable[[CData], object]) -> CData:
    """Return the object `out[0]` that a C call has created, or raise its error.

    `free` frees it when it is dropped, also with an interrupt that is raised here.
    """
    handle = ffi.gc(out[0], free) if out[0] != ffi.NULL else ffi.NULL
    check(status)
    return handle


_H = TypeVar("_H", bound="Handle")


class Handle:
    """Owner of an object of C, which is freed when the last owner drops it."""

    _handle: CData | None = None

    @property
    def handle(self) -> CData:
        """The object; raises ClosedError after `close`."""
        handle = self._handle
        if handle is None:
            raise self._closed_error()
        return handle

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._handle is None

    def close(self) -> None:
        """Drop the object; a call in progress in another thread ends first. May be called again."""
        self._handle = None

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"the {type(self).__name__.lower()} was closed")

    def __enter__(self: _H) -> _H:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _raise(status: int) -> NoReturn:
    message = ffi.string(lib.velo_message()).decode("utf-8", "replace")
    raise _ERRORS.get(status, InternalError)(message) from interrupt.take()


def int32(name: str, value: int) -> int:
    """Return `value` as a C int.

    Raises:
        ConfigError: it does not fit.
    """
    number = operator.index(value)
    if not -(2**31) <= number < 2**31:
        raise ConfigError(f"{name} is {number}, which does not fit in 32 bits")
    return number


def ints(array: npt.NDArray[np.int32]) -> CData:
    """Return a contiguous array as C sees it, valid while the result exists."""
    return ffi.from_buffer("int32_t[]", array)


def read_bytes(call: Callable[[CData, int, CData], int], capacity: int = 256) -> bytes:
    """Return the bytes that `call(buffer, capacity, length)` writes, of any length."""
    length = ffi.new("size_t *")
    while True:
        buffer = ffi.new("char[]", capacity)
        status = call(buffer, capacity, length)
        if status != lib.VELO_BUFFER_TOO_SMALL:
            check(status)
            return bytes(ffi.buffer(buffer, length[0]))
        capacity = length[0]


_T = TypeVar("_T")


def from_c(kind: type[_T], struct: CData) -> _T:
    """Return a dataclass of `kind` from a C struct with fields of the same names.

    A field that may be None is None if C has -1.
    """
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]  # every caller passes a dataclass
        value = getattr(struct, field.name)
        if field.type == "str":
            value = ffi.string(value).decode("utf-8", "replace")
        elif field.type == "bool":
            value = bool(value)
        elif field.type == "int | None" and value == -1:
            value = None
        values[field.name] = value
    return kind(**values)
