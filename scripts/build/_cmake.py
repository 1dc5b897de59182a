"""Configure and build with CMake; the output goes to a log that is shown after a failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts._common import ROOT, ScriptError


def program(name: str) -> str | None:
    """Return the path of a program: the one beside this Python, else the first in PATH."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


def cmake() -> str:
    """Return the path of cmake.

    Raises: ScriptError if it is not installed.
    """
    found = program("cmake")
    if found is None:
        raise ScriptError(
            f"cmake is needed for this: install it, for example with {sys.executable} -m pip install cmake"
        )
    return found


def configure(source: Path, build: Path, options: Mapping[str, str | bool]) -> None:
    """Configure `build` from `source`; an existing configuration keeps its generator and compilers."""
    configured = (build / "CMakeCache.txt").exists()
    defaults = {} if configured else launchers()  # changed launchers would rebuild everything
    arguments = [f"-D{key}={_value(value)}" for key, value in {**defaults, **options}.items()]
    ninja = program("ninja")
    if ninja and not configured:
        arguments += ["-G", "Ninja"]
    if ninja and (not configured or (build / "build.ninja").exists()):
        arguments += [f"-DCMAKE_MAKE_PROGRAM={ninja}"]  # pip's, for example, vanishes with its environment
    build.mkdir(parents=True, exist_ok=True)
    run_logged([cmake(), "-S", str(source), "-B", str(build), *arguments], build / "configure.log")


def build_targets(build: Path, targets: Sequence[str]) -> None:
    """Build the targets with as many jobs as there are processors."""
    jobs = str(os.cpu_count() or 1)
    run_logged(
        [cmake(), "--build", str(build), "--parallel", jobs, "--target", *targets], build / "build.log"
    )


def copy_package(to: Path) -> None:
    """Copy the package's Python files, without the libraries of a build in place."""
    left_out = shutil.ignore_patterns("__pycache__", "*.so", "lib")
    shutil.copytree(ROOT / "pyvelo", to / "pyvelo", ignore=left_out, dirs_exist_ok=True)


def launchers() -> dict[str, str]:
    """Return the options that put ccache in front of the compilers, none if it is not installed."""
    ccache = program("ccache")
    return {f"CMAKE_{language}_COMPILER_LAUNCHER": ccache for language in ("C", "CXX")} if ccache else {}


def run_logged(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run a command whose output goes to `log`.

    Raises: ScriptError if it fails, after printing the last lines of the log.
    """
    with log.open("wb") as stream:
        done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode != 0:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:]
        print("\n".join(tail), file=sys.stderr)
        raise ScriptError(f"{' '.join(command[:3])} … failed: its last lines are above, all of them in {log}")


def _value(value: str | bool) -> str:
    return value if isinstance(value, str) else "ON" if value else "OFF"
