"""Measure what Ray Serve adds to two servers: time to the first token, and throughput.

    pip install '.[ray,serve]'
    python scripts/bench/ray_serve.py
    python scripts/bench/ray_serve.py model.gguf --streams 16 --tokens 128 --rounds 3 --json

Two `pyvelo serve` by hand, and two replicas of `python -m pyvelo.cluster.ray`, have a thread each and answer
the same requests in turns; the clients are in this process. By hand, they ask the servers alternately.

- first token: seconds of one request alone, through Ray less by hand: the median of pairs.
- throughput: tokens per second of all streams through Ray, over those by hand; no two prompts begin alike.
- processor: milliseconds of a token, of all processes of the servers, and of Ray with its replicas. If the
  engines take all cores, the ratio of these two is the limit of the throughput.

Ray's workers import pyvelo from the folder in which this is started. The default model is bench/engine.py's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter as now
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ScriptError, run_main
from scripts._served import served
from scripts.bench._http import ask_pyvelo, free_port
from scripts.bench._runs import default_model
from scripts.bench._serving import Job

SINGLES = 30
"""Pairs of requests alone."""
N_PROMPT = 8
"""Tokens of a prompt."""
PATIENCE = 120.0
"""Seconds that Ray has to end."""


@dataclass(frozen=True)
class Row:
    """Figures of a round; tokens per second of all streams."""

    added_first_ms: float
    by_hand: float
    with_ray: float
    by_hand_cpu_ms: float
    with_ray_cpu_ms: float

    @property
    def ratio(self) -> float:
        return self.with_ray / self.by_hand

    @property
    def limit(self) -> float:
        return self.by_hand_cpu_ms / self.with_ray_cpu_ms


class Side(NamedTuple):
    """Servers that answer the same requests: their ports, and processes whose children count, too."""

    ports: list[int]
    pids: list[int]


@contextmanager
def cluster(*options: str) -> Iterator[Side]:
    """Start two replicas on Ray; end them after the block."""
    port = free_port()
    command = [sys.executable, "-m", "pyvelo.cluster.ray", "--port", str(port), "--replicas", "2", *options]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        lines = process.stdout if process.stdout is not None else ()
        if not any(line.startswith("served at") for line in lines):
            raise ScriptError("pyvelo.cluster.ray did not start: see above")
        yield Side([port], [process.pid])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)


async def streams(ports: list[int], numbers: range, n_new: int) -> tuple[float, list[float]]:
    """Run one stream for each number at once; return the seconds of all, and to each first token."""
    begin, firsts = now(), list[float]()

    async def one(number: int) -> None:
        seen: list[float] = []
        prompt = [1 + number % 250, 1 + number // 250, *range(1, N_PROMPT - 1)]
        await ask_pyvelo(ports[number % len(ports)], Job(0.0, prompt, n_new), lambda _: seen.append(now()))
        firsts.append(seen[0] - begin)

    await asyncio.gather(*map(one, numbers))
    return now() - begin, firsts


def processor_seconds(pids: list[int]) -> float:
    """Return the processor time of processes and all that they have started, on Linux."""
    times, parents = dict[int, int](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], times[pid] = int(fields[1]), int(fields[11]) + int(fields[12])
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sum(times.get(pid, 0) for pid in found) / os.sysconf("SC_CLK_TCK")


async def measure(by_hand: Side, with_ray: Side, given: argparse.Namespace) -> list[Row]:
    """Return a row for each round."""
    first = 0

    def numbers(n: int) -> range:
        nonlocal first
        first += n
        return range(first - n, first)

    for side in (by_hand, with_ray):
        await streams(side.ports, numbers(given.streams), given.tokens)  # weights are packed
    rows = []
    for _ in range(given.rounds):
        added = []
        for _ in range(SINGLES):
            (plain,), (other,) = [
                (await streams(ports, numbers(1), 1))[1] for ports in (by_hand.ports[:1], with_ray.ports)
            ]
            added.append(other - plain)
        total = given.streams * given.tokens
        rates, taken = [], []
        for side in (by_hand, with_ray):
            before = processor_seconds(side.pids)
            rates.append(total / (await streams(side.ports, numbers(given.streams), given.tokens))[0])
            taken.append(1e3 * (processor_seconds(side.pids) - before) / total)
        rows.append(Row(1e3 * statistics.median(added), *rates, *taken))
    return rows


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if min(given.streams, given.tokens, given.rounds) < 1:
        raise ScriptError("--streams, --tokens and --rounds must be at least 1")
    options = [
        str(given.model or default_model()),
        "--threads",
        "1",
        "--ctx",
        "2048",
        "--kv-cache-bytes",
        "1G",
    ]
    with ExitStack() as stack:
        servers = [stack.enter_context(served(*options)) for _ in range(2)]
        by_hand = Side([each.port for each in servers], [each.pid for each in servers])
        rows = asyncio.run(measure(by_hand, stack.enter_context(cluster(*options)), given))
    medians = {
        "added_first_ms": statistics.median(row.added_first_ms for row in rows),
        "ratio": statistics.median(row.ratio for row in rows),
        "limit": statistics.median(row.limit for row in rows),
    }
    if given.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], **medians}))
        return 0
    print("first token, ms   by hand, tokens/s   with Ray   ratio   processor, ms a token   with Ray   limit")
    for row in rows:
        rates = f"{row.by_hand:19.1f} {row.with_ray:10.1f} {row.ratio:7.2f}"
        taken = f"{row.by_hand_cpu_ms:23.2f} {row.with_ray_cpu_ms:10.2f} {row.limit:7.2f}"
        print(f"{row.added_first_ms:15.1f} {rates} {taken}")
    print(f"medians: {medians['added_first_ms']:.1f} ms, {medians['ratio']:.2f} of {medians['limit']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
