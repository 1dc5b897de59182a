"""Locks of files between processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO

import pytest

from pyvelo import private_files
from pyvelo.private_files import FileLock


def test_one_has_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = FileLock.take(path)
    assert lock is not None
    assert FileLock.take(path) is None
    lock.release()
    again = FileLock.take(path)
    assert again is not None
    again.remove()
    assert not path.exists()
    last = FileLock.take(path)
    assert last is not None
    again.remove()
    assert path.exists()
    last.release()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows removes no open file")
def test_a_lock_of_a_removed_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lock = tmp_path / "lock", private_files._lock
    holder = FileLock.take(path)
    assert holder is not None

    def lock_later(file: IO[bytes]) -> None:
        holder.remove()  # between the open and the lock
        lock(file)

    monkeypatch.setattr(private_files, "_lock", lock_later)
    taken = FileLock.take(path)
    assert taken is not None
    monkeypatch.undo()
    assert path.exists()
    assert FileLock.take(path) is None, "both would have it"
    taken.release()
