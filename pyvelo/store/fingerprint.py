"""Fingerprints: what K and V depend on besides the tokens, as 32 bytes."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyvelo.private_files import replace_file

__all__ = ["file_digest", "fingerprint", "known_digest"]

PIECE = 1 << 22  # bytes that are hashed at once
MOST_REMEMBERED = 200  # files


def fingerprint(settings: Mapping[str, Any]) -> bytes:
    """Return the SHA-256 of settings that JSON can express, and of the machine's byte order."""
    text = json.dumps({"byte order": sys.byteorder, **settings}, sort_keys=True)
    return hashlib.sha256(text.encode()).digest()


def known_digest(descriptors: Sequence[int], memory: Path) -> str | None:
    """Return what the file `memory` of `file_digest` remembers of open files; None: nothing."""
    return _read(memory).get(_key(descriptors))


def file_digest(descriptors: Sequence[int], memory: Path) -> str:
    """Return the SHA-256 of the contents of open files, one after the other.

    A file `memory` remembers it for `known_digest`, by the places, sizes and times of the files.

    Raises:
        OSError: a file cannot be read.
    """
    found = [os.fstat(descriptor) for descriptor in descriptors]
    key = _key(descriptors)
    digest = hashlib.sha256()
    for descriptor, status in zip(descriptors, found, strict=True):
        with open(os.dup(descriptor), "rb") as file:
            file.seek(0)
            while piece := file.read(PIECE):
                digest.update(piece)
        now = os.fstat(descriptor)
        if (now.st_size, now.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
            raise OSError("the model's file was changed while it was read")
    if _key(descriptors) == key:
        known = {**_read(memory), key: digest.hexdigest()}
        _write(memory, dict(list(known.items())[-MOST_REMEMBERED:]))
    return digest.hexdigest()


def _key(descriptors: Sequence[int]) -> str:
    """Return what tells open files apart, as far as the system knows."""
    found = [os.fstat(descriptor) for descriptor in descriptors]
    return json.dumps([[s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for s in found])


def _read(memory: Path) -> dict[str, str]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(k): str(v) for k, v in known.items()} if isinstance(known, dict) else {}


def _write(memory: Path, known: Mapping[str, str]) -> None:
    """Replace the file; two processes may do so, and one of the two digests may be lost."""
    with suppress(OSError):
        memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = json.dumps(known).encode()
        replace_file(memory, data, memory.with_suffix(f".{os.getpid()}"))
