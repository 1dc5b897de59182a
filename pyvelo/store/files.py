"""Store in a folder: a file for each record, and an index in SQLite.

A record is written to a temporary file and renamed, then indexed. A process that dies between the two leaves
a file that the next writer removes. One process writes to a folder at a time; others read from it, and their
`save` does nothing.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pyvelo.store.base import RecordName, StoreError, StoreStats

__all__ = ["FileStore"]

_log = logging.getLogger("pyvelo")

SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    key BLOB PRIMARY KEY, tenant BLOB NOT NULL, bytes INTEGER NOT NULL, used REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON records (used);
CREATE INDEX IF NOT EXISTS by_tenant ON records (tenant);
"""
AT_ONCE = 500  # keys of a statement: SQLite's oldest limit is 999
EVICTED = 64  # records that are looked at together
PATIENCE = 0.2  # seconds to wait for another process's lock of the index
ASK_AGAIN = 5.0  # seconds until a reader tries to become the writer again
SUFFIX = ".kv"


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
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock: IO[bytes] | None = None
        self._asked = -ASK_AGAIN
        self._n_bytes = 0
        self._index = self._open_index()
        self._may_write()

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
        except FileNotFoundError:
            self.delete(name)  # from the index
            return None

    def save(self, name: RecordName, record: bytes) -> None:
        if not self._may_write() or (self._max_bytes is not None and len(record) > self._max_bytes):
            return
        self.delete(name)
        self._evict(len(record))
        path = self._path(name.key)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self._write(path, record)
        row = name.key, name.tenant, len(record), self._clock()
        self._change("INSERT INTO records VALUES (?, ?, ?, ?)", [row])
        self._n_bytes += len(record)

    def delete(self, name: RecordName) -> None:
        self._remove([(name.key,)])

    def touch(self, names: Sequence[RecordName]) -> None:
        now = self._clock()
        self._change("UPDATE records SET used = ? WHERE key = ?", [(now, name.key) for name in names])

    def purge(self, tenant: bytes | None) -> int:
        every, one = "SELECT key FROM records", "SELECT key FROM records WHERE tenant = ?"
        keys = list(self._rows(every) if tenant is None else self._rows(one, tenant))
        self._remove(keys)
        return len(keys)

    def stats(self) -> StoreStats:
        ((n_records, n_bytes),) = self._rows("SELECT count(*), coalesce(sum(bytes), 0) FROM records")
        return StoreStats(n_records, n_bytes)

    def close(self) -> None:
        self._index.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # ---- the index ----

    def _open_index(self) -> sqlite3.Connection:
        """Open the index; one that is damaged is removed, and with it what it named."""
        path = self.folder / "index.sqlite"
        try:
            return _connect(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # locked, or the folder is read-only
                raise StoreError(f"{path}: {error}") from error
            _log.warning("the index of the KV store in %s is damaged and begins anew: %s", self.folder, error)
            for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
                (self.folder / name).unlink(missing_ok=True)
            return _connect(path)

    def _rows(self, sql: str, *values: object) -> Iterator[tuple[Any, ...]]:
        with _as_store_errors():
            yield from self._index.execute(sql, values).fetchall()

    def _change(self, sql: str, rows: Sequence[tuple[object, ...]]) -> None:
        with _as_store_errors(), self._index:
            self._index.executemany(sql, rows)

    def _oldest(self) -> float:
        """Return the time of use before which records have expired."""
        return 0.0 if self._ttl is None else self._clock() - self._ttl

    # ---- files ----

    def _path(self, key: bytes) -> Path:
        text = key.hex()
        return self.folder / text[:2] / (text + SUFFIX)

    def _write(self, path: Path, record: bytes) -> None:
        partial = path.with_suffix(f".{os.getpid()}")
        try:
            descriptor = os.open(
                partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o600
            )
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                rest = memoryview(record)
                while rest:
                    rest = rest[file.write(rest) :]
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise

    def _remove(self, keys: Sequence[tuple[bytes, ...]]) -> None:
        for key, *_ in keys:
            with suppress(FileNotFoundError):
                self._path(key).unlink()
        sizes = [
            size
            for (key, *_) in keys
            for (size,) in self._rows("SELECT bytes FROM records WHERE key = ?", key)
        ]
        self._change("DELETE FROM records WHERE key = ?", [(key,) for (key, *_) in keys])
        self._n_bytes -= sum(map(int, sizes))

    def _evict(self, n_bytes: int) -> None:
        """Remove expired records, and the least recently used ones until `n_bytes` more fit."""
        if self._ttl is not None:
            self._remove(list(self._rows("SELECT key FROM records WHERE used < ?", self._oldest())))
        while self._max_bytes is not None and self._n_bytes + n_bytes > self._max_bytes:
            rows = list(self._rows("SELECT key, bytes FROM records ORDER BY used LIMIT ?", EVICTED))
            if not rows:
                break
            freed, n = 0, 0
            while n < len(rows) and self._n_bytes + n_bytes - freed > self._max_bytes:
                freed, n = freed + int(rows[n][1]), n + 1
            self._remove(rows[:n])

    # ---- one writer ----

    def _may_write(self) -> bool:
        """Return whether this process is the folder's writer; become it if there is none."""
        if self._lock is None and time.monotonic() - self._asked >= ASK_AGAIN:
            self._asked = time.monotonic()
            self._lock = _lock(self.folder / "lock")
            if self._lock is not None:
                self._tidy()
        return self._lock is not None

    def _tidy(self) -> None:
        """Remove what a writer that died has left, and count the bytes."""
        indexed = {key for (key,) in self._rows("SELECT key FROM records")}
        there = set()
        for path in self.folder.glob("??/*"):
            key = _key_of(path)
            if key in indexed:
                there.add(key)
            else:
                with suppress(OSError):
                    path.unlink()
        self._change("DELETE FROM records WHERE key = ?", [(key,) for key in indexed - there])
        self._n_bytes = self.stats().n_bytes or 0


def _connect(path: Path) -> sqlite3.Connection:
    # every file that SQLite adds has the mode of this one
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    index = sqlite3.connect(path, timeout=PATIENCE, check_same_thread=False)
    try:
        index.execute("PRAGMA journal_mode = WAL")
        index.execute("PRAGMA synchronous = NORMAL")
        index.executescript(SCHEMA)
    except BaseException:
        index.close()
        raise
    return index


@contextmanager
def _as_store_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(f"the index: {error}") from error


def _key_of(path: Path) -> bytes | None:
    """Return the key of a record's file; None: it is something else."""
    try:
        return bytes.fromhex(path.stem) if path.suffix == SUFFIX else None
    except ValueError:
        return None


def _lock(path: Path) -> IO[bytes] | None:
    """Lock a file for this process until it is closed; None: another process has it."""
    file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b")  # noqa: SIM115
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
