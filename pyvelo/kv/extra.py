"""`extra` of block hashes: the key of the adapter that computes the blocks, then the salt in UTF-8."""

from __future__ import annotations

import struct

__all__ = ["adapter_key", "salt_of"]

_MARK = b"\xff"  # begins no salt: no UTF-8 text has this byte
_SCALE = struct.Struct("<f")
_N_BYTES = len(_MARK) + 32 + _SCALE.size  # of a key


def adapter_key(digest: bytes, scale: float) -> bytes:
    """Return the bytes that stand for an adapter.

    digest: SHA-256 of its file; scale: factor of its product.
    """
    return _MARK + digest + _SCALE.pack(scale)


def salt_of(extra: bytes) -> bytes:
    """Return the bytes of the salt in `extra`."""
    return extra[_N_BYTES:] if extra.startswith(_MARK) else extra
