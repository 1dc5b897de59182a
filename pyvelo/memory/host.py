"""How much memory is really free: of the machine, and within the limits that a container sets."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform == "linux":
    import resource

__all__ = ["free_memory"]


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that may be allocated without swapping or being killed; None where the system does not tell.

    The least of MemAvailable, what is left of the limit of address space (`ulimit -v`) and what is left under
    each memory cgroup (version 1 or 2) of this process, where page cache that can be dropped counts as free.
    `root` is where /proc and /sys are found.
    """
    limits = [*_available(root), *_address_space(root), *_cgroup_limits(root)]
    return max(0, min(limits)) if limits else None


def _available(root: Path) -> Iterator[int]:
    text = _read(root / "proc/meminfo")
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
            return
    if not text and hasattr(os, "sysconf"):
        yield from _half_of_physical()


def _address_space(root: Path) -> Iterator[int]:
    used = _read(root / "proc/self/statm").split()
    if sys.platform == "linux" and used:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            yield limit - int(used[0]) * resource.getpagesize()


def _half_of_physical() -> Iterator[int]:
    """Where free memory is not told (macOS), half of what there is."""
    try:
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError):
        return


def _cgroup_limits(root: Path) -> Iterator[int]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                yield from _walk(root / mount, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            yield from _walk(root / "sys/fs/cgroup/memory", path, *names)


def _walk(mount: Path, path: str, limit_name: str, usage_name: str, prefix: str) -> Iterator[int]:
    """What is left in the group at `path` and in each group above it, up to the mount itself.

    Inside a container the path may be the host's and absent below the mount; the mount then is the own group.
    """
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        group = mount.joinpath(*parts[:depth])
        limit, usage = _read(group / limit_name).strip(), _read(group / usage_name).strip()
        if limit.isdigit() and usage.isdigit():
            yield int(limit) - int(usage) + _droppable(group, prefix)


def _droppable(group: Path, prefix: str) -> int:
    names = {f"{prefix}inactive_file", f"{prefix}active_file"}
    fields = (line.split() for line in _read(group / "memory.stat").splitlines())
    return sum(int(field[1]) for field in fields if len(field) == 2 and field[0] in names)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
