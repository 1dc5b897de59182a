"""Check that no request sees another's tokens: concurrent requests must get the answers of each alone.

    python scripts/check/isolation.py
    python scripts/check/isolation.py --requests 1000 --seed 7 --schedules 3

Requests of eight tenants run at once over a pool of a quarter of their demand, with host memory for some of
the preempted ones. Their prompts have private and shared prefixes; there are samples, cancels and priorities,
and half of the requests stream. Further schedules repeat them in another order and with other limits of a
step, so that others share, wait and are preempted. Every step is audited, and free blocks are filled with NaN
(VELO_DEBUG). In deterministic mode every answer must equal, token for token, the answer of the same request
alone without any sharing, and so must its streamed pieces; a cancelled answer must be a prefix of it. The
model is the tiny preset, made for the run.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter as now
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ROOT, run_main

if TYPE_CHECKING:
    from pyvelo.engine.engine import Engine
    from pyvelo.engine.request import Request
    from pyvelo.outputs import StreamPiece

TENANTS = 8
N_CTX = 512
AT_ONCE = 48
"""Requests that run at any time."""


@dataclass(frozen=True)
class Job:
    """One request. `cancel_after`: steps until it is cancelled, None if it is not; `listens`: it streams."""

    prompt: tuple[int, ...]
    salt: str
    n: int
    max_tokens: int
    temperature: float
    seed: int
    priority: int
    cancel_after: int | None
    listens: bool


def jobs(count: int, seed: int, n_vocab: int) -> list[Job]:
    """Draw a workload; two thirds of the prompts share a prefix with others."""
    draw = random.Random(seed)

    def words(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, n_vocab) for _ in range(draw.randint(low, high)))

    public = [words(20, 120) for _ in range(6)]
    private = [[words(20, 120) for _ in range(4)] for _ in range(TENANTS)]
    made = []
    for _ in range(count):
        tenant = draw.randrange(TENANTS)
        beginning = draw.choice([(), draw.choice(public), draw.choice(private[tenant])])
        beginning = beginning[: draw.randint(0, len(beginning))] if draw.random() < 0.3 else beginning
        made.append(
            Job(
                prompt=beginning + words(1, 40),
                salt=f"tenant {tenant}",
                n=draw.choice([1, 1, 1, 1, 2, 3]),
                max_tokens=draw.randint(1, 30) if draw.random() < 0.8 else draw.randint(100, 300),
                temperature=draw.choice([0.0, 1.0]),
                seed=draw.randrange(1 << 32),
                priority=draw.choice([0, 0, 0, 1, -1]),
                cancel_after=draw.randint(0, 40) if draw.random() < 0.08 else None,
                listens=draw.random() < 0.5,
            )
        )
    return made


def submission_of(engine: Engine, job: Job, on_piece: Callable[[StreamPiece], None] | None = None) -> Any:
    from pyvelo import SamplingParams

    params = SamplingParams(
        n=job.n,
        max_tokens=job.max_tokens,
        temperature=job.temperature,
        seed=job.seed,
        priority=job.priority,
        cache_salt=job.salt,
        ignore_eos=True,
    )
    return engine.processor.prepare(list(job.prompt), params, on_piece)


def alone(engine: Engine, work: list[Job]) -> Iterator[list[tuple[int, ...]]]:
    """Yield each request's answers from an engine that shares nothing."""
    from pyvelo.engine.request import RequestStatus

    for job in work:
        requests = submission_of(engine, job).requests
        for request in requests:
            request.status, request.followers = RequestStatus.NEW, []
            engine.core.inbox.submit([request])
            while not request.finished:
                engine.core.step()
        yield [request.generated_ids for request in requests]


@dataclass(frozen=True)
class Said:
    """Requests of a job, and the pieces that it streamed."""

    requests: tuple[Request, ...]
    pieces: list[StreamPiece]

    def told(self, index: int) -> tuple[int, ...]:
        """Return the streamed tokens of one of its answers."""
        return tuple(token for piece in self.pieces if piece.index == index for token in piece.token_ids)


@dataclass(frozen=True)
class Schedule:
    """Order of the requests, and the limits of a step."""

    order: tuple[int, ...]
    max_num_seqs: int
    max_batch_tokens: int


