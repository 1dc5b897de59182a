"""Records: a block of KV, with all that it depends on in the header and a checksum at the end.

    magic, version, part, bytes of tokens and of payload
    fingerprint, hash of the parent block, digest of the salt and the adapter
    tokens of the block, int32
    payload, as the pool has it
    xxh3_128 of everything before

A loader knows the whole header of the record that it wants. It takes no payload whose header differs in any
byte: equal hashes alone prove no hit. An encrypted record shows nothing of its header: a mark, a nonce, the
payload by AES-256-GCM with the header as associated data, and the checksum.
"""

from __future__ import annotations

import hmac
import os
import struct
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

from pyvelo.errors import ConfigError
from pyvelo.kv.adopt import SNAPSHOT
from pyvelo.kv.extra import salt_of
from pyvelo.store.base import RecordName

__all__ = ["SNAPSHOT", "Address", "Addressed", "BadRecord", "Codec", "owner_of"]

MAGIC = b"PyVeloKV"
ENCRYPTED = b"PyVeloKE\x01"  # the last byte is the version
VERSION = 1
HEAD = struct.Struct("<8sIiIQ")
NONCE, TAG, CHECKSUM, OWNER, DIGEST = 12, 16, 16, 16, 32  # bytes


class BadRecord(ValueError):
    """A record that is damaged, or of something else."""


class Addressed(Protocol):
    """Place of a record, and what its payload is checked against; `n_bytes`: of the payload, None: any."""

    @property
    def name(self) -> RecordName: ...
    @property
    def n_bytes(self) -> int | None: ...
    @property
    def is_kept(self) -> bool: ...
    def head(self) -> bytes: ...


class Address(NamedTuple):
    """All that the payload of a record depends on, and its length in bytes.

    fingerprint: of the model and of every setting that changes K and V, 32 bytes.
    parent, block_hash: of the prefix without and with the block, 32 bytes each.
    extra: salt and adapter, as in `BlockHashes`.
    tokens: of the block, int32.
    part: group of layers, or SNAPSHOT for the recurrent state after the block.
    """

    fingerprint: bytes
    parent: bytes
    block_hash: bytes
    extra: bytes
    tokens: bytes
    part: int
    n_bytes: int

    @property
    def name(self) -> RecordName:
        """Where the record is stored."""
        key = sha256(b"".join((self.fingerprint, self.block_hash, struct.pack("<i", self.part))))
        return RecordName(owner_of(salt_of(self.extra)), key.digest())

    @property
    def is_kept(self) -> bool:
        """Whether others are evicted before it: a block can be computed again."""
        return False

    def head(self) -> bytes:
        """Return the header of the record."""
        return b"".join(
            (
                HEAD.pack(MAGIC, VERSION, self.part, len(self.tokens), self.n_bytes),
                self.fingerprint,
                self.parent,
                sha256(self.extra).digest(),
                self.tokens,
            )
        )


def owner_of(salt: bytes) -> bytes:
    """Return the 16 bytes of the owner of a salt: all of it, or what stands before its first colon."""
    return sha256(b"owner" + salt.partition(b":")[0]).digest()[:OWNER]


class Codec:
    """Writer and reader of records.

    Args:
        key: of AES-256-GCM, 32 bytes, which also hides the names of records; None: nothing is encrypted.

    Raises:
        ConfigError: a package is missing, or the key has another length.
    """

    def __init__(self, key: bytes | None = None) -> None:
        try:
            from xxhash import xxh3_128_digest
        except ModuleNotFoundError:
            raise ConfigError('kv_store needs the package xxhash: pip install "pyvelo[store]"') from None
        self._checksum = xxh3_128_digest
        self._cipher = None if key is None else _cipher(key)
        self._name_key = None if key is None else hmac.digest(key, b"names of records", "sha256")

    def name(self, address: Addressed) -> RecordName:
        """Return the name under which a record is stored: without the key, it tells nothing."""
        owner, key = address.name
        if self._name_key is None:
            return RecordName(owner, key)
        return RecordName(self.owner(owner), hmac.digest(self._name_key, key, "sha256"))

    def owner(self, owner: bytes) -> bytes:
        """Return the owner in the names under which records are stored."""
        if self._name_key is None:
            return owner
        return hmac.digest(self._name_key, b"owner" + owner, "sha256")[:OWNER]

    def pack(self, address: Addressed, payload: bytes) -> bytes:
        """Return the record of a payload."""
        if address.n_bytes not in (None, len(payload)):
            raise ValueError(f"the payload has {len(payload)} bytes, its address says {address.n_bytes}")
        head = address.head()
        if self._cipher is None:
            body = head + payload
        else:
            nonce = os.urandom(NONCE)
            body = ENCRYPTED + nonce + self._cipher.encrypt(nonce, payload, head)
        return body + self._checksum(body)

    def unpack(self, address: Addressed, record: bytes) -> bytes:
        """Return the payload of a record; raise BadRecord unless it is exactly the one of the address."""
        head = address.head()
        before = head if self._cipher is None else ENCRYPTED
        n_added = 0 if self._cipher is None else NONCE + TAG
        n_bytes = len(record) - len(before) - n_added - CHECKSUM
        if n_bytes < 0 or address.n_bytes not in (None, n_bytes):
            raise BadRecord(f"it has {len(record)} bytes")
        if not record.startswith(before):
            raise BadRecord("its header is of another block")
        if self._checksum(memoryview(record)[:-CHECKSUM]) != record[-CHECKSUM:]:
            raise BadRecord("its checksum is wrong")
        payload = record[len(before) : -CHECKSUM]
        if self._cipher is None:
            return payload
        try:
            opened: bytes = self._cipher.decrypt(payload[:NONCE], payload[NONCE:], head)
        except Exception as error:  # InvalidTag, of a package that need not be installed
            raise BadRecord("it was encrypted for another block, or changed") from error
        return opened


def _cipher(key: bytes) -> Any:
    if len(key) != DIGEST:
        raise ConfigError(f"the key of kv_store has {len(key)} bytes: give 32")
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError:
        raise ConfigError('a key of kv_store needs cryptography: pip install "pyvelo[store]"') from None
    return AESGCM(key)
