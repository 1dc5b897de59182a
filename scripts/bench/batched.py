"""Compare PyVelo with stock llama-batched-bench: many sequences that decode at once over one cache.

    python scripts/bench/batched.py
    python scripts/bench/batched.py model.gguf --kv-type q8_0 --sequences 1 4 16 --prompt 1024 --json

Measures tokens per second over all sequences while all of them decode. Stock runs in both of its modes: a
cache cut into fixed streams, and one unified buffer; the ratio is against the better of the two in the same
round. Ours is the engine, with scheduling, sampling and text. The default model is bench/engine.py's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter as now

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import ScriptError, run_main
from scripts.bench._runs import default_model, in_own_process, output_of, stock_folder

BATCH = 512
TRIES = 3  # of llama-batched-bench, which may end before its log has written the result


@dataclass(frozen=True)
class Case:
    """One comparison; `prompt` and `tokens` are the lengths of each sequence."""

    kv_type: str
    sequences: int
    prompt: int
    tokens: int


@dataclass(frozen=True)
class Result:
    """Medians over the rounds, in tokens per second over all sequences."""

    kv_type: str
    sequences: int
    prompt: int
    ours: float
    streams: float
    unified: float
    ratio: float
    least: float
    most: float


def measure(model: Path, case: Case, threads: int) -> float:
    """Return our engine's speed, measured once the last sequence has its first token."""
    from pyvelo import SamplingParams
    from pyvelo.config import EngineConfig
    from pyvelo.engine.engine import open_engine

    # the first sequences generate while the last prompts are computed
    longest = case.tokens + case.sequences * -(-case.prompt // BATCH) + case.sequences
    engine = open_engine(
        EngineConfig(
            model=model,
            kv_type=case.kv_type,
            n_ctx=case.prompt + longest + 64,  # blocks in reserve let all sequences start
            kv_cache_bytes=1 << 33,
            max_num_seqs=case.sequences,
            max_batch_tokens=BATCH,
            n_threads=threads,
            prefix_cache=False,
        )
    )
    try:
        draw = random.Random(0)
        params = SamplingParams(max_tokens=longest, temperature=0.0, ignore_eos=True)
        n_vocab = engine.model.vocab.n_tokens
        prompts = [[draw.randrange(n_vocab) for _ in range(case.prompt)] for _ in range(case.sequences)]
        requests = [engine.processor.prepare(prompt, params).requests[0] for prompt in prompts]
        engine.core.inbox.submit(requests)
        while not all(request.n_generated for request in requests):
            engine.core.step()
        before, start = sum(request.n_generated for request in requests), now()
        for _ in range(case.tokens):
            engine.core.step()
        seconds = now() - start
        if sum(request.n_generated for request in requests) - before != case.sequences * case.tokens:
            raise ScriptError("the sequences did not all decode at once: the pool is too small for them")
        return case.sequences * case.tokens / seconds
    finally:
        engine.close()


def ours(model: Path, case: Case, threads: int) -> float:
    """Measure ours in a new process."""
    numbers = [case.sequences, case.prompt, case.tokens, threads]
    return float(in_own_process(__file__, model, [case.kv_type, *numbers]))


def stock_command(stock_bin: Path, model: Path, case: Case, threads: int) -> list[str]:
    """Return the command of llama-batched-bench."""
    types = ["-ctk", case.kv_type, "-ctv", case.kv_type]
    command = [
        str(stock_bin / "llama-batched-bench"),
        "-m",
        str(model),
        "-t",
        str(threads),
        "-fa",
        "on",
        *types,
    ]
    command += ["-c", str(case.sequences * (case.prompt + case.tokens)), "-b", "2048", "-ub", str(BATCH)]
    command += ["-npp", str(case.prompt), "-ntg", str(case.tokens), "-npl", str(case.sequences)]
    return [*command, "--output-format", "jsonl"]


def stock(stock_bin: Path, model: Path, case: Case, threads: int, unified: bool) -> float:
    """Return the generation speed of llama-batched-bench.

    Raises: ScriptError if it prints none.
    """
    command = [*stock_command(stock_bin, model, case, threads), *(["-kvu"] if unified else [])]
    for _ in range(TRIES):
        lines = [line for line in output_of(command).splitlines() if line.startswith("{")]
        if lines:
            return float(json.loads(lines[-1])["speed_tg"])
    raise ScriptError(f"{command[0]} printed no result in {TRIES} runs")


def race(model: Path, stock_bin: Path, case: Case, threads: int, rounds: int) -> Result:
    """Measure all three in turns, `rounds` times."""
    found = [
        (
            ours(model, case, threads),
            stock(stock_bin, model, case, threads, unified=False),
            stock(stock_bin, model, case, threads, unified=True),
        )
        for _ in range(rounds)
    ]
    ratios = [mine / max(streams, unified) for mine, streams, unified in found]
    mine, streams, unified = (statistics.median(column) for column in zip(*found, strict=True))
    return Result(
        case.kv_type, case.sequences, case.prompt, mine, streams, unified,
        statistics.median(ratios), min(ratios), max(ratios),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file; default: bench/engine.py's")
    parser.add_argument("--stock-bin", type=Path, help="folder of the stock programs; default: built here")
    parser.add_argument("--kv-type", nargs="+", default=["f16", "q8_0"])
    parser.add_argument("--sequences", nargs="+", type=int, default=[16])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each sequence's prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens that each sequence decodes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args()
    if given.worker:
        kv_type, *numbers = given.worker
        sequences, prompt, tokens, threads = map(int, numbers)
        print(measure(given.model, Case(kv_type, sequences, prompt, tokens), threads))
        return 0
    model, stock_bin = given.model or default_model(), stock_folder(given.stock_bin)
    cases = [Case(kv, n, given.prompt, given.tokens) for kv in given.kv_type for n in given.sequences]
    results = [race(model, stock_bin, case, given.threads, given.rounds) for case in cases]
    if given.json:
        print(json.dumps([asdict(result) for result in results], indent=2))
        return 0
    print(f"{model.name}, {given.threads} threads, tokens per second over all sequences\n")
    print("| KV | sequences | prompt | PyVelo | streams | unified | ratio | rounds |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for r in results:
        print(
            f"| {r.kv_type} | {r.sequences} | {r.prompt} | {r.ours:.1f} | {r.streams:.1f} | {r.unified:.1f} "
            f"| {r.ratio:.2f} | {r.least:.2f} to {r.most:.2f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