def schedules(count: int, n_jobs: int, seed: int) -> list[Schedule]:
    """Return the schedules; the first one is plain."""
    draw = random.Random(seed)
    made = [Schedule(tuple(range(n_jobs)), 256, 512)]
    while len(made) < count:
        order = draw.sample(range(n_jobs), n_jobs)
        max_seqs = draw.randint(AT_ONCE // 4, AT_ONCE)
        made.append(Schedule(tuple(order), max_seqs, draw.randint(max_seqs, 2 * max_seqs)))
    return made


def together(engine: Engine, work: list[Job], order: Sequence[int]) -> list[Said]:
    """Run all jobs, AT_ONCE at a time; return the results in the order of `work`."""
    started: dict[int, Said] = {}
    open_: list[tuple[Job, tuple[Request, ...], int]] = []
    step = 0
    while len(started) < len(work) or open_:
        while len(open_) < AT_ONCE and len(started) < len(work):
            number = order[len(started)]
            job = work[number]
            pieces: list[StreamPiece] = []
            requests = submission_of(engine, job, pieces.append if job.listens else None).requests
            engine.core.inbox.submit(requests)
            started[number] = Said(requests, pieces)
            open_.append((job, requests, step))
        for job, requests, since in open_:
            if job.cancel_after is not None and step - since >= job.cancel_after:
                engine.core.inbox.cancel(requests)
        if not engine.core.step():
            raise RuntimeError(f"step {step} does nothing, although requests are open")
        step += 1
        open_ = [entry for entry in open_ if not all(request.finished for request in entry[1])]
    return [started[number] for number in range(len(work))]


def compare(work: list[Job], expected: list[list[tuple[int, ...]]], got: list[Said]) -> int:
    """Return the number of answers that are wrong or were streamed wrongly."""
    wrong = 0
    for number, (job, answers, said) in enumerate(zip(work, expected, got, strict=True)):
        for answer, request in zip(answers, said.requests, strict=True):
            tokens, told = request.generated_ids, said.told(request.index)
            whole = request.finish_reason == "length" and tokens == answer
            cut = job.cancel_after is not None and tokens == answer[: len(tokens)]
            heard = not job.listens or (told == tokens if whole else told == tokens[: len(told)])
            if request.error is not None or not (whole or cut) or not heard:
                wrong += 1
                print(
                    f"request {number}: {request.finish_reason} {request.error} {tokens} is not {answer}, "
                    f"or differs from its stream: {told}"
                )
    return wrong


def tiny_model(folder: Path) -> Path:
    path = folder / "tiny.gguf"
    make = [sys.executable, str(ROOT / "scripts/models/make.py"), "tiny", str(path), "--type", "f32"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    return path


def run(model: Path, count: int, seed: int, n_schedules: int) -> int:
    from pyvelo.config import EngineConfig
    from pyvelo.engine.engine import open_engine

    def opened(**settings: Any) -> Engine:
        return open_engine(
            EngineConfig(model=model, deterministic=True, n_ctx=N_CTX, n_threads=1, **settings)
        )

    os.environ["VELO_DEBUG"] = "1"
    first = opened(prefix_cache=False)
    try:
        work = jobs(count, seed, first.model.vocab.n_tokens)
        start = now()
        expected = list(alone(first, work))
        print(f"{count} requests alone: {now() - start:.0f} s", flush=True)
        tokens = [job.n * (len(job.prompt) + job.max_tokens) for job in work]
        demand = AT_ONCE * sum(tokens) // len(tokens)
        pool = -(-demand // 4 // 256) * 256 * first.geometry.token_bytes
    finally:
        first.close()
    wrong = 0
    for schedule in schedules(n_schedules, count, seed):
        engine = opened(
            kv_cache_bytes=pool,
            swap_bytes=pool // 2,
            max_num_seqs=schedule.max_num_seqs,
            max_batch_tokens=schedule.max_batch_tokens,
        )
        try:
            wrong += run_together(engine, work, expected, schedule)
        finally:
            engine.close()
    print(f"{wrong} wrong")
    return wrong


def run_together(
    engine: Engine, work: list[Job], expected: list[list[tuple[int, ...]]], schedule: Schedule
) -> int:
    """Run one schedule; return the number of wrong answers, plus one if a block is held at the end."""
    start = now()
    wrong = compare(work, expected, together(engine, work, schedule.order))
    stats = engine.stats()
    print(
        f"together, {schedule.max_num_seqs} sequences and {schedule.max_batch_tokens} tokens a step at most: "
        f"{now() - start:.0f} s, {stats.hit_tokens} of {stats.queried_tokens} tokens shared, "
        f"{stats.block_copies} copies, {stats.preemptions} preemptions ({stats.swaps} to host memory), "
        f"{stats.block_evictions} evictions, {stats.requests_aborted} cancelled",
        flush=True,
    )
    held = (stats.blocks_used, stats.swap_blocks_used, stats.running, stats.waiting)
    if held != (0, 0, 0, 0):
        print(f"blocks used, swapped, requests running, waiting: {held}, but all should be 0")
        wrong += 1
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedules", type=int, default=2, help="number of concurrent runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return int(run(tiny_model(Path(folder)), given.requests, given.seed, given.schedules) > 0)


if __name__ == "__main__":
    sys.exit(run_main(main))
