"""Imports of the package's files go one way, as docs/ARCHITECTURE.md draws them, and never in a circle."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import pyvelo

PACKAGE = Path(pyvelo.__file__).parent
BASE = {
    "_version",
    "cpu",
    "errors",
    "finalizer",
    "hosts",
    "keywords",
    "lazy",
    "other_names",
    "private_files",
    "threads",
}
"""What everything may import."""

FACES = {"llm", "async_llm", "session", "beam_search", "demo", ""}
MAY_IMPORT = {
    "kv": set(),
    "native": set(),
    "config": {"kv", "kv_events", "kv_store"},
    "kv_events": set(),
    "kv_store": set(),
    "sampling": set(),
    "outputs": set(),
    "models": {"kv"},
    "chat": {"native", "sampling", "outputs"},
    "grammar": {"native", "sampling"},
    "memory": {"native", "kv", "models", "config"},
    "engine_view": {"engine", "kv", "native", "outputs"},
    "store": {"kv", "kv_store", "config", "models", "sampling"},
    "events": {"kv", "kv_events", "config"},
    "engine": {"native", "kv", "models", "chat", "grammar", "memory", "config", "sampling", "outputs"}
    | {"store", "events"},
    "trace": {"kv", "engine"},
    "simulate": {"kv", "engine", "memory", "trace", "sampling"},
    "server": {"engine", "kv", "chat", "native", "trace", "config", "sampling", "outputs"}
    | {"session", "store"},
    "batch": {"server", "config"},
    "cluster": {"server", "engine", "kv", "chat", "native", "models", "memory", "config", "demo"} | {"cli"},
}
"""Folders and files that a folder's files may import, apart from BASE and their own folder."""


def module_of(path: Path) -> str:
    """Return the name of a file's module without "pyvelo."; the package itself is ""."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Return the modules of pyvelo that a file names in imports, also in late imports and for types."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(PACKAGE.parent).parts[:-1]
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            start = ".".join(part for part in (base, node.module or "") if part)
            names = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "pyvelo":
                parts = name.split(".")[1:]
                while ".".join(parts) not in modules:  # the last ones name what is inside
                    parts.pop()
                found.add(".".join(parts))
    return found


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    files = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    assert {"", "llm", "engine.step", "kv.manager", "native", "native._ffi"} <= set(files)
    # the compiled module and its stub have no file of Python
    modules = set(files) | {"native._velo"}
    return {name: imports_of(path, modules) - {name, "native._velo"} for name, path in files.items()}


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """Return modules of which each imports the next and the last the first; [] if there are none."""
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> list[str]:
        if name in way:
            return way[way.index(name) :]
        if name not in done:
            for other in sorted(imports[name]):
                if circle := visit(other, [*way, name]):
                    return circle
            done.add(name)
        return []

    return next((circle for name in imports if (circle := visit(name, []))), [])


def wrong_ways(imports: dict[str, set[str]]) -> list[str]:
    """Return the imports that MAY_IMPORT does not allow."""
    wrong = []
    for name, others in sorted(imports.items()):
        top = name.split(".")[0]
        for other in sorted(others):
            target = other.split(".")[0]
            free = top in ("cli", "__main__") or (top in FACES and target != "cli")
            if not free and target not in {top, *BASE, *MAY_IMPORT.get(top, ())}:
                wrong.append(f"{name} imports {other}")
    return wrong


def test_no_circle(imports: dict[str, set[str]]) -> None:
    assert circle_in(imports) == []


def test_one_way(imports: dict[str, set[str]]) -> None:
    assert wrong_ways(imports) == []


def test_each_folder_has_a_rule(imports: dict[str, set[str]]) -> None:
    assert {name.split(".")[0] for name in imports} == {*MAY_IMPORT, *FACES, *BASE, "cli", "__main__"}


def test_what_breaks_the_rules_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert wrong_ways({"kv.pool": {"errors", "kv.prefix", "engine.step"}, "llm": {"engine.step"}}) == [
        "kv.pool imports engine.step"
    ]


def test_the_places_in_the_architecture_page_exist() -> None:
    root = Path(__file__).resolve().parents[1]
    page = (root / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
    places = re.findall(r"`(\w+)\.(\w+)` in `(pyvelo/[\w/]+\.py)`", page)
    assert len(places) >= 5
    for owner, method, path in places:
        tree = ast.parse((root / path).read_text(encoding="utf-8"))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
        methods = {node.name for cls in classes for node in cls.body if isinstance(node, ast.FunctionDef)}
        assert method in methods, f"{path} has no {owner}.{method}"
