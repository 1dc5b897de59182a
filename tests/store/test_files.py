"""FileStore: limits, expiry, one writer, damage, and processes that are killed."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pyvelo.errors import StoreError
from pyvelo.store.base import RecordName, StoreStats
from pyvelo.store.files import FileStore

OWNER = bytes(16)
Files = Callable[..., FileStore]


def name(number: int, owner: bytes = OWNER) -> RecordName:
    return RecordName(owner, number.to_bytes(32, "big"))


@pytest.fixture
def files() -> Iterator[Files]:
    """Return a function that opens stores, which the end of the test closes."""
    with ExitStack() as stack:

        def make(*given: Any, **settings: Any) -> FileStore:
            store = FileStore(*given, **settings)
            stack.callback(store.close)
            return store

        yield make


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("??/*"))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def test_the_least_recently_used_records_are_evicted(files: Files, tmp_path: Path) -> None:
    store = files(tmp_path, max_bytes=1000, clock=Clock())
    for number in range(10):
        store.save(name(number), bytes(100))
    store.touch([name(0), name(3)])
    store.save(name(10), bytes(300))
    there = [number for number in range(11) if store.lookup([name(number)])[0]]
    assert there == [0, 3, 5, 6, 7, 8, 9, 10]
    assert store.stats().n_bytes == 1000 == sum(path.stat().st_size for path in files_in(tmp_path))
    assert not store.save(name(11), bytes(1001)), "larger than all of it"
    assert not store.lookup([name(11)])[0]
    assert store.stats().n_records == 8
    store.save(name(10), bytes(100))  # replaced
    assert store.stats().n_bytes == 800


def test_an_earlier_record_stays_until_the_new_one_is_written(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reader = (files(tmp_path, max_bytes=1000) for _ in range(2))
    assert store.save(name(1), bytes(700), keep=True)
    assert store.save(name(2), bytes(200))
    seen: list[bytes | None] = []

    def full(*given: Any) -> None:
        seen.append(reader.load(name(1)))
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr("pyvelo.store.files.replace_file", full)
        with pytest.raises(OSError, match="no space"):
            store.save(name(1), bytes(950), keep=True)
    assert seen == [bytes(700)]
    assert store.load(name(1)) == bytes(700)
    assert store.save(name(1), bytes(950), keep=True), "the other one makes room"
    assert store.load(name(1)) == reader.load(name(1)) == bytes(950)
    assert store.stats() == StoreStats(1, 950)
    assert store.save(name(1), bytes(1000), keep=True)
    assert not store.lookup([name(2)])[0]
    assert [path.stat().st_size for path in files_in(tmp_path)] == [1000]


def test_a_size_that_a_killed_writer_did_not_note(files: Files, tmp_path: Path) -> None:
    store = files(tmp_path)
    store.save(name(1), bytes(100))
    store.close()
    (file,) = files_in(tmp_path)
    file.write_bytes(bytes(300))
    assert files(tmp_path).stats() == StoreStats(1, 300)


def test_the_limit_holds_after_any_operations(files: Files, tmp_path: Path) -> None:
    rng, clock = random.Random(3), Clock()
    store = files(tmp_path, max_bytes=2000, clock=clock)
    for _ in range(400):
        number = rng.randrange(30)
        kind = rng.randrange(6)
        if kind < 4:
            store.save(name(number), bytes(rng.randrange(1, 500)))
        elif kind == 4:
            store.delete(name(number))
        else:
            store.close()
            store = files(tmp_path, max_bytes=2000, clock=clock)
        n_bytes = sum(path.stat().st_size for path in files_in(tmp_path))
        assert store.stats().n_bytes == n_bytes <= 2000


def test_kept_records_are_evicted_last_and_do_not_expire(files: Files, tmp_path: Path) -> None:
    clock = Clock()
    store = files(tmp_path, max_bytes=1000, ttl=60, clock=clock)
    assert store.save(name(0), bytes(300), keep=True)
    for number in range(1, 20):
        assert store.save(name(number), bytes(100))
    assert store.lookup([name(0)])[0]
    clock.now += 100
    assert store.save(name(20), bytes(400))
    assert [number for number in range(21) if store.lookup([name(number)])[0]] == [0, 20]
    assert store.save(name(21), bytes(900))
    assert not store.lookup([name(0)])[0], "there was nothing else to evict"


def test_an_index_of_another_version_begins_anew(files: Files, tmp_path: Path) -> None:
    store = files(tmp_path)
    store.save(name(1), b"x")
    store.close()
    with sqlite3.connect(tmp_path / "pyvelo-kv.sqlite") as index:
        index.execute("PRAGMA user_version = 99")
    assert not files(tmp_path).lookup([name(1)])[0]


def test_records_expire_after_their_last_use(files: Files, tmp_path: Path) -> None:
    clock = Clock()
    store = files(tmp_path, ttl=60, clock=clock)
    store.save(name(0), b"a")
    store.save(name(1), b"b")
    clock.now += 50
    store.touch([name(1)])
    clock.now += 50
    assert store.lookup([name(0), name(1)]) == [False, True]
    assert store.load(name(0)) is None
    store.save(name(2), b"c")  # removes what has expired
    assert len(files_in(tmp_path)) == 2


def test_only_the_owner_may_read(files: Files, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    store = files(folder)
    store.save(name(1), b"secret")
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_one_process_writes_and_others_read(files: Files, tmp_path: Path) -> None:
    writer, reader = files(tmp_path), files(tmp_path)
    writer.save(name(1), b"one")
    reader.save(name(2), b"two")  # does nothing
    assert reader.load(name(1)) == b"one"
    assert reader.lookup([name(1), name(2)]) == [True, False]
    assert writer.lookup([name(2)]) == [False]
    writer.close()
    reader._asked = -1e9  # some seconds later
    reader.save(name(2), b"two")
    assert reader.load(name(2)) == b"two"


def test_a_file_that_is_gone_is_a_miss(files: Files, tmp_path: Path) -> None:
    store = files(tmp_path)
    store.save(name(1), b"one")
    files_in(tmp_path)[0].unlink()
    assert store.load(name(1)) is None
    assert store.lookup([name(1)]) == [False]


def test_what_a_killed_writer_left_is_removed(files: Files, tmp_path: Path) -> None:
    store = files(tmp_path)
    store.save(name(1), b"one")
    store.save(name(2), b"two")
    store.close()
    one = next(path for path in files_in(tmp_path) if path.read_bytes() == b"one")
    (tmp_path / "09").mkdir()
    (tmp_path / "09" / f"{'09' * 32}.kv").write_bytes(b"not indexed")
    others = [
        "go/main.go",
        "00/notes.kv",
        "db/thesis.txt",
        f"0a/{'09' * 32}.kv",
        "index.sqlite",
        "lock",
        "00/9",
    ]
    for other in others:
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_text("mine")
    one.with_suffix(".4711").write_bytes(b"half of a reco")
    one.unlink()
    store = files(tmp_path)
    assert store.lookup([name(1), name(2)]) == [False, True]
    assert [path.read_bytes() for path in tmp_path.glob("0[09]/*.*") if len(path.stem) == 64] == [b"two"]
    assert store.stats().n_bytes == 3
    assert [(tmp_path / other).read_text() for other in others] == ["mine"] * len(others)


@pytest.mark.parametrize("damage", [b"", b"no index at all" * 100])
def test_a_damaged_index_begins_anew(
    files: Files, tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = files(tmp_path)
    store.save(name(1), b"one")
    store.close()
    for path in tmp_path.glob("pyvelo-kv.sqlite-*"):
        path.unlink()
    (tmp_path / "pyvelo-kv.sqlite").write_bytes(damage)
    store = files(tmp_path)
    assert store.load(name(1)) is None
    assert files_in(tmp_path) == []
    store.save(name(1), b"again")
    assert store.load(name(1)) == b"again"
    assert ("begins anew" in caplog.text) == bool(damage)


def test_an_index_that_is_damaged_later_begins_anew(files: Files, tmp_path: Path) -> None:
    store = files(tmp_path)
    for number in range(400):
        store.save(name(number), b"x")
    store.close()
    index = tmp_path / "pyvelo-kv.sqlite"
    damaged = bytearray(index.read_bytes())
    damaged[5000:] = random.Random(1).randbytes(len(damaged) - 5000)
    index.write_bytes(damaged)
    store = files(tmp_path)
    for _ in range(2):
        try:
            store.save(name(500), b"again")
        except StoreError:
            continue
        break
    assert store.load(name(500)) == b"again"
    assert store.stats().n_records == 1


def test_a_folder_that_is_removed_is_made_again(files: Files, tmp_path: Path) -> None:
    store = files(tmp_path / "kv")
    store.save(name(1), b"one")
    shutil.rmtree(tmp_path / "kv")
    assert store.load(name(1)) is None
    store.save(name(2), b"two")
    assert store.load(name(2)) == b"two"
    assert not files(tmp_path / "kv").save(name(3), b"three"), "it has a writer"


def test_bytes_that_another_process_purged_are_free(files: Files, tmp_path: Path) -> None:
    writer, reader = files(tmp_path, max_bytes=1000), files(tmp_path)
    for number in range(10):
        writer.save(name(number), bytes(100))
    assert reader.purge(None) == 10
    for number in range(10, 19):
        writer.save(name(number), bytes(100))
    assert writer.stats().n_records == 9


def test_the_beginning_of_what_was_touched_is_evicted_last(files: Files, tmp_path: Path) -> None:
    store = files(tmp_path, max_bytes=1000)
    for number in range(8):
        store.save(name(number), bytes(100))
    store.touch([name(number) for number in range(8)])
    store.save(name(8), bytes(700))
    assert [number for number in range(8) if store.lookup([name(number)])[0]] == [0, 1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_process_that_is_forked_has_no_part_in_the_lock(files: Files, tmp_path: Path) -> None:
    store = files(tmp_path)
    pid = os.fork()
    if not pid:
        time.sleep(20)
        os._exit(0)
    try:
        store.save(name(1), b"one")
        assert not files(tmp_path).save(name(2), b"two"), "the parent still writes"
        store.close()
        assert files(tmp_path).save(name(2), b"two")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
def test_a_folder_that_may_only_be_read(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = files(tmp_path)
    store.save(name(1), b"one")
    store.close()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write to any folder
    reader = files(tmp_path)
    assert reader.load(name(1)) == b"one"
    assert not reader.save(name(2), b"two")
    reader.touch([name(1)])
    reader.delete(name(1))
    assert reader.lookup([name(1), name(2)]) == [True, False]
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has other permissions")
def test_a_folder_of_others_is_refused(files: Files, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(StoreError, match="other users may write"):
        files(tmp_path / "kv")


def test_a_full_disk_loses_only_what_was_being_written(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = files(tmp_path)
    store.save(name(1), b"one")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(name(2), b"two")
    monkeypatch.undo()
    assert store.lookup([name(1), name(2)]) == [True, False]
    assert len(files_in(tmp_path)) == 1
    store.save(name(2), b"two")
    assert store.load(name(2)) == b"two"


def test_a_folder_that_cannot_be_used(files: Files, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="file"):
        files(tmp_path / "file" / "kv")
    with pytest.raises(StoreError, match="is a file: give a folder"):
        files(tmp_path / "file")
    store = files(tmp_path / "kv")
    other = sqlite3.connect(tmp_path / "kv" / "pyvelo-kv.sqlite")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match="locked"):
        store.save(name(1), b"one")
    other.rollback()
    store.save(name(1), b"one")
    assert store.load(name(1)) == b"one"


WRITER = """
import random, sys
from pathlib import Path
from pyvelo.store.base import RecordName, StoreStats
from pyvelo.store.files import FileStore
store = FileStore(Path(sys.argv[1]), max_bytes=40_000)
rng = random.Random(int(sys.argv[2]))
print("ready", flush=True)
while True:
    number = rng.randrange(200)
    store.save(RecordName(bytes(16), number.to_bytes(32, "big")), number.to_bytes(2, "big") * 200)
    if rng.random() < 0.1:
        store.delete(RecordName(bytes(16), rng.randrange(200).to_bytes(32, "big")))
"""


def kill_writers(folder: Path, n: int) -> None:
    """Kill a writer again and again; check after each time that each record is whole or a miss."""
    rng = random.Random(n)
    for life in range(n):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), str(life)], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(rng.random() * 0.02)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        store = FileStore(folder, max_bytes=40_000)
        names = [name(number) for number in range(200)]
        found = store.lookup(names)
        for number, there in enumerate(found):
            record = store.load(names[number])
            assert record == (number.to_bytes(2, "big") * 200 if there else None)
        assert sum(found) == len(files_in(folder)) == store.stats().n_records
        assert (store.stats().n_bytes or 0) <= 40_000
        store.close()


def test_killed_writers(tmp_path: Path) -> None:
    kill_writers(tmp_path, 8)


@pytest.mark.slow
def test_writers_that_are_killed_a_thousand_times(tmp_path: Path) -> None:
    kill_writers(tmp_path, 1000)
