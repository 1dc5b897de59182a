"""Includes of the native files go one way: a header and the source beside it count as one unit."""

from __future__ import annotations

import re
from pathlib import Path

from .test_imports import circle_in

NATIVE = Path(__file__).resolve().parents[1] / "native"
SUFFIXES = {".h", ".hpp", ".cuh", ".inc", ".c", ".cpp", ".cu"}
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)


def unit_of(path: Path) -> str:
    """Return a file's path below native/ without its suffix."""
    return path.relative_to(NATIVE).with_suffix("").as_posix()


def included(path: Path, files: dict[str, list[Path]]) -> set[Path]:
    """Return our files that a file includes: the one beside it first, as compilers look."""
    found = set()
    for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
        near = (path.parent / name).resolve()
        others = [near] if near.exists() else files.get(Path(name).name, [])
        assert len(others) <= 1, f"{path} includes {name}, of which there are {len(others)}"
        found.update(others)
    return found


def units() -> dict[str, set[str]]:
    """Return each unit with the units that its files include."""
    paths = [path for path in NATIVE.rglob("*") if path.suffix in SUFFIXES]
    files: dict[str, list[Path]] = {}
    for path in paths:
        files.setdefault(path.name, []).append(path)
    graph: dict[str, set[str]] = {unit_of(path): set() for path in paths}
    for path in paths:
        graph[unit_of(path)] |= {unit_of(other) for other in included(path, files)} - {unit_of(path)}
    return graph


def test_no_circle_of_includes() -> None:
    graph = units()
    assert "ops/paged-attn" in graph["ops/cpu/attention/paged-problem"]
    assert circle_in(graph) == []
