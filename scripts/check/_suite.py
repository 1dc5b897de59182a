"""Test suites of other servers: a run of pytest with a plugin of ours, and its cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scripts._common import ROOT, ScriptError
from scripts._served import PROGRAM

if TYPE_CHECKING:
    import pytest

__all__ = ["OUTCOMES", "Case", "run_suite", "skip", "totals"]

OUTCOMES = ("passed", "skipped", "failed")


@dataclass(frozen=True)
class Case:
    """A case of a suite and how it ended: passed, skipped or failed."""

    file: str
    name: str
    outcome: str
    reason: str = ""


def run_suite(
    plugin: str, models: Mapping[str, Path], root: Path, report: Path, arguments: Sequence[str]
) -> list[Case]:
    """Run pytest in `root` with a plugin that finds `models` and our command in PYVELO_SUITE.

    Raises: ScriptError if it could not run.
    """
    files = {name: str(path) for name, path in models.items()}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-p", "no:randomly", "-p", plugin, "--rootdir", str(root), f"--junitxml={report}"]
    environment = {
        **os.environ,
        "PYVELO_SUITE": json.dumps({**files, "command": [sys.executable, "-c", PROGRAM]}),
        "PYTHONPATH": os.pathsep.join([str(root), str(ROOT)]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    status = subprocess.run([*command, *arguments], cwd=root, env=environment).returncode
    if status not in (0, 1) or not report.is_file():
        raise ScriptError("pytest could not run the suite: see above")
    return [_case(each) for each in ElementTree.parse(report).iter("testcase")]


def totals(cases: Sequence[Case]) -> Counter[str]:
    """Print how many cases ended how; return the numbers."""
    counts = Counter(case.outcome for case in cases)
    print(", ".join(f"{counts[each]} {each}" for each in OUTCOMES))
    return counts


def skip(item: pytest.Item, reasons: Mapping[str, str]) -> None:
    """Skip a case whose name begins as one of `reasons`, with the reason."""
    import pytest

    name = f"{item.path.stem}.{item.name}"
    for start, reason in reasons.items():
        if name.startswith(start):
            item.add_marker(pytest.mark.skip(reason=reason))


def _case(found: ElementTree.Element) -> Case:
    file = found.get("classname", "").split(".")[-1]
    for outcome, tags in {"failed": ("failure", "error"), "skipped": ("skipped",)}.items():
        for tag in tags:
            if (child := found.find(tag)) is not None:
                return Case(file, found.get("name", ""), outcome, child.get("message", ""))
    return Case(file, found.get("name", ""), "passed")
