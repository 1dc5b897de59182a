"""Host memory in front of a store: the payloads that were saved or loaded last."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from pyvelo.store.base import RecordName
from pyvelo.store.record import Addressed

__all__ = ["HostTier"]


class _Payload(NamedTuple):
    owner: bytes
    head: bytes
    data: bytes


class HostTier:
    """Payloads in memory, the least recently used ones evicted. Thread-safe. No room before `limit`."""

    def __init__(self) -> None:
        self._max_bytes = 0
        self._n_bytes = 0
        self._payloads: OrderedDict[bytes, _Payload] = OrderedDict()
        self._n_purges: Counter[bytes | None] = Counter()  # by their owner; None: of all
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._payloads)

    @property
    def n_bytes(self) -> int:
        """Bytes of all payloads."""
        return self._n_bytes

    def has(self, name: RecordName, address: Addressed) -> bool:
        """Return whether it has the payload of a record with exactly the header of an address."""
        found = self._payloads.get(name.key)
        return found is not None and found.head == address.head()

    def get(self, name: RecordName, address: Addressed) -> bytes | None:
        """Return the payload of a record as `has` finds it; it is then the last one used."""
        with self._lock:
            if not self.has(name, address):
                return None
            self._payloads.move_to_end(name.key)
            return self._payloads[name.key].data

    def n_purges(self, name: RecordName) -> int:
        """Return how often a record of this owner was purged."""
        return self._n_purges[None] + self._n_purges[name.owner]

    def put(self, name: RecordName, address: Addressed, data: bytes, n_purges: int) -> None:
        """Take the payload of a record, unless it is larger than all of the memory.

        n_purges: when the payload was found; after another purge it is not taken.
        """
        with self._lock:
            self._discard(name.key)
            if len(data) > self._max_bytes or n_purges != self.n_purges(name):
                return
            self._payloads[name.key] = _Payload(name.owner, address.head(), data)
            self._n_bytes += len(data)
            self._evict()

    def limit(self, max_bytes: int) -> None:
        """Set the most bytes of all payloads."""
        with self._lock:
            self._max_bytes = max_bytes
            self._evict()

    def touch(self, names: Iterable[RecordName]) -> None:
        """Note that records were used, the first ones last."""
        with self._lock:
            for name in reversed(list(names)):
                if name.key in self._payloads:
                    self._payloads.move_to_end(name.key)

    def discard(self, name: RecordName) -> None:
        """Drop the payload of a record."""
        with self._lock:
            self._discard(name.key)

    def purge(self, owner: bytes | None) -> None:
        """Drop the payloads of an owner, or all."""
        with self._lock:
            self._n_purges[owner] += 1
            for key in [key for key, each in self._payloads.items() if owner in (None, each.owner)]:
                self._discard(key)

    def _evict(self) -> None:
        while self._n_bytes > self._max_bytes:
            self._discard(next(iter(self._payloads)))

    def _discard(self, key: bytes) -> None:
        if (found := self._payloads.pop(key, None)) is not None:
            self._n_bytes -= len(found.data)
