"""Search of the GPU check on a machine: the archive, programs, libraries."""

from __future__ import annotations

import io
import os
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from scripts.build._cmake import copy_package
from scripts.gpu import _machine
from scripts.gpu._machine import (
    Done,
    Places,
    find_sanitizer,
    library_folders,
    not_found,
    nvidia_folders,
    run_program,
    settle,
)
from scripts.gpu._report import Missing, OutOfTime
from scripts.gpu.bundle import pack, sizes

# ---- programs ----


def test_programs_that_are_not_there() -> None:
    with pytest.raises(Missing, match="cannot be run: No such file"):
        run_program(["/nonexistent/program"], 1, {})


def test_programs_get_variables_and_no_input(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['A'], sys.stdin.read() == '', os.path.realpath('.'))"
    done = run_program([sys.executable, "-c", code], 30, {"A": "7"})
    assert done.out.split()[:2] == ["7", "True"]
    assert not Path(done.out.split()[2], "pyvelo").exists(), "no package is found beside it"
    done = run_program([sys.executable, "-c", "import sys; print('x' * 300000); sys.exit('no')"], 30, {})
    assert (done.code, len(done.out), done.err) == (1, 300001, "no\n")


def test_what_a_late_program_printed_is_kept_and_what_it_started_ends(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    with pytest.raises(OutOfTime, match="did not end within 2 s") as late:
        run_program([sys.executable, "-c", code], 2, {})
    child = int(late.value.out)
    for _ in range(200):
        if not _lives(child):
            return
        time.sleep(0.05)
    pytest.fail("the child lives on")


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


# ---- what was carried ----


def bundle_at(folder: Path) -> Path:
    """A bundle, small."""
    (folder / "pyvelo" / "native" / "lib").mkdir(parents=True)
    (folder / "stock").mkdir()
    program = folder / "pyvelo" / "native" / "lib" / "velo-op-bench"
    program.write_text("#!/bin/sh\necho hi\n")
    program.chmod(0o755)
    (folder / "stock" / "libvelo-ggml-cuda.so").symlink_to("../pyvelo/native/lib/libvelo-ggml-cuda.so")
    return folder


def test_what_is_packed_is_found_again(tmp_path: Path) -> None:
    archive = pack(bundle_at(tmp_path / "here" / "gpu"))
    assert sizes(tmp_path / "here" / "gpu", archive)[-1] == ("gpu.tar.xz", archive.stat().st_size)
    there = tmp_path / "there"
    there.mkdir()
    carried = archive.rename(there / "gpu.tar.xz")
    places = settle(there / "gpu")
    assert (places.package, places.bundle, places.stock) == (
        there / "gpu",
        there / "gpu",
        there / "gpu/stock",
    )
    program = places.program("velo-op-bench")
    assert program is not None
    assert run_program([os.fspath(program)], 10, {}).out == "hi\n"
    assert (
        os.readlink(there / "gpu/stock/libvelo-ggml-cuda.so") == "../pyvelo/native/lib/libvelo-ggml-cuda.so"
    )
    assert (there / "gpu/pyvelo/llm.py").exists(), "the checkout's Python is taken"
    (there / "gpu" / "mine").touch()
    settle(there / "gpu")
    assert (there / "gpu" / "mine").exists(), "it is unpacked once"
    os.utime(carried, (time.time() + 60, time.time() + 60))
    settle(there / "gpu")
    assert not (there / "gpu" / "mine").exists(), "a newer archive replaces it"


def test_a_truncated_archive_is_reported(tmp_path: Path) -> None:
    archive = pack(bundle_at(tmp_path / "gpu"))
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    with pytest.raises(Missing, match=r"gpu\.tar\.xz cannot be unpacked"):
        settle(_moved(archive, tmp_path / "cut"))
    assert not (tmp_path / "cut" / "gpu").exists()


def _moved(archive: Path, folder: Path) -> Path:
    folder.mkdir()
    archive.rename(folder / archive.name)
    return folder / "gpu"


def test_an_archive_cannot_write_elsewhere(tmp_path: Path) -> None:
    if not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python unpacks without a filter")
    with tarfile.open(tmp_path / "gpu.tar.xz", "w:xz") as tar:
        entry = tarfile.TarInfo("../escaped")
        entry.size = 1
        tar.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(Missing, match="cannot be unpacked"):
        settle(tmp_path / "gpu")
    assert not (tmp_path / "escaped").exists()


def test_the_package_is_copied_without_what_was_built(tmp_path: Path) -> None:
    copy_package(tmp_path)
    found = {path.name for path in (tmp_path / "pyvelo").rglob("*")}
    assert {"__init__.py", "_ffi.py", "demo.gguf"} <= found
    assert not {"lib", "__pycache__"} & found
    assert not [name for name in found if name.endswith(".so")]


def test_what_is_started_finds_the_carried_package_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "given")
    monkeypatch.setenv("LD_LIBRARY_PATH", "libs")
    places = Places(tmp_path, tmp_path, tmp_path / "stock", (Path("/nv"),))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert places.environment() == {
        "PYTHONPATH": f"{tmp_path}:given:{tmp_path}/site",
        "LD_LIBRARY_PATH": "libs:/nv",
    }
    assert places.library_path(places.stock) == f"{tmp_path}/stock:libs:/nv"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert places.environment()["PYTHONPATH"] == f"{tmp_path}:given", "what is installed here is taken"


# ---- NVIDIA's ----

LDD = """\tlinux-vdso.so.1 (0x00007ffd)
\tlibvelo-ggml-base.so => /x/libvelo-ggml-base.so (0x00007f)
\tlibcublas.so.13 => not found
\tlibcudart.so.13 => not found
\tlibcublas.so.13 => not found
"""


def test_libraries_are_looked_for_where_nvidia_puts_them(tmp_path: Path) -> None:
    def run(command: Sequence[str], seconds: float, extra: Mapping[str, str]) -> Done:
        return Done(0, LDD, "")

    assert not_found(LDD) == (["libcublas.so.13", "libcudart.so.13"], [])
    folders = [tmp_path / "cu13", tmp_path / "cublas"]
    for folder in folders:
        folder.mkdir()
    (folders[1] / "libcublas.so.13").touch()
    assert library_folders(run, tmp_path / "x.so", folders) == ([folders[1]], ["libcudart.so.13"])
    (folders[0] / "libcudart.so.13").touch()
    assert library_folders(run, tmp_path / "x.so", folders) == ([folders[1], folders[0]], [])


def test_toolkits_and_packages_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    sanitizer = tmp_path / "toolkit" / "compute-sanitizer" / "compute-sanitizer"
    sanitizer.parent.mkdir(parents=True)
    sanitizer.touch(0o755)
    monkeypatch.syspath_prepend(os.fspath(tmp_path))
    monkeypatch.setenv("CUDA_HOME", os.fspath(tmp_path / "toolkit"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert tmp_path / "nvidia/cu13/lib" in nvidia_folders()
    assert nvidia_folders()[0] == tmp_path / "toolkit" / "lib64"
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert find_sanitizer() == sanitizer
    sanitizer.chmod(0o644)
    monkeypatch.setattr(_machine, "TOOLKITS", ())
    assert find_sanitizer() is None
