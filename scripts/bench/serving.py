"""Serve the same requests with PyVelo and with stock llama-server, in both of its cache modes.

    python scripts/bench/serving.py
    python scripts/bench/serving.py model.gguf --kv-type q8_0 --requests 96 --rate 1 --rounds 3 --json
    python scripts/bench/serving.py --http --requests 16 --rate inf --shortest 128 --longest 128

Requests arrive as a Poisson process; their prompts and answers have exponential lengths within bounds and
random tokens; answers are greedy and of full length. Every side gets the same token ids at the same times, as
many threads, tokens of a step and bytes of KV cache, and with --gpu all layers on GPUs:

- PyVelo: AsyncLLM, without its prefix cache.
- PyVelo over HTTP, with --http: `pyvelo serve`. The ratios are of this side then.
- streams: llama-server with as many slots as the cache has room for, in equal parts that each hold the
  longest of the requests, or with --any-length the longest that the workload allows.
- unified: llama-server with one buffer for all slots. If more slots run than fit and the buffer fills up, the
  server aborts every running request; the client sends those again, up to --tries times, after growing
  pauses.

The server is queried over loopback; each side runs in a process of its own, in turns. Goodput is the tokens
of finished requests per second, and the requests per second that met two limits: the time to the first token,
and the mean time between tokens. TTFT and TBT are those times over all requests and over all tokens; peak is
the number of requests that generate at once; waste is the share of their reserved memory (blocks, slots,
cells) that holds no token, fill the share of the whole cache that does. The ratio is against the better stock
mode of the same round. The default model is bench/engine.py's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts._common import run_main
from scripts.bench._http import ask_pyvelo
from scripts.bench._runs import default_model, in_own_process, stock_folder
from scripts.bench._serving import (
    Job,
    Load,
    Record,
    Summary,
    play,
    summarise,
    waste_of_blocks,
    waste_of_slots,
    workload,
)
from scripts.bench._sides import GRAIN, Mode, Plan, context_of, our_server, stock_modes, stock_server
from scripts.bench._stock_server import ask

OURS, OVER_HTTP = "PyVelo", "PyVelo over HTTP"

WARM_UP = Job(0.0, list(range(1, 33)), 4)


@dataclass(frozen=True)
class Run:
    """Records of one side, and the capacity of its cache in tokens."""

    records: list[Record]
    waste: float
    capacity: int


# ---- ours: in a process of its own ----


async def serve(plan: Plan) -> tuple[list[Record], float, int]:
    """Return the records, the mean waste while requests run, and the pool's capacity in tokens."""
    from pyvelo import AsyncLLM, SamplingParams

    async with AsyncLLM(
        plan.model,
        kv_type=plan.kv_type,
        kv_cache_bytes=plan.kv_bytes,
        n_ctx=context_of(plan.load),
        n_threads=plan.threads,
        max_batch_tokens=plan.batch,
        n_gpu_layers=-1 if plan.gpu else 0,
        prefix_cache=False,
    ) as llm:

        async def answer(job: Job, came: Callable[[int], None]) -> None:
            params = SamplingParams(max_tokens=job.n_new, temperature=0.0, ignore_eos=True)
            async for piece in llm.stream(job.prompt, params):
                came(len(piece.token_ids))

        wastes: list[float] = []

        async def watch() -> None:
            while True:
                stats = await llm.stats()
                if stats.blocks_used:
                    wastes.append(stats.waste)
                await asyncio.sleep(0.25)

        jobs = workload(plan.load, llm.vocab.n_tokens)
        await play([WARM_UP], answer)
        watching = asyncio.create_task(watch())
        records = await play(jobs, answer)
        watching.cancel()
        capacity = (await llm.stats()).tokens_total
        return records, statistics.fmean(wastes) if wastes else 0.0, capacity


def worker(what: str, data: dict[str, Any]) -> Any:
    """Serve, or measure the bytes of a token, in a process of its own."""
    plan = Plan(**{**data, "model": Path(data["model"]), "load": Load(**data["load"])})
    if what == "serve":
        records, waste, capacity = asyncio.run(serve(plan))
        return {"records": [asdict(record) for record in records], "waste": waste, "capacity": capacity}
    from pyvelo import LLM

    with LLM(plan.model, kv_type=plan.kv_type, n_ctx=GRAIN, max_num_seqs=1) as llm:
        return {"token_bytes": llm.geometry.token_bytes, "n_vocab": llm.vocab.n_tokens}


