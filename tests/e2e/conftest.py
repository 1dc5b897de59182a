"""Where the two builds of the contiguous path are, and the models that all three paths run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import pyvelo

ROOT = Path(__file__).resolve().parents[2]
SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")

MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def patched_library() -> Path:
    """Stock code paths inside the patched tree, as installed with the tests."""
    library = Path(pyvelo.__file__).parent / "native" / "lib" / f"libvelo-lab{SUFFIX}"
    if not library.exists():
        pytest.fail(f"{library} is missing: install with -C cmake.define.PYVELO_BUILD_TESTS=ON")
    return library


@pytest.fixture(scope="session")
def stock_library() -> Path:
    """The untouched upstream, built once by scripts/build_stock.py; VELO_STOCK_BIN names another build."""
    folder = os.environ.get("VELO_STOCK_BIN")
    if folder is None:
        command = [sys.executable, str(ROOT / "scripts" / "build_stock.py"), "--libs-only"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        folder = done.stdout.splitlines()[-1]
    return Path(folder) / f"libvelo-contiguous{SUFFIX}"


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """make_model("--arch", "llama", ...): the path of a model with these arguments, made once a session."""
    made: dict[tuple[str, ...], Path] = {}
    folder = tmp_path_factory.mktemp("models")

    def make(*arguments: str) -> Path:
        if arguments not in made:
            path = folder / f"model-{len(made)}.gguf"
            subprocess.run(
                [sys.executable, str(ROOT / "scripts" / "make_model.py"), *arguments, str(path)],
                check=True, capture_output=True,
            )  # fmt: skip
            made[arguments] = path
        return made[arguments]

    return make
