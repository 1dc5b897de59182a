"""Fixtures: the two builds of the contiguous path, the models of all three paths, and an event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import pyvelo
from pyvelo import AsyncLLM
from scripts.models import make

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
    """The untouched upstream, built once by scripts/build/stock.py; VELO_STOCK_BIN names another build."""
    folder = os.environ.get("VELO_STOCK_BIN")
    if folder is None:
        command = [sys.executable, str(ROOT / "scripts/build/stock.py"), "--libs-only"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        folder = done.stdout.splitlines()[-1]
    return Path(folder) / f"libvelo-contiguous{SUFFIX}"


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("patched_library", marks=pytest.mark.laboratory),
        pytest.param("stock_library", marks=pytest.mark.stock),
    ],
)
def contiguous_build(request: pytest.FixtureRequest) -> Path:
    """The contiguous path of the patched tree; with the marker "stock", the unpatched one, too."""
    library: Path = request.getfixturevalue(request.param)
    return library


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """make_model("--arch", "llama", ...): the path of a model with these arguments, made once a session."""
    made: dict[tuple[str, ...], Path] = {}
    folder = tmp_path_factory.mktemp("models")

    def make_once(*arguments: str) -> Path:
        if arguments not in made:
            path = folder / f"model-{len(made)}.gguf"
            assert make.main([*arguments, str(path)]) == 0
            made[arguments] = path
        return made[arguments]

    return make_once


@pytest.fixture
def run(tiny_model_f32: Path) -> Callable[..., None]:
    """Runs a coroutine function with an engine that must be idle in the end."""

    def run_it(body: Callable[[AsyncLLM], Coroutine[Any, Any, None]], **settings: Any) -> None:
        async def around() -> None:
            settings.setdefault("n_ctx", 512)
            async with AsyncLLM(tiny_model_f32, deterministic=True, n_threads=1, **settings) as llm:
                await body(llm)
                gc.collect()
                stats = await llm.stats()
                assert (stats.running, stats.waiting, stats.idle, stats.blocks_used) == (0, 0, 0, 0)

        asyncio.run(asyncio.wait_for(around(), 120))

    return run_it
