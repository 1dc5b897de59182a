"""Both stores do what a dictionary does."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyvelo.store.base import BlockStore, RecordName

MakeStore = Callable[[], BlockStore]

OWNERS = [bytes([n]) * 16 for n in range(3)]
NAMES = [RecordName(owner, bytes([n, owner[0]]) * 16) for owner in OWNERS for n in range(6)]


class _Operations:
    """A store beside a dictionary."""

    def __init__(self, make: MakeStore) -> None:
        self.make = make
        self.store = make()
        self.store.purge(None)
        self.expected: dict[RecordName, bytes] = {}

    def save(self, name: RecordName, record: bytes) -> None:
        assert self.store.save(name, record, keep=record[:1] > b"a")
        self.expected[name] = record

    def delete(self, name: RecordName, record: bytes) -> None:
        self.store.delete(name)
        self.expected.pop(name, None)

    def load(self, name: RecordName, record: bytes) -> None:
        assert self.store.load(name) == self.expected.get(name)

    def touch(self, name: RecordName, record: bytes) -> None:
        self.store.touch([name, NAMES[0]])

    def purge(self, name: RecordName, record: bytes) -> None:
        gone = [each for each in self.expected if each.owner == name.owner]
        assert self.store.purge(name.owner) == len(gone)
        for each in gone:
            del self.expected[each]

    def open_again(self, name: RecordName, record: bytes) -> None:
        self.store.close()
        self.store = self.make()

    def check(self) -> None:
        assert self.store.lookup(NAMES) == [name in self.expected for name in NAMES]
        assert self.store.stats().n_records == len(self.expected)


KINDS = ["save", "save", "save", "delete", "load", "touch", "purge", "open_again"]
STEP = st.tuples(st.sampled_from(KINDS), st.sampled_from(NAMES), st.binary(max_size=40))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, max_size=25))
def test_operations_in_any_order(make_store: MakeStore, steps: list[tuple[str, RecordName, bytes]]) -> None:
    both = _Operations(make_store)
    for kind, name, record in steps:
        getattr(both, kind)(name, record)
        both.check()
    for name in NAMES:
        both.load(name, b"")
    both.store.close()


def test_many_names_at_once(make_store: MakeStore) -> None:
    store = make_store()
    names = [RecordName(bytes(16), number.to_bytes(32, "little")) for number in range(1500)]
    for name in names[::3]:
        store.save(name, b"x")
    assert store.lookup(names) == [number % 3 == 0 for number in range(1500)]
    assert store.lookup([]) == []
    assert store.purge(None) == 500
    assert not any(store.lookup(names))
