"""Markdown in a chat: no word of the model is hidden, and what is long moves on while it grows."""

from __future__ import annotations

import io
import re
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from rich.segment import Segment

from pyvelo.cli.markdown import LastRows, last_lines, make_markdown, split_blocks

from .ptys import in_a_terminal, rows_of, screen_on


def drawn(text: str, width: int = 400) -> str:
    """What a terminal shows of markdown."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(make_markdown(text))
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("A `List` and a List<String>.", "List<String>"),
        ("<details>\n<summary>More</summary>\nHidden\n</details>\n", "<summary>More</summary>"),
        ("<think>\nFirst I think.\nThen more.\n</think>\n\nDone", "First I think."),
        ("<!-- a comment -->", "a comment"),
        ("see [here](http://example.com/a_b 'the title') now", "http://example.com/a_b 'the title'"),
        ("![a picture](cat.png)", "cat.png"),
        ("[name]: http://example.com/x\n", "http://example.com/x"),
        ("<http://example.com/y>", "<http://example.com/y>"),
        ("write &lt;b&gt; and &amp;amp;", "&lt;b&gt; and &amp;amp;"),
        ("| a | b |\n|---|---|\n| 1 | 2 | three |\n", "three"),
        ("```hello world\ncode\n```\n", "hello world"),
        ("> " * 60 + "deep", "deep"),
        ("- " * 60 + "deep", "deep"),
        ("2024. Was a year", "2024"),
        *((text, text) for text in ("1969.", "42)", "1.", "-", ">")),
        ("1.\n2.\n3.", " 1\n 2\n 3\n"),
        ("1. one\n2.\n3. three", " 1 one\n 2\n 3 three\n"),
        ("- a\n-\n- 1.\n- b", "\n •\n • 1"),
        (">\n> a", "▌ a"),
        *((text, text) for text in ("2*3*4 = 24", "f(x) = 3*x + 2*y*z", "2**3**2 and x**2 - y**2")),
        *(
            (text, text)
            for text in (
                *(
                    "SELECT *, count(*) FROM t",
                    "git add *; rm -rf ./*",
                    "Match src/*.py and tests/*.py here.",
                ),
                *("**/*.py and **/*.js", "^.*$ or .*?x.*", "/* a */ int x; /* b */", "'*' or '+' or '*'"),
                *(
                    "$x^{*}$, $y^{*}$",
                    "foo (*) bar (*) baz",
                    "Use _private and class_ here.",
                    "f(*args, **kw)",
                ),
                *("char *a, *b;", "int **p = *q;", "a * b * c", "| a | b |\n|---|---|\n| 1 | 2 | ? |"),
                *("a | b\n-|-\n!|@|?", "- old\n+ new", "+ new"),
            )
        ),
        *(
            (text, text)
            for text in (r"\d+\.\d+", r"C:\.config", r"\\server\share", r"\(x^2\) \{1,2\} 1 \\ 2")
        ),
        ("10. ten\n9. nine\n8. eight", "10. ten\n9. nine\n8. eight"),
        ("2024. A year\n1999. Another", "1999. Another"),
        ("- a\n  1. b\n  1. c", "1. c"),
        ("| a | b |\n|---|---|\n| x | y | ✓ | ✗ |\n", "✓ | ✗"),
    ],
)
def test_what_looks_like_markup_is_shown(text: str, shown: str) -> None:
    assert shown in re.sub(r" +", " ", drawn(text))


def test_markdown_is_drawn() -> None:
    assert "*" not in drawn("*one* and **two**, **三**四, (*five*)")
    assert "*" not in drawn('**Note:** *a b*, ***c***. **"d"** - **e**, **`f`**: *g*!\n* i\n* **j**')
    assert "*" not in drawn("\u8fd9**\u91cd\u70b9**\uff0c**\uff08h\uff09** **\u00e9**")
    assert "3." not in drawn("3. three\n4. four\n\n- a\n  0. zero\n  1. one")
    assert "~" not in drawn("~~three~~")
    assert "|" not in drawn("| a | b |\n|---|---|\n| 1 | 2 |\n")
    assert "`" not in drawn("```python\nx = 1\n```\n")
    assert "•" in drawn("* a\n* b")
    assert " 2 " in drawn("1. a\n2. b")


MARKUP = [
    *("\n", "\n\n", " ", "  \n", "*", "**", "_", "`", "```", "```\n", "\n```python\n", "~~~\n", "~~", "# "),
    *("\n## ", "> ", "\n> ", "- ", "\n- ", "\n  - ", "\n1. ", "7) ", "    ", "\t", "\n---\n", "===\n"),
    *("\\", "|", "\n|", "| ", "\n|---|---|\n", "<", ">", "</", "<!--", "-->", "<br>", "<div>\n", "[", "]"),
    *("](", ")", "![", "]: ", "&amp;", "&", ";", "#", ":", "://", '"', "'", "!", "[x] ", "[^1]", "<?"),
    *("<![CDATA[", "$$", "é", "🙂", "中"),
]
PIECES = st.lists(st.sampled_from(MARKUP) | st.just(None), max_size=30)


@given(PIECES)
@example(["<div>\n", None])
@example([None, "\n|", None, "|", None, "\n|---|---|\n", "|", None, "|", None, "|", None])
def test_every_word_of_the_model_is_shown(pieces: list[str | None]) -> None:
    """A word is letters that are no markup: here each is another one."""
    words = [f"word{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(len(pieces))]
    text = "".join(word if piece is None else piece for piece, word in zip(pieces, words, strict=True))
    shown = drawn(text)
    for piece, word in zip(pieces, words, strict=True):
        assert piece is not None or word in shown, (text, shown)


@pytest.mark.parametrize(("columns", "width"), [(3, 80), (5, 20), (8, 20), (12, 40), (30, 80)])
def test_a_table_is_drawn_where_it_fits_and_never_cut(columns: int, width: int) -> None:
    heads = [f"head{number}" for number in range(columns)]
    cells = [f"cell{number}" for number in range(columns)]
    rows = ["|" + "|".join(row) + "|\n" for row in (heads, ["---"] * columns, cells)]
    shown = drawn("".join(rows), width)
    assert all(word in re.sub(r"\s", "", shown) for word in heads + cells)
    assert ("|" in shown) == (columns > 3)
    assert max(map(len, shown.splitlines())) <= width


@given(PIECES)
def test_no_word_is_lost_between_blocks(pieces: list[str | None]) -> None:
    """As a chat prints them: what is complete at once, the rest when it is."""
    words = [f"word{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(len(pieces))]
    shown = rest = ""
    for piece, word in zip(pieces, words, strict=True):
        done, rest = split_blocks(rest + (word if piece is None else piece))
        shown += "".join(map(drawn, done))
    shown += drawn(rest)
    for piece, word in zip(pieces, words, strict=True):
        assert piece is not None or word in shown


def test_what_is_no_fence_opens_no_code_block() -> None:
    assert split_blocks("```x``` is code\n\nmore") == (["```x``` is code\n\n"], "more")
    assert split_blocks("````\n```\n\n```\n````\n\nz") == (["````\n```\n\n```\n````\n\n"], "z")


def test_the_last_lines_keep_the_fence_that_opens_them() -> None:
    code = "a\n\n```python\n" + "".join(f"{n}\n" for n in range(50))
    assert last_lines(code, 3) == "```python\n47\n48\n49\n"
    assert last_lines(code + "```\nb\nc\nd\n", 2) == "c\nd\n"
    assert last_lines("a\nb\n", 9) == "a\nb\n"


@given(PIECES, st.integers(2, 30))
def test_the_last_rows_fit_the_screen(pieces: list[str | None], height: int) -> None:
    text = "".join(piece or "word" for piece in pieces)
    console = Console(file=io.StringIO(), width=40, height=height, force_terminal=True, color_system=None)
    assert len(console.render_lines(LastRows(make_markdown(text), []))) < max(3, height)


LONG = """
import os
from pyvelo.cli.screen import RichScreen
screen = RichScreen()
screen.show("Here:\\n\\n{start}")
for number in range(60):
    screen.show(f"line{{number}}\\n")
    screen._live.refresh()
