"""Records: a block of KV, with all that it depends on in the header and a checksum at the end.

    magic, version, part, bytes of tokens and of payload, flags
    fingerprint, hash of the parent block, digest of the salt and the adapter
    tokens of the block, int32
    payload, as the pool has it; encrypted: nonce, then AES-256-GCM with all of the above as associated data
    xxh3_128 of everything before

A loader knows the whole header of the record that it wants. It takes no payload whose header differs in any
byte: equal hashes alone prove no hit.
"""

from __future__ import annotations

import os
import struct
from hashlib import sha256
from typing import Any, NamedTuple

from pyvelo.errors import ConfigError
from pyvelo.store.base import RecordName

__all__ = ["SNAPSHOT", "Address", "BadRecord", "Codec"]

MAGIC = b"PyVeloKV"
VERSION = 1
HEAD = struct.Struct("<8sIiIQI")
ENCRYPTED = 1
NONCE, TAG, CHECKSUM, DIGEST = 12, 16, 16, 32  # bytes

SNAPSHOT = -1
"""Part of a record that holds a recurrent state."""


class BadRecord(ValueError):
    """A record that is damaged, or of something else."""


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
        return RecordName(tenant_of(self.extra), key.digest())


def tenant_of(extra: bytes) -> bytes:
    """Return the 16 bytes that stand for a salt and an adapter in the names of records."""
    return sha256(b"tenant" + extra).digest()[:16]


class Codec:
    """Writer and reader of records.

    Args:
        key: of AES-256-GCM, 32 bytes; None: records are not encrypted.

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

    def pack(self, address: Address, payload: bytes) -> bytes:
        """Return the record of a payload."""
        if len(payload) != address.n_bytes:
            raise ValueError(f"the payload has {len(payload)} bytes, its address says {address.n_bytes}")
        head = self._head(address)
        if self._cipher is not None:
            nonce = os.urandom(NONCE)
            payload = nonce + self._cipher.encrypt(nonce, payload, head)
        body = head + payload
        return body + self._checksum(body)

    def unpack(self, address: Address, record: bytes) -> bytes:
        """Return the payload of a record; raise BadRecord unless it is exactly the one of the address."""
        head = self._head(address)
        extra = NONCE + TAG if self._cipher is not None else 0
        if len(record) != len(head) + extra + address.n_bytes + CHECKSUM:
            raise BadRecord(f"it has {len(record)} bytes")
        if record[: len(head)] != head:
            raise BadRecord("its header is of another block")
        if self._checksum(memoryview(record)[:-CHECKSUM]) != record[-CHECKSUM:]:
            raise BadRecord("its checksum is wrong")
        payload = record[len(head) : -CHECKSUM]
        if self._cipher is None:
            return payload
        try:
            opened: bytes = self._cipher.decrypt(payload[:NONCE], payload[NONCE:], head)
        except Exception as error:  # InvalidTag, of a package that need not be installed
            raise BadRecord("it was encrypted with another key, or changed") from error
        return opened

    def _head(self, address: Address) -> bytes:
        flags = ENCRYPTED if self._cipher is not None else 0
        sizes = len(address.tokens), address.n_bytes, flags
        return b"".join(
            (
                HEAD.pack(MAGIC, VERSION, address.part, *sizes),
                address.fingerprint,
                address.parent,
                sha256(address.extra).digest(),
                address.tokens,
            )
        )


def _cipher(key: bytes) -> Any:
    if len(key) != DIGEST:
        raise ConfigError(f"the key of kv_store has {len(key)} bytes: give 32")
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ModuleNotFoundError:
        raise ConfigError('a key of kv_store needs cryptography: pip install "pyvelo[store]"') from None
    return AESGCM(key)
