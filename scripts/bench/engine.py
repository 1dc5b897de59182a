"""Compare PyVelo's engine with stock llama-bench on the same model file.

    python scripts/bench/engine.py
    python scripts/bench/engine.py model.gguf --kv-type q8_0 --depth 4096 --rounds 5 --json
    python scripts/bench/engine.py --depth 0 --busy 1           beside another busy process

Both prefill a batch and decode token by token, at an empty context and at a deep one, with flash attention
and the same KV type. Ours is measured as users run it: LLM.stream, with scheduling, sampling and text;
stock's figure is the forward pass alone. The two take turns, each time in a new process; the ratio is the
median over the rounds. The default model is the qwen3-0.6b preset of models/make.py, made once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter as now
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import run_main
from scripts.bench._runs import PRESET, default_model, in_own_process, output_of, random_prompt, stock_folder

if TYPE_CHECKING:
    from pyvelo import LLM
    from pyvelo.kv.types import KVType

# minimum ratios at an empty context and at a deep one
EMPTY_TARGET, DEEP_TARGET = 0.97, 1.0
BATCH = 512


@dataclass(frozen=True)
class Case:
    """One comparison; depth in tokens."""

    kv_type: KVType
    depth: int


@dataclass(frozen=True)
class Speeds:
    """Prefill and decode speed in tokens per second."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class Result:
    """Medians over the rounds, and the smallest and largest ratio of a round."""

    kv_type: KVType
    depth: int
    what: str
    ours: float
    stock: float
    ratio: float
    least: float
    most: float
    target: float

    @property
    def reached(self) -> bool:
        return self.ratio >= self.target


@dataclass(frozen=True)
class Plan:
    """Settings that every measurement shares."""

    model: Path
    stock_bin: Path
    threads: int
    prompt: int
    tokens: int
    repeats: int


# ---- ours: runs in a process of its own ----


