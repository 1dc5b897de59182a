"""Compile everything native for another system, with the compiler of the package ziglang.

    pip install ziglang
    python scripts/build/cross_compile.py x86_64-windows-gnu
    python scripts/build/cross_compile.py --check aarch64-macos x86_64-macos

Builds the libraries and three programs: velo-lab-check compares the operator and the products with
references, velo-lab-generate MODEL PROMPT TOKENS prints an answer, velo-lab-host MODEL checks memory and
cores. Programs for Windows run under wine. The Python module needs the other system's Python, so it is left
out. --check parses our sources and builds nothing; warnings are errors then.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, ScriptError, run_main
from scripts.build._cmake import cmake

NATIVE = ROOT / "native"
TARGETS = ("velo", "velo-lab-check", "velo-lab-generate", "velo-lab-host")
TOOLS = ("ar", "ranlib", "rc")
AVX2 = tuple(f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C"))
SYSTEMS = {
    "x86_64-windows-gnu": ("Windows", "AMD64", AVX2),
    "x86_64-macos": ("Darwin", "x86_64", AVX2),
    "aarch64-macos": ("Darwin", "arm64", ("-DGGML_CPU_ARM_ARCH=apple_m1",)),
    "x86_64-linux-gnu": ("Linux", "x86_64", (*AVX2, "-DGGML_AVX512=ON")),  # without VNNI, as in Skylake-X
}
"""CMake's names of the system and its processor, and the processor's instructions."""
OPTIONS = ("-DPYVELO_MODULE=OFF", "-DPYVELO_NATIVE=OFF", "-DGGML_OPENMP=OFF")  # zig has no OpenMP
COMPILE_ONLY = (
    "-DPYVELO_BUILD_TESTS=ON",
    "-DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY",
    *(f"-DCMAKE_{language}_FLAGS=-c" for language in ("C", "CXX")),
)
"""CMake links nothing with these, so zig need not build its C and C++ libraries, which takes two minutes."""
PARSE = ("-fsyntax-only", "-Werror", "-Wno-unused-command-line-argument")


def zig(tool: str) -> list[str]:
    """Return the command of one of zig's tools."""
    return [sys.executable, "-m", "ziglang", tool]


def write_tool(folder: Path, tool: str) -> Path:
    """Write a program that runs one of zig's tools, because CMake wants a path; return it."""
    path = folder / f"zig-{tool}"
    words = " ".join(f'"{word}"' for word in zig(tool))
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    path.chmod(0o755)
    return path


def configure(system: str, folder: Path, options: list[str]) -> None:
    """Configure a build of native/ for one of SYSTEMS.

    Raises: ScriptError if CMake fails.
    """
    name, processor, instructions = SYSTEMS[system]
    folder.mkdir(parents=True, exist_ok=True)
    command = [cmake(), "-S", str(NATIVE), "-B", str(folder), "-G", "Ninja"]
    command += [f"-DCMAKE_SYSTEM_NAME={name}", f"-DCMAKE_SYSTEM_PROCESSOR={processor}"]
    for language, tool in (("C", "cc"), ("CXX", "c++")):
        command.append(f"-DCMAKE_{language}_COMPILER={';'.join([*zig(tool), '-target', system])}")
    command += [
        f"-DCMAKE_{variable}={write_tool(folder, tool)}"
        for variable, tool in zip(("AR", "RANLIB", "RC_COMPILER"), TOOLS, strict=True)
    ]
    command.append(f"-DCMAKE_INSTALL_NAME_TOOL={shutil.which('false')}")  # of macOS, for an install
    command += [f"-DPython_EXECUTABLE={sys.executable}", *OPTIONS, *instructions, *options]
    if subprocess.run(command, check=False).returncode != 0:
        raise ScriptError(f"CMake cannot configure a build for {system}: see its message above")


def build(system: str, targets: list[str], jobs: int) -> None:
    """Build these targets in build/cross-SYSTEM.

    Raises: ScriptError if a source does not compile or a target does not link.
    """
    folder = ROOT / "build" / f"cross-{system}"
    configure(system, folder, ["-DPYVELO_BUILD_TESTS=ON"])
    command = [cmake(), "--build", str(folder), "-j", str(jobs), "--target", *targets]
    if subprocess.run(command, check=False).returncode != 0:
        raise ScriptError(f"native/ cannot be built for {system}: see the compiler's message above")


def parse(command: dict[str, str]) -> str:
    """Parse one source of a compilation database; return the compiler's messages."""
    words = " ".join((command["command"], *PARSE))
    done = subprocess.run(words, shell=True, cwd=command["directory"], capture_output=True, text=True)
    return done.stderr or f"{command['file']}: status {done.returncode}" if done.returncode != 0 else ""


def check(system: str, jobs: int) -> None:
    """Parse our sources as the build for a system compiles them.

    Raises: ScriptError if a source has an error or a warning.
    """
    folder = ROOT / "build" / f"check-{system}"
    configure(system, folder, list(COMPILE_ONLY))
    listed = subprocess.run(
        ["ninja", "-C", str(folder), "-t", "compdb-targets", *TARGETS], capture_output=True, check=True
    )
    ours = {one["file"]: one for one in json.loads(listed.stdout) if Path(one["file"]).is_relative_to(NATIVE)}
    with ThreadPoolExecutor(jobs) as pool:
        messages = [message for message in pool.map(parse, ours.values()) if message]
    if messages:
        print("\n".join(messages), file=sys.stderr)
        raise ScriptError(f"{len(messages)} of {len(ours)} sources do not compile for {system}")
    print(f"{system}: {len(ours)} sources")


def main() -> int:
    """Build or check for each system."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("system", nargs="+", choices=SYSTEMS)
    parser.add_argument("--check", action="store_true", help="parse our sources, build nothing")
    parser.add_argument("--target", nargs="+", default=TARGETS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.jobs < 1:
        raise ScriptError(f"--jobs {options.jobs}: give 1 or more")
    if importlib.util.find_spec("ziglang") is None:
        raise ScriptError("the compiler is the package ziglang, which is not installed: pip install ziglang")
    for system in options.system:
        if options.check:
            check(system, options.jobs)
        else:
            build(system, options.target, options.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
