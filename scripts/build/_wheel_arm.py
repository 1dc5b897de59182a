"""Build the wheel for 64-bit ARM with a cross compiler, and try it under emulation."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts._common import ScriptError
from scripts.build._wheel_check import ANSWER, QUESTION, libraries, run
from scripts.check.portable import PREFIX

TRIPLE = "aarch64-linux-gnu"
PROGRAMS = (f"{TRIPLE}-gcc", f"{TRIPLE}-g++", "qemu-aarch64", "apt-get", "dpkg-deb")

# What the linker of a C program brings, and the standard library of Python 3.11 in Debian 12.
PACKAGES = (
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib"),
    *("libc6", "libgcc-s1", "libstdc++6", "zlib1g", "libexpat1", "libffi8", "libssl3"),
    *("liblzma5", "libbz2-1.0", "libsqlite3-0", "libuuid1"),
)
VERSION = "3.11"

VARIANTS = ("armv8.0_1", "armv8.2_1", "armv8.2_2", "armv8.2_3", "armv8.6_1", "armv8.6_2")
NEWER_VARIANTS = ("armv9.2_1", "armv9.2_2")
"""With SME, which compilers have known since GCC 14."""

PROCESSORS = {"cortex-a53": "armv8.0_1", "cortex-a76": "armv8.2_2"}
"""Processors of qemu, and the variants that they shall take."""


def settings() -> dict[str, str]:
    """Return CMake's options. The threads are ggml's: libgomp would be the cross compiler's."""
    return {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_C_COMPILER": PROGRAMS[0],
        "CMAKE_CXX_COMPILER": PROGRAMS[1],
        "Python_INCLUDE_DIR": sysconfig.get_path("include"),  # the stable interface's is the same on both
        "GGML_OPENMP": "OFF",
    }


def check_programs() -> None:
    """Raise ScriptError if a program is missing."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise ScriptError(
            f"{', '.join(missing)} not found: this needs Debian, with its packages g++-{TRIPLE} and qemu-user"
        )


def unpack_python(folder: Path) -> Path:
    """Unpack Debian's Python for ARM in `folder`, which nothing is installed into; return the program."""
    state = folder / "apt"
    packages = folder / "packages"
    for path in (state / "lists/partial", state / "archives/partial", packages):
        path.mkdir(parents=True)
    (state / "status").touch()
    options = [f"Dir::State={state}", f"Dir::State::status={state}/status", f"Dir::Cache={state}"]
    options += ["APT::Architecture=arm64", "APT::Architectures=arm64"]
    apt = ["apt-get", *(word for option in options for word in ("-o", option))]
    for command in ([*apt, "update"], [*apt, "download", *PACKAGES]):
        run(command, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, packages)
    for package in packages.glob("*.deb"):
        run(["dpkg-deb", "-x", str(package), str(folder / "root")], {"PATH": "/usr/bin:/bin"}, folder)
    return folder / f"root/usr/bin/python{VERSION}"


def install(wheel: Path, folder: Path) -> None:
    """Install the wheel and the packages that it needs for ARM in `folder`, by this machine's pip."""
    tags = re.findall(r"manylinux[0-9_]+_aarch64", wheel.name)
    platforms = [*tags, "manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--target", str(folder), "--only-binary", ":all:", "--python-version", VERSION]
    command += [word for platform in platforms for word in ("--platform", platform)]
    run([*command, f"{wheel}[cli]"], dict(os.environ), folder.parent)


def ask(emulator: Sequence[str], python: Path, packages: Path) -> str:
    """Ask the demo model a question; print the answer, and return the variant that gave it.

    Raises: ScriptError if the answer is wrong, or not one variant was loaded.
    """
    program = (
        "import atexit, runpy, sys; sys.argv[:] = ['pyvelo', 'run', '-p', sys.argv[1]]\n"
        "atexit.register(lambda: print(open('/proc/self/maps').read()))\n"
        "runpy.run_module('pyvelo', run_name='__main__')"
    )
    command = [*emulator, "-E", f"PYTHONPATH={packages}", str(python), "-c", program, QUESTION]
    said = run(command, {"HOME": str(packages.parent), "PATH": "/usr/bin:/bin"}, packages.parent)
    answer = said.partition("\n")[0]
    found = {path.stem.removeprefix(PREFIX) for path in libraries(said) if path.name.startswith(PREFIX)}
    print(f"{' '.join(emulator[:3])}: {', '.join(sorted(found))}: {answer}", flush=True)
    if not re.search(rf"\b{ANSWER}\b", answer):
        raise ScriptError(f"{QUESTION!r} shall be answered with {ANSWER}: {answer!r}")
    if len(found) != 1:
        raise ScriptError(f"a process shall load one {PREFIX}*: it loaded {', '.join(found) or 'none'}")
    return found.pop()


def check_wheel(wheel: Path) -> None:
    """Install the wheel beside an emulated Python, and ask the demo model on several processors.

    Raises: ScriptError if a processor takes another variant than the best that it can run.
    """
    with tempfile.TemporaryDirectory(prefix="pyvelo-wheel-") as name:
        folder = Path(name).resolve()
        python = unpack_python(folder)
        install(wheel.resolve(), folder / "site")
        names = [path.stem.removeprefix(PREFIX) for path in (folder / "site").rglob(f"{PREFIX}*")]
        for processor, expected in {**PROCESSORS, "max": max(names)}.items():
            emulator = ("qemu-aarch64", "-cpu", processor, "-L", str(folder / "root"))
            if (variant := ask(emulator, python, folder / "site")) != expected:
                raise ScriptError(f"{processor} shall take the variant {expected}: it took {variant}")