def measure(model: Path, case: Case, threads: int, prompt: int, tokens: int, repeats: int) -> Speeds:
    """Return our engine's speeds: medians of `repeats` requests, after one that warms up."""
    with opened(model, case, case.depth + prompt + tokens + 1, threads) as llm, _step_ends() as ends:
        arrivals(llm, random_prompt(llm, prompt), 2)
        prefill, decode = [], []
        for _ in range(repeats):
            start = now()
            ends.clear()
            arrivals(llm, random_prompt(llm, case.depth + prompt), 1)
            # the last chunks are the prompt after the depth
            before = [start, *ends][-1 - -(-prompt // BATCH)]
            prefill.append(prompt / (ends[-1] - before))
            seen = arrivals(llm, random_prompt(llm, max(1, case.depth)), tokens + 1)
            decode.append(tokens / (seen[-1] - seen[0]))
        return Speeds(statistics.median(prefill), statistics.median(decode))


def opened(model: Path, case: Case, n_ctx: int, threads: int) -> LLM:
    """Open an engine without a prefix cache."""
    from pyvelo import LLM

    return LLM(
        model,
        kv_type=case.kv_type,
        n_ctx=n_ctx,
        n_threads=threads,
        n_gpu_layers=0,
        max_batch_tokens=BATCH,
        prefix_cache=False,
    )


def arrivals(llm: Any, prompt: list[int], tokens: int) -> list[float]:
    """Generate, and return the arrival time of each piece of the answer."""
    from pyvelo import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return [now() for _ in llm.stream(prompt, params)]


@contextmanager
def _step_ends() -> Iterator[list[float]]:
    """Give a list that receives the end time of every engine step within the block.

    Nothing else shows the chunks of a prompt.
    """
    from pyvelo.engine.step import EngineCore

    ends: list[float] = []
    step = EngineCore.step

    def timed(core: EngineCore) -> bool:
        progress = step(core)
        ends.append(now())
        return progress

    with patch.object(EngineCore, "step", timed):
        yield ends


# ---- the comparison ----


def ours(plan: Plan, case: Case) -> Speeds:
    """Measure ours in a new process."""
    numbers = [plan.threads, plan.prompt, plan.tokens, plan.repeats]
    answer = in_own_process(__file__, plan.model, [case.kv_type, case.depth, *numbers])
    return Speeds(answer["prefill"], answer["decode"])


def stock(plan: Plan, case: Case) -> Speeds:
    """Return llama-bench's speeds."""
    tests = llama_bench(plan, case, ["-p", str(plan.prompt), "-n", str(plan.tokens)])
    speeds = {test["n_gen"] > 0: statistics.median(test["samples_ts"]) for test in tests}
    return Speeds(prefill=speeds[False], decode=speeds[True])


def llama_bench(plan: Plan, case: Case, tests: list[str]) -> Any:
    """Run llama-bench with our batch sizes and return its JSON."""
    command = [str(plan.stock_bin / "llama-bench"), "-m", str(plan.model), "-o", "json"]
    command += ["-t", str(plan.threads), "-fa", "1", "-ctk", case.kv_type, "-ctv", case.kv_type]
    command += ["-b", "2048", "-ub", str(BATCH), "-d", str(case.depth), "-r", str(plan.repeats)]
    return json.loads(output_of([*command, *tests]))


def race(plan: Plan, case: Case, rounds: int) -> Iterator[Result]:
    """Measure both in turns; stock goes first in every other round."""
    pairs = []
    for number in range(rounds):
        if number % 2:
            theirs, mine = stock(plan, case), ours(plan, case)
        else:
            mine, theirs = ours(plan, case), stock(plan, case)
        pairs.append((mine, theirs))
        if sys.stderr.isatty():
            print(f"{case.kv_type} at {case.depth}: round {number + 1} of {rounds}", file=sys.stderr)
    for what in ("prefill", "decode"):
        mine_all = [getattr(mine, what) for mine, _ in pairs]
        stock_all = [getattr(theirs, what) for _, theirs in pairs]
        ratios = [a / b for a, b in zip(mine_all, stock_all, strict=True)]
        yield Result(
            case.kv_type,
            case.depth,
            what,
            statistics.median(mine_all),
            statistics.median(stock_all),
            statistics.median(ratios),
            min(ratios),
            max(ratios),
            DEEP_TARGET if case.depth else EMPTY_TARGET,
        )


# ---- busy processes and output ----


@contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run `count` processes that each keep a core busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield busy
    finally:
        for process in busy:
            process.kill()
            process.wait()


def show(results: list[Result], plan: Plan) -> None:
    """Print a Markdown table."""
    print(f"{plan.model.name}, {plan.threads} threads, tokens per second\n")
    print("| KV | context | | PyVelo | stock | ratio | rounds | |")
    print("|---|---:|---|---:|---:|---:|---|---|")
    for r in results:
        what = f"prefill {plan.prompt}" if r.what == "prefill" else f"decode {plan.tokens}"
        verdict = "" if r.reached else f"below {r.target:.2f}"
        print(
            f"| {r.kv_type} | {r.depth} | {what} | {r.ours:.1f} | {r.stock:.1f} "
            f"| {r.ratio:.2f} | {r.least:.2f} to {r.most:.2f} | {verdict} |"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help=f"a GGUF file; default: the {PRESET} preset")
    parser.add_argument("--stock-bin", type=Path, help="folder of a stock llama-bench; default: built here")
    parser.add_argument("--kv-type", nargs="+", default=["f16", "q8_0"])
    parser.add_argument("--depth", nargs="+", type=int, default=[0, 4096], help="tokens of context")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    parser.add_argument("--repeats", type=int, default=2, help="measurements in a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode")
    parser.add_argument("--busy", type=int, default=0, help="other busy processes during the run")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a minimum ratio is missed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args()


def main() -> int:
    given = _arguments()
    if given.worker:
        kv_type, *numbers = given.worker
        depth, threads, prompt, tokens, repeats = map(int, numbers)
        speeds = measure(given.model, Case(kv_type, depth), threads, prompt, tokens, repeats)
        print(json.dumps(asdict(speeds)))
        return 0
    plan = Plan(
        model=given.model or default_model(),
        stock_bin=stock_folder(given.stock_bin),
        threads=given.threads,
        prompt=given.prompt,
        tokens=given.tokens,
        repeats=given.repeats,
    )
    cases = [Case(kv_type, depth) for depth in given.depth for kv_type in given.kv_type]
    with busy_processes(given.busy):
        results = [result for case in cases for result in race(plan, case, given.rounds)]
    if given.json:
        print(json.dumps([{**asdict(r), "reached": r.reached} for r in results], indent=2))
    else:
        show(results, plan)
    return int(given.check and not all(r.reached for r in results))


if __name__ == "__main__":
    sys.exit(run_main(main))
