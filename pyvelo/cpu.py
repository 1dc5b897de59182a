"""Check of the processor before the library is loaded: instruction sets that it was compiled for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pyvelo.errors import LibraryError

__all__ = ["REBUILD", "check_cpu", "cpu_flags", "missing_flags"]

NEEDED = Path(__file__).parent / "native" / "lib" / "cpu-flags.txt"
"""Linux's names of instruction sets, a line each; none of a portable build."""
CPUINFO = Path("/proc/cpuinfo")
REBUILD = "pip install --force-reinstall --no-cache-dir FOLDER"


def check_cpu(needed: Path = NEEDED, cpuinfo: Path = CPUINFO) -> None:
    """Raise LibraryError if the processor lacks an instruction set; return if one of the files is missing."""
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            missing = missing_flags(needed.read_text(encoding="ascii"), lines)
    except (OSError, ValueError):
        return
    if missing:
        raise LibraryError(
            f"pyvelo was built for another processor: this one lacks {', '.join(missing)}. Build it on this "
            f"machine from the source in a folder ({REBUILD}), or for every processor "
            "(pip install -C cmake.define.PYVELO_PORTABLE=ON FOLDER)"
        )


def missing_flags(needed: str, cpuinfo: Iterable[str]) -> list[str]:
    """Return the names in `needed` that the lines of /proc/cpuinfo lack; none if they list no flags."""
    has = cpu_flags(cpuinfo)
    return [flag for flag in needed.split() if flag not in has] if has else []


def cpu_flags(cpuinfo: Iterable[str]) -> set[str]:
    """Return the instruction sets of the first processor in the lines of /proc/cpuinfo, by Linux's names.

    No later line is read: the kernel takes long to tell of hundreds of processors.
    """
    for line in cpuinfo:
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):  # of x86, of ARM
            return set(flags.split())
    return set()
