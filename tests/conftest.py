"""The tiny models that all tests share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# before OpenMP and NumPy read them: threads would spin for each other, beside the tests of other processes
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pyvelo
from scripts.models import make
from tests import lab_device

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure() -> None:
    lab_device.from_environment()
    hypothesis.settings.register_profile("tests", deadline=None)  # no test depends on time
    hypothesis.settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "patched_library" in fixtures:
            item.add_marker("laboratory")
        if "stock_library" in fixtures:
            item.add_marker("stock")
        if "packed_model" in fixtures:
            item.add_marker("packing")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # garbage collections do not visit the tests themselves


@pytest.fixture(scope="session", autouse=True)
def _away_from_the_checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let child processes import the package that the tests import, and the checkout's `tests` and `scripts`.

    Python would prefer the current folder's package.
    """
    with pytest.MonkeyPatch.context() as patch:
        folders = os.pathsep.join([os.fspath(Path(pyvelo.__file__).parents[1]), os.fspath(ROOT)])
        patch.setenv("PYTHONPATH", folders, prepend=os.pathsep)
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        yield


@pytest.fixture
def sigint() -> Iterator[None]:
    """Restore Python's own handler for SIGINT, for any caller of the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _make(path: Path, *options: str) -> Path:
    assert make.main(["tiny", *options, str(path)]) == 0
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small random model, in the preset's own type."""
    return _make(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_model_f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same model with f32 weights, for exact comparisons."""
    return _make(tmp_path_factory.mktemp("model") / "tiny-f32.gguf", "--type", "f32")


@pytest.fixture(scope="session")
def packed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of some MB, most of it in a type with a faster layout for AMX, AVX2 and NEON."""
    shape = ("--embd", "512", "--ffn", "1024", "--layers", "8", "--untied")
    return _make(tmp_path_factory.mktemp("model") / "packed.gguf", *shape, "--type", "q4_0")


@pytest.fixture(scope="session")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose answers may be so long that they do not end during a test."""
    return _make(tmp_path_factory.mktemp("model") / "endless.gguf", "--ctx", "65536")
