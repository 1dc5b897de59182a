"""Time paged attention beside stock FLASH_ATTN_EXT on the same bytes, one operator at a time.

Both run as the layers of a model would, each layer with its own K and V, in turns within one process; the
blocks of the paged pool are permuted. Times are medians over rounds in which no other process was busy. Needs
libvelo-lab: a build with -DPYVELO_BUILD_TESTS=ON, or PYVELO_LAB.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from tests.ops import lab
from tests.ops.lab import HEADER, Heads, Params, Run

T = TypeVar("T")

SHAPES = {  # heads, KV heads, head size of K and of V
    "16/8/128": (16, 8, 128, 128),
    "32/8/128": (32, 8, 128, 128),
    "32/8/64": (32, 8, 64, 64),
    "8/1/256": (8, 1, 256, 256),
    "32/32/80": (32, 32, 80, 80),
    "32/32/96": (32, 32, 96, 96),
    "16/4/112": (16, 4, 112, 112),
    "16/16/192": (16, 16, 192, 128),
    "16/1/576": (16, 1, 576, 512),
}
MOST_LAYERS = 28


@dataclass
class Point:
    """One measurement: its parameters, and the median seconds of one operator.

    With --shared-prefix `stock` is ours without sharing.
    """

    type: str
    shape: str
    sequences: int
    queries: int
    context: int
    threads: int
    stock: float
    ours: float
    deterministic: bool
    fast: bool
    quiet: bool

    @property
    def ratio(self) -> float:
        """Stock's time divided by ours."""
        return self.stock / self.ours


def cold_bytes() -> int:
    """Return the bytes of K and V over all layers that do not fit into a cache.

    That is twice the last-level cache, and at least 256 MB.
    """
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    try:
        largest = max((int(size.read_text().rstrip("K\n")) for size in sizes), default=0) << 10
    except (OSError, ValueError):  # another format
        largest = 0
    return max(256 << 20, 2 * largest)


def random_bytes(kv_type: str, n: int, rng: np.random.Generator) -> lab.Bytes:
    """Return [n] bytes of normally distributed numbers in the type; a short run is repeated, to be quick."""
    groups = lab.quantize(kv_type, rng.standard_normal((1 << 15, 32)).astype(np.float32))
    return np.resize(groups.reshape(-1), n)


def causal_mask(n_seqs: int, n_q: int, n_kv: int) -> npt.NDArray[np.float16]:
    """Return stock's mask: 0 if a query attends to a token, else -inf."""
    sees = np.arange(n_kv)[None, :] <= (n_kv - n_q + np.arange(n_q))[:, None]
    mask = np.where(sees, 0.0, -np.inf).astype(np.float16)
    return np.ascontiguousarray(np.broadcast_to(mask, (n_seqs, n_q, n_kv)))


def others_share(since: tuple[float, float, float] | None = None) -> tuple[tuple[float, float, float], float]:
    """Return (now, share of all cores that other processes used since); 0 if the system does not say."""
    try:
        fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return (0.0, 0.0, 0.0), 0.0
    busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
    own = sum(os.times()[:2])
    now = (time.monotonic(), busy, own)
    if since is None:
        return now, 0.0
    passed = max(1e-3, now[0] - since[0]) * (os.cpu_count() or 1)
    return now, ((now[1] - since[1]) - (now[2] - since[2])) / passed


def quiet_rounds(run: Callable[[], T], wanted: int, patience: float) -> tuple[list[T], bool]:
    """Run rounds until `wanted` of them were undisturbed by other processes.

    Returns those and True; after `patience` seconds without any, the disturbed ones and False.
    """
    quiet, noisy, until = list[T](), list[T](), time.monotonic() + patience
    while not (quiet or noisy) or (len(quiet) < wanted and time.monotonic() < until):
        mark, _ = others_share()
        result = run()
        (quiet if others_share(mark)[1] < 0.08 else noisy).append(result)
    return (quiet, True) if quiet else (noisy, False)


