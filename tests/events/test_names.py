"""Names of adapters in events."""

from __future__ import annotations

from typing import Any

from pyvelo.events.names import Names
from pyvelo.kv.extra import adapter_key


class Adapter:
    def __init__(self, digest: bytes) -> None:
        self.key = adapter_key(digest * 32, 1.0)


def test_what_the_extra_of_hashes_contains() -> None:
    poet, clerk = Adapter(b"p"), Adapter(b"c")
    names = Names({"poet": (None, poet)})
    assert names.split(b"") == (None, b"")
    assert names.split(b"salt") == (None, b"salt")
    assert names.split(poet.key) == ("poet", b"")
    assert names.split(poet.key + b"salt") == ("poet", b"salt")
    assert names.split(clerk.key) is None
    assert names.split(clerk.key + b"salt") is None


def test_an_adapter_with_another_name_is_absent_once() -> None:
    poet, clerk = Adapter(b"p"), Adapter(b"c")
    adapters: dict[str, tuple[Any, Any]] = {"a": (None, poet), "b": (None, poet)}
    names = Names(adapters)
    assert not names.update()
    assert names.split(poet.key) == ("a", b"")
    adapters["a"] = None, clerk
    assert names.update()
    assert names.split(poet.key) is None
    assert names.split(clerk.key) == ("a", b"")
    assert names.update()
    assert names.split(poet.key) == ("b", b"")
    adapters.clear()
    assert names.update()
    assert not names.update()
    assert (names.split(poet.key), names.split(clerk.key)) == (None, None)
