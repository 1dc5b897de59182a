#!/usr/bin/env python3
"""What the block manager and the scheduler cost on one core, without a model.

    python scripts/bench_kv.py
    python scripts/bench_kv.py --json

Every figure is the median of --rounds; beside it is the project's goal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from time import perf_counter as now

from pyvelo.engine.request import Request
from pyvelo.engine.scheduler import Limits, schedule
from pyvelo.kv.draft import BlockTable, Start
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.pool import BlockPool
from pyvelo.kv.prefix import Chain
from pyvelo.sampling import SamplingParams
from pyvelo.text.detokenizer import Detokenizer

SIZE = 32
"""Tokens of a block."""


@dataclass(frozen=True)
class Result:
    """Microseconds; `goal` is what the project promises."""

    what: str
    median: float
    goal: float


def microseconds(rounds: int, prepare: Callable[[], Callable[[], object]]) -> float:
    """The median time of what `prepare` returns, made anew for every round."""
    times = []
    for _ in range(rounds):
        run = prepare()
        start = now()
        run()
        times.append((now() - start) * 1e6)
    return statistics.median(times)


def started(manager: BlockManager, tokens: array[int], salt: bytes = b"") -> BlockTable:
    """A sequence that holds all its tokens, computed."""
    draft = manager.draft()
    outcome = draft.start(len(tokens), Chain(tokens, SIZE, salt))
    if not isinstance(outcome, Start):
        raise SystemExit(f"the pool is too small for the benchmark: {outcome}")
    draft.grow(outcome.table, len(tokens))
    manager.commit(draft)
    manager.advance(outcome.table, len(tokens))
    return outcome.table


def take_and_free(rounds: int) -> float:
    n = 1024
    pool = BlockPool(4 * n)
    return microseconds(rounds, lambda: lambda: pool.release(pool.take(n))) / n


def step_of_256(rounds: int) -> float:
    """Every sequence decodes; in each round eight of them grow into a block."""
    manager, limits = BlockManager(256 * (8 + rounds // SIZE), SIZE), Limits(256, 512)
    running = [_decoding(manager, index) for index in range(256)]
    times = []
    for _ in range(rounds):
        start = now()
        manager.commit(schedule((), running, manager, limits).draft)
        times.append((now() - start) * 1e6)
        for request in running:
            request.n_computed = len(request.tokens)
            request.tokens.append(0)
            if request.table is not None:
                manager.advance(request.table, request.n_computed)
    return statistics.median(times)


def _decoding(manager: BlockManager, index: int) -> Request:
    """A request whose prompt is computed and whose first token was drawn."""
    request = Request(
        range(100 + index % SIZE),
        SamplingParams(max_tokens=None, cache_salt=str(index)),
        max_new=100_000,
        seed=0,
        detokenizer=Detokenizer(lambda token: b"", ()),
        block_size=SIZE,
    )
    request.table = started(manager, request.tokens, str(index).encode())
    request.n_computed = len(request.tokens)
    request.tokens.append(0)
    return request


def admission(rounds: int, n_tokens: int = 32768) -> float:
    """A prompt that somebody has asked before, from its tokens on."""
    manager = BlockManager(2 * n_tokens // SIZE, SIZE)
    prompt = array("i", range(n_tokens))
    manager.free(started(manager, prompt))

    def prepare() -> Callable[[], object]:
        tokens = array("i", prompt)
        return lambda: manager.free(started(manager, tokens))

    return microseconds(rounds, prepare)


def fork(rounds: int, n_tokens: int = 4096) -> float:
    manager = BlockManager(2 * n_tokens // SIZE, SIZE)
    tokens = array("i", range(n_tokens))
    table = started(manager, tokens)
    forks: list[BlockTable] = []

    def prepare() -> Callable[[], object]:
        while forks:
            manager.free(forks.pop())
        chain = Chain(array("i", tokens), SIZE)
        return lambda: forks.append(manager.fork(table, chain))

    return microseconds(rounds, prepare)


def results(rounds: int) -> Iterator[Result]:
    yield Result("take and give back, a block", take_and_free(rounds), 2)
    yield Result("schedule and commit, 256 sequences decode", step_of_256(rounds), 200)
    yield Result("admit 32768 tokens, all there", admission(rounds), 5000)
    yield Result("fork a sequence of 4096 tokens", fork(rounds), 100)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = list(results(given.rounds))
    if given.json:
        print(json.dumps([asdict(result) for result in found], indent=2))
        return 0
    print("| | median µs | goal µs |")
    print("|---|---:|---:|")
    for result in found:
        print(f"| {result.what} | {result.median:.1f} | {result.goal:g} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