def measure(
    kv_type: str, shape: str, n_seqs: int, n_q: int, context: int, options: argparse.Namespace
) -> Point:
    """Time both operators in turns and return their medians."""
    n_head, n_head_kv, d_k, d_v = SHAPES[shape]
    heads = Heads(d_k, d_v, n_head, n_head_kv, kv_type, kv_type)
    params = Params(block_size=options.block_size, deterministic=options.deterministic, fast=options.fast)
    of_k = d_k == 576  # multi-head latent attention: V is a view of K
    rng = np.random.default_rng(0)
    blocks = -(-context // params.block_size)
    n_slots = n_seqs * blocks * params.block_size
    row_k = lab.row_size(kv_type, d_k) * n_head_kv
    row_v = 0 if of_k else lab.row_size(kv_type, d_v) * n_head_kv
    most = MOST_LAYERS if n_q < 8 else 2
    layers = int(np.clip(-(-cold_bytes() // (n_slots * (row_k + row_v))), 1, most))

    stride = n_slots * max(row_k, row_v)  # the same for K's layers and V's
    k = random_bytes(kv_type, layers * stride, rng)
    v = random_bytes(kv_type, layers * stride if row_v else 1, rng)
    pool_k = k[: n_slots * row_k].reshape(n_slots, n_head_kv, -1)
    pool_v = v[: n_slots * row_v].reshape(n_slots, n_head_kv, -1) if row_v else None

    q = (1.5 * rng.standard_normal((n_seqs, n_q, n_head, d_k))).astype(np.float32)
    table = np.zeros((n_seqs, HEADER + blocks), np.int32)
    table[:, HEADER:] = rng.permutation(n_seqs * blocks).reshape(n_seqs, blocks)
    table[:, 0] = np.arange(n_seqs) * n_q
    table[:, 1:3] = n_q, context
    mask = causal_mask(n_seqs, n_q, context)
    flat_k = k[: n_seqs * context * row_k].reshape(n_seqs, context, n_head_kv, -1)
    flat_v = v[: n_seqs * context * row_v].reshape(n_seqs, context, n_head_kv, -1) if row_v else None
    rows = q.reshape(-1, n_head, d_k)

    def once(repeat: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        run = Run(threads=options.threads, layers=layers, layer_stride=stride, repeat=repeat + 1)
        if options.shared_prefix:
            other = lab.paged_attention(heads, params, rows, pool_k, pool_v, table, run=run)[1]
            tables = np.concatenate(
                [table[:, :HEADER], np.broadcast_to(table[:1, HEADER:], (n_seqs, blocks))], 1
            )
        else:
            other = lab.flash_attention(heads, params, q, flat_k, flat_v, mask, run=run)[1]
            tables = table
        ours = lab.paged_attention(heads, params, rows, pool_k, pool_v, tables, run=run)[1]
        return other[1:] / layers, ours[1:] / layers

    first = once(1)
    repeat = int(np.clip(options.seconds / 6 / (layers * float(first[0].sum() + first[1].sum())), 1, 50))
    rounds, quiet = quiet_rounds(lambda: once(repeat), 3, options.patience)
    stock = float(np.median(np.concatenate([r[0] for r in rounds])))
    ours = float(np.median(np.concatenate([r[1] for r in rounds])))
    return Point(
        kv_type, shape, n_seqs, n_q, context, options.threads, stock, ours, options.deterministic,
        options.fast, quiet,
    )  # fmt: skip


def kv_bytes(point: Point) -> int:
    """Return the bytes of K and V that the sequences of a point hold."""
    _, n_head_kv, d_k, d_v = SHAPES[point.shape]
    row = lab.row_size(point.type, d_k) + (0 if d_k == 576 else lab.row_size(point.type, d_v))
    return point.sequences * point.context * n_head_kv * row


def with_stock_of(point: Point, file: Path) -> Point:
    """Return the point with the stock time of another build, read from that build's --json."""
    where = ("type", "shape", "sequences", "queries", "context", "threads")
    for other in json.loads(file.read_text(encoding="utf-8"))["points"]:
        if all(other[name] == getattr(point, name) for name in where):
            return replace(point, stock=other["stock"])
    raise SystemExit(
        f"{file} has no point for {point.type} {point.shape} at {point.context}: measure it there"
    )


def points(options: argparse.Namespace) -> Iterator[Point]:
    """Measure every combination that the types allow."""
    for kv_type, shape, batch, context in itertools.product(
        options.types, options.shapes, options.batches, options.contexts
    ):
        n_seqs, n_q = (int(x) for x in batch.split("x"))
        _, _, d_k, d_v = SHAPES[shape]
        whole = kv_type not in lab.QUANTIZED or (d_k % 32 == 0 and d_v % 32 == 0)
        if whole and n_q <= context:
            point = measure(kv_type, shape, n_seqs, n_q, context, options)
            yield with_stock_of(point, options.stock_json) if options.stock_json else point


def main() -> None:
    """Print a row for each point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="+", default=["f16", "q8_0", "q4_0"], choices=lab.KV_TYPES)
    parser.add_argument("--shapes", nargs="+", default=["16/8/128", "32/8/64"], choices=SHAPES)
    parser.add_argument("--contexts", nargs="+", type=int, default=[32, 64, 512, 4096], help="tokens")
    parser.add_argument("--batches", nargs="+", default=["1x1"], help="sequences x query rows of each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=32, help="tokens")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each point")
    parser.add_argument("--patience", type=float, default=8.0, help="seconds to wait for quiet cores")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--fast", action="store_true", help="products in bfloat16 for all types")
    parser.add_argument(
        "--shared-prefix",
        action="store_true",
        help="all sequences share their blocks; compared with ours without sharing instead of stock",
    )
    parser.add_argument("--json", type=Path, help="write the points there")
    parser.add_argument("--stock-json", type=Path, help="take stock's times from another build's --json")
    options = parser.parse_args()

    one, three = (lab.read_rate(options.threads, streams, 3) for streams in (1, 3))
    print(
        f"memory read rate, {options.threads} threads: {one / 1e9:.1f} GB/s in one stream each, "
        f"{three / 1e9:.1f} in three"
    )
    other = "separate" if options.shared_prefix else "stock"
    print(f"| type | shape | batch | context | {other} µs | ours µs | ratio | ours GB/s |")
    print("|---|---|---|---|---|---|---|---|")
    measured = []
    for point in points(options):
        measured.append(point)
        rate_of_ours = kv_bytes(point) / point.ours / 1e9
        print(
            f"| {point.type} | {point.shape} | {point.sequences}x{point.queries} | {point.context} "
            f"| {point.stock * 1e6:.1f} | {point.ours * 1e6:.1f} | {point.ratio:.2f} | {rate_of_ours:.1f} |"
            f"{'' if point.quiet else ' others were busy'}",
            flush=True,
        )
    if options.json:
        found = [{**asdict(point), "ratio": point.ratio} for point in measured]
        options.json.write_text(
            json.dumps({"read_bytes_per_second": max(one, three), "points": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