os.write(1, b"BETWEEN")
screen.show("{end}")
screen.finish()
"""


@pytest.mark.parametrize(("start", "end"), [("```\\n", "```\\n"), ("- a list\\n", ""), ("", "")])
def test_a_block_longer_than_the_screen_moves_on(start: str, end: str) -> None:
    code, shown = in_a_terminal(
        [sys.executable, "-c", LONG.format(start=start, end=end)],
        rows=12,
        env={"COLUMNS": "120", "LINES": "12"},
    )
    assert code == 0, shown
    growing, _ = shown.decode().split("BETWEEN")
    assert all(f"line{number}" in growing for number in range(60))
    assert "..." not in growing
    rows = rows_of(shown.decode().replace("BETWEEN", ""), 120, 12)
    numbers = re.findall(r"line(\d+)", "\n".join(rows))
    assert numbers == [str(number) for number in range(60)]


@pytest.mark.parametrize("text", ["word " * 20, "```\n" + "x" * 50, "# head", "- item\n- item"])
def test_the_echo_of_ctrl_c_fits_beside_the_last_row(text: str) -> None:
    console = Console(width=20, height=10, file=io.StringIO())
    rows = console.render_lines(LastRows(make_markdown(text), []), pad=False)
    assert max(map(Segment.get_line_length, rows)) <= 20 - len("^C")


@pytest.mark.parametrize("text", ["Roses are red,\nviolets are blue.\n", "> one\n> two\n", "- one\n  two\n"])
def test_lines_of_a_verse_stay_lines(text: str) -> None:
    lines = [line for line in text.splitlines() if line]
    assert len(drawn(text).strip().splitlines()) == len(lines)


ANSWER = (
    "One.\n\nTwo.\n\n## Heading\n\nThree.\n\n\n- a\n- b\n\nFour.\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n---\n\nEnd.\n\n"
)


def printed(pieces: list[str], reasoning: str = "") -> list[str]:
    """Return the rows that stay on the screen of a chat after an answer."""
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    screen = screen_on(console)
    if reasoning:
        screen.show_reasoning(reasoning)
    for piece in pieces:
        screen.show(piece)
    screen.finish()
    assert isinstance(console.file, io.StringIO)
    rows = rows_of(console.file.getvalue().replace("\n", "\r\n"), 40, 60)
    return "\n".join(rows).rstrip().split("\n")


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_an_empty_line_separates_the_blocks_of_an_answer(size: int) -> None:
    pieces = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
    rows = printed(pieces)
    blocks = re.split(r"\n\n+", "\n".join(rows))
    assert [block.split()[0] for block in blocks] == [
        "One.",
        "Two.",
        "Heading",
        "Three.",
        "•",
        "Four.",
        "a",
        "-" * 40,
        "End.",
    ]
    assert printed(pieces, "First.\n\nThen.\n\n")[:5] == ["First.", "", "Then.", "", "One."]


def test_a_block_alone_has_no_empty_line_around_it() -> None:
    for text in ("One.\n", "- a\n- b\n", "---\n", "| a | b |\n|---|---|\n| 1 | 2 |\n"):
        rows = drawn(text, 40).removesuffix("\n").split("\n")
        assert rows[0]
        assert rows[-1]
        assert not any(row.endswith(" ") for row in rows)


@pytest.mark.parametrize("text", ["__init__", "a __main__ b", "my__name", "__slots__ = ()", "___"])
def test_underscores_of_identifiers_stay(text: str) -> None:
    assert text in drawn(f"x\n{text} and **bold**, _slanted_").replace("\n", " ")
    assert "bold, slanted" in drawn(f"{text} and **bold**, _slanted_")


CARRIAGE_RETURNS = """
from pyvelo.cli.screen import RichScreen
screen = RichScreen()
for piece in ("Dear Anna,\\r", "\\n\\r\\n", "```python\\r\\nx = 1\\r\\n```\\r", "\\nthe end\\r"):
    screen.show(piece)
screen.finish()
"""


def test_line_ends_of_windows_are_line_ends() -> None:
    code, shown = in_a_terminal(
        [sys.executable, "-c", CARRIAGE_RETURNS], rows=12, env={"COLUMNS": "40", "LINES": "12"}
    )
    assert code == 0, shown
    rows = [row.strip() for row in rows_of(shown.decode(), 40, 12)]
    assert [row for row in rows if row] == ["Dear Anna,", "x = 1", r"the end\x0d"]


TYPING = """
import termios
from pyvelo.cli.screen import RichScreen

def shown():
    return bool(termios.tcgetattr(0)[3] & termios.ECHO)

screen = RichScreen()
states = [shown()]
for call in (lambda: screen.show("a"), lambda: screen.show("b\\n\\nc"), screen.finish, screen.finish):
    call()
    states.append(shown())
print("typing is shown:", states)
"""


def test_what_is_typed_during_an_answer_is_not_shown() -> None:
    """A line end would come between the rows that are drawn anew."""
    code, shown = in_a_terminal([sys.executable, "-c", TYPING], rows=12, env={"COLUMNS": "80", "LINES": "12"})
    assert code == 0, shown
    assert b"[True, False, False, True, True]" in shown
