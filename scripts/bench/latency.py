"""Measure how a long prompt delays running streams: the time between their tokens, without it and with it.

    python scripts/bench/latency.py
    python scripts/bench/latency.py model.gguf --kv-type q8_0 --batch 32 128 512 --json

Eight streams decode; then a long prompt arrives and is computed in chunks beside them; then they decode alone
again. The streams grow all the time, so their time alone is taken before and after the long prompt. Decoding
sequences come first in every step; a prompt chunk is as long as the prefill budget allows and as
max_batch_tokens leaves room for: shorter chunks delay the long prompt's first token. Each value of that
setting runs in a process of its own, through AsyncLLM. The default model is bench/engine.py's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from contextlib import aclosing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter as now
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo.engine.prefill_budget import FEWEST, LOOK_AGAIN
from pyvelo.kv.types import KVType
from scripts._common import ScriptError, run_main
from scripts.bench._runs import default_model, in_own_process
from scripts.bench._serving import quantile

GOAL = 2.0
"""Largest factor by which the 99th percentile may grow."""

SLACK = 256
"""Tokens that a stream may generate while the long prompt is submitted."""

WARM_UP = 8
"""Tokens of every stream before timing starts."""


@dataclass(frozen=True)
class Case:
    """Settings of one run, lengths in tokens.

    `long`: the long prompt. `prompt`: the prompt of a stream. `tokens`: tokens of each stream before the long
    prompt arrives, and after its answer. `most`: the limit of a stream.
    """

    kv_type: KVType
    batch: int
    threads: int
    streams: int
    prompt: int
    tokens: int
    long: int
    most: int


@dataclass(frozen=True)
class Result:
    """Milliseconds between tokens, the longest stream's tokens, and seconds to the long prompt's first token.

    `grew_from` and `grew_to` are the tokens at the long prompt's arrival and at its answer.
    """

    batch: int
    grew_from: int
    grew_to: int
    alone_p50: float
    alone_p99: float
    beside_p50: float
    beside_p99: float
    long_ttft: float

    @property
    def ratio(self) -> float:
        return self.beside_p99 / self.alone_p99


# ---- in a process of its own ----


async def measure(model: Path, case: Case) -> Result:
    from pyvelo import AsyncLLM, SamplingParams

    n_ctx = max(case.long + 2, case.prompt + case.most)
    draw = random.Random(0)
    async with AsyncLLM(
        model,
        kv_type=case.kv_type,
        n_ctx=n_ctx,
        kv_cache_bytes=await _bytes(model, case),
        n_threads=case.threads,
        n_gpu_layers=0,
        max_batch_tokens=case.batch,
        max_num_seqs=case.streams + 1,
        prefix_cache=False,
    ) as llm:
        n_vocab = llm.vocab.n_tokens
        stamps: list[list[float]] = [[] for _ in range(case.streams)]
        news = asyncio.Event()

        async def chat(times: list[float]) -> None:
            prompt = [draw.randrange(n_vocab) for _ in range(case.prompt)]
            params = SamplingParams(max_tokens=case.most, temperature=0.0, ignore_eos=True)
            try:
                async for _ in llm.stream(prompt, params):
                    times.append(now())
                    news.set()
            finally:
                news.set()

        chats = [asyncio.create_task(chat(times)) for times in stamps]
        begin = await _all_got(chats, stamps, news, WARM_UP)
        arrival = await _all_got(chats, stamps, news, case.tokens)
        grew_from = case.prompt + _longest(stamps)
        prompt = [draw.randrange(n_vocab) for _ in range(case.long)]
        long = llm.stream(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
        async with aclosing(long):
            async for _ in long:
                answered = now()
        if any(task.done() for task in chats):
            raise ScriptError("a stream ended before the long prompt was computed: give a shorter --long")
        grew_to = case.prompt + _longest(stamps)
        end = await _all_got(chats, stamps, news, case.tokens)
        for task in chats:
            task.cancel()
        await asyncio.gather(*chats, return_exceptions=True)
    alone = gaps(stamps, begin, arrival) + gaps(stamps, answered, end)
    beside = gaps(stamps, arrival, answered)
    ms = [1e3 * quantile(part, share) for part in (alone, beside) for share in (0.5, 0.99)]
    return Result(case.batch, grew_from, grew_to, ms[0], ms[1], ms[2], ms[3], answered - arrival)


def _longest(stamps: list[list[float]]) -> int:
    return max(map(len, stamps))


async def _bytes(model: Path, case: Case) -> int:
    """Return the bytes of a cache with room for all streams, so that none is preempted."""
    from pyvelo import LLM

    def token_bytes() -> int:
        with LLM(model, kv_type=case.kv_type, n_ctx=256, max_num_seqs=1) as llm:
            return llm.geometry.token_bytes

    n_tokens = case.long + case.streams * (case.prompt + case.most) + 64 * (case.streams + 2)
    return (n_tokens + 256) * await asyncio.to_thread(token_bytes)


async def _all_got(
    chats: list[asyncio.Task[None]], stamps: list[list[float]], news: asyncio.Event, n: int
) -> float:
    """Wait until every stream has `n` more tokens; return the time."""
    wanted = [len(times) + n for times in stamps]
    while any(len(times) < n_wanted for times, n_wanted in zip(stamps, wanted, strict=True)):
        news.clear()
        await news.wait()
        if any(chat.done() for chat in chats):
            raise ScriptError(f"a stream ended before all had {n} more tokens")
    return now()


def gaps(stamps: list[list[float]], begin: float, end: float) -> list[float]:
    """Return the times between two tokens of a stream whose second token came between `begin` and `end`."""
    return [after - before for times in stamps for before, after in pairwise(times) if begin < after <= end]


# ---- output and arguments ----


def show(results: list[Result], model: Path, case: Case) -> None:
    """Print a Markdown table."""
    print(
        f"{model.name}, {case.kv_type}, {case.threads} threads: {case.streams} streams, a prompt of "
        f"{case.long} tokens; milliseconds between tokens\n"
    )
    print(
        "| max_batch_tokens | streams' tokens | alone p50, p99 | beside it p50, p99 | ratio of p99 | "
        "| its first token s |"
    )
    print("|---:|---:|---:|---:|---:|---|---:|")
    for r in results:
        verdict = "" if r.ratio < GOAL else f"not below {GOAL:g}"
        print(
            f"| {r.batch} | {r.grew_from} to {r.grew_to} | {r.alone_p50:.1f}, {r.alone_p99:.1f} "
            f"| {r.beside_p50:.1f}, {r.beside_p99:.1f} | {r.ratio:.2f} | {verdict} | {r.long_ttft:.1f} |"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file; default: bench/engine.py's")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[16, 32, 64, 128, 512], help="max_batch_tokens"
    )
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a stream's prompt")
    parser.add_argument(
        "--tokens", type=int, default=256, help="tokens of each stream before the long prompt, and after it"
    )
    parser.add_argument("--long", type=int, default=16384, help="tokens of the long prompt")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_intermixed_args()


def main() -> int:
    given = _arguments()
    if given.worker:
        print(json.dumps(asdict(asyncio.run(measure(given.model, Case(**json.loads(given.worker)))))))
        return 0
    model = given.model or default_model()
    results = []
    for batch in given.batch:
        case = Case(
            kv_type=given.kv_type,
            batch=batch,
            threads=given.threads,
            streams=given.streams,
            prompt=given.prompt,
            tokens=given.tokens,
            long=given.long,
            most=steps_of(given.long + given.streams * given.prompt, batch, given.streams)
            + 3 * given.tokens
            + SLACK,
        )
        answer: Any = in_own_process(__file__, model, [json.dumps(asdict(case))])
        results.append(Result(**answer))
        if sys.stderr.isatty():
            print(f"max_batch_tokens={batch}: {results[-1].ratio:.2f}", file=sys.stderr)
    if given.json:
        print(json.dumps([{**asdict(r), "ratio": r.ratio} for r in results], indent=2))
    else:
        show(results, model, case)
    return 0


def steps_of(long: int, batch: int, streams: int) -> int:
    """Return the largest number of steps that `long` prompt tokens take beside decoding streams."""
    if batch <= streams:
        raise ScriptError(f"--batch {batch} leaves no room in a step for a prompt beside {streams} streams")
    steps = -(-long // min(FEWEST, batch - streams))
    return steps + -(-steps // LOOK_AGAIN)


if __name__ == "__main__":
    sys.exit(run_main(main))
