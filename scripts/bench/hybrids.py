"""Measure what snapshots of recurrent states save: second turns, and many requests with one prefix.

    python scripts/bench/hybrids.py
    python scripts/bench/hybrids.py --preset lfm2-350m --rounds 5 --json

For each preset of models/make.py with recurrent layers:

- the time to the first token of the second turn of a conversation, beside the same prompt without a cache.
  The second turn is the first prompt, its answer, and new tokens.
- the same with stock llama-server, which has checkpoints of states, with its default settings and as many
  threads and tokens of a step.
- the time of 16 simultaneous first tokens over one prefix of 1,024 tokens, beside the same without sharing.

Prompts are random tokens. Times are medians; a model is read and its weights are packed before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter as now
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import run_main
from scripts.bench._runs import default_model, random_prompt, stock_folder
from scripts.bench._serving import Job
from scripts.bench._stock_server import ServerSettings, ask, running
from scripts.bench.prefix import Result, first_token, many_prompts

PRESETS = ("qwen3.5-0.8b", "lfm2-350m", "granite-4-h-350m")
FIRST = 2048
"""Tokens of the first prompt."""
ANSWER = 40
"""Tokens of its answer."""
NEW = 16
"""Tokens that the second turn adds."""


@dataclass(frozen=True)
class Row:
    """Times in seconds of one preset: second turns of both sides, and first tokens over one prefix."""

    preset: str
    state_mib: float
    turn: Result
    stock_turn: Result
    many: Result


def second_turn(llm: Any, rounds: int) -> Result:
    """Time the second turn of a conversation with the first one in the cache, and without."""
    from pyvelo import SamplingParams

    params = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    cold, warm = [], []
    for number in range(rounds):
        draw = random.Random(number)
        prompt = random_prompt(llm, FIRST, draw)
        answer = llm.generate(prompt, params)[0].token_ids
        prompt = [*prompt, *answer, *random_prompt(llm, NEW, draw)]
        warm.append(first_token(llm, prompt))
        llm.reset_prefix_cache()
        cold.append(first_token(llm, prompt))
        llm.reset_prefix_cache()
    return Result("second turn", statistics.median(warm), statistics.median(cold))


def second_turn_of_stock(port: int, n_vocab: int, rounds: int) -> Result:
    """Time the same with stock's server, whose slot and checkpoints hold the first turn."""

    async def time(prompt: list[int], n_new: int, *, cached: bool) -> tuple[float, list[int]]:
        first: list[float] = []
        answer: list[int] = []
        start = now()
        await ask(port, Job(0.0, prompt, n_new), lambda n: first.append(now()), cached=cached, tokens=answer)
        return first[0] - start, answer

    async def rounds_of() -> Result:
        cold, warm = [], []
        await time([1] * 64, 4, cached=False)
        for number in range(rounds):
            draw = random.Random(number)
            prompt = [draw.randrange(n_vocab) for _ in range(FIRST)]
            _, answer = await time(prompt, ANSWER, cached=True)
            prompt = [*prompt, *answer, *(draw.randrange(n_vocab) for _ in range(NEW))]
            warm.append((await time(prompt, 1, cached=True))[0])
            cold.append((await time(prompt, 1, cached=False))[0])
        return Result("second turn", statistics.median(warm), statistics.median(cold))

    return asyncio.run(rounds_of())


def measure(preset: str, given: argparse.Namespace, stock: Path) -> Row:
    """Measure one preset, both sides one after the other."""
    from pyvelo import LLM

    model = default_model(preset)
    settings: dict[str, Any] = {"n_ctx": 4096, "n_threads": given.threads, "kv_cache_bytes": 4 << 30}
    with LLM(model, **settings) as llm, LLM(model, prefix_cache=False, **settings) as other:
        for engine in (llm, other):
            first_token(engine, [1] * 64)
        turn = second_turn(llm, given.rounds)
        many = many_prompts(llm, other, 1024, 16)
        n_vocab, state = llm.vocab.n_tokens, llm.info.state_bytes / (1 << 20)
    server = ServerSettings(
        program=stock / "llama-server", model=model, kv_type="f16", context=4096, slots=1, unified=False,
        threads=given.threads, batch=512, connections=2, checkpoints=True,
    )  # fmt: skip
    with running(server) as port:
        stock_turn = second_turn_of_stock(port, n_vocab, given.rounds)
    return Row(preset, state, turn, stock_turn, many)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", action="append", choices=PRESETS, help="default: all of them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--stock-bin", type=Path, help="folder of stock's llama-server")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    stock = stock_folder(given.stock_bin, "--server")
    rows = [measure(preset, given, stock) for preset in given.preset or PRESETS]
    if given.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    print(f"{given.threads} threads; seconds; a second turn of {FIRST} + {ANSWER} + {NEW} tokens\n")
    print("| model | state, MiB | second turn | cold | share | stock's second turn | stock's cold | "
          "16 first tokens | not shared | ratio |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for row in rows:
        turn, other, many = row.turn, row.stock_turn, row.many
        print(f"| {row.preset} | {row.state_mib:.1f} | {turn.with_it:.3f} | {turn.without:.2f} | "
              f"{turn.with_it / turn.without:.1%} | {other.with_it:.3f} | {other.without:.2f} | "
              f"{many.with_it:.2f} | {many.without:.2f} | {many.ratio:.1f} |")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
