"""Measure the share of prompt tokens that the prefix cache finds, by simulation.

    python scripts/bench/hits.py
    python scripts/bench/hits.py --conversations 200 --json

Two mixes of requests run through the real scheduler and block manager, without a model:

- chat: conversations of several turns. A turn's prompt is the whole conversation so far and new tokens. The
  turns of all conversations are mixed.
- shared prefix: requests with one of a few instructions, and a tail of their own.

Each mix runs with the layers of Gemma 3 4B as if they had no window, with their windows, and with the layers
of Qwen3.5 0.8B. The last column is the share that an endless pool finds: what the prompts have in common.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo.kv.geometry import Geometry, make_geometry
from pyvelo.simulate.engine import Setup, simulate
from pyvelo.simulate.workload import Job
from scripts._common import run_main
from scripts.bench.windows import SHAPES, Layer

MIB = 1 << 20
N_CTX = 8192
ENDLESS = 64 << 30


def chat(n: int, seed: int) -> list[Job]:
    """Return the turns of `n` conversations, some ten of which are open at once."""
    draw = random.Random(seed)
    turns: list[tuple[float, int]] = []
    for conversation in range(n):
        time = conversation * 12.0
        for _ in range(draw.randint(3, 10)):
            turns.append((time, conversation))
            time += draw.uniform(10.0, 60.0)
    jobs: list[Job] = []
    last: dict[int, int] = {}
    for time, conversation in sorted(turns):
        before = last.get(conversation)
        shared = jobs[before].n_prompt + jobs[before].n_answer if before is not None else 0
        n_new, n_answer = draw.randint(10, 200), draw.randint(20, 300)
        if shared + n_new + n_answer > N_CTX:
            continue
        last[conversation] = len(jobs)
        jobs.append(Job(time, shared + n_new, n_answer, n_answer, 1, before, shared))
    return jobs


def shared_prefix(n: int, seed: int) -> list[Job]:
    """Return `n` requests, each with one of eight instructions of 300 to 1,500 tokens."""
    draw = random.Random(seed)
    lengths = [draw.randint(300, 1500) for _ in range(8)]
    first: dict[int, int] = {}
    jobs: list[Job] = []
    for number in range(n):
        which = min(draw.randrange(8), draw.randrange(8))
        n_answer = draw.randint(20, 200)
        like = first.setdefault(which, number)
        shared = lengths[which] if like != number else 0
        jobs.append(Job(number * 2.0, lengths[which] + draw.randint(10, 300), n_answer, n_answer, 1,
                        like if shared else None, shared))  # fmt: skip
    return jobs


def caches() -> dict[str, Geometry]:
    """Return the caches to compare."""
    layers = SHAPES["Gemma 3 4B"].layers()
    hybrid = [Layer(i, 2, 256, 256, 0, 0) for i in range(3, 24, 4)]
    state = 18 * (16 * 128 * 128 + 3 * 3 * 16 * 128) * 4
    return {
        "Gemma 3 4B, no window": make_geometry("gemma", layers, windows=False),
        "Gemma 3 4B": make_geometry("gemma", layers),
        "Qwen3.5 0.8B": make_geometry("qwen", hybrid, state_bytes=state),
    }


def hit_rate(geometry: Geometry, jobs: list[Job], n_bytes: int) -> float:
    """Return the share of prompt tokens that were hits."""
    n_blocks = n_bytes // geometry.block_bytes // geometry.grain_blocks * geometry.grain_blocks
    setup = Setup(
        n_blocks=n_blocks, block_size=geometry.block_size, block_bytes=geometry.block_bytes, n_ctx=N_CTX,
        max_seqs=32, windows=geometry.windows, state_blocks=geometry.state_blocks,
    )  # fmt: skip
    return simulate(setup, jobs).hit_rate


@dataclass(frozen=True)
class Row:
    """Shares of prompt tokens that were hits in pools of several sizes (MiB), of one mix and cache."""

    mix: str
    cache: str
    rates: dict[int, float]
    endless: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--mib", type=int, action="append", help="size of a pool; default: 1024, 2048, 4096")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    sizes = given.mib or [1024, 2048, 4096]
    mixes = {
        "chat": chat(given.conversations, given.seed),
        "shared prefix": shared_prefix(given.requests, given.seed),
    }
    rows = []
    for mix, jobs in mixes.items():
        for name, geometry in caches().items():
            rates = {size: hit_rate(geometry, jobs, size * MIB) for size in sizes}
            endless = hit_rate(replace(geometry, state_bytes=0), jobs, ENDLESS)
            rows.append(Row(mix, name, rates, endless))
    if given.json:
        print(json.dumps([row.__dict__ for row in rows], indent=2))
        return 0
    heads = " | ".join(f"{size:,} MiB" for size in sizes)
    print(f"| mix | cache | {heads} | endless |")
    print("|---|---|" + "---:|" * (len(sizes) + 1))
    for row in rows:
        shown = " | ".join(f"{rate:.0%}" for rate in row.rates.values())
        print(f"| {row.mix} | {row.cache} | {shown} | {row.endless:.0%} |")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
