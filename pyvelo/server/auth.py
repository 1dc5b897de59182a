"""API keys: the tenant that a key names, its limits, and the salt that keeps its prefixes apart."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pyvelo.errors import ConfigError, shown
from pyvelo.server.errors import HttpError

__all__ = ["ANYBODY", "Keys", "Tenant", "read_keys"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LIMITS = ("requests", "tokens", "priority")
_KEY = re.compile(r"[ -~]+")
"""Keys that the headers of all clients can have."""


@dataclass(eq=False)
class Tenant:
    """Owner of a key.

    name: in logs and metrics.
    digest: SHA-256 of the key.
    requests, tokens: most requests at once, and most prompt tokens in the queue; None: the server's limits.
    priority: of its requests, unless they ask for a lower one; lower values run first.
    n_requests: requests now.
    """

    name: str
    digest: bytes = field(default=b"", repr=False)
    requests: int | None = None
    tokens: int | None = None
    priority: int = 0
    n_requests: int = 0

    @property
    def has_key(self) -> bool:
        """Whether a key names it: `ANYBODY` has none."""
        return bool(self.digest)

    @property
    def owner(self) -> str:
        """What all salts of the key begin with, up to a colon."""
        return _hash(b"pyvelo owner", self.digest)[:32]

    def salt(self, asked: str) -> str:
        """Return the cache salt of a request: of the key, and of the salt in the body."""
        if not self.has_key:
            return asked
        given = asked.encode("utf-8", "surrogatepass")
        return f"{self.owner}:{_hash(b'pyvelo tenant', self.digest, given)}"


ANYBODY = Tenant("anybody")
"""Tenant of a server without keys."""


def _hash(*parts: bytes) -> str:
    """Return SHA-256 in hexadecimal of parts with their lengths, so that no choice of one equals another."""
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()


class Keys:
    """Tenants by the hashes of their keys; without tenants no key is needed."""

    def __init__(self, tenants: Sequence[Tenant] = ()) -> None:
        self._tenants = tuple(tenants)

    @property
    def needed(self) -> bool:
        return bool(self._tenants)

    def tenant(self, authorization: str, api_key: str = "") -> Tenant:
        """Return the tenant of a request; the time does not tell how much of a wrong key is right.

        Args:
            authorization: the header "Bearer KEY".
            api_key: the header x-api-key, as Anthropic's clients send it.

        Raises: HttpError 401.
        """
        if not self._tenants:
            return ANYBODY
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            key = api_key
        digest, found = _digest(key.strip()), None
        for tenant in self._tenants:
            if hmac.compare_digest(tenant.digest, digest):
                found = tenant
        if found is None:
            what = "this API key is unknown" if key.strip() else "an API key is needed"
            raise HttpError(
                401,
                f"{what}: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found


def read_keys(path: Path | None, given: Iterable[str] = ()) -> Keys:
    """Return the keys of a file and of an environment variable.

    A line of the file is `NAME KEY [requests=N] [tokens=N] [priority=N]`; KEY may be `sha256:` and the hash
    of the key in hexadecimal. Empty lines and lines with # at their start are ignored.

    Args:
        given: keys alone; their tenants are key-1, key-2, ...

    Raises: ConfigError with the line that is wrong, without its key.
    """
    keys = [key.strip() for key in given]
    tenants = [
        Tenant(f"key-{n}", _stored(key, f"key {n} of PYVELO_API_KEY", hashed=False))
        for n, key in enumerate(keys, 1)
        if key
    ]
    if len(keys) > 1 and not tenants:
        raise ConfigError("PYVELO_API_KEY has commas alone: give keys between them")
    if path is not None:
        tenants += [
            _tenant(line.split(), f"api_key_file={path}, line {number}")
            for number, line in enumerate(_lines(path), 1)
            if line.strip() and not line.lstrip().startswith("#")
        ]
        if not tenants:
            raise ConfigError(f"api_key_file={path} has no key: give lines of NAME KEY")
    names: dict[str, str] = {}
    for name, digest in ((tenant.name, tenant.digest.hex()) for tenant in tenants):
        if name in names.values():
            raise ConfigError(f"two API keys have the same name, {name!r}: each needs its own")
        if digest in names:
            raise ConfigError(f"{names[digest]!r} and {name!r} have the same API key: each needs its own")
        names[digest] = name
    return Keys(tenants)


def _lines(path: Path) -> list[str]:
    """Return the lines of a file of keys; editors of Windows begin it with a mark of its encoding."""
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        reason = error.strerror or str(error)
    except UnicodeDecodeError:
        reason = "no UTF-8 text"
    raise ConfigError(f"api_key_file={path} cannot be read ({reason}): give a file with lines of NAME KEY")


def _tenant(words: Sequence[str], where: str) -> Tenant:
    if len(words) < 2 or not _NAME.fullmatch(words[0]):
        raise ConfigError(
            f"{where}: give NAME KEY; a name has up to 64 letters, digits and the characters _ . -"
        )
    tenant, given = Tenant(words[0], _stored(words[1], where)), set()
    for number, word in enumerate(words[2:], 3):
        name, _, value = word.partition("=")
        if name not in _LIMITS or not re.fullmatch(r"-?[0-9]{1,9}", value):
            what = shown(word) if name in _LIMITS else f"word {number}"  # which may be a part of a key
            raise ConfigError(
                f"{where}: {what} is no limit: give requests=, tokens= or priority= and a number of up to 9 "
                f"digits"
            )
        if name in given:
            raise ConfigError(f"{where}: {name}= has two values: give one")
        given.add(name)
        if name != "priority" and int(value) < 1:
            raise ConfigError(f"{where}: {name} must be at least 1, got {value}")
        setattr(tenant, name, int(value))
    return tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _stored(word: str, where: str, hashed: bool = True) -> bytes:
    """Return the digest of a key; with `hashed`, a word with sha256: is the digest itself."""
    if not _KEY.fullmatch(word):
        raise ConfigError(f"{where}: clients can send printable ASCII characters only: give a key of these")
    if not (hashed and word.startswith("sha256:")):
        return _digest(word)
    if not re.fullmatch(r"[0-9a-fA-F]{64}", word[7:]):
        raise ConfigError(f"{where}: a hash is sha256: and 64 hexadecimal digits")
    return bytes.fromhex(word[7:])
