"""Compile everything native for another system with the compiler of the package ziglang.

    pip install ziglang
    python scripts/build/cross_compile.py x86_64-windows-gnu
    python scripts/build/cross_compile.py aarch64-macos --target velo

The module of Python is not built: it needs the other system's Python. The libraries are all that it calls. Programs
for Windows run under wine: velo-lab-check.exe checks the operator and the products.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, ScriptError, run_main

AVX2 = [f"-DGGML_{name}=ON" for name in ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")]
SYSTEMS = {
    "x86_64-windows-gnu": ("Windows", "AMD64", AVX2),
    "x86_64-macos": ("Darwin", "x86_64", AVX2),
    "aarch64-macos": ("Darwin", "arm64", ["-DGGML_CPU_ARM_ARCH=apple_m1"]),
}
"""CMake's names of the system and the processor, and the instructions that its machines have."""
TOOLS = ("ar", "ranlib", "rc")


def write_tool(folder: Path, tool: str) -> Path:
    """Write a program that runs one of zig's tools, which CMake wants as a file; return its path."""
    path = folder / f"zig-{tool}"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {tool} "$@"\n')
    path.chmod(0o755)
    return path


def configure(system: str, folder: Path, options: list[str]) -> None:
    """Configure a build of native/ for a system of SYSTEMS."""
    name, processor, instructions = SYSTEMS[system]
    folder.mkdir(parents=True, exist_ok=True)
    tools = {tool: write_tool(folder, tool) for tool in TOOLS}
    compiler = f"{sys.executable};-m;ziglang;{{}};-target;{system}"
    command = ["cmake", "-S", str(ROOT / "native"), "-B", str(folder), "-G", "Ninja"]
    command += [f"-DCMAKE_SYSTEM_NAME={name}", f"-DCMAKE_SYSTEM_PROCESSOR={processor}"]
    command += [f"-DCMAKE_C_COMPILER={compiler.format('cc')}", f"-DCMAKE_CXX_COMPILER={compiler.format('c++')}"]
    command += [f"-DCMAKE_AR={tools['ar']}", f"-DCMAKE_RANLIB={tools['ranlib']}", f"-DCMAKE_RC_COMPILER={tools['rc']}"]
    command += [f"-DCMAKE_INSTALL_NAME_TOOL={shutil.which('false')}"]  # asked for on macOS; run by an install alone
    command += ["-DPYVELO_NATIVE=OFF", "-DPYVELO_BUILD_TESTS=ON", "-DGGML_OPENMP=OFF", "-DGGML_METAL=OFF"]
    command += ["-DGGML_BLAS=OFF", "-DGGML_ACCELERATE=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    command += ["-DPYVELO_MODULE=OFF", *instructions, *options]
    subprocess.run(command, check=True)


def main() -> int:
    """Return 0, or 1 if a step fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--target", nargs="+", default=["velo", "velo-lab-check", "velo-lab-generate"])
    parser.add_argument("--define", nargs="+", default=[], metavar="NAME=VALUE", help="more options for CMake")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if importlib.util.find_spec("ziglang") is None:
        raise ScriptError("the compiler is the package ziglang, which is not installed: pip install ziglang")
    folder = ROOT / "build" / f"cross-{options.system}"
    configure(options.system, folder, [f"-D{one}" for one in options.define])
    build = ["cmake", "--build", str(folder), "-j", str(options.jobs), "--target", *options.target]
    return subprocess.run(build, check=False).returncode


if __name__ == "__main__":
    sys.exit(run_main(main))