def in_worker(plan: Plan, what: str) -> Any:
    """Run `worker` in a process of its own and return its result."""
    data = {**asdict(plan), "model": str(plan.model)}
    return in_own_process(__file__, plan.model, [what, json.dumps(data)])


def ours(plan: Plan) -> Run:
    """Run PyVelo's side."""
    answer = in_worker(plan, "serve")
    return Run([Record(**entry) for entry in answer["records"]], answer["waste"], answer["capacity"])


def ours_over_http(plan: Plan, jobs: list[Job], n_cache: int) -> Run:
    """Run `pyvelo serve`; its queue takes all requests."""
    with our_server(plan, len(jobs), sum(len(job.prompt) for job in jobs)) as port:
        asyncio.run(play([WARM_UP], partial(ask_pyvelo, port)))
        records = asyncio.run(play(jobs, partial(ask_pyvelo, port), plan.tries))
    return Run(records, waste_of_blocks(records), n_cache)


# ---- stock ----


def stock(plan: Plan, program: Path, mode: Mode, jobs: list[Job]) -> Run:
    """Run one mode of llama-server."""
    with stock_server(plan, program, mode, len(jobs)) as port:
        asyncio.run(play([WARM_UP], partial(ask, port)))
        records = asyncio.run(play(jobs, partial(ask, port), plan.tries))
    # cells of the unified buffer are allocated one by one
    waste = 0.0 if mode.unified else waste_of_slots(records, mode.context // mode.slots)
    return Run(records, waste, mode.context)


# ---- the comparison ----


def race(plan: Plan, program: Path, unified_slots: list[int], rounds: int) -> list[dict[str, Summary]]:
    """Return a summary of each side for every round; stock goes first in every other round."""
    probe = in_worker(plan, "probe")
    jobs = workload(plan.load, probe["n_vocab"])
    n_cache = plan.kv_bytes // probe["token_bytes"]
    longest = context_of(plan.load) - 2 if plan.any_length else max(job.n_tokens for job in jobs)
    sides: dict[str, Callable[[], Run]] = {OURS: partial(ours, plan)}
    if plan.http:
        sides[OVER_HTTP] = partial(ours_over_http, plan, jobs, n_cache)
    for mode in stock_modes(n_cache, longest, unified_slots):
        sides[mode.name] = partial(stock, plan, program, mode, jobs)
    found = []
    for number in range(rounds):
        order = list(sides)[:: -1 if number % 2 else 1]
        summaries = {}
        for name in order:
            run = sides[name]()
            summaries[name] = summarise(
                run.records,
                ttft_limit=plan.ttft_limit,
                tbt_limit=plan.tbt_limit,
                capacity=run.capacity,
                waste=run.waste,
            )
            if sys.stderr.isatty():
                print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr)
        found.append({name: summaries[name] for name in sides})
    return found


def median(rounds: list[Summary]) -> Summary:
    """Return the medians of every field."""
    return Summary(*(statistics.median_low(column) for column in zip(*map(astuple, rounds), strict=True)))


def ratios(rounds: list[dict[str, Summary]], field: str) -> list[float]:
    """Return ours over the better stock mode for each round; infinite if stock's is 0."""
    found = []
    for summaries in rounds:
        stock = [each for name, each in summaries.items() if name not in (OURS, OVER_HTTP)]
        best = max(getattr(summary, field) for summary in stock)
        mine = getattr(summaries[OVER_HTTP if OVER_HTTP in summaries else OURS], field)
        found.append(mine / best if best else math.inf)
    return found


