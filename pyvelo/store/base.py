"""Interface of a store of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["BlockStore", "RecordName", "StoreError", "StoreStats"]


class StoreError(Exception):
    """A store that does not answer, or cannot do what it was asked for."""


class RecordName(NamedTuple):
    """Name of a record: 16 bytes of its tenant and 32 bytes of its own."""

    tenant: bytes
    key: bytes


@dataclass(frozen=True)
class StoreStats:
    """Records and bytes in a store; None: unknown."""

    n_records: int | None
    n_bytes: int | None


class BlockStore(Protocol):
    """Store of records, for one thread at a time. Every method may raise StoreError or OSError."""

    def lookup(self, names: Sequence[RecordName]) -> list[bool]:
        """Return for each record whether the store has it."""

    def load(self, name: RecordName) -> bytes | None:
        """Return a record; None: the store does not have it."""

    def save(self, name: RecordName, record: bytes) -> None:
        """Save a record, whole or not at all; it may evict others."""

    def delete(self, name: RecordName) -> None:
        """Delete a record, if the store has it."""

    def touch(self, names: Sequence[RecordName]) -> None:
        """Note that records were used: they are evicted later."""

    def purge(self, tenant: bytes | None) -> int:
        """Delete the records of a tenant, or all; return how many."""

    def stats(self) -> StoreStats:
        """Return the size of the store."""

    def close(self) -> None:
        """Close the store; may be called again."""
