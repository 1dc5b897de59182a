"""Build the checks of the operator and of products for 64-bit ARM, and run them under emulation.

    python scripts/check/arm.py                          with the dot product of bytes
    python scripts/check/arm.py --arch armv8-a           without it
    python scripts/check/arm.py --arch armv8.6-a+fp16    with the product of matrices of bytes, too

Needs a cross compiler and qemu: on Debian the packages g++-aarch64-linux-gnu and qemu-user.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT

CHECK = "velo-lab-check"
TRIPLE = "aarch64-linux-gnu"
PROGRAMS = (f"{TRIPLE}-gcc", f"{TRIPLE}-g++", "qemu-aarch64")


def build(arch: str, jobs: int) -> Path:
    """Build the check for `arch`; return its path."""
    folder = ROOT / "build" / f"cross-{arch.replace('+', '-')}"
    configure = ["cmake", "-S", str(ROOT / "native"), "-B", str(folder)]
    configure += ["-DPYVELO_BUILD_TESTS=ON", "-DPYVELO_NATIVE=OFF", f"-DGGML_CPU_ARM_ARCH={arch}"]
    configure += ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    configure += [f"-DCMAKE_C_COMPILER={PROGRAMS[0]}", f"-DCMAKE_CXX_COMPILER={PROGRAMS[1]}"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", "-DPYVELO_MODULE=OFF"]
    subprocess.run(configure, check=True)
    subprocess.run(["cmake", "--build", str(folder), "-j", str(jobs), "--target", CHECK], check=True)
    return next(path for path in folder.rglob(CHECK) if path.is_file() and os.access(path, os.X_OK))


def main() -> int:
    """Return the check's status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", default="armv8.2-a+dotprod+fp16", help="value of GCC's -march")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        print(f"arm.py: {', '.join(missing)} not found: install them first", file=sys.stderr)
        return 1
    check = build(options.arch, options.jobs)
    return subprocess.run([PROGRAMS[2], "-L", f"/usr/{TRIPLE}", str(check), "2"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
