"""Cases of a report of pytest."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Case", "cases_of"]


@dataclass(frozen=True)
class Case:
    """A case of a suite and how it ended: passed, skipped or failed."""

    file: str
    name: str
    outcome: str
    reason: str = ""


def cases_of(report: Path) -> list[Case]:
    """Return the cases of a report in JUnit's format."""
    return [_case(each) for each in ElementTree.parse(report).iter("testcase")]


def _case(found: ElementTree.Element) -> Case:
    file = found.get("classname", "").split(".")[-1]
    for outcome, tags in {"failed": ("failure", "error"), "skipped": ("skipped",)}.items():
        for tag in tags:
            if (child := found.find(tag)) is not None:
                return Case(file, found.get("name", ""), outcome, child.get("message", ""))
    return Case(file, found.get("name", ""), "passed")
