"""Serving workload as plain data: requests, their arrivals, token times, and the summary of a run."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter as now

__all__ = [
    "Ask",
    "Held",
    "Job",
    "Load",
    "Record",
    "Refused",
    "Summary",
    "held",
    "play",
    "quantile",
    "summarise",
    "waste_of_blocks",
    "waste_of_slots",
    "workload",
]


BLOCK = 32
"""Tokens of a block, by default."""


@dataclass(frozen=True)
class Load:
    """Description of a workload: lengths in tokens before the bounds apply, `rate` in requests per second."""

    requests: int
    rate: float
    prompt_mean: int
    answer_mean: int
    shortest: int
    longest: int
    seed: int


@dataclass(frozen=True)
class Job:
    """One request; `arrival` in seconds after the start."""

    arrival: float
    prompt: list[int]
    n_new: int

    @property
    def n_tokens(self) -> int:
        """Prompt and answer, in tokens."""
        return len(self.prompt) + self.n_new


@dataclass
class Record:
    """Outcome of a job: `stamps` are the times of its tokens, in seconds after the start."""

    arrival: float
    n_prompt: int
    n_new: int
    stamps: list[float] = field(default_factory=list)
    thrown_away: int = 0  # tokens of aborted tries
    tries: int = 0
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.error is None and len(self.stamps) == self.n_new


class Refused(Exception):
    """Error of a request that the server aborted and that may be sent again."""


Ask = Callable[[Job, Callable[[int], None]], Awaitable[None]]
"""Sends a job and reports each arrival of tokens by their count. Raises Refused if the server aborts it."""


def workload(load: Load, n_vocab: int) -> list[Job]:
    """Draw jobs: Poisson arrivals, exponential lengths within the bounds, random tokens."""
    draw = random.Random(load.seed)

    def length(mean: int) -> int:
        return min(max(round(draw.expovariate(1 / mean)), load.shortest), load.longest)

    jobs, arrival = [], 0.0
    for _ in range(load.requests):
        prompt = [draw.randrange(n_vocab) for _ in range(length(load.prompt_mean))]
        jobs.append(Job(arrival, prompt, length(load.answer_mean)))
        arrival += draw.expovariate(load.rate)
    return jobs


async def play(jobs: Sequence[Job], ask: Ask, tries: int = 1) -> list[Record]:
    """Send every job at its arrival; repeat a refused one up to `tries` times.

    The pause before a repetition is random and grows, so that the requests do not all arrive at once.
    """
    start = now()
    draw = random.Random(0)

    async def one(job: Job) -> Record:
        record = Record(job.arrival, len(job.prompt), job.n_new)

        def came(n_tokens: int) -> None:
            record.stamps += [now() - start] * n_tokens

        await asyncio.sleep(job.arrival - (now() - start))
        while record.tries < tries:
            record.tries += 1
            record.thrown_away += len(record.stamps)
            record.stamps.clear()
            try:
                await ask(job, came)
                record.error = None
                break
            except Refused as error:
                record.error = str(error)
                await asyncio.sleep(draw.uniform(0, 2**record.tries) if record.tries < tries else 0)
        return record

    return list(await asyncio.gather(*map(one, jobs)))


# ---- the summary ----


@dataclass(frozen=True)
class Held:
    """Number of generating requests at a time, and the tokens of prompt and answer stored for them.

    reserved: tokens in the blocks that they fill.
    """

    time: float
    requests: int
    tokens: int
    reserved: int


def held(records: Sequence[Record], every: float = 0.25) -> list[Held]:
    """Return the running requests and their stored tokens, sampled every `every` seconds."""
    finished = [record for record in records if record.stamps]
    end = max((record.stamps[-1] for record in finished), default=0.0)
    found = []
    for number in range(int(end / every) + 1):
        time = number * every
        active = [record for record in finished if record.stamps[0] <= time < record.stamps[-1]]
        tokens = [r.n_prompt + sum(stamp <= time for stamp in r.stamps) for r in active]
        reserved = sum(-(-n // BLOCK) * BLOCK for n in tokens)
        found.append(Held(time, len(active), sum(tokens), reserved))
    return found


def waste_of_slots(records: Sequence[Record], slot: int) -> float:
    """Return the share of the occupied slots' tokens that is empty, averaged over time."""
    shares = [1 - look.tokens / (look.requests * slot) for look in held(records) if look.requests]
    return statistics.fmean(shares) if shares else 0.0


def waste_of_blocks(records: Sequence[Record]) -> float:
    """Return the share of the tokens in blocks that is empty, averaged over time."""
    shares = [1 - look.tokens / look.reserved for look in held(records) if look.requests]
    return statistics.fmean(shares) if shares else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value at the given share of the sorted values, 0 if there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Summary:
    """Figures of one run; times in seconds.

    `waste` is the share of the reserved cache that holds no token, `fill` the share of the whole cache that
    does. Both are means over the time in which any request runs.
    """

    seconds: float  # from the first arrival to the last token
    tokens_per_s: float  # of requests that finished
    good_per_s: float  # requests that finished within both limits
    good: int
    failed: int
    broken_off: int  # tries that the server aborted
    ttft_p50: float
    ttft_p99: float
    tbt_p50: float
    tbt_p99: float
    peak: int  # requests that generate at once
    waste: float
    fill: float


def summarise(
    records: Sequence[Record], *, ttft_limit: float, tbt_limit: float, capacity: int, waste: float
) -> Summary:
    """Summarise the records of one run.

    A request is good if its first token came within `ttft_limit` seconds of its arrival and the others were
    `tbt_limit` seconds apart on average. `capacity` is the cache's size in tokens.
    """
    finished = [record for record in records if record.finished]
    seconds = max((record.stamps[-1] for record in finished), default=math.inf)
    firsts = [record.stamps[0] - record.arrival for record in finished]
    gaps = [_gaps(record) for record in finished]
    good = sum(
        first <= ttft_limit and (not between or statistics.fmean(between) <= tbt_limit)
        for first, between in zip(firsts, gaps, strict=True)
    )
    all_gaps = [gap for between in gaps for gap in between]
    tokens = [look.tokens for look in held(records) if look.requests]
    return Summary(
        seconds=seconds if finished else 0.0,
        tokens_per_s=sum(record.n_new for record in finished) / seconds,
        good_per_s=good / seconds,
        good=good,
        failed=len(records) - len(finished),
        broken_off=sum(record.tries - record.finished for record in records),
        ttft_p50=quantile(firsts, 0.5),
        ttft_p99=quantile(firsts, 0.99),
        tbt_p50=quantile(all_gaps, 0.5),
        tbt_p99=quantile(all_gaps, 0.99),
        peak=_peak(records),
        waste=waste,
        fill=statistics.fmean(tokens) / capacity if tokens else 0.0,
    )


def _peak(records: Sequence[Record]) -> int:
    """Return the largest number of requests that generate at once.

    An end and a start at the same time do not overlap.
    """
    spans = [(record.stamps[0], record.stamps[-1]) for record in records if record.stamps]
    return max((sum(first <= time < last for first, last in spans) for time, _ in spans), default=0)


def _gaps(record: Record) -> list[float]:
    return [after - before for before, after in pairwise(record.stamps)]
