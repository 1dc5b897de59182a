"""Store in a Valkey or Redis server, for several machines. The server's limit and policy evict records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pyvelo.errors import ConfigError, StoreError
from pyvelo.kv_store import place_shown
from pyvelo.store.base import RecordName, StoreStats

__all__ = ["ValkeyStore"]

PREFIX = b"pyvelo:kv:"
TIMEOUT = 1.0  # seconds of a call
CONNECT = 0.25  # seconds
AT_ONCE = 1000  # keys of a scan


class ValkeyStore:
    """Records as strings `pyvelo:kv:OWNER:KEY` of a server.

    Args:
        url: valkey://, redis:// or unix:// with host, port, password and number of the database; valkeys://
            and rediss:// encrypt the connection.
        ttl: seconds after their last use when records expire; None: never.

    Raises:
        ConfigError: the package valkey is missing, or the address is wrong.
    """

    def __init__(self, url: str, *, ttl: float | None = None) -> None:
        try:
            import valkey
        except ModuleNotFoundError:
            raise ConfigError('this kv_store needs the package valkey: pip install "pyvelo[store]"') from None
        self._errors = valkey.ValkeyError
        self._ttl = None if ttl is None else max(1, round(ttl))
        try:
            self._client: Any = valkey.Valkey.from_url(
                url, socket_timeout=TIMEOUT, socket_connect_timeout=CONNECT
            )
            self._client.connection_pool.make_connection()  # checks the options of the address
        except (ValueError, TypeError) as error:
            raise ConfigError(f"kv_store={place_shown(url)!r}: {_without(url, str(error))}") from None

    def lookup(self, names: Sequence[RecordName]) -> list[bool]:
        with self._as_store_errors(), self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.exists(_key(name))
            return [bool(found) for found in pipeline.execute()]

    def load(self, name: RecordName) -> bytes | None:
        with self._as_store_errors():
            record: bytes | None = self._client.get(_key(name))
            return record

    def save(self, name: RecordName, record: bytes, keep: bool = False) -> bool:
        with self._as_store_errors():
            self._client.set(_key(name), record, ex=None if keep else self._ttl)
        return True

    def delete(self, name: RecordName) -> None:
        with self._as_store_errors():
            self._client.unlink(_key(name))

    def touch(self, names: Sequence[RecordName]) -> None:
        if self._ttl is None:
            return  # reading is use enough for the server's policy
        with self._as_store_errors(), self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.expire(_key(name), self._ttl)
            pipeline.execute()

    def purge(self, owner: bytes | None) -> int:
        pattern = PREFIX + (b"*" if owner is None else owner.hex().encode() + b":*")
        with self._as_store_errors():
            keys = list(self._client.scan_iter(match=pattern, count=AT_ONCE))
            for first in range(0, len(keys), AT_ONCE):
                self._client.unlink(*keys[first : first + AT_ONCE])
            return len(keys)

    def stats(self) -> StoreStats:
        """Return the size of the server's whole database."""
        with self._as_store_errors():
            return StoreStats(self._client.dbsize(), self._client.info("memory").get("used_memory"))

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def _as_store_errors(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise StoreError(str(error)) from error


def _without(url: str, message: str) -> str:
    """Return a message of the client, unless it may have a part of an address that has a secret."""
    return "the address or its options are wrong" if "@" in url or "?" in url else message


def _key(name: RecordName) -> bytes:
    return PREFIX + name.owner.hex().encode() + b":" + name.key.hex().encode()
