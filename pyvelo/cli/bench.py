"""`pyvelo bench`: a table of speeds, row by row, and a picture of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyvelo.cli.measure import BenchPlan, Row, measure
from pyvelo.cli.picture import check_picture
from pyvelo.cli.progress import loading
from pyvelo.cli.terminal import print_json, print_out

__all__ = ["run_bench"]

HEAD = ("KV type", "test", "depth", "sequences", "tokens/s")


def run_bench(plan: BenchPlan, *, as_json: bool, plot: Path | None) -> int:
    """Print each row when it is measured, or one JSON object at the end; return the exit code."""
    if plot is not None:
        check_picture("--plot", plot)
    rows: list[Row] = []
    with _own_options():
        for row in measure(plan, loading):
            if not rows and not as_json:
                print_out(_line(HEAD))
            rows.append(row)
            if not as_json:
                print_out(_line(_cells(row)), flush=True)
    if as_json:
        results = [asdict(row) | {"median": row.median, "spread": row.spread} for row in rows]
        print_json({"model": str(plan.model), "results": results}, indent=None)
    if plot is not None:
        draw(rows, plot, Path(plan.model).name)
    return 0


@contextmanager
def _own_options() -> Iterator[None]:
    """Name the options of this command in the warning about a context that is longer than trained."""

    def rename(record: logging.LogRecord) -> bool:
        record.msg = str(record.msg).replace("n_ctx=%d is", "a test of %d tokens (see --depth) is")
        return True

    log = logging.getLogger("pyvelo")
    log.addFilter(rename)
    try:
        yield
    finally:
        log.removeFilter(rename)


def _cells(row: Row) -> tuple[str, ...]:
    test = f"{row.test} {row.n_tokens}"
    return row.kv_type, test, f"{row.depth}", f"{row.sequences}", f"{row.median:.2f} ± {row.spread:.2f}"


def _line(cells: Sequence[str]) -> str:
    kv_type, test, *numbers = cells
    return (
        f"{kv_type:<12} {test:<12}" + "".join(f"{number:>12}" for number in numbers[:2]) + f"{numbers[2]:>22}"
    )


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw speeds of prompts and answers over depth, one line for each KV type and number of sequences."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    handles: dict[str, Any] = {}  # by label: a line has the same color in both panels
    for axes, test in zip(figure.subplots(1, 2), ("prompt", "answer"), strict=True):
        _draw_test(axes, [row for row in rows if row.test == test], handles)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
    figure.savefig(path)


def _draw_test(axes: Any, rows: Sequence[Row], handles: dict[str, Any]) -> None:
    lines: dict[str, list[Row]] = {}
    for row in rows:
        several = f", {row.sequences} sequences" if row.sequences > 1 else ""
        lines.setdefault(f"{row.kv_type} pages{several}", []).append(row)
    for label, points in lines.items():
        color = f"C{[*handles, label].index(label)}"
        depths, medians = [row.depth for row in points], [row.median for row in points]
        spreads = [row.spread for row in points]
        line = axes.errorbar(depths, medians, spreads, marker="o", capsize=3, color=color)
        handles.setdefault(label, line)
    axes.set(
        title=f"{rows[0].test}s of {rows[0].n_tokens} tokens",
        xlabel="tokens in the context before",
        ylabel="tokens per second, of all sequences",
        ylim=(0, None),
    )
