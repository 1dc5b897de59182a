"""A block of an answer is printed row by row as it grows, as if it had been printed at once in the end."""

from __future__ import annotations

import io

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from pyvelo.cli.markdown import make_markdown, split_blocks
from pyvelo.cli.settled import split_settled

from .ptys import rows_of, screen_on

WIDTH = 30

MARKUP = (
    "**bold",
    "words**",
    "`code",
    "here`",
    "_slanted_",
    "~~gone~~",
    "*",
    "`",
    "**",
    "_",
    "[a](b)",
    "<div>",
)
PLAIN = (
    "a",
    "word",
    "longer",
    "2*3",
    "snake_case",
    "-",
    "1.",
    "#",
    "|",
    "\\(x\\)",
    "x" * 40,
    "中文没有空格" * 5,
)
WORDS = st.sampled_from([*PLAIN, *MARKUP])
LINES = st.lists(WORDS, min_size=1, max_size=30).map(" ".join)
PARAGRAPHS = st.lists(LINES, min_size=1, max_size=4).map("\n".join)
LISTS = st.lists(LINES, min_size=1, max_size=12).map(lambda lines: "\n".join(f"- {line}" for line in lines))
NUMBERED = st.lists(LINES, min_size=1, max_size=12).map(
    lambda lines: "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
)
CODE = st.lists(
    st.sampled_from(["x = 1", "", "    return '''", "'''", "# note", "y" * 45, "if a:", "\tb()"]), max_size=25
).map(lambda lines: "\n".join(["```python", *lines, "```"]))
TABLES = st.integers(1, 12).map(lambda n: "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * n)
KINDS = (PARAGRAPHS, LISTS, CODE, TABLES)
ANSWERS = st.lists(st.one_of(KINDS), min_size=1, max_size=3).map("\n\n".join)
WITH_NUMBERS = st.lists(st.one_of(*KINDS, NUMBERED), min_size=1, max_size=3).map("\n\n".join)


def console() -> Console:
    return Console(file=io.StringIO(), width=WIDTH, height=12, force_terminal=True, color_system=None)


def shown(terminal: Console) -> list[str]:
    """The rows of a terminal, from the first one that was ever printed to the last one that is not empty."""
    assert isinstance(terminal.file, io.StringIO)
    rows = rows_of(terminal.file.getvalue().replace("\n", "\r\n"), WIDTH, 12)
    return "\n".join(rows).rstrip().split("\n")


def at_once(text: str) -> list[str]:
    """The rows of an answer of which each block is printed when it is complete."""
    whole, rest, follows = console(), text, False
    while rest:
        end = next((at for at in range(1, len(rest)) if split_blocks(rest[:at])[0]), len(rest))
        block, rest = rest[:end], rest[end:]
        if block.strip():
            if follows:
                whole.print()
            whole.print(make_markdown(block))
            follows = True
    return shown(whole)


def streamed(text: str, size: int) -> list[str]:
    """The rows of an answer that came in pieces, with what was drawn anew in between."""
    terminal = console()
    screen = screen_on(terminal)
    for at in range(0, len(text), size):
        screen.show(text[at : at + size])
        if screen._live is not None:
            screen._live.refresh()
    screen.finish()
    return shown(terminal)


@settings(deadline=None, max_examples=60)
@given(ANSWERS, st.sampled_from([1, 3, 20]))
@example("word " * 100 + "**bold " + "words " * 30 + "end** and " + "more " * 50, 3)
@example("\n".join(f"- item {n} " + "word " * n for n in range(15)), 3)
@example("2. \n snake_case C# a|b **bold** **a** **b** === :---: `a \n ~~~ **bold**", 3)
@example("Answer:\n\n42.\n\nBecause 6*7", 1)
@example("```python\n" + "".join(f"line_{n} = {n}\n" for n in range(40)) + "```\n", 3)
@example("中文没有空格的文字" * 30, 3)
@example("| " + "header " * 20 + "|\n|---|\n| 1 |\n", 3)
@example("a | b " * 20 + "\n---|---\n1 | 2\n", 3)
@example("| a |\n|---|\n| 1 |\n\n```python\n```\n\n| b |\n|---|\n| 2 |\n", 20)
def test_pieces_leave_the_rows_of_the_whole(text: str, size: int) -> None:
    assert streamed(text, size) == at_once(text)


@settings(deadline=None, max_examples=30)
@given(WITH_NUMBERS, st.sampled_from([1, 3, 20]))
@example("- a **b** c\n" * 12 + "- 1.\n- a", 1)
def test_every_character_is_shown_once(text: str, size: int) -> None:
    """The margin of a list's numbers follows from how many there are, so its rows may differ."""
    shown, whole = ("".join(rows).replace(" ", "") for rows in (streamed(text, size), at_once(text)))
    assert shown == whole


def settled(text: str) -> str:
    return split_settled(text, make_markdown, console(), is_markdown=True)[0]


@pytest.mark.parametrize(
    "text",
    [
        "word " * 60,
        "a `name_of` and *slanted* word, " * 10,
        "2*3 and snake_case, " * 20,
        "\n".join(f"line {n}" for n in range(20)),
        "\n".join(f"- item {n}" for n in range(20)),
        "\n".join(f"{n}. item" for n in range(1, 9)),
        "```python\n" + "".join(f"x{n} = {n}\n" for n in range(20)),
        "中文没有空格的文字" * 20,
    ],
)
def test_all_but_the_last_rows_are_printed(text: str) -> None:
    rest = split_settled(text, make_markdown, console(), is_markdown=True)[1]
    assert len(console().render_lines(make_markdown(rest))) <= 5


@pytest.mark.parametrize("mark", ["**", "*", "`", "~~"])
def test_nothing_after_a_mark_is_printed_that_later_text_may_close(mark: str) -> None:
    text = "before " * 30 + mark + "after " * 30 + "after"
    assert "after" not in settled(text)
    assert "after" in settled(text + mark + " end" * 60)


def test_reasoning_is_no_markup() -> None:
    text = "**word " * 60
    head, tail = split_settled(text, Text, console(), is_markdown=False)
    assert head + tail == text
    assert len(tail) < 4 * WIDTH


def test_a_heading_or_a_table_of_the_last_lines_is_still_one() -> None:
    for text in ("word " * 40 + "\nheading", "word " * 40 + "\n| a | b |"):
        assert text.splitlines()[-1] not in settled(text)


@pytest.mark.parametrize("more", ["# b", "- item", "+ 3", "* y", "> q", "1. one", "    code", "===", "| a"])
@pytest.mark.parametrize(
    "before", ["x" * 300, "https://e.com/" + "a" * 300, "word " * 60 + "- \u5199" * 90 + "-"]
)
def test_nothing_is_printed_within_a_word_that_grows(before: str, more: str) -> None:
    """What comes next would begin a block of its own, and lose its marks."""
    head, tail = split_settled(before, make_markdown, console(), is_markdown=True)
    separately = Console(file=io.StringIO(), width=WIDTH)
    for part in filter(None, (head, tail + more)):
        separately.print(make_markdown(part))
    together = Console(file=io.StringIO(), width=WIDTH)
    together.print(make_markdown(before + more))
    assert separately.file.getvalue() == together.file.getvalue()  # type: ignore[attr-defined]
