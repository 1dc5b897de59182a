"""From the setting `kv_store` to a store."""

from __future__ import annotations

import os
from pathlib import Path

from pyvelo.errors import ConfigError
from pyvelo.store.base import BlockStore
from pyvelo.store.files import FileStore
from pyvelo.store.guard import GuardedStore
from pyvelo.store.record import Codec

__all__ = ["cache_folder", "default_folder", "open_store"]

SERVERS = ("valkey", "valkeys", "redis", "rediss", "unix")


def open_store(
    where: str, *, max_bytes: int | None = None, ttl: float | None = None, key: bytes | None = None
) -> GuardedStore:
    """Return the store at a folder or at the address of a Valkey or Redis server.

    Nothing is opened before the first call.

    Args:
        where: path of a folder, or valkey://HOST:PORT/DATABASE.
        max_bytes: of a folder; a server has its own limit.
        ttl: seconds after their last use when records expire; None: never.
        key: 32 bytes to encrypt the records with; None: they are not encrypted.

    Raises:
        ConfigError: the address is wrong, or a package is missing.
    """
    scheme, separator, _ = where.partition("://")
    codec = Codec(key)
    if not separator:
        folder = Path(where).expanduser()
        return GuardedStore(lambda: FileStore(folder, max_bytes=max_bytes, ttl=ttl), where, codec)
    if scheme not in SERVERS:
        raise ConfigError(f"kv_store={where!r}: give a folder, or valkey://HOST:PORT")
    from pyvelo.store.valkey import ValkeyStore

    server: BlockStore = ValkeyStore(where, ttl=ttl)  # connects at the first call
    return GuardedStore(lambda: server, _without_password(where), codec)


def _without_password(address: str) -> str:
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def cache_folder() -> Path:
    """Return this user's folder for what can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(base) if base else Path.home() / ".cache") / "pyvelo"


def default_folder() -> Path:
    """Return the folder of the store that chats use."""
    return cache_folder() / "kv"
