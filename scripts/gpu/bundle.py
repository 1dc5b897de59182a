"""Pack all that gpu/check.py needs on a machine with a card: build/gpu.tar.xz.

    python scripts/gpu/bundle.py [--architectures 90-real] [--python 3.12]

Needs nvcc, and cuBLAS from the toolkit or from the PyPI package nvidia-cublas beside this Python, but neither
a card nor a driver. The archive holds the package with its CUDA backend, velo-op-bench, upstream's
test-backend-ops on the patched tree, and stock llama-bench and llama-server. These two are unpatched but use
our CUDA backend, since a second one would make the archive too large: all its kernels except the operator's
are upstream's. The CPU's code runs on any CPU with AVX2. --python adds cffi and gguf for that Python on
Linux, for machines that lack these and cannot install them.

cuBLAS is not in it (hundreds of MB): the other machine has it with its toolkit or as a package.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ScriptError, run_main
from scripts.build._cmake import build_targets, cmake, copy_package, run_logged
from scripts.build.cuda import BUILD, LIBRARY, configure_cuda
from scripts.build.stock import build_stock
from scripts.gpu._machine import BUNDLE

TARGETS = ("velo", "_velo", "velo-lab", "velo-lab-gpu", "velo-op-bench", "test-backend-ops")
STOCK = ("llama-bench", "llama-server")
WHEELS = ("cffi", "gguf")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_MIB = 56
"""Uploads are often limited, and the checkout needs its share too."""


def make(
    bundle: Path, architectures: str, tree: Path | None, cublas: Path | None, python: str | None
) -> None:
    """Build everything and replace the folder by it."""
    configure_cuda(architectures, tree, cublas)
    build_targets(BUILD, TARGETS)
    part = bundle.with_name(f".{bundle.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    copy_package(part)
    install = [cmake(), "--install", str(BUILD), "--component", "pyvelo", "--prefix", str(part), "--strip"]
    run_logged(install, BUILD / "install.log")
    libraries = part / "pyvelo" / "native" / "lib"
    (libraries / "libvelo-lab-gpu.so").unlink()  # runs kernels on machines without a card
    copy_stripped([BUILD / "bin" / "test-backend-ops"], libraries)
    copy_stock(part / "stock", libraries / LIBRARY)
    if python is not None:
        add_wheels(part / "site", python)
    shutil.rmtree(bundle, ignore_errors=True)
    part.rename(bundle)


def copy_stock(to: Path, backend: Path) -> None:
    """Copy stock's programs and libraries, with a link to the one CUDA backend."""
    built = build_stock(STOCK, {"GGML_NATIVE": False, "STOCK_CUDA": (BUILD / "bin" / LIBRARY).as_posix()})
    copy_stripped([*(built / name for name in STOCK), *built.glob("lib*.so*")], to)
    (to / LIBRARY).symlink_to(Path("..") / backend.relative_to(to.parent))


def copy_stripped(files: Iterable[Path], to: Path) -> None:
    """Copy programs and libraries without their symbols.

    Raises: ScriptError if binutils is missing.
    """
    strip = shutil.which("strip")
    if strip is None:
        raise ScriptError("strip is needed to make programs small: install binutils")
    to.mkdir(parents=True, exist_ok=True)
    for file in files:
        if not file.is_symlink():
            shutil.copy2(file, to)
            subprocess.run([strip, str(to / file.name)], check=True)


def add_wheels(to: Path, python: str) -> None:
    """Unpack the packages for another Python."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [
        "--python-version",
        python,
        "--implementation",
        "cp",
        *platforms,
        "--target",
        str(to),
        *WHEELS,
    ]
    to.mkdir(parents=True)
    run_logged(command, BUILD / "wheels.log")


def pack(bundle: Path) -> Path:
    """Write the archive of the folder beside it; return its path."""
    archive = bundle.with_name(bundle.name + ".tar.xz")
    part = archive.with_name(f".{archive.name}.part")
    with tarfile.open(part, "w:xz") as tar:
        for path in sorted(bundle.iterdir()):
            tar.add(path, path.name, filter=lambda entry: None if "__pycache__" in entry.name else entry)
    part.replace(archive)
    return archive


def sizes(bundle: Path, archive: Path) -> list[tuple[str, int]]:
    """Return names and bytes, the largest files first and the archive last."""
    files = [path for path in bundle.rglob("*") if path.is_file() and not path.is_symlink()]
    files.sort(key=lambda path: -path.stat().st_size)
    largest = [(path.relative_to(bundle).as_posix(), path.stat().st_size) for path in files[:8]]
    whole = sum(path.stat().st_size for path in files)
    return [*largest, (f"{bundle.name}, all of it", whole), (archive.name, archive.stat().st_size)]


def main(argv: Sequence[str] | None = None) -> int:
    """Pack the bundle and print its size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architectures", default="90-real", help="as CMake names them (default: 90-real)")
    parser.add_argument("--tree", type=Path, help="a patched llama.cpp tree (default: made in the cache)")
    parser.add_argument("--cublas", type=Path, help="the folder of cuBLAS (default: searched for)")
    parser.add_argument("--python", help="such as 3.12: add cffi and gguf for it")
    parser.add_argument("--most", type=int, default=MOST_MIB, help="MiB that the archive may have")
    given = parser.parse_args(argv)
    if given.python is not None and not re.fullmatch(r"3\.\d+", given.python):
        raise ScriptError(f"--python {given.python}: give a version such as 3.12")
    for folder in filter(None, (given.tree, given.cublas)):
        if not folder.is_dir():
            raise ScriptError(f"there is no folder {folder}")
    begin = time.perf_counter()
    make(BUNDLE, given.architectures, given.tree, given.cublas, given.python)
    archive = pack(BUNDLE)
    for name, n_bytes in sizes(BUNDLE, archive):
        print(f"{n_bytes / 2**20:8.1f} MiB  {name}")
    print(f"carry {archive} ({time.perf_counter() - begin:.0f} s)")
    if archive.stat().st_size > given.most << 20:
        raise ScriptError(f"{archive.name} is larger than {given.most} MiB: name fewer --architectures")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
