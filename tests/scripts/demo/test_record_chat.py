"""scripts/demo/record_chat.py draws the real chat, and docs/chat.svg is such a picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pyte
import pytest
from rich.style import Style
from rich.text import Text

from scripts.demo import record_chat

ROOT = Path(__file__).resolve().parents[3]
SVG = "{http://www.w3.org/2000/svg}"


def shown(picture: str) -> list[str]:
    """The lines of a picture, whatever the times."""
    root = ElementTree.fromstring(picture)
    rows: dict[float, str] = {}
    for text in root.iter(f"{SVG}text"):
        if (text.get("clip-path") or "").startswith("url(#chat-line-"):
            y = float(text.get("y") or 0)
            rows[y] = rows.get(y, "") + (text.text or "")
    lines = [rows[y].replace("\xa0", " ").strip() for y in sorted(rows)]
    return [re.sub(r"\d+\.\d+ (s|tokens per)\b", r"# \1", line) for line in lines]


def stands_alone(picture: str) -> bool:
    """Whether it refers to nothing outside itself."""
    references = re.findall(r"url\(([^)]*)\)|(?:href|src)\s*=\s*\"([^\"]*)\"|@(import|font-face)", picture)
    return all(inside.startswith("#") for inside, *_ in references)


@pytest.mark.slow
def test_the_picture_in_the_docs_is_what_the_chat_shows() -> None:
    drawn, kept = record_chat.record(), (ROOT / "docs/chat.svg").read_text(encoding="utf-8")
    assert shown(drawn) == shown(kept)
    assert stands_alone(drawn)
    assert stands_alone(kept)
    lines = shown(kept)
    for said, answer in (("> What is 12 + 30?", "so 42."), ("> Who is Anna?", "Anna Berger 4821.")):
        assert lines[lines.index(said) + 1].endswith(answer)
    assert any("tokens of the conversation were in the cache" in line for line in lines)


def test_styles_survive() -> None:
    screen = pyte.Screen(20, 4)
    pyte.Stream(screen).feed(
        "\x1b[1mbold\x1b[0m \x1b[31mred\x1b[0m\r\n\r\n\x1b[38;2;1;2;3mown\x1b[0m \x1b[91mbr\x1b[33my"
    )
    lines = record_chat.lines_of(screen)
    assert [line.plain for line in lines] == ["bold red", "", "own bry"]
    styles = {line.plain[span.start : span.end]: span.style for line in lines for span in line.spans}
    assert all(isinstance(style, Style) for style in styles.values())
    assert {text: str(styles[text]) for text in ("bold", "red", "own", "br", "y")} == {
        "bold": "bold",
        "red": "red",
        "own": "#010203",
        "br": "bright_red",
        "y": "yellow",
    }


def test_what_is_drawn_is_text_and_not_markup() -> None:
    drawn = record_chat.draw([Text("a <b> & [red]c[/red] {d}")])
    assert shown(drawn)[0] == "a <b> & [red]c[/red] {d}"
    assert stands_alone(drawn)
    assert not stands_alone(drawn.replace("url(#", "url(https://", 1))
