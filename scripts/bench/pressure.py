"""Measure the cost of too little memory: simultaneous requests over pools that hold a share of their demand.

    python scripts/bench/pressure.py
    python scripts/bench/pressure.py model.gguf --kv-type q8_0 --share 1 0.5 0.1 --rounds 5 --json

Loads: "equal" requests; "mixed" lengths; and "adversarial" ones, of which one takes all of the smallest pool
and the others end with a full block or with one token in a new block. All have the same priority, and answers
are longer than prompts, so that running requests outgrow the pool. First, in deterministic mode, every answer
over every pool must equal the answer over a sufficient pool, token for token. Then times in the default mode:
of the engine, which chooses swap or recomputation by measured costs, and of the two fixed policies. No run
may take more steps than the requests one after the other, each recomputed once: more would be a livelock.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter as now
from typing import TYPE_CHECKING

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from pyvelo.engine.prefill_budget import Costs
from scripts._common import ScriptError, run_main
from scripts.bench._runs import default_model, in_own_process

if TYPE_CHECKING:
    from pyvelo.engine.engine import Engine
    from pyvelo.engine.request import Request
    from pyvelo.kv.types import KVType

GOAL = 1.10
"""Largest ratio of the engine's seconds to the seconds of the better fixed policy."""

GRAIN = 256
"""Tokens; a pool's size is a multiple of it."""

POLICIES = ("measured", "swap", "recompute")
LOADS = ("equal", "mixed", "adversarial")


@dataclass(frozen=True)
class Case:
    """Settings of one load.

    The smallest pool has `smallest` tokens, the share `least` of what all requests store at once.
    """

    kv_type: KVType
    load: str
    smallest: int
    least: float
    batch: int
    threads: int
    token_bytes: int


@dataclass(frozen=True)
class Run:
    """One policy over one pool."""

    seconds: float
    steps: int
    preemptions: int
    swaps: int
    answers: list[list[int]]


@dataclass(frozen=True)
class Result:
    """Median seconds of each policy; `ratio` is the median of the rounds' ratios.

    Without a preemption only one policy is timed, and the ratio is 1.
    """

    load: str
    share: float
    wrong: int  # answers that differ, and requests that failed
    most_steps: float  # as a share of the bound; more than 1 is a livelock
    preemptions: int
    swaps: int
    measured: float
    swap: float | None
    recompute: float | None
    ratio: float

    @property
    def verdict(self) -> str:
        """The goal that was missed, empty if none was."""
        if self.wrong or self.most_steps > 1:
            return f"{self.wrong} wrong" if self.wrong else "livelock"
        return "" if self.ratio <= GOAL else f"above {GOAL:.2f}"


# ---- the work ----


def sizes(case: Case) -> list[tuple[int, int]]:
    """Return the tokens of prompt and answer of each request; in all they store `smallest / least`."""
    draw = random.Random(case.load)
    left, most = round(case.smallest / case.least), case.smallest
    found: list[tuple[int, int]] = []
    while left > 0:
        stored = min(left, max(2, _stored(case.load, most, len(found), draw)))
        left -= stored
        n_new = max(1, round(stored * draw.uniform(0.6, 0.95)))
        # the last token of an answer is never stored
        found.append((max(1, stored - n_new + 1), n_new))
    return found


