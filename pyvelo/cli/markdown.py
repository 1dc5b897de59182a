"""Markdown for a terminal that hides no word: complete blocks, and the end of the block that still grows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from string import punctuation
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.markdown import Markdown, MarkdownElement
    from rich.segment import Segment

__all__ = [
    "LastRows",
    "closing_fence",
    "last_lines",
    "make_markdown",
    "opening_fence",
    "parse",
    "rows_on",
    "split_blocks",
]

_FENCE = re.compile(r" {0,3}(?P<fence>`{3,}(?=[^`]*$)|~{3,})")
_WORD = re.compile(r"[^\W_]+|[^\x00-\x7f\w\s]|[!?@$%&;^/\"',{}(\[\]<\\]")  # or a symbol that is no markup
_NO_MARKUP = re.compile(rf"__+|\\[{re.escape(punctuation)}]")  # of names; of paths, patterns and LaTeX
# Emphasis opens at the beginning of words and closes at their end; marks elsewhere are of products, patterns,
# pointers and queries. Scripts other than Latin have no spaces between words.
_OTHER = r"[^\x00-\xa0\xc0-\u024f]"
_OPENS = re.compile(
    rf"(?:(?<![^\s(\[{{\"'>|:~-])|(?<={_OTHER}))(?:\*+(?:[\w(\[`$<&#@+-]|[\"']\w|{_OTHER})|_[^\s_]+_(?!\w))"
)
_CLOSES = re.compile(rf"(?<=[\w.!?)\]}}\"'`%$>;:,]|{_OTHER})[*_]+(?:[\s.,;:!?)\]}}\"'<|~-]|{_OTHER}|$)")
# what would drop or replace text: HTML, link targets and titles, definitions, entities, backslashes
_HIDING = ("html_block", "html_inline", "link", "image", "reference", "autolink", "entity", "escape")


def make_markdown(text: str) -> RenderableType:
    """Return markdown for rich, or the text itself if rich would drop a word of it."""
    from rich.text import Text

    tokens = parse(text)
    is_bare = _fill(tokens) and "\n" not in text.strip()  # a mark of a list alone, as in `1969.`
    _keep_lines(tokens)
    words, markup = Counter(_WORD.findall(text)), Counter(_markup_words(tokens))
    has_plus = any(token.type == "bullet_list_open" and token.markup == "+" for token in tokens)  # of a patch
    is_kept = _counts_up(tokens) and not is_bare and not has_plus
    if words - markup - Counter(_drawn_words(tokens)) or not is_kept:
        return Text(text)
    drawn = _renderer()("")
    drawn.parsed = tokens
    return _Whole(drawn, Text(text), Counter("".join((words - markup).elements())))


def parse(text: str) -> list[Any]:
    """Return the tokens of markdown without what would hide text."""
    tokens: list[Any] = _parser().parse(text)
    return tokens


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable(_HIDING)
    parser.inline.ruler.before("escape", "no_markup", _no_markup)
    parser.inline.ruler.at("emphasis", _emphasis)
    parser.parse("x")  # compiles the rules, which two threads must not do at once
    return parser


@cache
def _renderer() -> type[Markdown]:
    """Return rich's renderer without the empty rows that it draws above and below code."""
    from rich.markdown import CodeBlock, Markdown
    from rich.syntax import Syntax

    class Code(CodeBlock):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            code = str(self.text).rstrip()
            yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, padding=(0, 1))

    class Renderer(Markdown):
        elements: ClassVar[dict[str, type[MarkdownElement]]] = {
            **Markdown.elements,
            "fence": Code,
            "code_block": Code,
        }

    return Renderer


def split_blocks(text: str) -> tuple[list[str], str]:
    """Split markdown after each empty line outside a code fence; the rest may still grow."""
    blocks, rest, fence = list[str](), "", ""
    for line in text.splitlines(keepends=True):
        rest += line
        fence, is_fence = _after(fence, line)
        if not fence and not is_fence and not line.strip() and line.endswith("\n"):
            blocks.append(rest)
            rest = ""
    return blocks, rest


def last_lines(text: str, n_lines: int) -> str:
    """Return the last lines of markdown; inside a code block, with the line that opens it."""
    lines = text.splitlines(keepends=True)
    return opening_fence("".join(lines[:-n_lines])) + "".join(lines[-n_lines:])


def opening_fence(text: str) -> str:
    """Return the line that opens the code block in which markdown ends, or ""."""
    opening = fence = ""
    for line in text.splitlines(keepends=True):
        before = fence
        fence, _ = _after(fence, line)
        if fence and not before:
            opening = line
    return opening if fence else ""


def closing_fence(line: str) -> str:
    """Return the line that closes the code block that a line opens, or "" if it opens none."""
    match = _FENCE.match(line.rstrip())
    return match["fence"] + "\n" if match else ""


class _Whole:
    """Drawn markdown, or its source if a table is too wide for the screen and would lose characters."""

    def __init__(self, drawn: RenderableType, source: RenderableType, characters: Counter[str]) -> None:
        self._drawn = drawn
        self._source = source
        self._characters = characters

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = console.render_lines(self._drawn, options, pad=False)
        if self._characters - Counter(char for row in rows for segment in row for char in segment.text):
            yield self._source
        else:
            yield from _joined(_without_edges([_without_padding(row) for row in rows]))


ECHO_WIDTH = len("^C")


