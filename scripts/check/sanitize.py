"""Build native checks with sanitizers and run them, and the tests of the binding and of the operator.

`sanitize.py 'address;undefined'` or `sanitize.py thread`. Each kind has its own build folder,
build/sanitize-KIND. ThreadSanitizer uses ggml's own threads, since it does not know the barriers of OpenMP,
and runs no Python tests, since Python itself is not built for it.
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
from scripts.build._cmake import copy_package

DRIVERS = {"velo-lab-check": {"thread": ["2", "3"]}}
"""Native programs that check themselves and end with 0: name, and arguments for a kind of sanitizer.

ggml's own threads spin while they wait, so ThreadSanitizer runs not many more of them than cores.
"""
TESTS = ("tests/native", "tests/ops")
PRELOADED = ("libasan.so", "libubsan.so", "libstdc++.so.6")
"""A sanitizer must come first in a process and find what it intercepts; Python loads neither itself."""
OPTIONS = {
    # gcc 12 aligns the frames of its stack for use after return to 32 bytes; AVX-512 needs 64
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def folder_of(sanitizers: str) -> Path:
    """Return the build folder of a kind: address;undefined goes to build/sanitize-address-undefined."""
    return ROOT / "build" / f"sanitize-{sanitizers.replace(';', '-')}"


def build(sanitizers: str, extra: list[str], jobs: int, targets: tuple[str, ...]) -> Path:
    """Configure and build `targets`, or everything without any; return the build folder."""
    folder = folder_of(sanitizers)
    configure = ["cmake", "-S", str(ROOT / "native"), "-B", str(folder), "-DPYVELO_BUILD_TESTS=ON"]
    configure += [f"-DPYVELO_SANITIZE={sanitizers}", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", *extra]
    subprocess.run(configure, check=True)
    what = ["--target", *targets] if targets else []
    subprocess.run(["cmake", "--build", str(folder), "-j", str(jobs), *what], check=True)
    return folder


def run_drivers(folder: Path, sanitizers: str) -> bool:
    """Run every driver found in the build folder; return False if one failed."""
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


def run_tests(folder: Path) -> bool:
    """Run TESTS over a package of this build, laid out beside it; return False if one failed."""
    package = folder / "package"
    shutil.rmtree(package, ignore_errors=True)
    copy_package(package)
    install = ["cmake", "--install", str(folder), "--component", "pyvelo", "--prefix", str(package)]
    subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [str(ROOT / tests) for tests in TESTS]
    settings = {**os.environ, **OPTIONS, "PYTHONPATH": str(package), "LD_PRELOAD": _preload()}
    # Python leaves much unfreed, and SIGBUS of a truncated file is for the tested handler
    settings["ASAN_OPTIONS"] += ":detect_leaks=0:handle_sigbus=0"
    return subprocess.run(command, cwd=package, env=settings, check=False).returncode == 0


def _preload() -> str:
    """Return the runtime libraries of the compiler."""
    compiler = os.environ.get("CXX", "c++")
    found = []
    for name in PRELOADED:
        ask = [compiler, f"-print-file-name={name}"]
        found.append(subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
    return " ".join(found)


def main() -> int:
    """Return 0 if everything passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sanitizers", choices=["address;undefined", "address", "undefined", "thread"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cmake", action="append", default=[], help="an argument for CMake")
    options = parser.parse_args()
    with_tests = "thread" not in options.sanitizers
    targets = () if with_tests else tuple(DRIVERS)
    folder = build(options.sanitizers, options.cmake, options.jobs, targets)
    good = run_drivers(folder, options.sanitizers)
    if with_tests:
        good = run_tests(folder) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
