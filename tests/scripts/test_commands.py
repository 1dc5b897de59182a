"""Every command of scripts/ is listed in its README, and starts from any folder."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

import pyvelo
from scripts._common import ROOT
from tests import forks

SCRIPTS = ROOT / "scripts"
COMMANDS = sorted(
    path.relative_to(SCRIPTS).as_posix() for path in SCRIPTS.glob("*/*.py") if path.name[0] != "_"
)


def test_the_readme_lists_each_command_and_no_other() -> None:
    text = (SCRIPTS / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE) == COMMANDS


def test_only_helpers_lie_outside_the_folders() -> None:
    assert [path.name for path in SCRIPTS.glob("*.py") if path.name[0] != "_"] == []


def test_no_name_hides_a_module_that_others_import() -> None:
    """The folder of a command that runs comes first in its sys.path."""
    files = [path for path in SCRIPTS.glob("*/*.py") if path.parent.name != "__pycache__"]
    assert [path for path in files if path.stem in sys.stdlib_module_names] == []
    found = [(path, importlib.util.find_spec(path.stem)) for path in files]
    assert [path for path, spec in found if spec is not None and spec.origin is not None] == []


ANEW = """
import os, runpy, sys
for name in ("pyvelo", "scripts", "tests"):
    sys.modules.pop(name, None)  # the command must find them again
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="some commands need modules of POSIX")
def test_each_command_starts_outside_the_checkout(tmp_path: Path) -> None:
    package = Path(pyvelo.__file__).parents[1]
    # the root itself must not be there: a command has to find it
    environment = os.environ | {"PYTHONPATH": "" if package == ROOT else os.fspath(package)}

    def start(name: str) -> str:
        command = [forks.PYTHON, "-c", ANEW, os.fspath(SCRIPTS / name), "--help"]
        done = forks.run(command, cwd=tmp_path, env=environment, text=True)
        good = done.returncode == 0 and done.stdout.startswith("usage: ") and not done.stderr
        return "" if good else f"{name}: {done.returncode} {done.stdout[:200]} {done.stderr[-500:]}"

    assert [failure for failure in map(start, COMMANDS) if failure] == []
