"""Files of one user: locks between processes, and files that are replaced as a whole."""

from __future__ import annotations

import errno
import os
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

__all__ = ["FileLock", "replace_file"]


def replace_file(path: Path, data: bytes, partial: Path) -> None:
    """Write a file that its owner alone may read, as a whole or not at all.

    partial: is written first, and then renamed; nothing of it stays after an error.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(partial, flags, 0o600), "wb", buffering=0) as file:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


class FileLock:
    """Lock of a file by this process. A process that is forked from it has no part in it."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        _locks.add(self)

    @classmethod
    def take(cls, path: Path) -> FileLock | None:
        """Lock a file; None: another process has it. Raise OSError if it cannot be opened or locked."""
        while True:
            file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")  # noqa: SIM115
            try:
                _lock(file)
            except OSError as error:
                file.close()
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                return None
            if sys.platform == "win32" or _is_at(file, path):
                return cls(path, file)
            file.close()  # it was removed meanwhile

    def release(self) -> None:
        """Let another process write. A child that has the file open, too, would keep the lock by that."""
        if sys.platform != "win32" and not self._file.closed:
            import fcntl

            fcntl.flock(self._file, fcntl.LOCK_UN)
        self.forget()

    def remove(self) -> None:
        """Remove the file and release the lock, if it was not released."""
        if self._file.closed:
            return
        if sys.platform == "win32":  # which removes no open file
            self.release()
        with suppress(OSError):
            self._path.unlink()
        self.release()

    def forget(self) -> None:
        """Close the file, in a process that does not have the lock."""
        self._file.close()


def _lock(file: IO[bytes]) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_locks() -> None:
    for lock in list(_locks):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
