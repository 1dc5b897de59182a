"""A serving workload as plain data: requests and their arrivals, when tokens came, and what that makes."""

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
    "waste_of_slots",
    "workload",
]


@dataclass(frozen=True)
class Load:
    """What is asked. Lengths in tokens, `rate` in requests per second; means before the bounds apply."""

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
        """Prompt and answer."""
        return len(self.prompt) + self.n_new


@dataclass
class Record:
    """What became of a job: `stamps` are the times of its tokens, in seconds after the start."""

    arrival: float
    n_prompt: int
    n_new: int
    stamps: list[float] = field(default_factory=list)
    thrown_away: int = 0  # tokens of tries that the server broke off
    tries: int = 0
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.error is None and len(self.stamps) == self.n_new


class Refused(Exception):
    """The server broke a request off; it may be asked again."""


Ask = Callable[[Job, Callable[[int], None]], Awaitable[None]]
"""Asks for a job's answer, and tells of tokens as they come, how many at once; Refused where it broke off."""


def workload(load: Load, n_vocab: int) -> list[Job]:
    """Poisson arrivals; lengths of prompt and answer are exponential within bounds; tokens mean nothing."""
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
    """Asks for every job when it arrives, all at once; what is refused is asked anew, up to `tries` times,
    after a pause that grows, at random so that not all come back at once."""
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


# ---- what it makes ----


@dataclass(frozen=True)
class Held:
    """Requests that have a token and await more: how many at once, and the tokens of prompt and answer that
    are stored for them."""

    time: float
    requests: int
    tokens: int


def held(records: Sequence[Record], every: float = 0.25) -> list[Held]:
    """Looked at every so many seconds."""
    finished = [record for record in records if record.stamps]
    end = max((record.stamps[-1] for record in finished), default=0.0)
    found = []
    for number in range(int(end / every) + 1):
        time = number * every
        active = [record for record in finished if record.stamps[0] <= time < record.stamps[-1]]
        tokens = sum(r.n_prompt + sum(stamp <= time for stamp in r.stamps) for r in active)
        found.append(Held(time, len(active), tokens))
    return found


def waste_of_slots(records: Sequence[Record], slot: int) -> float:
    """The share of slots of `slot` tokens that holds none, while requests have them: a mean over time."""
    shares = [1 - look.tokens / (look.requests * slot) for look in held(records) if look.requests]
    return statistics.fmean(shares) if shares else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Summary:
    """Of one run; times in seconds. `waste` is the share of what is set aside that holds no token, `fill` the
    share of the whole cache that does, both means over the time in which anything is held."""

    seconds: float  # from the first arrival to the last token
    tokens_per_s: float  # of requests that finished
    good_per_s: float  # requests that finished within both limits
    good: int
    failed: int
    broken_off: int  # tries that the server ended with an error
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
    """A request is good when its first token came within `ttft_limit` seconds of its arrival, and the others
    `tbt_limit` seconds apart on the average; `capacity` is the cache in tokens."""
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
    """Who ends when another begins was not there beside it."""
    spans = [(record.stamps[0], record.stamps[-1]) for record in records if record.stamps]
    return max((sum(first <= time < last for first, last in spans) for time, _ in spans), default=0)


def _gaps(record: Record) -> list[float]:
    return [after - before for before, after in pairwise(record.stamps)]
