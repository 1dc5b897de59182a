"""`pyvelo report`: a recorded run as a picture, or in numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape

from pyvelo.cli.picture import check_picture
from pyvelo.cli.render import WIDTH_WITHOUT_TERMINAL
from pyvelo.cli.tables import facts_grid, print_table
from pyvelo.cli.terminal import make_console
from pyvelo.cli.values import count, show_bytes
from pyvelo.errors import ConfigError
from pyvelo.trace.blockmap import summarize
from pyvelo.trace.format import Trace, read_trace

__all__ = ["print_summary", "report"]


def report(path: Path, picture: Path | None, by_steps: bool = False) -> dict[str, Any]:
    """Return the summary of the trace at `path` as plain data; draw it to `picture` if that is given.

    Args:
        path: the trace.
        picture: file of the picture, None for no picture.
        by_steps: draw over steps instead of seconds.

    Raises:
        TraceError: the trace is not valid.
        OSError: a file cannot be read or written.
        ConfigError: the picture cannot be drawn.
    """
    if picture is not None:
        check_picture("-o", picture)
    trace = read_trace(path)
    summary = asdict(summarize(trace))
    if picture is not None:
        _draw(trace, picture, by_steps)
    return {
        "trace": os.fspath(path),
        "pool": asdict(trace.header),
        "summary": summary,
        "picture": None if picture is None else os.fspath(picture),
    }


def _draw(trace: Trace, picture: Path, by_steps: bool) -> None:
    if not trace.steps:
        raise ConfigError(f"{trace.path}: nothing was recorded, there is nothing to draw")
    from pyvelo.cli.draw import draw

    draw(trace, picture, by_steps)


def print_summary(content: Mapping[str, Any]) -> None:
    """Print the summary of `report` as text."""
    run, pool = content["summary"], content["pool"]
    console = make_console(width_without_terminal=WIDTH_WITHOUT_TERMINAL)
    table = facts_grid()
    block_bytes, size = pool["block_bytes"], pool["block_size"]
    table.add_row("run", f"{run['seconds']:.2f} s, {run['steps']:,} moments; {_requests(run)}")
    table.add_row(
        "pool",
        f"{pool['n_blocks']:,} blocks of {size} tokens, {show_bytes(pool['n_blocks'] * block_bytes)}",
    )
    table.add_row("in use", f"{run['mean_used']:.1f} blocks in the mean, {run['peak_used']:,} at most")
    table.add_row(
        "shared",
        f"{run['peak_shared']:,} blocks at most; sharing saved {_percent(run['saved_by_sharing'])} of all",
    )
    table.add_row("swapped", f"{run['peak_swapped']:,} blocks at most")
    table.add_row(
        "preempted",
        f"{run['preemptions']:,} times, {run['swaps']:,} of them to host memory; "
        f"{run['evictions']:,} cached blocks were evicted",
    )
    table.add_row("waste", f"{_percent(run['waste_paged'])} of the allocated slots had no token")
    token_bytes = block_bytes // size
    for name, what in (("ctx", "n_ctx"), ("max", "its prompt and longest answer")):
        peak = show_bytes(run[f"peak_reserved_{name}"] * token_bytes)
        waste = _percent(run[f"waste_reserved_{name}"])
        table.add_row("", f"with {what} for each, contiguously: {waste}, and {peak} held at most")
    if content["picture"] is not None:
        table.add_row("picture", escape(content["picture"]))
    print_table(console, table)


def _requests(run: Mapping[str, Any]) -> str:
    return (
        f"{count(run['requests'], 'request')}, {run['finished']:,} ended, up to {run['peak_running']} at once"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
