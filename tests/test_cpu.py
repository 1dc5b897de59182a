"""A library for another processor is refused before any of it runs."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from native.cmake.cpu_flags import NAMES, compiled_flags, is_native
from pyvelo.cpu import NEEDED, check_cpu, missing_flags
from pyvelo.errors import LibraryError
from tests.copies import copy_package, run_copy

X86 = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu sse2 pni avx avx2 fma\nbugs\t\t: none\n\n" * 2
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(
    ("needed", "cpuinfo", "missing"),
    [
        ("avx\navx2\nfma\n", X86, []),
        ("avx2\navx512f\nfma\navx_vnni\n", X86, ["avx512f", "avx_vnni"]),
        ("av\n", X86, ["av"]),  # whole names are compared
        ("asimddp\n", ARM, []),
        ("asimddp\nsve\n", ARM, ["sve"]),
        ("", X86, []),
        ("avx2\n", "processor\t: 0\n", []),  # unknown
        ("avx2\n", "", []),
    ],
)
def test_what_a_processor_lacks(needed: str, cpuinfo: str, missing: list[str]) -> None:
    assert missing_flags(needed, cpuinfo.splitlines(keepends=True)) == missing


def test_files_that_are_missing(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("avx9\n")
    check_cpu(tmp_path / "no", there)
    check_cpu(there, tmp_path / "no")
    (tmp_path / "cpuinfo").write_text(X86)
    with pytest.raises(LibraryError, match="this one lacks avx9"):
        check_cpu(there, tmp_path / "cpuinfo")


@pytest.mark.skipif(sys.platform != "linux", reason="the build writes the list on Linux")
def test_this_build_has_a_list_that_this_processor_meets() -> None:
    names = NEEDED.read_text(encoding="ascii").split()
    assert set(names) <= set(NAMES.values())
    check_cpu()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/cpuinfo is Linux's")
@pytest.mark.parametrize("command", [["-m", "pyvelo.cli", "run", "hi"], ["-c", "import pyvelo; pyvelo.LLM"]])
def test_a_package_for_another_processor(tmp_path: Path, command: list[str]) -> None:
    libraries = copy_package(tmp_path, "*.so") / "native" / "lib"
    (libraries / NEEDED.name).write_text("avx2\navx9\nasimd9\n")
    done = run_copy(tmp_path, command)
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert "built for another processor: this one lacks " in last
    assert "avx9, asimd9" in last
    assert "PYVELO_PORTABLE=ON" in last
    assert ("Traceback" in done.stderr) is (command[0] == "-c")


def test_the_list_of_a_compiler() -> None:
    macros = "#define __AVX2__ 1\n#define __FMA__ 1\n#define __SSE2__ 1\n#define NOT__AVX512F__ 1\n"
    assert compiled_flags(macros) == ["avx2", "fma"]
    assert compiled_flags("") == []
    assert is_native(["-O3", "-march=native"])
    assert is_native(["-mcpu=native+dotprod"])
    assert not is_native(["-mavx2", "-mfma"])


PROJECT = """
cmake_minimum_required(VERSION 3.26)
project(try LANGUAGES CXX)
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
file(WRITE ${CMAKE_BINARY_DIR}/x.cpp "int x;")
add_library(ggml-cpu OBJECT ${CMAKE_BINARY_DIR}/x.cpp)
target_compile_options(ggml-cpu PRIVATE ${FLAGS})
include(${NATIVE}/cmake/CpuFlags.cmake)
get_target_property(_defined ggml-cpu COMPILE_DEFINITIONS)
file(WRITE ${CMAKE_BINARY_DIR}/defined.txt "${_defined}")
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="flags of x86 on Linux")
def test_a_kept_build_folder_compiles_anew_for_another_processor(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    native = Path(__file__).parents[1] / "native"

    def configure(*options: str) -> tuple[list[str], str]:
        command = ["cmake", "-S", ".", "-B", "build", f"-DNATIVE={native}", *options]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        build = tmp_path / "build"
        return (build / "cpu-flags.txt").read_text().split(), (build / "defined.txt").read_text()

    old, for_old = configure("-DFLAGS=-mavx2")
    assert {"avx", "avx2"} <= set(old)
    assert not {"fma", "avx512f"} & set(old)
    assert configure("-DFLAGS=-mavx2") == (old, for_old)
    new, for_new = configure("-DFLAGS=-mavx512f")
    assert "avx512f" in new
    assert for_new != for_old
    assert for_new.startswith("PYVELO_COMPILED_FOR_")
    assert configure("-DFLAGS=-mavx2", "-DPYVELO_PORTABLE=ON")[0] == []
