"""The folder of upstream's templates and vocabularies."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def models_folder() -> Path:
    """Return upstream's folder `models`, fetched if it is not cached yet."""
    command = [sys.executable, str(ROOT / "scripts/upstream/fetch.py")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.splitlines()[-1]) / "models"
