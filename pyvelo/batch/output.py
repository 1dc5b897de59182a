"""File of a batch's results: what it holds already, and the appending of whole lines."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import numpy as np

from pyvelo.batch.lines import Lines
from pyvelo.batch.rows import HEAD, Result, parse_result
from pyvelo.errors import ConfigError

__all__ = ["Held", "Numbers", "Output", "open_output", "read_results"]

CHUNK = 1 << 20
"""Bytes of a read."""
MAX_RESULT = 1 << 30
"""Longest line of a file of results, in bytes."""
MIN_RECENT = 1 << 16


class Numbers:
    """Map of 64-bit keys to numbers, which takes 16 bytes for each, and some MiB.

    The keys of a million different custom_ids are all different with a probability of 1 - 3e-8.
    """

    def __init__(self) -> None:
        self._recent: dict[int, int] = {}
        self._keys = np.empty(0, np.int64)  # sorted
        self._numbers = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._recent) + len(self._keys)

    def get(self, key: int) -> int | None:
        """Return the number of a key; None if there is none."""
        if (found := self._recent.get(key)) is not None or not len(self._keys):
            return found
        at = int(self._keys.searchsorted(key))
        return int(self._numbers[at]) if at < len(self._keys) and self._keys[at] == key else None

    def add(self, key: int, number: int) -> None:
        """Add a key that the map does not have."""
        self._recent[key] = number
        if len(self._recent) >= max(MIN_RECENT, len(self._keys) // 16):
            keys = np.concatenate([self._keys, np.fromiter(self._recent.keys(), np.int64)])
            numbers = np.concatenate([self._numbers, np.fromiter(self._recent.values(), np.int64)])
            order = keys.argsort(kind="stable")
            self._keys, self._numbers = keys[order], numbers[order]
            self._recent.clear()


@dataclass
class Held:
    """Results that a file holds.

    by_id: whether they failed, by the hash of the custom_id.
    by_line: the same for results without a custom_id, by the line of the input.
    end: bytes of the file's whole results.
    open_end: whether the last one of them lacks its line end.
    """

    by_id: Numbers = field(default_factory=Numbers)
    by_line: Numbers = field(default_factory=Numbers)
    end: int = 0
    open_end: bool = False

    def add(self, result: Result) -> None:
        """Add a result; of several with one custom_id the first counts."""
        key, held = (
            (hash(result.custom_id), self.by_id) if result.line is None else (result.line, self.by_line)
        )
        if held.get(key) is None:
            held.add(key, int(result.failed))

    def failed(self, custom_id: str | None, line: int) -> bool | None:
        """Return whether the result of a row failed; None if the file has no result of it."""
        found = self.by_line.get(line) if custom_id is None else self.by_id.get(hash(custom_id))
        return None if found is None else bool(found)


def read_results(file: FileIO, path: object) -> Held:
    """Return what a file holds. Its last line may be torn: the beginning of a result.

    Raises: ConfigError for a file that is no output of a batch.
    """
    held, lines, number = Held(), Lines(MAX_RESULT), 0
    while data := file.read(CHUNK):
        for line in lines.feed(data):
            number += 1
            held.end += 1 + len(line or b"")
            _add(held, line, path, number)
    for line in lines.end():
        if line is not None and parse_result(line) is not None:
            held.end += len(line)
            held.open_end = True
            _add(held, line, path, number + 1)
        elif line is None or not (line.startswith(HEAD) or HEAD.startswith(line)):
            raise _no_output(path, number + 1)
    return held


def _add(held: Held, line: bytes | None, path: object, number: int) -> None:
    result = None if line is None else parse_result(line)
    if result is None:
        raise _no_output(path, number)
    held.add(result)


def _no_output(path: object, number: int) -> ConfigError:
    return ConfigError(
        f"{path} exists, and its line {number} is no result of a batch: name another file for the results"
    )


class Output:
    """File to which results are appended.

    size: in bytes.
    unwanted: a new file without results is removed at the end, because the run did not reach its own.
    """

    def __init__(self, file: FileIO, size: int) -> None:
        self._file = file
        self.size = size
        self.unwanted = False

    def append(self, lines: bytes) -> None:
        """Write whole lines; after an error none of them is in the file, as far as that can be.

        Raises:
            OSError: they cannot be written, or the name belongs to another file or to none.
        """
        self.check_there()
        view = memoryview(lines)
        try:
            while view:
                view = view[self._file.write(view) or 0 :]
        except OSError as error:
            error.filename = self._file.name
            with suppress(OSError):
                self._file.truncate(self.size)
                self._file.seek(self.size)
            raise
        self.size += len(lines)

    def check_there(self) -> None:
        """Raise OSError if the file was deleted or replaced."""
        try:
            there = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._file.name))
        except FileNotFoundError:
            there = False
        if not there:
            raise FileNotFoundError(errno.ENOENT, "it was deleted or replaced: the run ends", self._file.name)


@contextmanager
def open_output(path: Path) -> Iterator[tuple[Output, Held]]:
    """Open a file for results, for this process alone; yield it, and the results that it holds.

    A torn last line is cut off. A new file without results is removed if the block raises.

    Raises:
        ConfigError: the file is no output of a batch, or another process writes to it.
        OSError: it cannot be opened.
    """
    with suppress(FileNotFoundError):
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # opening a folder has an error of its own
            raise ConfigError(f"{path} is no ordinary file: results go to one, from which a run is resumed")
    try:
        file, is_new = FileIO(path, "x+"), True
    except FileExistsError:
        file, is_new = FileIO(path, "r+"), False
    with file:
        _lock(file, path)
        held = read_results(file, path)
        file.truncate(held.end)
        file.seek(held.end)
        output = Output(file, held.end)
        if held.open_end:
            output.append(b"\n")
        try:
            yield output, held
        except BaseException:
            output.unwanted = True
            raise
        finally:
            if is_new and output.unwanted and not output.size:
                path.unlink()


def _lock(file: FileIO, path: Path) -> None:
    """Lock a file until it is closed; raise ConfigError if another process has locked it."""
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{path}: another run writes to it: wait for its end, or name another file"
        ) from None
    except OSError:
        return  # a file system without locks
