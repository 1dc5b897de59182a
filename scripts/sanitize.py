"""Builds native checks with sanitizers and runs them.

`sanitize.py 'address;undefined'` or `sanitize.py thread`. Each kind has a build folder of its own,
build/sanitize-KIND. ThreadSanitizer gets ggml's own threads: it cannot see the barriers of OpenMP.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DRIVERS = {"velo-lab-check": {"thread": ["2", "3"]}}
"""Native programs that check themselves and end with 0: name, and arguments for a kind of sanitizer.

ggml's own threads spin while they wait, so under ThreadSanitizer not many more of them than cores.
"""
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def folder_of(sanitizers: str) -> Path:
    """The build folder of a kind: address;undefined goes to build/sanitize-address-undefined."""
    return ROOT / "build" / f"sanitize-{sanitizers.replace(';', '-')}"


def build(sanitizers: str, extra: list[str], jobs: int) -> Path:
    """Configures and builds the drivers; returns the build folder."""
    folder = folder_of(sanitizers)
    configure = ["cmake", "-S", str(ROOT / "native"), "-B", str(folder), "-DPYVELO_BUILD_TESTS=ON"]
    configure += [f"-DPYVELO_SANITIZE={sanitizers}", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", *extra]
    subprocess.run(configure, check=True)
    subprocess.run(["cmake", "--build", str(folder), "-j", str(jobs), "--target", *DRIVERS], check=True)
    return folder


def run(folder: Path, sanitizers: str) -> bool:
    """Runs every driver found in the build folder; False when one failed."""
    good = True
    for driver, arguments in DRIVERS.items():
        programs = [path for path in folder.rglob(driver) if path.is_file() and os.access(path, os.X_OK)]
        if len(programs) != 1:
            raise SystemExit(f"{driver} should be built once under {folder}, found {programs}")
        command = [str(programs[0]), *arguments.get(sanitizers, [])]
        status = subprocess.run(command, env={**os.environ, **OPTIONS}, check=False).returncode
        print(f"{driver}: {'passed' if status == 0 else f'failed with status {status}'}", flush=True)
        good = good and status == 0
    return good


def main() -> int:
    """Ends with 0 when everything passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sanitizers", choices=["address;undefined", "address", "undefined", "thread"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cmake", action="append", default=[], help="an argument for configuring")
    options = parser.parse_args()
    return 0 if run(build(options.sanitizers, options.cmake, options.jobs), options.sanitizers) else 1


if __name__ == "__main__":
    sys.exit(main())
