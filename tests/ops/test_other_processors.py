"""The kernels that this processor would not choose, as far as it can run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_without_tile_registers() -> None:
    """Numbers, bits and products once more, in a process that does not ask for AMX."""
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(str(here / f"test_{name}.py") for name in ("numbers", "bits", "products"))],
        env={**os.environ, "PYVELO_NO_AMX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
