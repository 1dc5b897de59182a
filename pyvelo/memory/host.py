"""Free memory of the machine, within the limits of the process and its container."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

from pyvelo.memory.cgroups import groups, read
from pyvelo.native import devices, reserved_memory

if sys.platform == "linux":
    import resource

__all__ = ["free_memory"]


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that can be allocated without swapping or being killed; None if unknown.

    On Linux, this is the minimum of MemAvailable, the rest of the limit of address space (`ulimit -v`) and
    the rest of each memory cgroup (version 1 or 2) of this process. Page cache that can be dropped counts as
    free. `root` is the folder of /proc and /sys. Other systems are asked for what they count as free.
    """
    limits = [*_available(root), *_address_space(root), *_cgroup_limits(root)]
    return max(0, min(limits)) if limits else None


def _available(root: Path) -> Iterator[int]:
    text = read(root / "proc/meminfo")
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
            return
    if not text:  # not Linux
        for device in devices():
            if device.kind == "cpu" and device.memory_free:  # without what models have reserved
                yield device.memory_free + reserved_memory()


def _address_space(root: Path) -> Iterator[int]:
    used = read(root / "proc/self/statm").split()
    limit = _address_space_limit()
    if used and limit is not None:
        yield limit - int(used[0]) * mmap.PAGESIZE


def _address_space_limit() -> int | None:
    limit: int | None = None
    if sys.platform == "linux":
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        limit = None if soft == resource.RLIM_INFINITY else soft
    return limit


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the rest of the limit of each memory group of this process."""
    for version, group in groups(root, "memory"):
        if version == 2:
            limit_name, usage_name, prefix = "memory.max", "memory.current", ""
        else:
            limit_name, usage_name, prefix = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        limit, usage = read(group / limit_name).strip(), read(group / usage_name).strip()
        if limit.isdigit() and usage.isdigit():
            yield int(limit) - int(usage) + _droppable(group, prefix)


def _droppable(group: Path, prefix: str) -> int:
    names = {f"{prefix}inactive_file", f"{prefix}active_file"}
    fields = (line.split() for line in read(group / "memory.stat").splitlines())
    return sum(int(field[1]) for field in fields if len(field) == 2 and field[0] in names)
