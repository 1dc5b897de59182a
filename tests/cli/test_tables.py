"""Tables lose no value on a screen of any width, and no line ends with spaces."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pyvelo.cli.tables import facts_grid, numbers_table, print_table

ROWS = [("f16", "1.5 KiB", "13,230,336"), ("q8_0", "816 bytes", "25,123,456"), ("iq4_nl", "-", "7")]
HEADINGS = ("type", "a token", "sequences here")


def printed(width: int, *rows: tuple[str, ...]) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    table = numbers_table(*HEADINGS)
    for row in rows:
        table.add_row(*row)
    print_table(console, table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", range(12, 60))
def test_no_value_is_cut_at_any_width(width: int) -> None:
    text = printed(width, *ROWS)
    assert "\u2026" not in text
    assert not any(line.endswith(" ") for line in text.splitlines())
    words = text.split()
    for row in ROWS:
        for value in row:
            assert all(word in words for word in value.split()), value


@given(st.lists(st.tuples(*[st.text("ab 1,", max_size=9)] * 3), max_size=4), st.integers(8, 80))
def test_lines_end_without_spaces(rows: list[tuple[str, ...]], width: int) -> None:
    assert not any(line.endswith(" ") for line in printed(width, *rows).splitlines())


def test_a_wide_screen_has_a_line_for_each_row_and_a_narrow_one_for_each_value() -> None:
    assert printed(80, *ROWS).splitlines() == [
        "type      a token  sequences here",
        "f16       1.5 KiB      13,230,336",
        "q8_0    816 bytes      25,123,456",
        "iq4_nl          -               7",
    ]
    assert printed(20, ROWS[0]).splitlines() == ["f16", "  a token: 1.5 KiB", "  sequences here: 13,230,336"]


def test_facts_fold() -> None:
    console = Console(file=io.StringIO(), width=20, highlight=False)
    grid = facts_grid()
    grid.add_row("model", "/a/long/path/of/a/model.gguf")
    print_table(console, grid)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert "".join(line.split()[-1] for line in lines) == "/a/long/path/of/a/model.gguf"
    assert all(len(line) <= 20 for line in lines)
