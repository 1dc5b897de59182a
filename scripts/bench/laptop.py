"""Compare PyVelo on a laptop's processor with stock llama.cpp and ik_llama.cpp, all built for it alike.

    cmake -S native -B build/avx2 -DPYVELO_NATIVE=OFF -DPYVELO_BUILD_TESTS=ON && cmake --build build/avx2 -j
    cmake --install build/avx2 --component pyvelo --prefix .
    python scripts/bench/build_ik.py ../ik_llama.cpp
    python scripts/bench/laptop.py --ik-bin ../ik_llama.cpp/build-avx2/bin

Runs the PyVelo that this Python imports; the second command replaces the library of the checkout. A build for
AVX-VNNI has -DGGML_AVX_VNNI=ON, too. Measures prompts, one sequence and several that decode at once, and
decoding behind a long context. The programs take turns, each time in a new process; a ratio is the median
over the rounds. ik_llama.cpp packs the weights when it loads them (-rtr), as PyVelo does in its first step;
its programs measure no prompt behind a context. The default model is bench/engine.py's.

The memory's limit of one sequence is the speed at which threads that only add numbers up read the model's
file and the pages of K and V: the median of tries beside each turn. It is empty without libvelo-lab, which
-DPYVELO_BUILD_TESTS=ON makes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo.cpu import NEEDED
from pyvelo.kv.types import KVType
from pyvelo.memory.cores import find_cores
from scripts._common import ScriptError, gguf_file, positive, run_main
from scripts.bench import batched, engine
from scripts.bench._runs import check_programs, default_model, output_of
from scripts.bench.engine import BATCH, Plan
from scripts.build.stock import LIBRARIES, PROCESSORS, TOOLS, build_stock

PROGRAMS = ("ours", "stock", "ik", "memory")
SEVERAL = (4, 8, 16)  # sequences that decode at once
SHORT = 16  # tokens of the prompts of several sequences


@dataclass(frozen=True)
class Case:
    """Measurement of a prompt, or of sequences that decode, behind `depth` tokens."""

    what: str  # "prefill" or "decode"
    sequences: int
    depth: int
    kv_type: KVType

    @property
    def name(self) -> str:
        where = f" at {self.depth}, {self.kv_type}" if self.depth else ""
        if self.what == "prefill":
            return f"prefill{where}"
        return f"decode, {self.sequences} sequence{'s' * (self.sequences > 1)}{where}"


CASES = (
    Case("prefill", 1, 0, "f16"),
    *(Case("decode", n, 0, "f16") for n in (1, *SEVERAL)),
    *(Case("decode", 1, 4096, kv_type) for kv_type in ("f16", "q8_0")),
    *(Case("prefill", 1, 4096, kv_type) for kv_type in ("f16", "q8_0")),
)


@dataclass(frozen=True)
class Result:
    """Medians of the rounds by program: tokens per second, and ours over the others'.

    A program that does not measure the case has no entry.
    """

    name: str
    speeds: dict[str, float]
    over: dict[str, float]


# ---- one measurement ----


def ours(plan: Plan, case: Case) -> float:
    """Return our tokens per second."""
    if case.sequences > 1:
        return batched.ours(plan.model, _batched(plan, case), plan.threads)
    return float(getattr(engine.ours(plan, engine.Case(case.kv_type, case.depth)), case.what))


def stock(plan: Plan, case: Case) -> float:
    """Return the tokens per second of stock, with several sequences in its quicker mode."""
    if case.sequences > 1:
        return max(
            batched.stock(plan.stock_bin, plan.model, _batched(plan, case), plan.threads, unified)
            for unified in (False, True)
        )
    return float(getattr(engine.stock(plan, engine.Case(case.kv_type, case.depth)), case.what))


def ik(plan: Plan, case: Case) -> float | None:
    """Return the tokens per second of ik_llama.cpp, whose folder `plan` names.

    None for a prompt behind a context.
    """
    if case.sequences > 1:
        return _ik_batched(plan, case)
    if case.what == "prefill" and case.depth:
        return None
    tests = ["-p", str(plan.prompt), "-n", "0"]
    if case.what == "decode":
        tests = ["-p", "0", "-n", "0", "-gp", f"{case.depth},{plan.tokens}"]
        if not case.depth:
            tests = ["-p", "0", "-n", str(plan.tokens)]
    command = [str(plan.stock_bin / "llama-bench"), *_shared(plan, case), "-fa", "1", "-rtr", "1"]
    (test,) = json.loads(output_of([*command, "-o", "json", "-r", str(plan.repeats), *tests]))
    return float(statistics.median(test["samples_ts"]))


def memory(plan: Plan, case: Case) -> float | None:
    """Return the tokens per second of one sequence that the memory allows; None for others."""
    if case.what == "prefill" or case.sequences > 1:
        return None
    try:
        from tests.ops import lab
    except (ImportError, OSError):
        return None  # a build without tests
    with engine.opened(plan.model, engine.Case(case.kv_type, 0), 64, 1) as llm:
        stats = llm.stats()
    token_bytes = stats.block_bytes // stats.block_size
    rate = statistics.median(lab.read_rate(plan.threads, streams, 1) for streams in (1, 2, 3) * 3)
    return rate / (plan.model.stat().st_size + case.depth * token_bytes)


def _ik_batched(plan: Plan, case: Case) -> float:
    command = [str(plan.stock_bin / "llama-batched-bench"), *_shared(plan, case), "-fa", "on", "-rtr"]
    command += ["-c", str(case.sequences * (SHORT + plan.tokens) + BATCH), "-npp", str(SHORT)]
    command += ["-ntg", str(plan.tokens), "-npl", str(case.sequences)]
    with tempfile.TemporaryDirectory() as folder:  # for the log that it leaves
        done = subprocess.run(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    return _last_speed(done.stdout)  # its table is in the log


def _shared(plan: Plan, case: Case) -> list[str]:
    types = ["-ctk", case.kv_type, "-ctv", case.kv_type]
    return ["-m", str(plan.model), "-t", str(plan.threads), *types, "-ub", str(BATCH)]


def _batched(plan: Plan, case: Case) -> batched.Case:
    return batched.Case(case.kv_type, case.sequences, SHORT, plan.tokens)


def _last_speed(output: str) -> float:
    """Return the decoding speed in the last row of a table of llama-batched-bench."""
    rows = [line.split("|")[1:-1] for line in output.splitlines() if line.startswith("|")]
    if not rows or len(rows[-1]) < 8:
        raise ScriptError(f"llama-batched-bench printed no table: {output[-200:]!r}")
    return float(rows[-1][7])


# ---- the comparison ----


def race(plan: Plan, ik_bin: Path | None, case: Case, rounds: int) -> Result:
    """Measure all programs in turns, each first in its round."""
    programs: dict[str, Callable[[], float | None]] = {
        "ours": lambda: ours(plan, case),
        "stock": lambda: stock(plan, case),
        "ik": lambda: ik(replace(plan, stock_bin=ik_bin), case) if ik_bin else None,
        "memory": lambda: memory(plan, case),
    }
    found: dict[str, list[float | None]] = {name: [] for name in programs}
    for number in range(rounds):
        first = number % len(PROGRAMS)
        for name in PROGRAMS[first:] + PROGRAMS[:first]:
            found[name].append(programs[name]())
        last = ", ".join(f"{name} {values[-1]}" for name, values in found.items())
        print(f"{case.name}, round {number + 1} of {rounds}: {last}", file=sys.stderr, flush=True)
    measured = {name: [value for value in values if value is not None] for name, values in found.items()}
    return Result(
        case.name,
        {name: statistics.median(values) for name, values in measured.items() if values},
        {
            name: statistics.median(a / b for a, b in zip(measured["ours"], values, strict=True))
            for name, values in measured.items()
            if values and name != "ours"
        },
    )


def step_costs(plan: Plan, rounds: int) -> dict[int, float]:
    """Return how many times as long as a step of one sequence our step of several takes.

    Each round measures all of them within a minute, since the speed of a machine drifts.
    """
    found: dict[int, list[float]] = {n: [] for n in SEVERAL}
    for _ in range(rounds):
        speeds = {n: ours(plan, Case("decode", n, 0, "f16")) for n in (1, *SEVERAL)}
        for n, ratios in found.items():
            ratios.append(speeds[1] * n / speeds[n])
    return {n: statistics.median(ratios) for n, ratios in found.items()}


def show(results: list[Result], costs: dict[int, float], plan: Plan) -> None:
    """Print a Markdown table, and the costs of steps."""
    print(f"{plan.model.name}, {plan.threads} threads, prompts of {plan.prompt}, tokens per second\n")
    print("| | PyVelo | stock | ik_llama.cpp | memory's limit | over stock | over ik | over the limit |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for r in results:
        speeds = [f"{r.speeds[name]:.1f}" if name in r.speeds else "" for name in PROGRAMS]
        ratios = [f"{r.over[name]:.2f}" if name in r.over else "" for name in PROGRAMS[1:]]
        print(f"| {' | '.join((r.name, *speeds, *ratios))} |")
    if costs:
        told = ", ".join(f"{n}: {cost:.2f}" for n, cost in costs.items())
        print(f"\nCost of a step with several sequences over one: {told}.")


def built_for() -> str:
    """Return the processor for which the imported PyVelo is built, one of `PROCESSORS`."""
    flags = NEEDED.read_text(encoding="ascii").split() if NEEDED.exists() else []
    if not flags or "avx512f" in flags:
        return "native"
    return "avx-vnni" if "avx_vnni" in flags else "avx2"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=gguf_file, help="a GGUF file; default: bench/engine.py's")
    parser.add_argument("--cpu", choices=PROCESSORS, help="what stock is built for; default: as PyVelo")
    parser.add_argument("--stock-bin", type=Path, help="folder of the stock programs; default: built here")
    parser.add_argument(
        "--ik-bin", type=Path, help="folder of ik_llama.cpp's programs; default: without them"
    )
    parser.add_argument("--rounds", type=positive, default=3, help="turns; default: %(default)s")
    parser.add_argument(
        "--repeats", type=positive, default=2, help="measurements in a turn; default: %(default)s"
    )
    parser.add_argument(
        "--threads", type=positive, default=find_cores().threads, help="of each program; default: %(default)s"
    )
    parser.add_argument(
        "--prompt", type=positive, default=512, help="tokens of a prompt; default: %(default)s"
    )
    parser.add_argument(
        "--tokens", type=positive, default=64, help="that each sequence decodes; default: %(default)s"
    )
    parser.add_argument(
        "--depth",
        nargs="+",
        type=int,
        choices=(0, 4096),
        default=[0, 4096],
        help="tokens before a measurement",
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    for folder in (given.stock_bin, given.ik_bin):
        check_programs(folder, "llama-bench", "llama-batched-bench")
    plan = Plan(
        model=(given.model or default_model()).resolve(),
        stock_bin=given.stock_bin or build_stock(LIBRARIES + TOOLS, PROCESSORS[given.cpu or built_for()]),
        threads=given.threads,
        prompt=given.prompt,
        tokens=given.tokens,
        repeats=given.repeats,
    )
    cases = [case for case in CASES if case.depth in given.depth]
    ik_bin = given.ik_bin and given.ik_bin.resolve()
    results = [race(plan, ik_bin, case, given.rounds) for case in cases]
    costs = step_costs(plan, given.rounds) if 0 in given.depth else {}
    if given.json:
        print(json.dumps({"cases": [asdict(result) for result in results], "costs": costs}, indent=2))
    else:
        show(results, costs, plan)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
