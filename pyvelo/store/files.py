"""Store in a folder: a file for each record, and an index in SQLite.

A record is written to a temporary file and renamed, then indexed. An earlier one of its name stays until
then. A process that dies between the two leaves a file that the next writer removes, or whose size it
corrects. It removes nothing that has not the name of a record. One process writes to a folder; others
read from it, and their `save` does nothing.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pyvelo.errors import StoreError
from pyvelo.private_files import FileLock, replace_file
from pyvelo.store.base import RecordName, StoreStats

__all__ = ["FileStore", "make_folder"]

_log = logging.getLogger("pyvelo")

VERSION = 1  # of the index
SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    key BLOB PRIMARY KEY, owner BLOB NOT NULL, bytes INTEGER NOT NULL, used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON records (used);
CREATE INDEX IF NOT EXISTS by_owner ON records (owner);
"""
AT_ONCE = 500  # keys of a statement: SQLite's oldest limit is 999
EVICTED = 64  # records that are looked at together
PATIENCE = 0.2  # seconds to wait for another process's lock of the index
ASK_AGAIN = 5.0  # seconds until a reader tries to become the writer again, and the bytes are counted again
TICK = 1e-6  # seconds between the uses of records that are touched together
INDEX, LOCK = "pyvelo-kv.sqlite", "pyvelo-kv.lock"
_FILE = re.compile(
    r"([0-9a-f]{64})\.(kv|[0-9]+)"
)  # of a record, and of one that is being written by a process


