"""Tables for terminals of any width and for pipes: no value is cut, and no line ends with spaces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

__all__ = ["facts_grid", "fits_on", "numbers_table", "print_table"]


def facts_grid() -> Table:
    """Return an empty grid for rows of a name and its facts."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def numbers_table(first: str, *headings: str) -> Table:
    """Return an empty table for rows of a name and its numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def fits_on(console: Console, table: Table) -> bool:
    """Return whether a console shows each row of a table in one line."""
    wide = console.options.update(width=1 << 12)
    return Measurement.get(console, wide, table).maximum <= console.width


def print_table(console: Console, table: Table) -> None:
    """Print a table; with a line for each word of its headings, or as a list, if the screen is too narrow."""
    if not table.show_header or fits_on(console, table):
        console.print(_Stripped(table))
        return
    names = [str(column.header) for column in table.columns]
    for column, name in zip(table.columns, names, strict=True):
        column.header = name.replace(" ", "\n")
    if fits_on(console, table):
        console.print(_Stripped(table))
        return
    for line in _listed(table, names[1:]):
        console.print(line, soft_wrap=True)


def _listed(table: Table, headings: Sequence[str]) -> Iterator[RenderableType]:
    """Yield a line for the name of each row, and one for each of its values."""
    names, *columns = ([*column.cells] for column in table.columns)
    for number, name in enumerate(names):
        yield Text.from_markup(str(name).rstrip(), style="bold")
        for heading, cells in zip(headings, columns, strict=True):
            yield f"  {heading}: {cells[number]}".rstrip()


class _Stripped:
    """Content without the spaces at the ends of its lines."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for row in console.render_lines(self._content, options, pad=False):
            while row and not row[-1].text.strip():
                row.pop()
            yield from row[:-1]
            if row:
                yield row[-1]._replace(text=row[-1].text.rstrip())
            yield Segment.line()
