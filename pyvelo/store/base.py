"""Interface of a store of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["BlockStore", "RecordName", "StoreStats", "StoreTotals"]


class RecordName(NamedTuple):
    """Name of a record: 16 bytes of its owner and 32 bytes of its own."""

    owner: bytes
    key: bytes


@dataclass(frozen=True)
class StoreStats:
    """Records and bytes in a store; None: unknown."""

    n_records: int | None
    n_bytes: int | None


class StoreTotals(NamedTuple):
    """Totals of a store since it was opened; `host_tokens`: of the loaded ones, from host memory."""

    loaded_tokens: int = 0
    host_tokens: int = 0
    saved_blocks: int = 0
    failures: int = 0


class BlockStore(Protocol):
    """Store of records, for one thread at a time. Every method may raise StoreError or OSError."""

    def lookup(self, names: Sequence[RecordName]) -> list[bool]:
        """Return for each record whether the store has it."""

    def load(self, name: RecordName) -> bytes | None:
        """Return a record; None: the store does not have it."""

    def save(self, name: RecordName, record: bytes, keep: bool = False) -> bool:
        """Save a record, whole or not at all, and return whether the store has it; it may evict others.

        keep: it does not expire, and others are evicted before it.
        """

    def delete(self, name: RecordName) -> None:
        """Delete a record, if the store has it."""

    def touch(self, names: Sequence[RecordName]) -> None:
        """Note that records were used: they are evicted later."""

    def purge(self, owner: bytes | None) -> int:
        """Delete the records of an owner, or all; return how many."""

    def stats(self) -> StoreStats:
        """Return the size of the store."""

    def close(self) -> None:
        """Close the store; may be called again."""