class FileStore:
    """Records in a folder that belongs to the user alone.

    Args:
        folder: is made, if it does not exist.
        max_bytes: of all records; the least recently used ones are evicted. None: no limit.
        ttl: seconds after their last use when records expire; None: never.
        clock: seconds since the epoch.

    Raises:
        StoreError, OSError: the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int | None = None,
        ttl: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self._max_bytes, self._ttl, self._clock = max_bytes, ttl, clock
        self._lock: FileLock | None = None
        self._index: sqlite3.Connection | None = None
        self._begin()

    # ---- of BlockStore ----

    def lookup(self, names: Sequence[RecordName]) -> list[bool]:
        found: set[bytes] = set()
        oldest = self._oldest()
        for first in range(0, len(names), AT_ONCE):
            keys = [name.key for name in names[first : first + AT_ONCE]]
            marks = ",".join("?" * len(keys))
            sql = f"SELECT key FROM records WHERE used >= ? AND key IN ({marks})"
            found.update(key for (key,) in self._rows(sql, oldest, *keys))
        return [name.key in found for name in names]

    def load(self, name: RecordName) -> bytes | None:
        if not self.lookup([name])[0]:
            return None
        try:
            return self._path(name.key).read_bytes()
        except FileNotFoundError:  # the writer or another program removed it
            self.delete(name)
            return None

    def save(self, name: RecordName, record: bytes, keep: bool = False) -> bool:
        if not self._may_write() or (self._max_bytes is not None and len(record) > self._max_bytes):
            return False
        more = len(record) - self._size(name.key)
        self._evict(more, name.key)
        path = self._path(name.key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, record, path.with_suffix(f".{os.getpid()}"))
        row = name.key, name.owner, len(record), math.inf if keep else self._clock()
        self._change("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)", [row])
        self._n_bytes += more
        return True

    def delete(self, name: RecordName) -> None:
        if not self._is_read_only:
            self._remove([(name.key,)])

    def touch(self, names: Sequence[RecordName]) -> None:
        now, sql = self._clock(), "UPDATE records SET used = max(used, ?) WHERE key = ?"
        if self._is_read_only:
            return
        self._change(sql, [(now - TICK * number, name.key) for number, name in enumerate(names)])

    def purge(self, owner: bytes | None) -> int:
        every, one = "SELECT key FROM records", "SELECT key FROM records WHERE owner = ?"
        keys = list(self._rows(every) if owner is None else self._rows(one, owner))
        self._remove(keys)
        return len(keys)

    def stats(self) -> StoreStats:
        ((n_records, n_bytes),) = self._rows("SELECT count(*), coalesce(sum(bytes), 0) FROM records")
        return StoreStats(n_records, n_bytes)

    def close(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _begin(self) -> None:
        """Open the folder, as its writer if it has none."""
        make_folder(self.folder)
        self._is_read_only = not os.access(self.folder, os.W_OK)
        self._n_bytes, self._counted, self._asked = 0, -1, -ASK_AGAIN
        self._may_write()

    # ---- the index ----

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Yield the index. One that is damaged or of another version is removed by the writer."""
        path = self.folder / INDEX
        try:
            if self._index is None:
                self._index = _connect(path, self._is_read_only)
            yield self._index
        except sqlite3.OperationalError as error:  # locked, or the folder is read-only
            raise StoreError(f"{path}: {error}") from error
        except sqlite3.Error as error:
            if self._lock is not None:
                _log.warning("the index of the KV store in %s begins anew: %s", self.folder, error)
                self._remove_index()
            raise StoreError(f"{path}: {error}") from error

    def _remove_index(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None
        for suffix in ("", "-wal", "-shm"):
            (self.folder / f"{INDEX}{suffix}").unlink(missing_ok=True)
        self._n_bytes = 0

    def _rows(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        with self._opened() as index:
            return index.execute(sql, values).fetchall()

    def _change(self, sql: str, rows: Sequence[tuple[object, ...]]) -> None:
        with self._opened() as index, index:
            index.executemany(sql, rows)

    def _oldest(self) -> float:
        """Return the time of use before which records have expired."""
        return 0.0 if self._ttl is None else self._clock() - self._ttl

    # ---- files ----

    def _path(self, key: bytes) -> Path:
        text = key.hex()
        return self.folder / text[:2] / f"{text}.kv"

    def _remove(self, keys: Sequence[tuple[bytes, ...]]) -> None:
        for key, *_ in keys:
            with suppress(FileNotFoundError):
                self._path(key).unlink()
        n_bytes = sum(self._size(key) for (key, *_) in keys)
        self._change("DELETE FROM records WHERE key = ?", [(key,) for (key, *_) in keys])
        self._n_bytes -= n_bytes

    def _size(self, key: bytes) -> int:
        """Return the bytes of a record, 0 if there is none."""
        return sum(int(size) for (size,) in self._rows("SELECT bytes FROM records WHERE key = ?", key))

    def _evict(self, n_bytes: int, kept: bytes) -> None:
        """Remove expired records but `kept`, and the least recently used ones until `n_bytes` more fit."""
        if self._ttl is not None:
            old = "SELECT key FROM records WHERE used < ? AND key != ?"
            self._remove(list(self._rows(old, self._oldest(), kept)))
        if self._max_bytes is None:
            return
        if self._n_bytes + n_bytes > self._max_bytes and self._version() != self._counted:
            self._count()  # another process has changed the index
        while self._n_bytes + n_bytes > self._max_bytes:
            by_use = "SELECT key, bytes FROM records WHERE key != ? ORDER BY used LIMIT ?"
            rows = list(self._rows(by_use, kept, EVICTED))
            if not rows:
                break
            freed, n = 0, 0
            while n < len(rows) and self._n_bytes + n_bytes - freed > self._max_bytes:
                freed, n = freed + int(rows[n][1]), n + 1
            self._remove(rows[:n])

    # ---- one writer ----

    def _may_write(self) -> bool:
        """Return whether this process is the folder's writer; become it if there is none."""
        if self._lock is not None and not (self.folder / INDEX).exists():  # removed
            self.close()
            self._begin()
        if self._is_read_only:
            return False
        if self._lock is None and time.monotonic() - self._asked >= ASK_AGAIN:
            self._asked = time.monotonic()
            self._lock = FileLock.take(self.folder / LOCK)
            if self._lock is not None:
                self._begin_to_write()
        return self._lock is not None

    def _begin_to_write(self) -> None:
        try:
            try:
                self._tidy()
            except StoreError:
                if self._index is not None:
                    raise
                self._tidy()  # the index was damaged, and begins anew
        except BaseException:
            self.close()
            raise

    def _tidy(self) -> None:
        """Remove what a writer that died has left, and count the bytes."""
        indexed = dict(self._rows("SELECT key, bytes FROM records"))
        there = dict[bytes, int]()
        for path in self.folder.glob("[0-9a-f][0-9a-f]/*"):
            match = _FILE.fullmatch(path.name)
            if match is None or match[1][:2] != path.parent.name:
                continue
            key = bytes.fromhex(match[1])
            if match[2] == "kv" and key in indexed:
                there[key] = path.stat().st_size
            else:
                with suppress(OSError):
                    path.unlink()
        self._change("DELETE FROM records WHERE key = ?", [(key,) for key in indexed.keys() - there])
        sizes = [(size, key) for key, size in there.items() if size != indexed[key]]
        self._change("UPDATE records SET bytes = ? WHERE key = ?", sizes)
        self._count()

    def _count(self) -> None:
        self._n_bytes, self._counted = self.stats().n_bytes or 0, self._version()

    def _version(self) -> int:
        """Return a number that changes when another process changes the index."""
        ((version,),) = self._rows("PRAGMA data_version")
        return int(version)


def is_store(folder: Path) -> bool:
    """Return whether a folder has been a store."""
    return (folder / INDEX).is_file()


def make_folder(folder: Path) -> None:
    """Make a folder for this user alone; raise StoreError for one that others may change."""
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file: give a folder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "geteuid"):
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise StoreError(f"other users may write to {folder}: give a folder of your own (mode 700)")


def _connect(path: Path, read_only: bool) -> sqlite3.Connection:
    if read_only:  # as if the file did not change: SQLite could not make its own files
        return sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True, check_same_thread=False)
    # every file that SQLite adds has the mode of this one
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    index = sqlite3.connect(path, timeout=PATIENCE, check_same_thread=False)
    try:
        index.execute("PRAGMA journal_mode = WAL")
        index.execute("PRAGMA synchronous = NORMAL")
        version = index.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError("it is of another version of PyVelo")
        if version != VERSION:
            index.execute(f"PRAGMA user_version = {VERSION}")
            index.executescript(SCHEMA)
    except BaseException:
        index.close()
        raise
    return index
