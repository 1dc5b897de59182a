"""The beginning of a growing block of markdown that no further text changes: it can be printed for good."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style

from pyvelo.cli.markdown import closing_fence, opening_fence, parse

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["split_settled"]

KEPT = 3  # rows at the end that may change: a word grows, or the next line makes a heading or a table of them
# marks that later text may close
_OPENING = re.compile(r"`|~~|\*\*(?=\S)|(?<![A-Za-z0-9_)\]*])\*(?=\S)")
_WORD = re.compile(r"[!-~]*(?:[ \t]*\n|[ \t]+)?")
_NO_BLOCK = re.compile(r"[^\W\d_]|[^\x00-\x7f]|[\"'(]|`[^`]|\*\*?[^\s*]")  # begins none, whatever comes then
_TABLE = re.compile(r"^[ |:]*-[-: \t|]*$", re.MULTILINE)  # the line below its header, and other lines


def split_settled(
    text: str, draw: Callable[[str], RenderableType], console: Console, *, is_markdown: bool
) -> tuple[str, str]:
    """Split a block that still grows into what can be printed for good and a rest that is a block of its own.

    Drawn one after the other they have the rows of the whole. The first is empty if there is no such place.
    """
    if is_markdown and _TABLE.search(text) and _has_table(text):
        return "", text  # any row may make the columns wider

    def rows(part: str) -> list[list[Segment]]:
        found = console.render_lines(draw(part), pad=False)
        return [_comparable(row) for row in found]

    whole = rows(text)
    drawn = "".join(segment.text for row in whole[:-KEPT] for segment in row)
    for cut in _cuts(text, drawn, is_markdown):
        fence = opening_fence(text[:cut]) if is_markdown else ""
        head, tail = text[:cut] + closing_fence(fence), fence + text[cut:]
        after_word = next(_WORD.finditer(text, cut)).end()  # the next word may fit the row without its marks
        if is_markdown and _may_change(text[:after_word]):
            continue
        if rows(head) + rows(tail) == whole:
            return head, tail
    return "", text


def _has_table(text: str) -> bool:
    return any(token.type == "table_open" and not token.level for token in parse(text))


def _comparable(row: list[Segment]) -> list[Segment]:
    return [*Segment.simplify(segment._replace(style=segment.style or Style.null()) for segment in row)]


def _cuts(text: str, drawn: str, is_markdown: bool) -> Iterator[int]:
    """Yield where the text that is `drawn` may end: within its last line, or before that line.

    Markup is not drawn, so the characters that are drawn are found in the text one after the other.
    """
    at = 0
    for char in drawn:
        if not char.isspace():
            at = max(at, text.find(char, at) + 1)
    if at:
        if text[at : at + 1].isascii():  # a word, or markup that ends it; others are broken anywhere
            at = next(_WORD.finditer(text, at)).end()
        begin = text.rfind("\n", 0, at) + 1
        may_be_header = "|" in text[begin:].partition("\n")[0]  # of a table, if the next line is `---|---`
        if not is_markdown or (_NO_BLOCK.match(text, at) and not may_be_header):
            yield at
        yield begin


def _may_change(text: str) -> bool:
    """Return whether there is an opening mark that was not closed."""
    inline = (token.children or () for token in parse(text))
    return any(child.type == "text" and _OPENING.search(child.content) for line in inline for child in line)
