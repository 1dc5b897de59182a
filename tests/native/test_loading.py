"""A compiled module that cannot be loaded is an error in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyvelo.errors import LibraryError, VeloError
from pyvelo.native._ffi import why_not_loaded
from tests.copies import copy_package, run_copy


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("_velo.abi3.so", "_velo"),
        ("lib/libvelo-llama.so", "libvelo-llama.so: cannot open shared object file"),
    ],
)
def test_a_missing_library(tmp_path: Path, missing: str, said: str) -> None:
    (copy_package(tmp_path, "*lab*") / "native" / missing).unlink()
    done = run_copy(tmp_path, ["-m", "pyvelo.cli", "run", "model.gguf", "-p", "x"])
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("pyvelo: the compiled part of pyvelo cannot be loaded (")
    assert said in done.stderr
    assert "install the package with pip" in done.stderr
    done = run_copy(tmp_path, ["-c", "from pyvelo import LLM"])
    assert done.stderr.splitlines()[-1].startswith("pyvelo.errors.LibraryError: the compiled part")
    assert done.stderr.count("Traceback") == 1


def test_a_checkout_that_hides_the_installed_package(tmp_path: Path) -> None:
    error = ImportError("No module named 'pyvelo.native._velo'")
    assert "install the package with pip, or" in why_not_loaded(error, tmp_path)
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "CMakeLists.txt").touch()
    assert why_not_loaded(error, tmp_path).endswith("from another folder, or install with pip install -e")


def test_a_missing_library_of_nvidia_has_another_remedy() -> None:
    said = "libcublas.so.13: cannot open shared object file: No such file or directory"
    assert why_not_loaded(ImportError(said)) == (
        f"the compiled part of pyvelo cannot be loaded ({said}): install NVIDIA's CUDA toolkit, or "
        "`pip install nvidia-cublas` of the CUDA it was built with"
    )
    assert issubclass(LibraryError, VeloError)
    assert issubclass(LibraryError, ImportError)
