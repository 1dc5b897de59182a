"""Rows that grow in a terminal whose size changes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from pyvelo.cli.growing import Growing

from .ptys import rows_of

HEIGHT = 30


def made_lower(text: str, height: int) -> list[str]:
    """All rows of a terminal, also of what left it, which is made lower below a growing text."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, height=HEIGHT, _environ={"TERM": "xterm"})
    growing = Growing(console, lambda: Text(text))
    growing.auto_refresh = False
    console.print("above")
    with growing:
        growing.refresh()
        # the rows down to the cursor's stay above it: those at the top leave a screen that is too low
        rows = rows_of(file.getvalue().replace("\n", "\r\n"), 60, HEIGHT)
        file.seek(0)
        file.truncate()
        file.write("\n".join(rows).rstrip())
        console.height = height
        growing.refresh()
    console.print("below")
    return [row for row in rows_of(file.getvalue().replace("\n", "\r\n"), 60, height) if row]


@pytest.mark.parametrize("lines", [1, 5, 10, 15, 29, 30, 100])
@pytest.mark.parametrize("height", [15, 16, 20, 29, 30, 40])
def test_a_lower_terminal_shows_no_fragments(lines: int, height: int) -> None:
    text = "\n".join(f"row {n}" for n in range(lines))
    assert made_lower(text, height) == ["above", "below"]


def drawn(text: str, widths: tuple[int, int], screen_width: int) -> list[str]:
    """Rows of a terminal of so many columns, between others, after a text was drawn at two widths."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, height=HEIGHT, _environ={"TERM": "xterm"})
    growing = Growing(console, lambda: Text(text))
    growing.auto_refresh = False
    console.width = widths[0]
    console.print("above")
    with growing:
        for width in widths:
            console.width = width
            growing.refresh()
    console.print("below")
    return [row for row in rows_of(file.getvalue().replace("\n", "\r\n"), screen_width, HEIGHT) if row]


@pytest.mark.parametrize("widths", [(60, 25), (60, 31), (60, 59), (60, 60)])
def test_a_narrower_terminal_shows_no_fragments(
    widths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XTERM_VERSION", "STY"):
        monkeypatch.delenv(name, raising=False)
    # what was drawn for the wide screen lies on the narrow one as in a terminal that wraps its rows anew
    text = " ".join(f"w{n:02}" for n in range(40))
    assert drawn(text, widths, widths[1]) == ["above", "below"]


@pytest.mark.parametrize("lines", [1, HEIGHT - 1, HEIGHT, 2 * HEIGHT])
@pytest.mark.parametrize("length", [3, 25, 57, 200])
@pytest.mark.parametrize("width", [30, 31, 45])
def test_a_text_taller_than_the_screen_leaves_none_of_its_rows(
    lines: int, length: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XTERM_VERSION", "STY"):
        monkeypatch.delenv(name, raising=False)
    text = "\n".join("x" * length for _ in range(lines))
    assert drawn(text, (60, width), width) == ["above", "below"]


@pytest.mark.parametrize("name", ["XTERM_VERSION", "STY"])
def test_a_terminal_that_cuts_its_rows_loses_no_row_above(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert drawn("word " * 30, (60, 25), 60) == ["above", "below"]


def test_a_terminal_without_cursor_keeps_what_is_printed_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XTERM_VERSION", "STY"):
        monkeypatch.delenv(name, raising=False)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, height=HEIGHT, _environ={"TERM": "dumb"})
    console.width = 60
    growing = Growing(console, lambda: Text("word " * 30))
    growing.auto_refresh = False
    with growing:
        growing._widths[:] = [58, 58]
        console.width = 25
        console.print("beside")
    assert file.getvalue() == "beside\n"
