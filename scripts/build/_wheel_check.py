"""Try a wheel without a compiler, on this processor and on an older one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from scripts._common import ScriptError
from scripts.check.portable import PREFIX

QUESTION, ANSWER = "What is 12 + 30?", "42"
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "make", "ninja", "ld", "as")
SECONDS = 600  # an emulated processor is slow

# Flags of /proc/cpuinfo that each variant needs; the last variant that runs is used.
_AVX2 = "sse4_2 avx f16c fma avx2 bmi2"
_AVX512 = f"{_AVX2} avx512f avx512cd avx512vl avx512dq avx512bw"
VARIANTS: dict[str, frozenset[str]] = {
    name: frozenset(needs.split())
    for name, needs in {
        "x64": "",
        "sse42": "sse4_2",
        "sandybridge": "sse4_2 avx",
        "ivybridge": "sse4_2 avx f16c",
        "piledriver": "sse4_2 avx f16c fma",
        "haswell": _AVX2,
        "alderlake": f"{_AVX2} avx_vnni",
        "skylakex": _AVX512,
        "cannonlake": f"{_AVX512} avx512vbmi",
        "cascadelake": f"{_AVX512} avx512_vnni",
        "icelake": f"{_AVX512} avx512vbmi avx512_vnni",
        "cooperlake": f"{_AVX512} avx512_vnni avx512_bf16",
        "zen4": f"{_AVX512} avx512vbmi avx512_vnni avx512_bf16",
        "sapphirerapids": f"{_AVX512} avx512vbmi avx512_vnni avx512_bf16 amx_tile amx_int8",
    }.items()
}

QEMU, QEMU_MODEL, QEMU_VARIANT = "qemu-x86_64", "Haswell", "haswell"

# Runs the program in its arguments; writes the process's final maps to the file named first.
_WITH_MAPS = """
import atexit, pathlib, runpy, sys
maps, *sys.argv = sys.argv[1:]
atexit.register(lambda: pathlib.Path(maps).write_text(pathlib.Path("/proc/self/maps").read_text()))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def best_variant(flags: Iterable[str]) -> str:
    """Return the variant for a processor with these flags (as in /proc/cpuinfo)."""
    has = frozenset(flags)
    return [name for name, needs in VARIANTS.items() if needs <= has][-1]


def needs_avx512(variant: str) -> bool:
    """Return whether the variant needs AVX-512."""
    return any(flag.startswith("avx512") for flag in VARIANTS[variant])


def flags_here(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the flags of this machine's processor."""
    found = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ScriptError(f"{cpuinfo} has no line of flags: a wheel for x86-64 is tried on x86-64")
    return frozenset(found[1].split())


def libraries(maps: str) -> set[Path]:
    """Return the shared libraries in the text of a /proc/PID/maps."""
    found = re.findall(r"^[0-9a-f]+-[0-9a-f]+ [^/\n]*(/.*\.so[^/\n]*)$", maps, re.MULTILINE)
    return set(map(Path, found))


def loaded_variant(mapped: Iterable[Path], environment: Path) -> str:
    """Return the variant of the CPU backend among the libraries of a process.

    Raises: ScriptError unless there are exactly one backend and one OpenMP library, both from `environment`.
    """
    backend, _ = (_the_one(kind, mapped, environment) for kind in (PREFIX, "libgomp"))
    return backend.stem.removeprefix(PREFIX)


def _the_one(kind: str, mapped: Iterable[Path], environment: Path) -> Path:
    found = sorted(path for path in mapped if path.name.startswith(kind))
    if len(found) != 1 or environment not in found[0].parents:
        loaded = ", ".join(map(str, found)) or "none"
        raise ScriptError(f"a process shall load one {kind}*, from the wheel: it loaded {loaded}")
    return found[0]


def without_compilers(programs: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment `base` with the folder `programs` as its only PATH."""
    hidden = ("CC", "CXX", "CMAKE", "LD_", "PYTHON", "VIRTUAL_ENV")
    kept = {name: value for name, value in base.items() if not name.startswith(hidden)}
    return {**kept, "PATH": str(programs)}


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel and its dependencies, all from wheels, into a new virtual environment in `folder`.

    Returns the environment's folder of programs.
    """
    run([sys.executable, "-m", "venv", str(folder)], dict(os.environ), folder.parent)
    programs = folder / "bin"
    environment = without_compilers(programs)
    pip = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "--only-binary", ":all:", f"{wheel}[cli]"], environment, folder.parent)
    if found := [name for name in COMPILERS if shutil.which(name, path=environment["PATH"])]:
        raise ScriptError(f"the clean environment has {', '.join(found)}: it shall have no compiler")
    return programs


def ask(programs: Path, machine: str, emulator: Sequence[str], expected: str) -> None:
    """Ask the demo model a question; print the answer and the variant that gave it.

    Raises: ScriptError if the answer or the variant is wrong.
    """
    maps = programs.parent / "maps"
    maps.unlink(missing_ok=True)
    command = [*emulator, str(programs / "python"), "-I", "-c", _WITH_MAPS, str(maps)]
    command += [str(programs / "pyvelo"), "run", "-p", QUESTION]
    answer = run(command, without_compilers(programs), programs.parent.parent).strip()
    variant = loaded_variant(libraries(maps.read_text()), programs.parent)
    print(f"{machine}: {variant}: {answer}", flush=True)
    if not re.search(rf"\b{ANSWER}\b", answer):
        raise ScriptError(f"{QUESTION!r} shall be answered with {ANSWER}: {answer!r}")
    if variant != expected:
        raise ScriptError(f"{machine} shall take the variant {expected}: it took {variant}")


def check_wheel(wheel: Path) -> None:
    """Install the wheel and run it here, then on a processor without AVX-512.

    That processor is emulated if qemu is installed; else the variants that need AVX-512 are removed.
    """
    with tempfile.TemporaryDirectory(prefix="pyvelo-wheel-") as folder:
        environment = Path(folder).resolve() / "environment"
        programs = install(wheel.resolve(), environment)
        flags = flags_here()
        ask(programs, "this processor", (), best_variant(flags))
        if qemu := shutil.which(QEMU):
            ask(programs, f"{QEMU} -cpu {QEMU_MODEL}", (qemu, "-cpu", QEMU_MODEL), QEMU_VARIANT)
            return
        for path in environment.rglob(f"{PREFIX}*"):
            if needs_avx512(path.stem.removeprefix(PREFIX)):
                path.unlink()
        older = best_variant(flag for flag in flags if not flag.startswith("avx512"))
        ask(programs, f"without the variants for AVX-512 (no {QEMU} here)", (), older)


def run(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> str:
    """Run the command and return its output."""
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except subprocess.TimeoutExpired:
        raise ScriptError(f"{_brief(command)} took longer than {SECONDS} s") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip()[-2000:]
        raise ScriptError(f"{_brief(command)} failed (status {error.returncode}): {said}") from None
    return done.stdout


def _brief(command: Sequence[str]) -> str:
    return " ".join(part for part in command if "\n" not in part)
