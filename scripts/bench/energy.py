"""Measure what a token costs beside stock: processor time, and energy if the machine counts it.

    python scripts/bench/energy.py
    python scripts/bench/energy.py model.gguf --sequences 1 8 --tokens 128 --threads 4

Both decode N tokens and 2 N tokens, in turns and in new processes. The difference is what N tokens cost: the
load and the warm-up are in both. Processor time is of all threads, so threads that spin at barriers cost more
than threads that sleep; Windows does not count it. Energy is of the whole processor package (RAPL), which
Linux shows to root alone. The default model is bench/engine.py's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter as now
from typing import Any

if sys.platform == "win32":
    sys.exit("energy.py: Windows does not count the processor time of another process: use Linux or macOS")

import resource

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo.memory.cores import find_cores
from scripts._common import gguf_file, positive, run_main
from scripts.bench._runs import check_programs, default_model, output_of, random_prompt, stock_folder
from scripts.bench.batched import Case, stock_command

RAPL = Path("/sys/class/powercap")
PROMPT = 16  # tokens


@dataclass(frozen=True)
class Spent:
    """Processor seconds, seconds and joules (None: not counted) of a process, or of one token."""

    processor: float
    wall: float
    joules: float | None

    def minus(self, other: Spent, tokens: int) -> Spent:
        """Return the difference to `other`, for each of so many tokens."""
        joules = None
        if self.joules is not None and other.joules is not None:
            joules = (self.joules - other.joules) / tokens
        return Spent((self.processor - other.processor) / tokens, (self.wall - other.wall) / tokens, joules)


@dataclass(frozen=True)
class Result:
    """Medians of the rounds, for each token."""

    sequences: int
    ours: Spent
    stock: Spent


def energy_counters(folder: Path = RAPL) -> list[Path]:
    """Return the readable counters of whole packages."""
    found = sorted(folder.glob("intel-rapl:*/name")) if folder.is_dir() else []
    packages = [path.parent for path in found if path.read_text(encoding="ascii").startswith("package-")]
    return [path for path in packages if os.access(path / "energy_uj", os.R_OK)]


def joules_between(before: Sequence[int], after: Sequence[int], ranges: Sequence[int]) -> float:
    """Return the joules between two readings of counters in microjoules, which wrap after their range."""
    return sum((b - a) % (most + 1) for a, b, most in zip(before, after, ranges, strict=True)) / 1e6


def spent_by(command: Sequence[str]) -> Spent:
    """Run a program to its end; raise ScriptError with its last line if it fails."""
    counters = energy_counters()
    ranges = [_number(path / "max_energy_range_uj") for path in counters]
    used, before = resource.getrusage(resource.RUSAGE_CHILDREN), _read(counters)
    start = now()
    output_of(command)
    wall, after, total = now() - start, _read(counters), resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = total.ru_utime + total.ru_stime - used.ru_utime - used.ru_stime
    return Spent(processor, wall, joules_between(before, after, ranges) if counters else None)


def _read(counters: Sequence[Path]) -> list[int]:
    return [_number(path / "energy_uj") for path in counters]


def _number(path: Path) -> int:
    return int(path.read_text(encoding="ascii"))


# ---- ours: runs in a process of its own ----


def generate(model: Path, sequences: int, tokens: int, threads: int) -> None:
    """Decode `tokens` tokens of each sequence."""
    from pyvelo import LLM, SamplingParams

    settings: dict[str, Any] = {"n_ctx": PROMPT + tokens, "n_threads": threads, "n_gpu_layers": 0}
    with LLM(model, max_num_seqs=sequences, prefix_cache=False, **settings) as llm:
        prompts = [random_prompt(llm, PROMPT) for _ in range(sequences)]
        llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))


# ---- the comparison ----


def ours(model: Path, sequences: int, tokens: int, threads: int) -> list[str]:
    """Return our command."""
    return [sys.executable, __file__, str(model), "--worker", *map(str, (sequences, tokens, threads))]


def race(model: Path, folder: Path, sequences: int, tokens: int, threads: int, rounds: int) -> Result:
    """Measure both in turns."""
    commands: tuple[Callable[[int], list[str]], ...] = (
        lambda n: ours(model, sequences, n, threads),
        lambda n: stock_command(folder, model, Case("f16", sequences, PROMPT, n), threads),
    )
    found: tuple[list[Spent], ...] = ([], [])
    for _ in range(rounds):
        for costs, command in zip(found, commands, strict=True):
            short, long = spent_by(command(tokens)), spent_by(command(2 * tokens))
            costs.append(long.minus(short, sequences * tokens))
    return Result(sequences, *map(_median, found))


def _median(costs: Sequence[Spent]) -> Spent:
    joules = [cost.joules for cost in costs if cost.joules is not None]
    return Spent(
        statistics.median(cost.processor for cost in costs),
        statistics.median(cost.wall for cost in costs),
        statistics.median(joules) if joules else None,
    )


def show(results: Sequence[Result], model: Path, threads: int) -> None:
    """Print a Markdown table."""
    print(f"{model.name}, {threads} threads, cost of a token\n")
    print("| sequences | | processor ms | ms | joules |")
    print("|---:|---|---:|---:|---:|")
    for result in results:
        for name, cost in (("PyVelo", result.ours), ("stock", result.stock)):
            joules = "" if cost.joules is None else f"{cost.joules:.3f}"
            times = f"{1e3 * cost.processor:.1f} | {1e3 * cost.wall:.1f}"
            print(f"| {result.sequences} | {name} | {times} | {joules} |")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=gguf_file, help="a GGUF file; default: bench/engine.py's")
    parser.add_argument("--stock-bin", type=Path, help="folder of the stock programs; default: built here")
    parser.add_argument("--sequences", nargs="+", type=positive, default=[1, 8], help="default: 1 8")
    parser.add_argument(
        "--tokens", type=positive, default=64, help="N, of each sequence; default: %(default)s"
    )
    parser.add_argument("--rounds", type=positive, default=3, help="turns; default: %(default)s")
    parser.add_argument(
        "--threads", type=positive, default=find_cores().threads, help="of each program; default: %(default)s"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=3, type=int, help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args()
    if given.worker:
        generate(given.model, *given.worker)
        return 0
    check_programs(given.stock_bin, "llama-batched-bench")
    model, folder = given.model or default_model(), stock_folder(given.stock_bin)
    results = [race(model, folder, n, given.tokens, given.threads, given.rounds) for n in given.sequences]
    if given.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
    else:
        show(results, model, given.threads)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
