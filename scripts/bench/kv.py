"""Time the block manager and the scheduler on one core, without a model.

    python scripts/bench/kv.py
    python scripts/bench/kv.py --json --vllm ~/vllm/bin/python

Every figure is the median of --rounds, beside the project's goal. --vllm names a Python that has vLLM: it
adds the cost of the same work in vLLM's BlockPool and KVCacheManager, with blocks of the same size (see
_vllm_kv.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter as now

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo.engine.request import Detokenizer, Request, Sequence
from pyvelo.engine.scheduler import schedule
from pyvelo.kv.manager import BlockManager
from pyvelo.kv.pool import BlockPool, BlockTable, Start
from pyvelo.kv.prefix import FULL, BlockHashes, Window
from pyvelo.memory.budget import Limits
from pyvelo.sampling import SamplingParams
from scripts._common import ScriptError, run_main
from scripts.bench._timing import microseconds

SIZE = 32
"""Tokens of a block."""

N_TAKEN = 1024
"""Blocks allocated at once."""

N_ADMITTED = 32768
"""Tokens of the cached prompt."""


@dataclass(frozen=True)
class Result:
    """Times in microseconds; `goal` is the project's, `vllm` the one measured in vLLM."""

    what: str
    median: float
    goal: float
    vllm: float | None = None


def started(manager: BlockManager, tokens: array[int], salt: bytes = b"") -> BlockTable:
    """Return the table of a sequence whose tokens are all computed."""
    allocation = manager.plan()
    outcome = allocation.start(len(tokens), BlockHashes(tokens, SIZE, salt))
    if not isinstance(outcome, Start):
        raise SystemExit(f"the pool is too small for the benchmark: {outcome}")
    allocation.grow(outcome.table, len(tokens))
    manager.commit(allocation)
    manager.advance(outcome.table, len(tokens))
    return outcome.table


def take_and_free(rounds: int, n: int = N_TAKEN) -> float:
    """Time allocating and freeing `n` blocks at once; return microseconds of a block."""
    pool = BlockPool(4 * n)
    return microseconds(rounds, lambda: lambda: pool.release(pool.allocate(n))) / n


def step_of_256(rounds: int, windows: tuple[Window, ...] = (FULL,)) -> float:
    """Time a step in which 256 sequences decode; eight of them allocate a block in each round and group."""
    n_blocks, limits = 256 * (8 + rounds // SIZE) * len(windows), Limits(256, 512)
    manager = BlockManager(n_blocks, SIZE, windows=windows, max_chunk=limits.max_batch_tokens)
    running = [_decoding(manager, index) for index in range(256)]
    times = []
    for _ in range(rounds):
        start = now()
        manager.commit(schedule((), running, manager, limits).allocation)
        times.append((now() - start) * 1e6)
        for request in running:
            request.n_computed = len(request.tokens)
            request.tokens.append(0)
            if request.sequence.table is not None:
                manager.advance(request.sequence.table, request.n_computed)
    return statistics.median(times)


def _decoding(manager: BlockManager, index: int) -> Request:
    """Return a request whose prompt is computed and whose first token is sampled."""
    request = Request(
        Sequence(range(100 + index % SIZE), SIZE, str(index)),
        SamplingParams(max_tokens=None),
        max_new=100_000,
        seed=0,
        detokenizer=Detokenizer(lambda token: b"", ()),
    )
    request.sequence.table = started(manager, request.tokens, str(index).encode())
    request.n_computed = len(request.tokens)
    request.tokens.append(0)
    return request


def admission(rounds: int, n_tokens: int = N_ADMITTED) -> float:
    """Time the admission of a prompt that is cached, from its tokens on."""
    manager = BlockManager(2 * n_tokens // SIZE, SIZE)
    prompt = array("i", range(n_tokens))
    manager.free(started(manager, prompt))

    def prepare() -> Callable[[], object]:
        tokens = array("i", prompt)
        return lambda: manager.free(started(manager, tokens))

    return microseconds(rounds, prepare)


def fork(rounds: int, n_tokens: int = 4096) -> float:
    """Time forking a sequence."""
    manager = BlockManager(2 * n_tokens // SIZE, SIZE)
    tokens = array("i", range(n_tokens))
    table = started(manager, tokens)
    forks: list[BlockTable] = []

    def prepare() -> Callable[[], object]:
        while forks:
            manager.free(forks.pop())
        hashes = BlockHashes(array("i", tokens), SIZE)
        return lambda: forks.append(manager.fork(table, hashes))

    return microseconds(rounds, prepare)


def vllm_costs(python: Path, rounds: int) -> dict[str, float]:
    """Return the microseconds of the same work in vLLM."""
    script = Path(__file__).resolve().parent / "_vllm_kv.py"
    sizes = map(str, (rounds, SIZE, N_TAKEN, N_ADMITTED))
    done = subprocess.run([str(python), str(script), *sizes], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ScriptError(f"vLLM could not be measured: {lines[-1] if lines else done.returncode}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def results(rounds: int, vllm: Path | None = None) -> Iterator[Result]:
    """Measure all figures."""
    theirs = vllm_costs(vllm, rounds) if vllm else {}
    yield Result("allocate and free a block", take_and_free(rounds), 2, theirs.get("take"))
    yield Result("schedule and commit, 256 sequences decode", step_of_256(rounds), 200)
    windows = (FULL, Window(128))
    yield Result("schedule and commit, 256 sequences, 2 groups", step_of_256(rounds, windows), 250)
    yield Result(f"admit {N_ADMITTED} tokens, all cached", admission(rounds), 5000, theirs.get("admit"))
    yield Result("fork a sequence of 4096 tokens", fork(rounds), 100)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="a Python that has vLLM")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = list(results(given.rounds, given.vllm))
    if given.json:
        print(json.dumps([asdict(result) for result in found], indent=2))
        return 0
    print(f"| | median µs | goal µs |{' vLLM µs |' if given.vllm else ''}")
    print(f"|---|---:|---:|{'---:|' if given.vllm else ''}")
    for result in found:
        theirs = "" if result.vllm is None else f"{result.vllm:.1f}"
        print(
            f"| {result.what} | {result.median:.1f} | {result.goal:g} |{f' {theirs} |' if given.vllm else ''}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
