"""Runner of the code blocks in a page, which compares their output with the page.

    ```python            runs, after those before it, in the page's own namespace
    ```text              behind it: what it prints
    ```console           `$ pyvelo ...` runs; what follows is its output, and lines behind "> " are typed
    ```python theirs     another library's: it must be Python; `console theirs` is for reading only
    ```json              must be JSON

In an output `...` stands for anything in a line, and for any lines where it is alone. Times are not compared.
"""

from __future__ import annotations

import ast
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

__all__ = ["Block", "Run", "blocks_of", "run_page", "same"]

Run = Callable[[list[str], str], tuple[int, str]]
"""Function from a command of `pyvelo` and its input to the exit code and all output."""

KINDS = ("python", "python theirs", "console", "console theirs", "text", "json")

_TIME = re.compile(r"\d[\d,.]*(?= (?:s|ms|per second)\b)")


@dataclass(frozen=True)
class Block:
    """A fenced block; `where` is its first line of code, `shown` the expected output of Python, if any."""

    kind: str
    code: str
    page: Path
    where: int
    shown: str | None = None


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page; ValueError for a block without a language."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    at = end = 0
    while at < len(lines):
        if not lines[at].startswith("```"):
            at += 1
            continue
        kind, begin = lines[at][3:].strip(), at + 1
        if kind not in KINDS:
            raise ValueError(f"{page.name}:{begin}: a block is none of {', '.join(KINDS)}, but {kind!r}")
        at = lines.index("```", begin)
        block = Block(kind, "".join(f"{line}\n" for line in lines[begin:at]), page, begin + 1)
        if (
            kind == "text"
            and found
            and found[-1].kind == "python"
            and not "".join(lines[end + 1 : begin - 1])
        ):
            found[-1] = replace(found[-1], shown=block.code)
        else:
            found.append(block)
        end = at
        at += 1
    return found


def run_page(page: Path, run: Run, places: Mapping[str, str] | None = None) -> int:
    """Run a page's blocks in the current folder; return how many ran. AssertionError names a wrong one.

    Args:
        places: text of the page to replace, which `run` may change: the address of a server.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    n_run = 0
    for block in blocks_of(page):
        for shown, real in (places or {}).items():
            block = replace(block, code=block.code.replace(shown, real))
        if block.kind == "python":
            _run_python(block, namespace)
            n_run += 1
        elif block.kind == "console":
            n_run += _run_console(block, run)
        elif block.kind == "python theirs":
            ast.parse(block.code, f"{page.name}:{block.where}")
        elif block.kind == "json":
            json.loads(block.code)
    for value in namespace.values():
        if type(value).__module__ == "openai":  # a client, with open connections
            value.close()  # type: ignore[attr-defined]
    return n_run


def _run_python(block: Block, namespace: dict[str, object]) -> None:
    # errors name the line of the page
    code = compile("\n" * (block.where - 1) + block.code, str(block.page), "exec")
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(code, namespace)
    if block.shown is not None:
        _compare(block, printed.getvalue(), block.shown)


def _run_console(block: Block, run: Run) -> int:
    n_run = 0
    for command, shown in _commands(block.code):
        words = shlex.split(command, comments=True)
        if words[0] != "pyvelo":
            continue
        typed = "".join(f"{line[2:]}\n" for line in shown if line.startswith("> "))
        expected = "".join(f"{line}\n" for line in shown if not line.startswith("> "))
        code, printed = run(words[1:], typed)
        assert code == 0 or "pyvelo: " in expected, f"{block.page.name}: $ {command}\n{printed}"
        if shown:
            _compare(block, printed, expected)
        n_run += 1
    return n_run


def _commands(code: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command and the lines after it."""
    command: str | None = None
    shown: list[str] = []
    for line in code.splitlines():
        if not line.startswith("$ "):
            shown.append(line)
            continue
        if command is not None:
            yield command, shown
        command, shown = line[2:], []
    if command is not None:
        yield command, shown


def _compare(block: Block, printed: str, shown: str) -> None:
    if not same(printed, shown):
        raise AssertionError(f"{block.page.name}:{block.where} shows\n{shown}\nbut it prints\n{printed}")


def same(printed: str, shown: str) -> bool:
    """Return whether the printed output matches the shown one; see above."""
    pattern = ""
    for line in _plain(shown):
        if line.strip() == "...":
            pattern += r"(?:[^\n]*\n)*"
        else:
            pattern += r"[^\n]*".join(map(re.escape, line.split("..."))) + r"\n"
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _plain(printed))) is not None


def _plain(text: str) -> list[str]:
    """Return lines without times, trailing blanks, and empty lines at the end."""
    return [_TIME.sub("#", line.rstrip()) for line in text.rstrip().splitlines()]
