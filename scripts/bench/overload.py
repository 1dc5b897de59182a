"""Overload `pyvelo serve`, and measure how many answers still arrive in time.

    python scripts/bench/overload.py
    python scripts/bench/overload.py model.gguf --seconds 60 --times 0.5 1 2 10 --json

Requests arrive as a Poisson process, at multiples of the rate that the server answers when many are asked at
once. The server runs in a process of its own, with a short queue, beyond which it refuses. Goodput is the
answers per second that met two limits: the time to the first token, and the mean time between tokens. Answers
429 and 503 are refusals, with the time of 99 % of them. The default model is bench/engine.py's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter as now

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ScriptError, run_main
from scripts._served import served
from scripts.bench._http import ask_pyvelo
from scripts.bench._runs import default_model
from scripts.bench._serving import Job, Load, Refused, play, quantile, summarise, workload

N_VOCAB = 256
"""Prompts have tokens below this one, which every vocabulary has."""


@dataclass(frozen=True)
class Row:
    """Outcome of one load; `times` is its rate over the server's, other rates are per second."""

    times: float
    offered: float
    good_per_s: float
    good: int
    failed: int
    refused: int
    refusal_p99_ms: float
    ttft_p99_ms: float


class Clients:
    """Requests to the server at a port, and the seconds to each refusal."""

    def __init__(self, port: int, given: argparse.Namespace) -> None:
        self._port = port
        self._given = given
        self._refusals: list[float] = []

    def jobs(self, count: int, rate: float) -> list[Job]:
        """Draw requests; all prompts and answers are equally long."""
        length = self._given.tokens
        return workload(Load(count, rate, length, length, length, length, self._given.seed), N_VOCAB)

    async def ask(self, job: Job, came: Callable[[int], None]) -> None:
        """Ask once; keep the time of a refusal."""
        begin = now()
        try:
            await ask_pyvelo(self._port, job, came)
        except Refused as error:
            if str(error).startswith(("status 429", "status 503")):
                self._refusals.append(now() - begin)
            raise

    async def capacity(self) -> float:
        """Return the answers per second when as many are asked at once as may run and wait."""
        jobs = self.jobs(self._given.seqs + self._given.queue, float("inf"))
        await play(jobs[:1], self.ask)
        records = await play(jobs, self.ask)
        if failed := [record.error for record in records if not record.finished]:
            raise ScriptError(f"{len(failed)} of {len(jobs)} requests failed without load: {failed[0]}")
        return len(jobs) / max(record.stamps[-1] for record in records)

    async def load(self, times: float, capacity: float) -> Row:
        """Return the outcome of a load of so many times the capacity."""
        given, rate = self._given, times * capacity
        self._refusals.clear()
        records = await play(self.jobs(max(1, round(rate * given.seconds)), rate), self.ask)
        found = summarise(
            records, ttft_limit=given.ttft_limit, tbt_limit=given.tbt_limit, capacity=1, waste=0.0
        )
        return Row(
            times=times,
            offered=rate,
            good_per_s=found.good_per_s,
            good=found.good,
            failed=found.failed - len(self._refusals),
            refused=len(self._refusals),
            refusal_p99_ms=1e3 * quantile(self._refusals, 0.99),
            ttft_p99_ms=1e3 * found.ttft_p99,
        )


async def measure(port: int, given: argparse.Namespace) -> list[Row]:
    """Return a row for each load."""
    clients = Clients(port, given)
    capacity = await clients.capacity()
    return [await clients.load(times, capacity) for times in given.times]


def share_of_best(rows: list[Row]) -> float:
    """Return the goodput of the largest load over the best of all."""
    best = max(row.good_per_s for row in rows)
    return max(rows, key=lambda row: row.times).good_per_s / best if best else 0.0


def show(rows: list[Row]) -> None:
    """Print a Markdown table."""
    print("| load | offered/s | good/s | good | failed | refused | refusal p99 ms | TTFT p99 ms |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row.times:g} | {row.offered:.2f} | {row.good_per_s:.2f} | {row.good} | {row.failed} "
            f"| {row.refused} | {row.refusal_p99_ms:.1f} | {row.ttft_p99_ms:.0f} |"
        )
    print(f"\nGoodput at the largest load: {share_of_best(rows):.0%} of the best")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file; default: bench/engine.py's")
    parser.add_argument("--times", type=float, nargs="+", default=[0.5, 0.8, 1.0, 10.0], metavar="N")
    parser.add_argument("--seconds", type=float, default=30.0, help="of arrivals, for each load")
    parser.add_argument("--tokens", type=int, default=64, help="of a prompt, and of an answer")
    parser.add_argument("--seqs", type=int, default=16, help="requests that run at once")
    parser.add_argument("--queue", type=int, default=8, help="requests that wait")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ttft-limit", type=float, default=10.0, help="seconds to the first token")
    parser.add_argument("--tbt-limit", type=float, default=0.5, help="seconds between tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_intermixed_args()
    if min(given.times) <= 0 or min(given.tokens, given.seqs) < 1:
        raise ScriptError("--times must be above 0, --tokens and --seqs at least 1")
    options = {
        "--max-num-seqs": given.seqs,
        "--max-queue": given.queue,
        "--threads": given.threads,
        "--ctx": 2 * given.tokens + 64,
    }
    model = given.model or default_model()
    with served(str(model), *(str(each) for pair in options.items() for each in pair)) as server:
        rows = asyncio.run(measure(server.port, given))
    if given.json:
        print(json.dumps({"share_of_best": share_of_best(rows), "rows": [asdict(row) for row in rows]}))
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
