"""Copies of the package, in which something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyvelo


def copy_package(folder: Path, *without: str) -> Path:
    """Copies the package into a folder without files of these patterns, and returns where it is."""
    package = folder / "pyvelo"
    patterns = shutil.ignore_patterns("__pycache__", *without)
    shutil.copytree(Path(pyvelo.__file__).parent, package, ignore=patterns)
    return package


def run_copy(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs Python with the copy in a folder; without `site`, which would import an editable install."""
    return subprocess.run(
        [sys.executable, "-S", *command],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.fspath(folder), *filter(None, sys.path)])},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
