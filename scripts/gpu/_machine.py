"""The machine that gpu/check.py runs on: programs, their libraries, and the bundle."""

from __future__ import annotations

import contextlib
import importlib.util
import lzma
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts._common import ROOT
from scripts.build._cmake import copy_package
from scripts.gpu._report import Missing, OutOfTime

__all__ = [
    "Done",
    "Places",
    "Run",
    "find_sanitizer",
    "last_line",
    "library_folders",
    "not_found",
    "run_program",
    "settle",
]

BUNDLE = ROOT / "build" / "gpu"
TOOLKITS = ("/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda")


@dataclass(frozen=True)
class Done:
    """Result of a program that has ended."""

    code: int
    out: str
    err: str


Run = Callable[[Sequence[str], float, Mapping[str, str]], Done]


def run_program(command: Sequence[str], seconds: float, extra: Mapping[str, str]) -> Done:
    """Run a program in the folder for temporary files; everything that it has started ends with it.

    In its own folder Python would find a package that hides the installed one. Raises OutOfTime with the
    output so far if it takes too long, Missing if it does not exist.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                list(command),
                env=os.environ | dict(extra),
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                cwd=tempfile.gettempdir(),
                start_new_session=True,
            )
        except OSError as error:
            raise Missing(f"{command[0]} cannot be run: {error.strerror}") from None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            late = f"{Path(command[0]).name} did not end within {seconds:.0f} s"
            raise OutOfTime(late, _text(out)) from None
        except BaseException:
            _end(process)
            raise
        return Done(code, _text(out), _text(err))


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(stream: object) -> str:
    stream.seek(0)  # type: ignore[attr-defined]
    return str(stream.read().decode("utf-8", "replace"))  # type: ignore[attr-defined]


def last_line(done: Done) -> str:
    """Return the last line of a program's output."""
    lines = [line for line in (done.err or done.out).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


# ---- bundle and builds ----


@dataclass(frozen=True)
class Places:
    """Folders of the package (None: the installed one), of the bundle, and of stock's programs.

    `nvidia` are folders of libraries that the loader does not find itself.
    """

    package: Path | None
    bundle: Path | None
    stock: Path | None
    nvidia: tuple[Path, ...] = ()

    @property
    def libraries(self) -> Path | None:
        """Folder of the package's native libraries."""
        if self.package is not None:
            return self.package / "pyvelo" / "native" / "lib"
        found = importlib.util.find_spec("pyvelo")
        return Path(found.origin).parent / "native" / "lib" if found and found.origin else None

    def program(self, name: str) -> Path | None:
        """Return a program: in the bundle, beside the package's libraries, or the newest below build/."""
        folders = [self.bundle, self.libraries, ROOT / "build"]
        for folder in filter(None, folders):
            paths = [path for path in folder.rglob(name) if path.is_file() and os.access(path, os.X_OK)]
            if paths:
                return max(paths, key=lambda path: path.stat().st_mtime)
        return None

    def library_path(self, first: Path | None = None) -> str:
        """Return the LD_LIBRARY_PATH of programs."""
        folders = [first, os.environ.get("LD_LIBRARY_PATH"), *self.nvidia]
        return os.pathsep.join(os.fspath(folder) for folder in folders if folder)

    def environment(self) -> dict[str, str]:
        """Return the variables with which programs find the package, its needs, and NVIDIA's libraries."""
        lacks = not all(importlib.util.find_spec(name) for name in ("_cffi_backend", "gguf"))
        site_folder = self.bundle / "site" if self.bundle and lacks else None
        folders = [self.package, os.environ.get("PYTHONPATH"), site_folder]
        python = os.pathsep.join(os.fspath(folder) for folder in folders if folder)
        return {"PYTHONPATH": python, "LD_LIBRARY_PATH": self.library_path()}


def settle(bundle: Path = BUNDLE, stock: Path | None = None) -> Places:
    """Unpack the bundle and return the places.

    Raises Missing if the archive cannot be unpacked.
    """
    archive = bundle.with_name(bundle.name + ".tar.xz")
    if archive.is_file() and not _is_newer(bundle, archive):
        unpack(archive, bundle)
    there = bundle if (bundle / "pyvelo" / "native" / "lib").is_dir() else None
    if there:
        copy_package(there)  # the checkout's may be newer
    package = there or (ROOT if _is_built(ROOT) else None)
    if stock is None and there and (there / "stock").is_dir():
        stock = there / "stock"
    return Places(package, there, stock)


def unpack(archive: Path, to: Path) -> None:
    """Replace the folder by the content of the archive, whole or not at all."""
    part = to.with_name(f".{to.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with tarfile.open(archive) as tar:
            if hasattr(tarfile, "data_filter"):
                tar.extractall(part, filter="data")
            else:
                tar.extractall(part)
    except (OSError, tarfile.TarError, lzma.LZMAError, EOFError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise Missing(f"{archive.name} cannot be unpacked: {error}") from None
    shutil.rmtree(to, ignore_errors=True)
    part.replace(to)
    os.utime(to)


def _is_newer(one: Path, other: Path) -> bool:
    return one.is_dir() and one.stat().st_mtime >= other.stat().st_mtime


def _is_built(checkout: Path) -> bool:
    native = checkout / "pyvelo" / "native"
    return any(native.glob("_velo*.so")) and (native / "lib").is_dir()


# ---- NVIDIA's libraries ----


def not_found(text: str) -> tuple[list[str], list[str]]:
    """Return the libraries and the symbols that ldd, or ldd -r, did not find; each once, sorted."""
    libraries = re.findall(r"^\s*(\S+) => not found", text, re.MULTILINE)
    symbols = re.findall(r"^\s*undefined symbol: (\S+)", text, re.MULTILINE)
    return sorted(set(libraries)), sorted(set(symbols))


def library_folders(
    run: Run, library: Path, places: Iterable[Path] | None = None
) -> tuple[list[Path], list[str]]:
    """Find the libraries that `library` lacks in the toolkit or beside Python.

    Returns their folders, and the names that are nowhere.
    """
    try:
        missing, _ = not_found(run(["ldd", os.fspath(library)], 30, {}).out)
    except (Missing, OutOfTime):
        return [], []
    found, nowhere = list[Path](), list[str]()
    for name in missing:
        folder = next(
            (f for f in (nvidia_folders() if places is None else places) if (f / name).exists()), None
        )
        if folder is None:
            nowhere.append(name)
        elif folder not in found:
            found.append(folder)
    return found, nowhere


def nvidia_folders() -> list[Path]:
    """Return the library folders of the CUDA toolkit and of NVIDIA's packages."""
    named = [os.environ[name] for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)]
    toolkits = [Path(path) for path in named]
    for pattern in TOOLKITS:
        toolkits += sorted(Path("/").glob(pattern.lstrip("/")), reverse=True)
    folders = [
        toolkit / part for toolkit in toolkits for part in ("lib64", "lib", "targets/x86_64-linux/lib")
    ]
    packages = {
        *sys.path,
        *site.getsitepackages(),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
    }
    for package in sorted(filter(None, packages)):
        folders += sorted(Path(package, "nvidia").glob("*/lib"))
    return folders


def find_sanitizer() -> Path | None:
    """Return the path of compute-sanitizer: in PATH or in a toolkit."""
    on_path = shutil.which("compute-sanitizer")
    if on_path:
        return Path(on_path)
    for folder in nvidia_folders():
        for path in (
            folder.parent / "bin" / "compute-sanitizer",
            folder.parent / "compute-sanitizer" / "compute-sanitizer",
        ):
            if os.access(path, os.X_OK):
                return path
    return None
