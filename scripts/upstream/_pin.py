"""The pinned source distribution of llama.cpp, and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts._common import ROOT, ScriptError

VENDOR = ROOT / "vendor"

# A requirement "name==version --hash=sha256:…"; pip allows the hash on a continued line.
_REQUIREMENT = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.!+_-]+)\s*\\?\s*"
    r"--hash=sha256:(?P<sha256>[0-9a-f]{64})\s*$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Pin:
    """Source distribution: name, version and sha256 (hexadecimal; empty if not known yet)."""

    name: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        """Line of a pip requirements file that names exactly this archive."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}"


def read_pin(vendor: Path = VENDOR) -> Pin:
    """Return the pin of vendor/upstream.txt.

    Raises: ScriptError if the file does not hold exactly one pinned requirement with a sha256.
    """
    path = vendor / "upstream.txt"
    found = list(_REQUIREMENT.finditer(path.read_text(encoding="utf-8")))
    if len(found) != 1:
        raise ScriptError(
            f"{path} must hold one line 'name==version --hash=sha256:…', and it holds {len(found)} of them"
        )
    return Pin(**found[0].groupdict())


def sha256_file(path: Path) -> str:
    """Return the sha256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def exclusive(lock: Path) -> Iterator[None]:
    """Hold a lock file during the block, so that a second process waits and then finds the work done."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a+b") as stream:
        # Without locks publish() is still atomic: the work is done twice at worst.
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                import msvcrt

                stream.seek(0)
                msvcrt.locking(stream.fileno(), msvcrt.LK_LOCK, 1)
            else:
                import fcntl

                fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def publish(target: Path, fill: Callable[[Path], None]) -> Path:
    """Fill a new folder and rename it to `target`, so that no process sees half of it.

    Replaces an existing folder. Returns `target`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        fresh = scratch / "fresh"
        fresh.mkdir()
        fill(fresh)
        if target.exists():
            target.rename(scratch / "stale")
        fresh.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
