"""Table of the warps that a multiprocessor holds for usual calls, from shared memory and registers."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from scripts._common import ROOT, ScriptError

SOURCE = ROOT / "native" / "lab" / "gpu_launches.cpp"
KIB = 1024
SHARED = {
    "7.0": (96, 96),
    "7.5": (64, 64),
    "8.0": (163, 164),
    "8.6": (99, 100),
    "8.9": (99, 100),
    "9.0": (227, 228),
    "10.0": (227, 228),
    "12.0": (99, 100),
}
"""KiB of shared memory of a thread block and of a multiprocessor, by compute capability."""
REGISTERS = 65536
SYSTEM_BYTES = KIB
"""Shared memory that the system takes for each thread block, from 8.0 on."""


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel for 512 queries, or for one, of a call's type and head size."""

    call: str
    kernel: tuple[int, int, int, str, str]
    """Template arguments."""
    warps: int
    """Warps of a thread block."""
    tokens: int
    """Tokens of a tile, or of each warp where warps divide the tokens."""
    bytes: int


def build_launches(folder: Path) -> Path:
    """Compile the program that prints launches, and return its path.

    Raises: ScriptError if the compiler of the host is missing or fails.
    """
    compiler, program = os.environ.get("CXX", "c++"), folder / "launches"
    include, output = f"-I{ROOT / 'native/ops/cuda'}", os.fspath(program)
    try:
        subprocess.run(
            [compiler, "-std=c++17", include, os.fspath(SOURCE), "-o", output],
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise ScriptError(f"{SOURCE.name} does not compile with {compiler}: {error}") from None
    return program


def launches(program: Path, capability: str) -> list[Launch]:
    """Return the launches of usual calls.

    Raises: ScriptError if the capability is unknown.
    """
    if capability not in SHARED:
        raise ScriptError(f"the shared memory of {capability} is not known: choose from {', '.join(SHARED)}")
    limit = str(SHARED[capability][0] * KIB)
    has_all = str(int(float(capability) >= 8))
    out = subprocess.run([program, limit, has_all], check=True, capture_output=True, text=True).stdout
    found = (json.loads(line) for line in out.splitlines())
    return [
        Launch(one["call"], tuple(one["kernel"]), one["warps"], one["tokens"], one["bytes"]) for one in found
    ]


def resident_blocks(shared_bytes: int, warps: int, registers: int, capability: str) -> int:
    """Return how many thread blocks a multiprocessor holds."""
    system = SYSTEM_BYTES if float(capability) >= 8 else 0
    by_memory = SHARED[capability][1] * KIB // (shared_bytes + system)
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    return min(by_memory, by_registers)


def print_occupancy(
    capabilities: Iterable[str],
    registers_of: Callable[[tuple[int, int, int, str, str], str], tuple[str, int] | None],
) -> None:
    """Print a table. `registers_of` returns a kernel's name and registers, or None if it was not compiled."""
    head = f"{'for':6} {'call':12} {'kernel':58} {'tokens':>6} {'KiB':>6} {'registers':>9}"
    print(f"{head} {'blocks':>6} {'warps':>5}")
    with tempfile.TemporaryDirectory() as folder:
        program = build_launches(Path(folder))
        found = [(one, launch) for one in capabilities for launch in launches(program, one)]
    for capability, launch in found:
        if (used := registers_of(launch.kernel, capability)) is None:
            continue
        name, registers = used
        blocks = resident_blocks(launch.bytes, launch.warps, registers, capability)
        print(
            f"{capability:6} {launch.call:12} {name:58} {launch.tokens:6} {launch.bytes / KIB:6.1f} "
            f"{registers:9} {blocks:6} {blocks * launch.warps:5}"
        )
