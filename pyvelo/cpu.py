"""Check of the processor before the library is loaded: instruction sets that it was compiled for."""

from __future__ import annotations

from pathlib import Path

from pyvelo.errors import LibraryError

__all__ = ["check_cpu", "cpu_flags", "missing_flags"]

NEEDED = Path(__file__).parent / "native" / "lib" / "cpu-flags.txt"
"""Linux's names of instruction sets, a line each; none of a portable build."""
CPUINFO = Path("/proc/cpuinfo")


def check_cpu(needed: Path = NEEDED, cpuinfo: Path = CPUINFO) -> None:
    """Raise LibraryError if the processor lacks an instruction set; return if one of the files is missing."""
    try:
        names = needed.read_text(encoding="ascii")
        has = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return
    if missing := missing_flags(names, has):
        raise LibraryError(
            f"pyvelo was built for another processor: this one lacks {', '.join(missing)}. Build it on this "
            "machine (pip install --force-reinstall --no-cache-dir), or for every processor "
            "(pip install -C cmake.define.PYVELO_PORTABLE=ON)"
        )


def missing_flags(needed: str, cpuinfo: str) -> list[str]:
    """Return the names in `needed` that the text of /proc/cpuinfo lacks; none if it lists no flags."""
    has = cpu_flags(cpuinfo)
    return [flag for flag in needed.split() if flag not in has] if has else []


def cpu_flags(cpuinfo: str) -> set[str]:
    """Return the instruction sets that the text of /proc/cpuinfo lists, by Linux's names."""
    for line in cpuinfo.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):  # of x86, of ARM
            return set(flags.split())
    return set()
