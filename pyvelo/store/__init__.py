"""Store of KV blocks that outlives the process: records, their checks, a folder, and a server."""

from .base import BlockStore, RecordName, StoreStats
from .guard import GuardedStore
from .opening import open_store
from .record import SNAPSHOT, Address, BadRecord, Codec

__all__ = [
    "SNAPSHOT",
    "Address",
    "BadRecord",
    "BlockStore",
    "Codec",
    "GuardedStore",
    "RecordName",
    "StoreError",
    "StoreStats",
    "open_store",
]
