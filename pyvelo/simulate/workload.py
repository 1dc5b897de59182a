"""Workload of a simulation: arrival times, prompt lengths and answer lengths of requests.

A workload is drawn from distributions, described in a file, or taken from a recorded run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyvelo.errors import ConfigError, check_path
from pyvelo.trace.format import Arrived, Finished, Trace

__all__ = [
    "END",
    "Job",
    "Lengths",
    "Texts",
    "WorkloadSpec",
    "draw_jobs",
    "jobs_of_trace",
    "parse_lengths",
    "parse_prefix",
    "read_jobs",
]

END = 0
"""The token that ends an answer before it has `max_tokens`."""

MAX_NUMBER = 1_000_000  # requests, and tokens of a length
MAX_SAMPLES = 1024  # as in SamplingParams
MIN_RATE = 1e-6  # requests per second, so that times stay exact to parts of a second


@dataclass(frozen=True)
class Job:
    """Request with a known answer. It arrives at `time` (seconds) and gets `samples` answers of `n_answer`
    tokens. The scheduler only knows `max_tokens`.

    It has its first `n_shared` tokens in common with the job `like`, the index of an earlier job: with that
    job's prompt, followed by its first answer.
    """

    time: float
    n_prompt: int
    n_answer: int
    max_tokens: int
    samples: int = 1
    like: int | None = None
    n_shared: int = 0


@dataclass(frozen=True)
class Lengths:
    """Distribution of lengths in tokens: `kind` with its numbers (see parse_lengths)."""

    kind: str
    a: float
    b: float = 0.0

    def draw(self, random: np.random.Generator, n: int) -> NDArray[np.int64]:
        """Return `n` lengths of at least 1."""
        if self.kind == "fixed":
            values = np.full(n, self.a)
        elif self.kind == "uniform":
            values = random.integers(int(self.a), int(self.b) + 1, n).astype(float)
        elif self.kind == "exponential":
            values = random.exponential(self.a, n)
        else:
            variance = math.log1p((self.b / self.a) ** 2)
            values = random.lognormal(math.log(self.a) - variance / 2, math.sqrt(variance), n)
        lengths: NDArray[np.int64] = np.clip(np.rint(values), 1, MAX_NUMBER).astype(np.int64)
        return lengths


@dataclass(frozen=True)
class WorkloadSpec:
    """Distributions of a workload. `rate` is in requests per second, with exponential times between them;
    infinite: all arrive at once. `prefixes` are pairs (tokens, share of the requests that start with them).
    """

    n_requests: int
    rate: float
    prompt: Lengths
    answer: Lengths
    max_tokens: int
    samples: int = 1
    prefixes: Sequence[tuple[int, float]] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, most in (
            ("requests", self.n_requests, MAX_NUMBER),
            ("max_tokens", self.max_tokens, MAX_NUMBER),
            ("samples", self.samples, MAX_SAMPLES),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{name} {value}: give a number from 1 to {most}")
        if not self.rate >= MIN_RATE:
            raise ConfigError(
                f"rate {self.rate}: give requests per second from {MIN_RATE} on, or inf for all at once"
            )
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"seed {self.seed}: give an integer from 0 to {(1 << 64) - 1}")
        if sum(share for _, share in self.prefixes) > 1 + 1e-9:
            raise ConfigError("the shares of the shared prefixes must sum to 1 at most")


def parse_lengths(text: str) -> Lengths:
    """Parse `200`, `uniform:LOW:HIGH`, `exponential:MEAN` or `lognormal:MEAN:SD`, in tokens.

    Raises:
        ConfigError: the text has another form, or a number is out of range.
    """
    kind, *rest = text.strip().split(":")
    if not rest:
        kind, rest = "fixed", [kind]
    counts = {"fixed": 1, "uniform": 2, "exponential": 1, "lognormal": 2}
    try:
        numbers = [float(part) for part in rest]
    except ValueError:
        numbers = []
    if (
        len(numbers) != counts.get(kind, -1)
        or not all(1 <= number <= MAX_NUMBER for number in numbers[:1])
        or not all(0 <= number <= MAX_NUMBER for number in numbers)
        or (kind == "uniform" and numbers[0] > numbers[1])
    ):
        raise ConfigError(
            f"{text!r} is not a length: give tokens, uniform:LOW:HIGH, exponential:MEAN or "
            f"lognormal:MEAN:SD, from 1 to {MAX_NUMBER}"
        )
    return Lengths(kind, *numbers)


def parse_prefix(text: str) -> tuple[int, float]:
    """Parse `N:SHARE` (this share of the requests starts with the same N tokens), or raise ConfigError."""
    tokens, _, share = text.partition(":")
    try:
        prefix = int(tokens), float(share)
    except ValueError:
        prefix = 0, 0.0
    if not (1 <= prefix[0] <= MAX_NUMBER and 0 < prefix[1] <= 1):
        raise ConfigError(f"{text!r} is not a shared prefix: give TOKENS:SHARE, such as 300:0.8")
    return prefix


def draw_jobs(spec: WorkloadSpec, n_ctx: int) -> list[Job]:
    """Return a workload, the same for the same seed.

    Shared prefixes are added to the drawn prompts. Sequences are cut to `n_ctx` tokens: first the prompt, so
    that one token can follow, then the answer.
    """
    random = np.random.default_rng(spec.seed)
    n = spec.n_requests
    gaps = random.exponential(1 / spec.rate, n) if math.isfinite(spec.rate) else np.zeros(n)
    times = np.cumsum(gaps) - gaps[0]
    prompts, answers = spec.prompt.draw(random, n), spec.answer.draw(random, n)
    bounds = np.cumsum([share for _, share in spec.prefixes])
    groups = np.searchsorted(bounds, random.random(n), side="right")
    first: dict[int, int] = {}
    jobs: list[Job] = []
    for index, group in enumerate(groups.tolist()):
        n_prefix = spec.prefixes[group][0] if group < len(spec.prefixes) else 0
        n_prompt = min(n_prefix + int(prompts[index]), n_ctx - 1)
        max_tokens = min(spec.max_tokens, n_ctx - n_prompt)
        like = first.setdefault(group, index) if n_prefix else index
        jobs.append(
            Job(
                time=float(times[index]),
                n_prompt=n_prompt,
                n_answer=min(int(answers[index]), max_tokens),
                max_tokens=max_tokens,
                samples=spec.samples,
                like=like if like != index else None,
                n_shared=min(n_prefix, n_prompt) if like != index else 0,
            )
        )
    return jobs


# ---- from files ----

_KEYS = {"time", "prompt", "answer", "max_tokens", "samples", "like", "shared"}


def read_jobs(path: str | os.PathLike[str]) -> list[Job]:
    """Read a workload from JSON: `{"requests": [{"time": 0.5, "prompt": 300, "answer": 40}, …]}`.

    Requests are in the order of time. Optional keys: `max_tokens` (default: the length of the answer),
    `samples`, and `like` with `shared` (see Job).

    Raises:
        OSError: the file cannot be read.
        ConfigError: the file is not valid; the message names the request.
    """
    with open(check_path(path), "rb") as file:
        try:
            content = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{os.fspath(path)} is not JSON: {error}") from None
    listed = content.get("requests") if isinstance(content, dict) else None
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f'{os.fspath(path)}: expected {{"requests": [...]}} with one request or more')
    jobs: list[Job] = []
    for index, entry in enumerate(listed):
        try:
            jobs.append(_job(entry, jobs))
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}, request {index}: {error}") from None
    return jobs


def _job(entry: Any, before: Sequence[Job]) -> Job:
    if not isinstance(entry, dict) or (unknown := sorted(map(str, entry.keys() - _KEYS))):
        raise ConfigError(f"unknown {unknown[0]!r}" if isinstance(entry, dict) else "not an object")

    def whole(name: str, default: int | None, low: int, high: int = MAX_NUMBER) -> int:
        value = entry.get(name, default)
        if type(value) is not int or not low <= value <= high:
            raise ConfigError(f"{name}={value!r}: give an integer from {low} to {high}")
        return value

    time = entry.get("time", 0)
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < math.inf:
        raise ConfigError(f"time={time!r}: give seconds")
    if before and time < before[-1].time:
        raise ConfigError(f"time={time!r} is before the time of the previous request")
    n_prompt, n_answer = whole("prompt", None, 1), whole("answer", None, 1)
    if "like" in entry and not before:
        raise ConfigError("like: the first request has none before it")
    like = whole("like", None, 0, len(before) - 1) if "like" in entry else None
    most = 0 if like is None else min(n_prompt, before[like].n_prompt + before[like].n_answer)
    return Job(
        time=float(time),
        n_prompt=n_prompt,
        n_answer=n_answer,
        max_tokens=whole("max_tokens", n_answer, n_answer),
        samples=whole("samples", 1, 1, MAX_SAMPLES),
        like=like,
        n_shared=whole("shared", most, 0, most),
    )


def jobs_of_trace(trace: Trace) -> list[Job]:
    """Return the requests of a recorded run that ended in it.

    Samples of one prompt are separate requests in a trace, and common starts are whole blocks.

    Raises:
        ConfigError: no request ended.
    """
    ended = {
        event.owner: event.n_generated
        for step in trace.steps
        for event in step.events
        if isinstance(event, Finished) and event.n_generated
    }
    jobs: list[Job] = []
    indices: dict[int, int] = {}  # by owner
    for step in trace.steps:
        for event in step.events:
            if isinstance(event, Arrived) and event.owner in ended and event.n_prompt:
                like = indices.get(event.like)
                indices[event.owner] = len(jobs)
                n_answer = ended[event.owner]
                known = 0 if like is None else jobs[like].n_prompt + jobs[like].n_answer
                jobs.append(
                    Job(
                        time=step.time,
                        n_prompt=event.n_prompt,
                        n_answer=n_answer,
                        max_tokens=max(event.max_new, n_answer),
                        like=like,
                        n_shared=min(event.n_shared, event.n_prompt, known),
                    )
                )
    if not jobs:
        raise ConfigError(f"{trace.path}: no request ended in this recording")
    return jobs


# ---- tokens ----


class Texts:
    """Random tokens of jobs, with their common starts. The same for the same seed."""

    def __init__(self, jobs: Sequence[Job], seed: int) -> None:
        self._jobs = jobs
        self._seed = seed
        self._wanted = {job.like for job in jobs}
        # prompt and first answer of each job that is the start of another
        self._whole: dict[int, NDArray[np.int32]] = {}

    def prompt(self, index: int) -> NDArray[np.int32]:
        """Return the prompt of a job. Call it for all jobs in their order."""
        job = self._jobs[index]
        own = self._draw(index, 0, job.n_prompt - job.n_shared)
        prompt = own if job.like is None else np.concatenate([self._whole[job.like][: job.n_shared], own])
        if index in self._wanted:
            self._whole[index] = np.concatenate([prompt, self.answer(index, 0)])
        return prompt

    def answer(self, index: int, sample: int) -> NDArray[np.int32]:
        """Return an answer. Its last token is END if it is shorter than `max_tokens`."""
        job = self._jobs[index]
        tokens = self._draw(index, sample + 1, job.n_answer)
        if job.n_answer < job.max_tokens:
            tokens[-1] = END
        return tokens

    def _draw(self, index: int, part: int, n: int) -> NDArray[np.int32]:
        random = np.random.default_rng([self._seed, index, part])
        return random.integers(END + 1, np.iinfo(np.int32).max, n, np.int32)
