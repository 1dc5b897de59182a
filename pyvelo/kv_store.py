"""Settings of a KV store, and the name of its place without secrets."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pyvelo.errors import ConfigError, check_path, one_line, shown

__all__ = ["KVStore", "place_of", "place_shown"]

SERVERS = ("valkey", "valkeys", "redis", "rediss", "unix")
PLACES = "give a folder, or valkey://HOST:PORT/DATABASE"
LONGEST = 10 * 365 * 86400  # seconds


@dataclass(frozen=True)
class KVStore:
    """Store of KV blocks that outlives the process.

    where: a folder of this user's, or valkey://HOST:PORT/DATABASE (redis:// and unix:// too).
    max_bytes: of a folder; the least recently used blocks are deleted. None: no limit. A server has its own.
    ttl: seconds after their last use when blocks expire; None: never.
    min_blocks: blocks of a prompt and its answer from which they are saved, though nothing of them was a hit.
    key: 32 bytes to encrypt the blocks with AES-256-GCM; None: they are not encrypted.

    Raises:
        ConfigError: a setting is out of range.
    """

    where: str | os.PathLike[str]
    max_bytes: int | None = 10 << 30
    ttl: float | None = None
    min_blocks: int = 4
    key: bytes | None = None

    def __post_init__(self) -> None:
        place_of(self.where)
        _check_integer("max_bytes", self.max_bytes, "bytes, at least 1, or None for no limit")
        _check_integer("min_blocks", self.min_blocks, "blocks, at least 1")
        if self.min_blocks is None:
            raise ConfigError("min_blocks=None of kv_store: give a number")
        ttl = self.ttl
        if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, (int, float))):
            raise ConfigError(f"ttl={shown(ttl)} of kv_store: give seconds, or None")
        if ttl is not None and not 0 < ttl <= LONGEST:
            raise ConfigError(f"ttl={ttl} of kv_store: give seconds above 0, up to {LONGEST} (ten years)")
        if self.key is not None and (not isinstance(self.key, bytes) or len(self.key) != 32):
            raise ConfigError("the key of kv_store must be 32 bytes, or None")

    def __repr__(self) -> str:
        """Return the settings without passwords and key."""
        place = place_shown(os.fspath(self.where))
        key = "" if self.key is None else ", key=..."
        settings = f"max_bytes={self.max_bytes}, ttl={self.ttl}, min_blocks={self.min_blocks}{key}"
        return f"KVStore({place!r}, {settings})"


def place_of(where: Any) -> tuple[str, str]:
    """Return the scheme of a server and its address, or "" and the path of a folder.

    Raises:
        ConfigError: it is neither.
    """
    try:
        text = os.fspath(where) if not isinstance(where, str) else where
    except TypeError:
        text = b""
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(f"kv_store={shown(where)}: {PLACES}")
    if re.fullmatch(r"[\w.-]+:[0-9]+(/.*)?", text):
        raise ConfigError(f"kv_store={text!r}: give valkey://{text} for a server, or ./{text} for a folder")
    scheme = urlsplit(text).scheme if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", text) else ""
    if not scheme:
        return "", _folder(text)
    if "://" not in text or scheme not in SERVERS:
        raise ConfigError(f"kv_store={place_shown(text)!r}: {PLACES}")
    database = urlsplit(text).path.strip("/")
    if scheme != "unix" and database and not database.isdecimal():
        raise ConfigError(f"kv_store={place_shown(text)!r}: the database is a number, not {database!r}")
    return scheme, scheme + text[len(scheme) :]


def place_shown(text: str) -> str:
    """Return an address without user, password and options, for messages."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return one_line(text)
    return one_line(f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}")


def _folder(text: str) -> str:
    try:
        return str(Path(check_path(text)).expanduser())
    except RuntimeError as error:
        raise ConfigError(f"kv_store={text!r}: {error}") from error


def _check_integer(name: str, value: object, valid: str) -> None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return
    raise ConfigError(f"{name}={shown(value)} of kv_store: give {valid}")
