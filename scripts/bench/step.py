"""Time one step of the engine beyond its C calls: what Python adds to every token.

    python scripts/bench/step.py tiny.gguf
    python scripts/bench/step.py tiny.gguf --seqs 32 --json

All sequences decode at once and their pieces are streamed. The time of the C calls (the forward pass and the
sampling, as the library measures them) is subtracted from the time of each step; the table shows the median
over the steps in microseconds, with its spread.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo import SamplingParams, StreamPiece
from pyvelo.config import EngineConfig
from pyvelo.engine.engine import Engine, open_engine
from pyvelo.errors import OutOfBlocks, VeloError

WARM_UP = 20  # steps
PROMPT = 40  # tokens


@dataclass(frozen=True)
class Row:
    """Microseconds per step: `python` is the median outside the C calls, `c` the median of the C calls."""

    sequences: int
    python: float
    fastest: float
    slowest_tenth: float
    c: float

    @property
    def per_sequence(self) -> float:
        return self.python / self.sequences


def measure(engine: Engine, n_seqs: int, n_steps: int) -> Row:
    """Run `n_steps` decode steps of `n_seqs` sequences."""
    pieces: deque[StreamPiece] = deque(maxlen=1)
    params = SamplingParams(max_tokens=WARM_UP + n_steps + 1, temperature=0, ignore_eos=True)
    prompt = [3] * PROMPT
    requests = [engine.processor.prepare(prompt, params, pieces.append).requests[0] for _ in range(n_seqs)]
    engine.core.inbox.submit(requests)
    while not all(request.n_generated for request in requests):
        engine.core.step()
    for _ in range(WARM_UP):
        engine.core.step()
    python, c = [], []
    if engine.core.n_running != n_seqs:
        raise OutOfBlocks(f"{n_seqs} sequences of {params.max_tokens} tokens do not fit: take fewer --steps")
    for _ in range(n_steps):
        before = engine.context.timings
        start = time.perf_counter()
        engine.core.step()
        whole = time.perf_counter() - start
        after = engine.context.timings
        native = after.run_seconds - before.run_seconds + after.sample_seconds - before.sample_seconds
        python.append((whole - native) * 1e6)
        c.append(native * 1e6)
    engine.core.cancel_all()
    return Row(
        sequences=n_seqs,
        python=statistics.median(python),
        fastest=min(python),
        slowest_tenth=statistics.quantiles(python, n=10)[-1],
        c=statistics.median(c),
    )


def run(config: EngineConfig, sizes: list[int], n_steps: int) -> list[Row]:
    engine = open_engine(config)
    try:
        return [measure(engine, n_seqs, n_steps) for n_seqs in sizes]
    finally:
        engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Times one step of the engine beyond its C calls.")
    parser.add_argument("model", type=Path, help="a small GGUF, such as scripts/models/make.py tiny")
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 8, 32, 128], metavar="N")
    parser.add_argument("--steps", type=int, default=300, help="steps that are timed (default 300)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if arguments.steps < 2 or min(arguments.seqs) < 1:
        parser.error("--steps takes 2 or more, --seqs 1 or more")
    config = EngineConfig(
        model=arguments.model,
        n_ctx=PROMPT + WARM_UP + arguments.steps + 2,
        max_num_seqs=max(arguments.seqs),
        max_batch_tokens=max(512, *arguments.seqs),
        kv_cache_bytes=1 << 30,
        n_threads=arguments.threads,
    )
    gc.disable()
    try:
        rows = run(config, arguments.seqs, arguments.steps)
    except VeloError as error:
        print(f"step.py: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps([asdict(row) | {"per_sequence": row.per_sequence} for row in rows]))
        return 0
    print(f"{'sequences':>9} {'python us':>10} {'fastest':>8} {'90 %':>8} {'per seq':>8} {'C us':>9}")
    for row in rows:
        print(
            f"{row.sequences:>9} {row.python:>10.1f} {row.fastest:>8.1f} {row.slowest_tenth:>8.1f} "
            f"{row.per_sequence:>8.2f} {row.c:>9.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
