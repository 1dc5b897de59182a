"""GuardedStore: a store that fails, hangs or lies is a miss, with one warning."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pyvelo.errors import StoreError
from pyvelo.store.base import RecordName, StoreStats
from pyvelo.store.files import FileStore
from pyvelo.store.guard import GuardedStore
from pyvelo.store.opening import open_store
from pyvelo.store.record import Address, Codec

from .conftest import redis_server
from .test_record import address


class Shaky:
    """A store in memory whose calls first do what `trouble` does."""

    def __init__(self) -> None:
        self.records: dict[RecordName, bytes] = {}
        self.trouble: Callable[[], object] = lambda: None
        self.n_calls = 0
        self.closed = threading.Event()

    def _begin(self) -> None:
        self.n_calls += 1
        self.trouble()

    def lookup(self, names: Sequence[RecordName]) -> list[bool]:
        self._begin()
        return [name in self.records for name in names]

    def load(self, name: RecordName) -> bytes | None:
        self._begin()
        return self.records.get(name)

    def save(self, name: RecordName, record: bytes, keep: bool = False) -> bool:
        self._begin()
        self.records[name] = record
        return True

    def delete(self, name: RecordName) -> None:
        self._begin()
        self.records.pop(name, None)

    def touch(self, names: Sequence[RecordName]) -> None:
        self._begin()

    def purge(self, owner: bytes | None) -> int:
        self._begin()
        return 7

    def stats(self) -> StoreStats:
        self._begin()
        return StoreStats(len(self.records), None)

    def close(self) -> None:
        self.closed.set()


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def shaky() -> Shaky:
    return Shaky()


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def guarded(shaky: Shaky, clock: Time) -> GuardedStore:
    return GuardedStore(lambda: shaky, "memory", Codec(), deadline=0.2, clock=clock)


ONE = address()
PAYLOAD = bytes(range(100))


def test_a_sound_store(guarded: GuardedStore, shaky: Shaky) -> None:
    assert guarded.load(ONE) is None
    guarded.save(ONE, PAYLOAD)
    assert guarded.lookup([ONE, address(part=1)]) == [True, False]
    assert guarded.load(ONE) == PAYLOAD
    assert guarded.stats() == StoreStats(1, None)
    assert guarded.purge() == 7
    assert (guarded.counts.n_loaded, guarded.counts.n_saved, guarded.counts.n_failures) == (1, 1, 0)
    guarded.close()
    assert shaky.closed.wait(5)


def fail() -> None:
    raise StoreError("it burns")


def burst() -> None:
    raise TypeError("unexpected keyword")


def deny() -> None:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("trouble", [fail, deny, burst])
def test_failures_are_misses_and_leave_the_store_alone_for_a_while(
    guarded: GuardedStore,
    shaky: Shaky,
    clock: Time,
    caplog: pytest.LogCaptureFixture,
    trouble: Callable[[], None],
) -> None:
    guarded.save(ONE, PAYLOAD)
    shaky.trouble = trouble
    pauses = []
    for _ in range(9):
        n_calls = shaky.n_calls
        assert guarded.load(ONE) is None
        assert shaky.n_calls == n_calls + 1
        assert guarded.is_away
        for _ in range(5):  # at once
            assert guarded.load(ONE) is None
            assert guarded.lookup([ONE]) == [False]
            guarded.save(ONE, PAYLOAD)
            guarded.touch([ONE])
        assert guarded.stats() == StoreStats(None, None)
        with pytest.raises(StoreError, match="is not written now: "):
            guarded.purge()
        assert guarded.is_full
        assert shaky.n_calls == n_calls + 2, "one read and one write"
        start = clock.now
        while guarded.is_away or guarded.is_full:
            clock.now += 0.5
        pauses.append(clock.now - start)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert len(caplog.records) == 1, "one warning while it fails"
    shaky.trouble = lambda: None
    assert guarded.load(ONE) == PAYLOAD
    shaky.trouble = trouble
    assert guarded.load(ONE) is None
    assert len(caplog.records) == 2, "one more, after it was sound"


def test_a_store_that_hangs_stalls_one_call(guarded: GuardedStore, shaky: Shaky, clock: Time) -> None:
    guarded.save(ONE, PAYLOAD)
    go_on = threading.Event()
    shaky.trouble = lambda: go_on.wait(20)
    start = time.monotonic()
    assert guarded.load(ONE) is None
    clock.now += 1000  # the pause is over, but the call hangs still
    for _ in range(100):
        assert guarded.lookup([ONE]) == [False]
    assert time.monotonic() - start < 2
    shaky.trouble = lambda: None
    go_on.set()
    for _ in range(200):
        clock.now += 1
        if not guarded.is_away:
            break
        time.sleep(0.01)
    assert guarded.load(ONE) == PAYLOAD


def test_a_caller_that_waits_for_less_is_no_failure_of_the_store(
    guarded: GuardedStore, shaky: Shaky, clock: Time, caplog: pytest.LogCaptureFixture
) -> None:
    guarded.save(ONE, PAYLOAD)
    go_on = threading.Event()
    shaky.trouble = lambda: go_on.wait(20)
    assert guarded.lookup([ONE], 0.01) == [False]
    n_calls = shaky.n_calls
    assert guarded.load(ONE, 0.01) is None  # at once: the lookup has not ended
    assert shaky.n_calls == n_calls
    assert guarded.is_away
    assert guarded.is_late
    assert not guarded.is_full
    go_on.set()
    for _ in range(500):
        if not guarded.is_away:
            break
        time.sleep(0.01)
    assert guarded.load(ONE, 5) == PAYLOAD
    assert not caplog.records
    go_on.clear()
    assert guarded.load(ONE, 0.01) is None
    clock.now += 0.3  # longer than the deadline of all calls
    assert guarded.is_away
    assert "not read for now" in caplog.text
    go_on.set()


def test_a_store_that_is_full_is_still_read(
    guarded: GuardedStore, shaky: Shaky, clock: Time, caplog: pytest.LogCaptureFixture
) -> None:
    guarded.save(ONE, PAYLOAD)
    shaky.save = lambda *_: fail()  # type: ignore[method-assign, assignment]
    for _ in range(5):
        assert not guarded.is_full
        guarded.save(address(part=1), PAYLOAD)
        assert guarded.is_full
        assert not guarded.is_away
        assert guarded.load(ONE) == PAYLOAD
        clock.now += 100
    assert [record.message for record in caplog.records] == [
        "the KV store memory is not written for now: it burns"
    ]


def test_a_store_that_lies_loses_the_record(guarded: GuardedStore, shaky: Shaky) -> None:
    guarded.save(ONE, PAYLOAD)
    other = address(parent=bytes(32))
    shaky.records[ONE.name] = Codec().pack(other, PAYLOAD)
    assert guarded.load(ONE) is None
    assert shaky.records == {}
    assert guarded.counts.n_bad == 1
    assert not guarded.is_away


def test_a_store_that_cannot_be_opened(clock: Time, caplog: pytest.LogCaptureFixture) -> None:
    guarded = GuardedStore(deny, "nowhere", Codec(), clock=clock)  # type: ignore[arg-type]
    assert guarded.load(ONE) is None
    assert "nowhere is not read for now" in caplog.text


def test_a_changed_file_is_a_miss_and_is_deleted(tmp_path: Path) -> None:
    guarded = open_store(str(tmp_path))
    guarded.save(ONE, PAYLOAD)
    (path,) = tmp_path.glob("??/*.kv")
    record = bytearray(path.read_bytes())
    record[-30] ^= 1
    path.write_bytes(record)
    assert guarded.load(ONE) is None
    assert not path.exists()
    assert guarded.lookup([ONE]) == [False]


def test_a_file_under_another_name_is_a_miss(tmp_path: Path) -> None:
    """Records that change places, within a folder and between two."""
    addresses: list[Address] = [address(), address(part=1), address(fingerprint=bytes(32))]
    folders = [tmp_path / "a", tmp_path / "b"]
    stores = [open_store(str(folder)) for folder in folders]
    for store in stores:
        for number, each in enumerate(addresses):
            store.save(each, bytes([number]) * 100)
    paths = [FileStore(folders[0])._path(each.name.key) for each in addresses]
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    assert [stores[0].load(each) for each in addresses] == [None] * 3
    assert stores[0].counts.n_bad == 3
    assert [stores[1].load(each) for each in addresses] == [bytes([number]) * 100 for number in range(3)]


def test_a_server_that_dies_and_returns(tmp_path: Path, redis: str) -> None:
    with redis_server(tmp_path) as (where, server):
        guarded = open_store(where)
        guarded.save(ONE, PAYLOAD)
        assert guarded.load(ONE) == PAYLOAD
        server.kill()
        server.wait()
        start = time.monotonic()
        for _ in range(50):
            assert guarded.load(ONE) is None
        assert time.monotonic() - start < 3
        assert guarded.is_away


def test_a_server_that_stops_answering(tmp_path: Path, redis: str) -> None:
    with redis_server(tmp_path) as (where, server):
        guarded = open_store(where)
        guarded.save(ONE, PAYLOAD)
        subprocess.run(["kill", "-STOP", str(server.pid)], check=True)
        start = time.monotonic()
        for _ in range(50):
            assert guarded.load(ONE) is None
        assert time.monotonic() - start < 3
        subprocess.run(["kill", "-CONT", str(server.pid)], check=True)


def test_a_server_without_memory_drops_what_is_saved(tmp_path: Path, redis: str) -> None:
    with redis_server(tmp_path, "--maxmemory", "1mb", "--maxmemory-policy", "noeviction") as (where, _):
        guarded = open_store(where)
        big = address(n_bytes=2 << 20)
        guarded.save(big, bytes(2 << 20))
        guarded.save(big, bytes(2 << 20))
        assert guarded.load(big) is None


def test_a_wrong_password_does_not_appear_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    guarded = open_store("valkey://anna:secret@127.0.0.1:1/0")
    assert guarded.load(ONE) is None
    assert "127.0.0.1:1" in caplog.text
    assert "secret" not in caplog.text
