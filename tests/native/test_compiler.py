"""A build without a compiler ends with a sentence."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "named", [{}, {"CC": "gcc -pthread", "CXX": "g++ -pthread"}]
)  # pip's build names Python's
@pytest.mark.skipif(sys.platform == "win32", reason="compilers of Windows are not found by PATH")
def test_a_missing_compiler_is_named_with_its_packages(tmp_path: Path, named: dict[str, str]) -> None:
    cmake = shutil.which("cmake")
    assert cmake is not None
    done = subprocess.run(
        [cmake, "-S", str(ROOT / "native"), "-B", str(tmp_path / "build"), "-DSKBUILD=2"],
        env={"PATH": str(tmp_path), **named},
        capture_output=True,
        text=True,
        check=False,
    )
    said = " ".join(done.stderr.split())
    assert done.returncode != 0
    assert "this machine has no C++ compiler. Install one (Debian and Ubuntu: apt install g++;" in said
    assert "scripts/build/wheels.py" in said
    assert "CMAKE_CXX_COMPILER" not in said  # CMake's own report
    assert "could not find" not in said.lower()