def show(plan: Plan, rounds: list[dict[str, Summary]]) -> None:
    """Print a Markdown table."""
    load = plan.load
    print(
        f"{plan.model.name}, {plan.kv_type}, {plan.kv_bytes / 1e6:.0f} MB of KV cache, "
        f"{plan.threads} threads; {load.requests} requests, {load.rate:g} per second; good: first token "
        f"within {plan.ttft_limit:g} s, others {plan.tbt_limit:g} s apart on the average\n"
    )
    titles = ["", "tokens/s", "good/s", "good", "failed", "broken off", "TTFT p50, p99 s", "TBT p50, p99 ms"]
    titles += ["peak", "waste", "fill"]
    print(f"| {' | '.join(titles)} |")
    print(f"|---{'|---:' * (len(titles) - 1)}|")
    for name in rounds[0]:
        s = median([summaries[name] for summaries in rounds])
        print(
            f"| {name} | {s.tokens_per_s:.1f} | {s.good_per_s:.3f} | {s.good} | {s.failed} | {s.broken_off} "
            f"| {s.ttft_p50:.2f}, {s.ttft_p99:.2f} | {1e3 * s.tbt_p50:.0f}, {1e3 * s.tbt_p99:.0f} "
            f"| {s.peak} | {s.waste:.1%} | {s.fill:.0%} |"
        )
    for field, what in (("tokens_per_s", "tokens per second"), ("good_per_s", "good requests per second")):
        found = ratios(rounds, field)
        print(
            f"\n{what} against the better stock mode: {statistics.median(found):.2f} "
            f"(rounds: {min(found):.2f} to {max(found):.2f})"
        )


def as_json(plan: Plan, rounds: list[dict[str, Summary]]) -> str:
    """Return the plan, every round and the ratios as JSON."""
    numbers = {
        field.name: [value if math.isfinite(value) else None for value in ratios(rounds, field.name)]
        for field in fields(Summary)
        if field.name in ("tokens_per_s", "good_per_s")
    }
    every = [{name: asdict(summary) for name, summary in summaries.items()} for summaries in rounds]
    return json.dumps(
        {"plan": {**asdict(plan), "model": plan.model.name}, "rounds": every, "ratios": numbers}
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file; default: bench/engine.py's")
    parser.add_argument("--stock-bin", type=Path, help="folder of a stock llama-server; default: built here")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--kv-bytes", type=int, default=900 << 20, help="bytes of each side's KV cache")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rate", type=float, default=0.5, help="arrivals per second; inf: all at once")
    parser.add_argument("--prompt-mean", type=int, default=256, help="tokens")
    parser.add_argument("--answer-mean", type=int, default=128, help="tokens")
    parser.add_argument("--shortest", type=int, default=32, help="tokens of a prompt or an answer")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of a prompt or an answer")
    parser.add_argument(
        "--unified-slots", type=int, nargs="+", default=[], help="default: as many as streams, and twice that"
    )
    parser.add_argument("--ttft-limit", type=float, default=10.0, help="seconds to the first token")
    parser.add_argument("--tbt-limit", type=float, default=0.5, help="seconds between tokens")
    parser.add_argument("--tries", type=int, default=5, help="attempts for a request that stock aborts")
    parser.add_argument("--batch", type=int, default=512, help="tokens of a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--any-length", action="store_true", help="stock's slots hold the longest request that may be drawn"
    )
    parser.add_argument("--gpu", action="store_true", help="all layers on GPUs, on every side")
    parser.add_argument("--http", action="store_true", help="also measure `pyvelo serve`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args()


def main() -> int:
    given = _arguments()
    if given.worker:
        what, data = given.worker
        print(json.dumps(worker(what, json.loads(data))))
        return 0
    load = Load(
        requests=given.requests,
        rate=given.rate,
        prompt_mean=given.prompt_mean,
        answer_mean=given.answer_mean,
        shortest=given.shortest,
        longest=given.longest,
        seed=given.seed,
    )
    plan = Plan(
        model=given.model or default_model(),
        kv_type=given.kv_type,
        kv_bytes=given.kv_bytes,
        threads=given.threads,
        batch=given.batch,
        load=load,
        ttft_limit=given.ttft_limit,
        tbt_limit=given.tbt_limit,
        tries=given.tries,
        gpu=given.gpu,
        any_length=given.any_length,
        http=given.http,
    )
    rounds = race(
        plan, stock_folder(given.stock_bin, "--server") / "llama-server", given.unified_slots, given.rounds
    )
    if given.json:
        print(as_json(plan, rounds))
    else:
        show(plan, rounds)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
