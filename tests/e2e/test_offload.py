"""Engines with layers on devices: as many as asked for or as fit, one pool on both sides, the same tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.laboratory  # its device


@pytest.mark.parametrize("what", ["1", "2", "auto"])
def test_offload(tiny_model_f32: Path, what: str) -> None:
    done = subprocess.run(
        [sys.executable, os.fspath(HERE / "offload.py"), os.fspath(tiny_model_f32), what],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
