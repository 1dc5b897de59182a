"""Hooks of mkdocs: pages of the site that are no files of docs/, and links to them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "index.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "scripts.md": "scripts/README.md",
}
"""Pages of the site, and their files outside docs/."""
LICENCES = "LICENSES/upstream.txt"
ELSEWHERE = {
    "](examples)": "](examples.md)",
    "](LICENSES)": f"]({LICENCES})",
    "](scripts/README.md": "](scripts.md",
    "](README.md": "](index.md",
}
"""Links of the checkout that have another name in the site."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root, the examples, the reference and the licences."""
    made = {name: (ROOT / source).read_text(encoding="utf-8") for name, source in PAGES.items()}
    made |= {"examples.md": examples(), "api.md": reference()}
    made |= {LICENCES: (ROOT / LICENCES).read_text(encoding="utf-8")}
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    for script in (ROOT / "examples").rglob("*.*"):
        if script.suffix not in (".py", ".conf", ".cfg", ".yaml"):
            continue
        name = script.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, content=script.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links lead to the pages of the site, whose files lie in one folder."""
    markdown = re.sub(r"\]\((?:docs|\.\.)/", "](", markdown)
    for link, target in ELSEWHERE.items():
        markdown = markdown.replace(link, target)
    # fences of snippets that are not run
    return re.sub(r"^```(\w+) theirs$", r"```\1", markdown, flags=re.MULTILINE)


def examples() -> str:
    """Return a page of the scripts in examples/, with the first line of each as its title."""
    parts = ["# Examples\n\nScripts that run without a download, with the demo model in the package."]
    for script in sorted((ROOT / "examples").glob("*.py")):
        source = script.read_text(encoding="utf-8")
        title = (ast.get_docstring(ast.parse(source)) or script.name).splitlines()[0]
        parts.append(f"## {script.stem}\n\n{title}\n\n```python\n{source}```")
    return "\n\n".join(parts) + "\n"


def reference() -> str:
    """Return a page with the docstring of each public name of the package."""
    tree = ast.parse((ROOT / "pyvelo" / "__init__.py").read_text(encoding="utf-8"))
    [names] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    first = ["LLM", "AsyncLLM", "SamplingParams", "Session", "RequestOutput", "StreamPiece"]
    others = sorted({*names, "__version__"} - {*first, "__version__"})
    return "# Reference\n\n" + "\n\n".join(f"::: pyvelo.{name}" for name in [*first, *others]) + "\n"
