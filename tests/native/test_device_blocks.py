"""Copies and swaps of blocks with some layers on a device whose memory the host cannot access."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.laboratory  # its device


@pytest.mark.parametrize(("n_gpu_layers", "layers_there"), [(0, 0), (1, 0), (2, 1), (3, 2), (-1, 2)])
def test_blocks_on_host_and_device(tiny_model_f32: Path, n_gpu_layers: int, layers_there: int) -> None:
    script = [sys.executable, os.fspath(HERE / "device_blocks.py")]
    done = subprocess.run(
        [*script, os.fspath(tiny_model_f32), str(n_gpu_layers), str(layers_there)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