def _stored(load: str, most: int, index: int, draw: random.Random) -> int:
    """Return the tokens that a request stores in the end, if a pool holds `most` of them."""
    if load == "equal":
        return most // 3
    if load == "mixed":
        return min(most, 16 + round(draw.expovariate(4 / most)))
    if index == 3:
        return most
    return 32 * draw.randint(1, max(1, most // 64)) + index % 2


def bound(work: list[tuple[int, int]], batch: int) -> int:
    """Return the steps of the requests one after the other, each recomputed once."""
    return sum(n_new + 2 * -(-(n_prompt + n_new) // batch) + 2 for n_prompt, n_new in work)


# ---- in a process of its own ----


def opened(model: Path, case: Case, share: float, *, deterministic: bool) -> Engine:
    """Open an engine over a pool of that share, with host memory for all requests."""
    from pyvelo.config import EngineConfig
    from pyvelo.engine.engine import open_engine

    demand = case.smallest / case.least
    n_tokens = max(case.smallest, -(-round(demand * share) // GRAIN) * GRAIN)
    return open_engine(
        EngineConfig(
            model=model,
            kv_type=case.kv_type,
            n_ctx=case.smallest,
            kv_cache_bytes=n_tokens * case.token_bytes,
            swap_bytes=2 * round(demand) * case.token_bytes,
            n_threads=case.threads,
            max_batch_tokens=case.batch,
            prefix_cache=False,
            deterministic=deterministic,
        )
    )


def token_bytes(model: Path, kv_type: KVType) -> int:
    """Return the bytes of a cached token."""
    from pyvelo import LLM

    with LLM(model, kv_type=kv_type, n_ctx=GRAIN, max_num_seqs=1) as llm:
        return llm.geometry.token_bytes


class Fixed(Costs):
    """Costs that always favour one policy."""

    def __init__(self, swap: bool) -> None:
        super().__init__()
        self._swap = swap

    def favour_swap(self, n_blocks: int, n_tokens: int) -> bool:
        return self._swap


def warm_up(engine: Engine) -> None:
    """Run the first step, which reads and packs the weights."""
    from pyvelo import SamplingParams

    (request,) = engine.processor.prepare([0], SamplingParams(max_tokens=1)).requests
    engine.core.inbox.submit([request])
    while not request.finished:
        engine.core.step()


def run(engine: Engine, case: Case) -> Run:
    """Run all requests at once, until all are done or the bound of steps is passed."""
    from pyvelo import SamplingParams

    work = sizes(case)
    draw = random.Random(1)
    n_vocab = engine.model.vocab.n_tokens
    prompts = [[draw.randrange(n_vocab) for _ in range(n_prompt)] for n_prompt, _ in work]
    requests: list[Request] = []
    for prompt, (_, n_new) in zip(prompts, work, strict=True):
        params = SamplingParams(max_tokens=n_new, temperature=0.0, ignore_eos=True)
        requests += engine.processor.prepare(prompt, params).requests
    before = engine.stats()
    most, steps, start = bound(work, case.batch), 0, now()
    engine.core.inbox.submit(requests)
    while not all(request.finished for request in requests) and steps <= most:
        engine.core.step()
        steps += 1
    seconds = now() - start
    engine.core.cancel_all()
    after = engine.stats()
    answers = [list(r.generated_ids) if r.finish_reason == "length" else [] for r in requests]
    return Run(seconds, steps, after.preemptions - before.preemptions, after.swaps - before.swaps, answers)


def worker(model: Path, case: Case, share: float, policies: list[str], deterministic: bool) -> list[Run]:
    """Run each policy in turn over one engine, which keeps its measured costs."""
    engine = opened(model, case, share, deterministic=deterministic)
    try:
        costs = {"measured": engine.core.costs, "swap": Fixed(True), "recompute": Fixed(False)}
        found = []
        warm_up(engine)
        for policy in policies:
            engine.core.costs = costs[policy]
            found.append(run(engine, case))
        return found
    finally:
        engine.close()


def in_worker(model: Path, case: Case, share: float, policies: list[str], deterministic: bool) -> list[Run]:
    data = [json.dumps(asdict(case)), share, ",".join(policies), int(deterministic)]
    return [Run(**entry) for entry in in_own_process(__file__, model, data)]


# ---- the figures ----


def wrong(expected: Run, got: Run) -> int:
    """Count the answers that differ from those over a sufficient pool."""
    return sum(not b or a != b for a, b in zip(expected.answers, got.answers, strict=True))


def results(model: Path, case: Case, shares: list[float], rounds: int) -> Iterator[Result]:
    """Measure each share."""
    expected = in_worker(model, case, 1.0, ["swap"], True)[0]
    for share in shares:
        exact = in_worker(model, case, share, list(POLICIES), True)
        times = timed(model, case, share, rounds if exact[0].preemptions else 0)
        runs = exact + [r for found in times.values() for r in found]
        seconds = {policy: [r.seconds for r in found] for policy, found in times.items()}
        better = map(min, seconds["swap"], seconds["recompute"])
        ratios = [a / b for a, b in zip(seconds["measured"], better, strict=False)]
        medians = {policy: statistics.median(found) for policy, found in seconds.items() if found}
        yield Result(
            load=case.load,
            share=share,
            wrong=sum(wrong(expected, got) for got in exact),
            most_steps=max(r.steps for r in runs) / bound(sizes(case), case.batch),
            preemptions=exact[0].preemptions,
            swaps=exact[0].swaps,
            measured=medians["measured"],
            swap=medians.get("swap"),
            recompute=medians.get("recompute"),
            ratio=statistics.median(ratios) if ratios else 1.0,
        )
        if sys.stderr.isatty():
            print(f"{case.load}, {share:.0%}", file=sys.stderr)


def timed(model: Path, case: Case, share: float, rounds: int) -> dict[str, list[Run]]:
    """Time each policy; they take turns in changing order.

    Without rounds, time the engine's own policy once.
    """
    order = [POLICIES[(turn + number) % 3] for number in range(rounds) for turn in range(3)] or ["measured"]
    runs = in_worker(model, case, share, ["measured", *order], False)[1:]
    return {p: [r for q, r in zip(order, runs, strict=True) if p == q] for p in POLICIES}


def show(found: list[Result], model: Path, given: argparse.Namespace) -> None:
    """Print a Markdown table."""
    print(
        f"{model.name}, {given.kv_type}, {given.threads} threads, seconds; "
        f"the smallest pool holds {given.smallest} tokens\n"
    )
    titles = ["requests", "pool", "preempted, swapped", "wrong", "of the bound", *POLICIES, "ratio", ""]
    print(f"| {' | '.join(titles)} |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---|")
    for r in found:
        print(
            f"| {r.load} | {r.share:.0%} | {r.preemptions}, {r.swaps} | {r.wrong} | {r.most_steps:.0%} "
            f"| {r.measured:.2f} | {_seconds(r.swap)} | {_seconds(r.recompute)} | {r.ratio:.2f} "
            f"| {r.verdict} |"
        )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file; default: bench/engine.py's")
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--load", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument(
        "--share",
        type=float,
        nargs="+",
        default=[1.0, 0.5, 0.25, 0.1],
        help="shares of the demand that a pool holds",
    )
    parser.add_argument("--smallest", type=int, default=512, help="tokens of the smallest pool")
    parser.add_argument("--batch", type=int, default=512, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a goal is missed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args()


def main() -> int:
    given = _arguments()
    if given.worker:
        data, share, policies, deterministic = given.worker
        case = Case(**json.loads(data))
        runs = worker(given.model, case, float(share), policies.split(","), deterministic == "1")
        print(json.dumps([asdict(r) for r in runs]))
        return 0
    if given.smallest < GRAIN or given.smallest % GRAIN or not all(0 < s <= 1 for s in given.share):
        raise ScriptError(f"--smallest must be a multiple of {GRAIN} tokens, --share above 0 and at most 1")
    model = given.model or default_model()
    n_bytes = token_bytes(model, given.kv_type)
    found: list[Result] = []
    for load in given.load:
        case = Case(
            given.kv_type, load, given.smallest, min(given.share), given.batch, given.threads, n_bytes
        )
        found += results(model, case, given.share, given.rounds)
    if given.json:
        print(json.dumps([{**asdict(r), "verdict": r.verdict} for r in found], indent=2))
    else:
        show(found, model, given)
    return int(given.check and any(r.verdict for r in found))


if __name__ == "__main__":
    sys.exit(run_main(main))
