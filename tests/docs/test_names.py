"""Names in the pages exist: our arguments in the tables, files and headings of links."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from pyvelo import LLM, BeamSearchParams, SamplingParams
from pyvelo.chat.conversation import ChatOptions
from pyvelo.config import EngineConfig

from .test_snippets import PAGES, ROOT

OURS = {field.name for kind in (EngineConfig, SamplingParams, BeamSearchParams) for field in fields(kind)}
OURS |= set(ChatOptions.__annotations__)
NAME = re.compile(r"\b([a-z_]+)=")
COMPARISONS = [page for page in PAGES if page.name.startswith("FROM_")]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def tables(page: Path) -> list[list[list[str]]]:
    """Return the cells of each table, its heading first."""
    found: list[list[list[str]]] = [[]]
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("|"):
            found[-1].append(cells(line))
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


@pytest.mark.parametrize("page", COMPARISONS, ids=lambda page: page.name)
def test_arguments_in_our_column_exist(page: Path) -> None:
    named: set[str] = set()
    for heading, line, *rows in tables(page):
        assert set(line[0]) == {"-"}
        assert all(len(row) == len(heading) == 2 for row in rows), heading
        named |= {
            name for row in rows for code in re.findall("`[^`]*`", row[1]) for name in NAME.findall(code)
        }
    # LLM.embed has these two for itself
    assert named - {"pooling", "normalize"} <= OURS
    assert len(named) > 20


def names(cell: str) -> set[str]:
    """Return the names of arguments in a cell."""
    return {name for code in re.findall("`[^`]*`", cell) for name in NAME.findall(code)}


@pytest.mark.parametrize("page", COMPARISONS, ids=lambda page: page.name)
def test_what_is_not_there_is_not_there(page: Path) -> None:
    missing = [row[0] for table in tables(page) for row in table if row[1].startswith("not there")]
    assert missing
    assert set().union(*map(names, missing)) & OURS == set()


def test_each_setting_is_in_the_readme_or_a_comparison() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in [*COMPARISONS, ROOT / "README.md"])
    settings = set(inspect.signature(LLM.__init__).parameters) - {"self", "model"}
    settings |= {field.name for field in fields(SamplingParams)}
    assert {name for name in settings if f"`{name}=" not in text} == set()


def slug(heading: str) -> str:
    """Return GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in map(slug, headings), target
