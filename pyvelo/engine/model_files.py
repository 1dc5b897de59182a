"""The files that an engine's weights are mapped from, watched for becoming shorter.

A page of a mapped file that is no longer there cannot be read. So the files are looked at before every step:
what was cut since then is told of with its numbers. What is cut while a step runs is seen by the native side
(`native/api/mapped-files.hpp`), which ends that step with an error too; on Linux, as elsewhere nothing can.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from pyvelo.errors import ModelError

__all__ = ["ModelFiles"]


class ModelFiles:
    """Holds the files open, and with them what is mapped, even where another file takes their name.

    Raises ModelError where they cannot be opened, or are not of `n_bytes` together.
    """

    def __init__(self, paths: Sequence[str], n_bytes: int) -> None:
        self._files: list[tuple[str, int, int]] = []
        try:
            for path in paths:
                file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
                self._files.append((path, file, os.fstat(file).st_size))
        except OSError as error:
            self.close()
            raise ModelError(f"cannot read {error.filename}: {error.strerror}") from error
        if sum(size for _, _, size in self._files) != n_bytes:
            self.close()
            raise ModelError(f"{paths[0]} was changed while it was opened")

    def check(self) -> None:
        """Raises ModelError where a file has become shorter since."""
        for path, file, size in self._files:
            now = os.fstat(file).st_size
            if now < size:
                raise ModelError(f"{path} became shorter while it was in use: {now} bytes of {size} are left")

    def close(self) -> None:
        """Lets go of the files; may be called twice."""
        while self._files:
            os.close(self._files.pop()[1])
