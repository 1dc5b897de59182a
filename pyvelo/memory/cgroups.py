"""Control groups of this process, in which a container limits memory and CPU time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["groups", "read"]

V2_MOUNTS = ("sys/fs/cgroup", "sys/fs/cgroup/unified")


def groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield version (1 or 2) and folder of each group that limits this process, the innermost first.

    In a container the path of /proc/self/cgroup may be the host's, and absent below the mount. The mount is
    the process's own group then, so it is always yielded.
    """
    for line in read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for mount in V2_MOUNTS:
                yield from ((2, group) for group in _upwards(root / mount, path))
        elif controller in controllers.split(","):
            for name in dict.fromkeys((controller, controllers)):
                yield from ((1, group) for group in _upwards(root / "sys/fs/cgroup" / name, path))


def read(path: Path) -> str:
    """Return a file's text; "" if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:depth])
