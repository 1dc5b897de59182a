"""Checks that the files of mapped weights have not changed.

Mapped memory changes with its file, and a page that the file lost cannot be read. So the files are checked
before every step, and an error names what changed. If a file is cut during a step, the native side
(`native/api/mapped-files.hpp`) ends that step with an error; this works on Linux only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from pyvelo.errors import ModelError
from pyvelo.finalizer import Finalizer

__all__ = ["ModelFiles"]


class _OpenFile:
    """Open file, which closes its descriptor when it is dropped."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        Finalizer(self, partial(os.close, self.descriptor))
        self.opened = os.fstat(self.descriptor)


class ModelFiles:
    """Open files of a model: the mapped content stays, even if another file takes a name.

    Raises:
        ModelError: a file cannot be opened, or the sum of their sizes is not `n_bytes`.
    """

    def __init__(self, paths: Sequence[str], n_bytes: int) -> None:
        self._files: list[_OpenFile] = []
        self.close = self._files.clear
        """Close the files, as dropping this object does; a C call, which may be made twice."""
        try:
            for path in paths:
                self._files.append(_OpenFile(path))
        except OSError as error:
            self.close()
            raise ModelError(f"cannot read {error.filename}: {error.strerror}") from error
        if sum(file.opened.st_size for file in self._files) != n_bytes:
            self.close()
            raise ModelError(f"{paths[0]} was changed while it was opened")

    def descriptors(self) -> list[int]:
        """Return a copy of each descriptor, which the caller closes."""
        found: list[int] = []
        try:
            for file in self._files:
                found.append(os.dup(file.descriptor))
        except OSError:
            for descriptor in found:
                os.close(descriptor)
            raise
        return found

    def check(self) -> None:
        """Raise ModelError if a file was cut or written since it was opened."""
        for file in self._files:
            now, size = os.fstat(file.descriptor), file.opened.st_size
            if now.st_size < size:
                raise ModelError(
                    f"{file.path} became shorter while it was in use: {now.st_size} bytes of {size} are left"
                )
            if now.st_size != size or now.st_mtime_ns != file.opened.st_mtime_ns:
                raise ModelError(
                    f"{file.path} was written to while it was in use ({now.st_size} bytes, once {size}): "
                    "open the model again"
                )

    def check_loaded(self) -> None:
        """Raise ModelError if a path names another file than it did, or the file was changed."""
        for file in self._files:
            try:
                same = os.path.samestat(os.stat(file.path), file.opened)
            except OSError:
                same = False
            if not same:
                raise ModelError(f"{file.path} was replaced while it was loaded: open the model again")
        self.check()