class LastRows:
    """Last rows of a text that is taller than the screen: as many as can be erased later.

    The rows are narrower than the screen, so that the echo of Ctrl-C starts no row of its own. They fit on a
    screen of half the width or height, too: if the terminal is made so small, none of them leaves it.

    widths: set to the cells of each row when they are drawn.
    """

    def __init__(self, content: RenderableType, widths: list[int]) -> None:
        self._content = content
        self._widths = widths

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        narrow = options.update(width=max(1, options.max_width - ECHO_WIDTH), height=None)
        rows = console.render_lines(self._content, narrow, pad=False)
        widths = [Segment.get_line_length(row) for row in rows]
        height = console.size.height
        widest, narrowest = options.max_width, max(1, options.max_width // 2)
        n = min(_fitting(widths, height // 2, widest), _fitting(widths, height - 1, narrowest))
        self._widths[:] = widths[-n:]
        yield from _joined(rows[-n:])


def rows_on(columns: int, widths: Iterable[int]) -> int:
    """Return the rows that rows of these widths take on a screen of so many columns."""
    return sum(max(1, -(-width // columns)) for width in widths)


def _fitting(widths: Sequence[int], n_rows: int, columns: int) -> int:
    """Return how many of the last rows, at least one, take at most `n_rows` on so many columns."""
    n = taken = 0
    for width in reversed(widths):
        taken += rows_on(columns, [width])
        if taken > n_rows:
            break
        n += 1
    return max(1, n)


def _after(fence: str, line: str) -> tuple[str, bool]:
    """Return the code fence that is open after a line, or "", and whether the line is one."""
    match = _FENCE.match(line.rstrip())
    if fence:
        closes = line.strip().startswith(fence) and not line.strip().strip(fence[0])
        return ("" if closes else fence), closes
    return (match["fence"] if match else ""), match is not None


def _joined(rows: Iterable[Iterable[Segment]]) -> Iterator[Segment]:
    from rich.segment import Segment

    for row in rows:
        yield from row
        yield Segment.line()


def _without_edges(rows: Sequence[list[Segment]]) -> Sequence[list[Segment]]:
    """Return the rows without the empty ones at both ends, which rich adds to lists, tables and rules."""
    filled = [number for number, row in enumerate(rows) if any(segment.text for segment in row)]
    return rows[filled[0] : filled[-1] + 1] if filled else ()


def _without_padding(row: list[Segment]) -> list[Segment]:
    """Return the row without the spaces at its end, which a narrower terminal would wrap."""
    from rich.style import Style

    for number in reversed(range(len(row))):
        segment, style = row[number], row[number].style or Style.null()
        if style.bgcolor or style.reverse or style.underline:
            return row[: number + 1]
        if text := segment.text.rstrip(" "):
            return [*row[:number], segment._replace(text=text)]
    return []


def _no_markup(state: StateInline, silent: bool) -> bool:
    """Parse as text what would be markup, but is not what models mean by it."""
    found = _NO_MARKUP.match(state.src, state.pos)
    if found is None:
        return False
    if not silent:
        state.pending += found[0]
    state.pos = found.end()
    return True


def _emphasis(state: StateInline, silent: bool) -> bool:
    """Parse marks of emphasis, which open and close it if models mean that."""
    from markdown_it.rules_inline.emphasis import tokenize

    begin, n_before = state.pos, len(state.delimiters)
    found = tokenize(state, silent)
    opens, closes = _OPENS.match(state.src, begin), _CLOSES.match(state.src, begin)
    for mark in state.delimiters[n_before:]:
        mark.open = mark.open and opens is not None
        mark.close = mark.close and closes is not None
    return found


def _counts_up(tokens: Iterable[Any]) -> bool:
    """Return whether the numbers of all lists are the ones that rich draws: each one more than the last."""
    expected: list[int] = []
    for token in tokens:
        if token.type == "ordered_list_open":
            start = token.attrGet("start")
            expected.append(1 if start is None else int(start))
        elif token.type == "bullet_list_open":
            expected.append(-1)
        elif token.type in ("ordered_list_close", "bullet_list_close"):
            expected.pop()
        elif token.type == "list_item_open" and expected[-1] >= 0:
            if int(token.info) != expected[-1]:
                return False
            expected[-1] += 1
    return True


def _fill(tokens: list[Any]) -> bool:
    """Put an empty paragraph into list items and quotations without content, of which rich draws nothing.

    Return whether there are such ones.
    """
    from markdown_it.token import Token

    kinds = ("list_item_open", "blockquote_open")
    empty = [
        n for n, (each, after) in enumerate(pairwise(tokens), 1) if each.type in kinds and after.nesting < 0
    ]
    for at in reversed(empty):
        inline = Token("inline", "", 0, children=[])
        tokens[at:at] = [Token("paragraph_open", "p", 1), inline, Token("paragraph_close", "p", -1)]
    return bool(empty)


def _keep_lines(tokens: Iterable[Any]) -> None:
    """Let a line of a paragraph end where the model ended it, as in a verse."""
    for token in tokens:
        if token.type == "softbreak":
            token.type = "hardbreak"
        _keep_lines(token.children or ())


def _drawn_words(tokens: Iterable[Any]) -> Iterator[str]:
    for token in tokens:
        if token.children is not None:
            yield from _drawn_words(token.children)
        else:
            yield from _WORD.findall(token.content)


def _markup_words(tokens: Iterable[Any]) -> Iterator[str]:
    """Yield the numbers of lists, which rich counts anew, and the languages of code, which choose colors."""
    for token in tokens:
        if token.type == "list_item_open" or (token.type == "fence" and _is_language(token.info)):
            yield from _WORD.findall(token.info)


def _is_language(name: str) -> bool:
    from rich.syntax import Syntax

    return Syntax("", name.strip()).lexer is not None
