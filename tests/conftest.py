"""The tiny models that all tests share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _make(path: Path, *options: str) -> Path:
    script = ROOT / "scripts/make_model.py"
    subprocess.run(
        [sys.executable, str(script), "tiny", *options, str(path)], check=True, stdout=subprocess.DEVNULL
    )
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, in the preset's own type."""
    return _make(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_model_f32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with f32 weights, for exact comparisons."""
    return _make(tmp_path_factory.mktemp("model") / "tiny-f32.gguf", "--type", "f32")
