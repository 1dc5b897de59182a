"""Picture of a recorded run: the block map over time, the states of blocks, and contiguous reservations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from pyvelo.trace.blockmap import BlockMap, Moment, moments, replay
from pyvelo.trace.format import Trace

__all__ = ["block_picture", "draw"]

COLUMNS = 600  # of the block map; a column shows the last moment that it covers
ROWS = 1024  # beyond which several blocks share a row
# states are white, gray and near black, which differ in lightness by at least 30 %; requests have colors
FREE = (255, 255, 255)
CACHED = (168, 168, 168)
SHARED = (32, 32, 32)
GRAYS = (14, 15)  # of tab20
OWNERS = [
    tuple(round(255 * part) for part in matplotlib.colormaps["tab20"](i)[:3])
    for i in range(20)
    if i not in GRAYS
]
"""Colors of requests, used in turn."""


def draw(trace: Trace, path: Path, by_steps: bool = False) -> None:
    """Draw a trace with steps to a file, over time or over steps; the name's suffix is the format.

    Equal traces give equal files.
    """
    run = list(moments(trace))
    with matplotlib.rc_context({"svg.hashsalt": "pyvelo", "font.size": 8, "axes.titlesize": 9}):
        figure = Figure(figsize=(9.5, 7), dpi=110, layout="constrained")
        FigureCanvasAgg(figure)
        upper, middle, lower = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1.5, 1.5])
        times = _axis(trace, by_steps)
        _draw_map(upper, trace, times)
        _draw_states(middle, trace, run, times)
        _draw_reservation(lower, trace, run, times)
        lower.set_xlabel("steps" if by_steps else "seconds")
        dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
        figure.savefig(path, metadata=dated.get(path.suffix.lower()))


def _axis(trace: Trace, by_steps: bool) -> NDArray[np.float64]:
    """Return the position of each moment: seconds or steps since the first one."""
    if by_steps:
        return np.arange(len(trace.steps), dtype=np.float64)
    return np.array([step.time for step in trace.steps]) - trace.steps[0].time


def block_picture(trace: Trace, times: NDArray[np.float64], columns: int = COLUMNS) -> NDArray[np.uint8]:
    """Return colors [blocks, columns, 3]: the request's for its blocks; shared, cached and free have others.

    Args:
        times: position of each moment, from 0 on.
        columns: width of the picture.
    """
    n_blocks = trace.header.n_blocks
    picture = np.full((n_blocks, columns, 3), 255, np.uint8)
    column, colors = 0, np.full((n_blocks, 3), 255, np.uint8)
    for (_, blocks), time in zip(replay(trace), times.tolist(), strict=True):
        now = int(time * (columns - 1) / times[-1]) if times[-1] else 0
        picture[:, column:now] = colors[:, None]
        column, colors = now, _colors(blocks)
    picture[:, column:] = colors[:, None]
    return picture


def _colors(blocks: BlockMap) -> NDArray[np.uint8]:
    colors = np.full((blocks.header.n_blocks, 3), FREE, np.uint8)
    cached = list(blocks.cached())
    colors[cached] = CACHED
    for owner, table in blocks.tables.items():
        colors[table.blocks] = OWNERS[owner % len(OWNERS)]
    if blocks.n_shared:
        colors[np.array(blocks.references) > 1] = SHARED
    return colors


def _draw_map(axes: Any, trace: Trace, times: NDArray[np.float64]) -> None:
    n_blocks = trace.header.n_blocks
    picture = block_picture(trace, times)[:: -(-n_blocks // ROWS)]
    extent = (0, float(times[-1]) or 1.0, n_blocks, 0)
    axes.imshow(picture, aspect="auto", interpolation="nearest", extent=extent, origin="upper")
    axes.set_title("blocks by request: a color for each request")
    axes.set_ylabel("block")
    _legend(axes, handles=_patches({"shared": SHARED, "cached, nobody's": CACHED, "free": FREE}))


def _draw_states(axes: Any, trace: Trace, run: Sequence[Moment], times: NDArray[np.float64]) -> None:
    parts = {
        "held by one": ([m.used - m.shared for m in run], OWNERS[0]),
        "shared": ([m.shared for m in run], SHARED),
        "cached": ([m.cached for m in run], CACHED),
        "free": ([m.free for m in run], FREE),
    }
    colors = {name: color for name, (_, color) in parts.items()}
    axes.stackplot(
        times,
        *(values for values, _ in parts.values()),
        colors=[_color(color) for color in colors.values()],
        edgecolor="none",
        step="post",
        rasterized=True,
    )
    handles: list[Any] = _patches(colors)
    if trace.header.n_swap_blocks:
        swapped = [m.swapped for m in run]
        handles += axes.plot(times, swapped, color="crimson", drawstyle="steps-post", label="in host memory")
    axes.set_ylim(0, trace.header.n_blocks)
    axes.set_title("states of the blocks")
    axes.set_ylabel("blocks")
    _legend(axes, handles=handles)


def _draw_reservation(axes: Any, trace: Trace, run: Sequence[Moment], times: NDArray[np.float64]) -> None:
    header = trace.header
    token_bytes = header.block_bytes / header.block_size
    largest = token_bytes * max(1, *(m.reserved_ctx for m in run), *(m.used * header.block_size for m in run))
    unit, name = (1 << 30, "GiB") if largest >= 2 << 30 else (1 << 20, "MiB")
    lines = {
        "n_ctx for each": [m.reserved_ctx for m in run],
        "prompt and longest\nanswer for each": [m.reserved_max for m in run],
        "pages": [m.used * header.block_size for m in run],
        "tokens": [m.tokens_stored for m in run],
    }
    for (label, slots), style in zip(lines.items(), ("C3--", "C1--", "C0-", "k:"), strict=True):
        values = np.array(slots) * (token_bytes / unit)
        axes.plot(times, values, style, drawstyle="steps-post", label=label, linewidth=1, rasterized=True)
    axes.set_ylim(bottom=0)
    axes.set_title("memory that the running requests hold, and would hold contiguously")
    axes.set_ylabel(name)
    _legend(axes)


def _patches(colors: Mapping[str, Sequence[int]]) -> list[Patch]:
    return [
        Patch(facecolor=_color(color), edgecolor="gray", linewidth=0.5, label=name)
        for name, color in colors.items()
    ]


def _legend(axes: Any, **handles: Any) -> None:
    """Add a legend beside the panel."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), fontsize=7, frameon=False, **handles)


def _color(color: Sequence[int]) -> tuple[float, float, float]:
    red, green, blue = (part / 255 for part in color)
    return red, green, blue
