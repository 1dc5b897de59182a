"""Measure the time per token over the length of the context, beside stock and the memory's limit; draw it.

    python scripts/bench/context.py --json docs/context.json
    python scripts/bench/context.py --draw docs/context.svg --from docs/context.json   (needs matplotlib)

Each point is LLM.stream at that depth, and stock's llama-bench up to --stock-depth (its prefill over
quantized pages is slow). The limit is the time to read the model's file and the pages of K and V once, at the
rate that this machine's memory reached in the same run. Needs libvelo-lab: a build with
-DPYVELO_BUILD_TESTS=ON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import run_main
from scripts.bench._runs import default_model, in_own_process, random_prompt, stock_folder
from scripts.bench.engine import BATCH, Case, Plan, arrivals, llama_bench, opened

GRACE = 4  # tokens of an answer before timing starts


@dataclass(frozen=True)
class Point:
    """Seconds per token at a depth; `stock` is None if it was not measured."""

    kv_type: str
    depth: int
    ours: float
    stock: float | None
    limit: float

    @property
    def ratio(self) -> float | None:
        """Stock's time divided by ours."""
        return None if self.stock is None else self.stock / self.ours


@dataclass(frozen=True)
class Line:
    """Straight line through our points of one type, by least squares: seconds = start + slope · depth.

    `deviation` is the largest relative distance of a point from it.
    """

    kv_type: str
    start: float
    slope: float
    deviation: float


def seconds_per_token(model: Path, case: Case, threads: int, tokens: int) -> tuple[float, int]:
    """Return (median seconds between tokens after a prompt of `depth`, bytes of a cached token)."""
    with opened(model, case, max(case.depth, 64) + tokens + GRACE + 1, threads) as llm:
        arrivals(llm, random_prompt(llm, 64), 8)
        times = arrivals(llm, random_prompt(llm, max(1, case.depth)), tokens + GRACE)
        stats = llm.stats()
        return (
            statistics.median(b - a for a, b in pairwise(times[GRACE - 1 :])),
            stats.block_bytes // stats.block_size,
        )


def stock_seconds(plan: Plan, case: Case) -> float:
    """Return llama-bench's seconds per token."""
    (test,) = llama_bench(plan, case, ["-p", "0", "-n", str(plan.tokens)])
    return 1 / float(test["avg_ts"])


def read_rate(threads: int) -> float:
    """Return the memory's read rate in bytes per second."""
    from tests.ops import lab

    return max(lab.read_rate(threads, streams, 5) for streams in (1, 3))


def measure(plan: Plan, given: argparse.Namespace) -> Iterator[Point]:
    """Measure every type at every depth."""
    rate = read_rate(plan.threads)
    for kv_type in given.kv_type:
        for depth in given.depth:
            case = Case(kv_type, depth)
            worker = [kv_type, depth, plan.threads, plan.tokens]
            ours, token_bytes = in_own_process(__file__, plan.model, worker)
            stock = stock_seconds(plan, case) if depth <= given.stock_depth else None
            limit = (plan.model.stat().st_size + depth * token_bytes) / rate
            point = Point(kv_type, depth, ours, stock, limit)
            print(row_of(point), flush=True)
            yield point


def row_of(p: Point) -> str:
    """Return a row of the Markdown table."""
    stock = "" if p.stock is None else f"{p.stock * 1e3:.1f}"
    ratio = "" if p.ratio is None else f"{p.ratio:.2f}"
    return (
        f"| {p.kv_type} | {p.depth} | {p.ours * 1e3:.1f} | {stock} | {ratio} "
        f"| {p.limit * 1e3:.1f} | {p.limit / p.ours:.0%} |"
    )


def line_of(points: list[Point]) -> Line:
    """Fit the line; every point counts by its relative error."""
    import numpy as np

    depths, times = np.array([p.depth for p in points], float), np.array([p.ours for p in points])
    slope, start = np.polyfit(depths, times, 1, w=1 / times)
    deviation = float(np.max(np.abs(start + slope * depths - times) / times))
    return Line(points[0].kv_type, float(start), float(slope), deviation)


def by_type(points: list[Point]) -> dict[str, list[Point]]:
    """Group the points by type, in the order of the first of each."""
    return {kv: [p for p in points if p.kv_type == kv] for kv in dict.fromkeys(p.kv_type for p in points)}


def draw(points: list[Point], path: Path) -> None:
    """Draw ours, stock and the limit, one panel for each type."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pyvelo"  # the same points give the same file
    from matplotlib import pyplot

    groups = by_type(points)
    figure, panels = pyplot.subplots(
        1, len(groups), figsize=(4.2 * len(groups), 3.6), sharey=True, squeeze=False
    )
    for panel, (kv_type, group) in zip(panels[0], groups.items(), strict=True):
        depths = [p.depth for p in group]
        known = [p for p in group if p.stock is not None]
        panel.plot(
            [p.depth for p in known],
            [1e3 * p.stock for p in known if p.stock],
            "s--",
            label="stock llama.cpp",
        )
        panel.plot(depths, [1e3 * p.ours for p in group], "o-", label="PyVelo")
        panel.plot(depths, [1e3 * p.limit for p in group], ":", color="black", label="memory read once")
        panel.set_title(f"{kv_type} pages")
        panel.set_xlabel("tokens of context")
        panel.set_ylim(0, 1.15e3 * max(p.ours for p in points))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("ms per token")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file; default: bench/engine.py's")
    parser.add_argument("--stock-bin", type=Path, help="folder of a stock llama-bench; default: built here")
    parser.add_argument("--kv-type", nargs="+", default=["f16", "q8_0", "q4_0"])
    parser.add_argument("--depth", nargs="+", type=int, default=[0, 1024, 2048, 4096, 8192, 16384, 32768])
    parser.add_argument("--stock-depth", type=int, default=4096, help="the deepest context for stock")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24, help="tokens to decode at each depth")
    parser.add_argument("--json", type=Path, help="write the points there")
    parser.add_argument("--draw", type=Path, help="write a picture there")
    parser.add_argument(
        "--from", dest="source", type=Path, help="points of an earlier run, instead of measuring"
    )
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args()


def _points(given: argparse.Namespace) -> list[Point]:
    if given.source:
        found: list[dict[str, Any]] = json.loads(given.source.read_text(encoding="utf-8"))["points"]
        return [Point(**point) for point in found]
    plan = Plan(
        model=given.model or default_model(),
        stock_bin=stock_folder(given.stock_bin),
        threads=given.threads,
        prompt=BATCH,
        tokens=given.tokens,
        repeats=1,
    )
    print("| KV | context | PyVelo ms | stock ms | ratio | limit ms | of the limit |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    return list(measure(plan, given))


def main() -> int:
    given = _arguments()
    if given.worker:
        kv_type, *numbers = given.worker
        depth, threads, tokens = map(int, numbers)
        print(json.dumps(seconds_per_token(given.model, Case(kv_type, depth), threads, tokens)))
        return 0
    points = _points(given)
    for line in (line_of(group) for group in by_type(points).values() if len(group) > 2):
        print(
            f"{line.kv_type}: {line.start * 1e3:.1f} ms + {line.slope * 1e9:.0f} ns · context, "
            f"no point further than {line.deviation:.0%} from it"
        )
    if given.json:
        given.json.write_text(
            json.dumps({"points": [asdict(p) for p in points]}, indent=1) + "\n", encoding="utf-8"
        )
    if given.draw:
        draw(points, given.draw)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
