"""Measurement of a model's speed: prompts and answers, at empty and deep contexts, alone and batched."""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from time import perf_counter as now

from pyvelo.config import EngineConfig, LoraGiven
from pyvelo.engine.engine import Engine, open_engine
from pyvelo.engine.loop import run_all
from pyvelo.engine.output import outputs_of
from pyvelo.errors import ConfigError, OutOfMemory
from pyvelo.kv.geometry import make_geometry
from pyvelo.models.gguf_parts import scan_model
from pyvelo.native import Model
from pyvelo.outputs import StreamPiece
from pyvelo.sampling import SamplingParams
from pyvelo.session import Session

__all__ = ["BenchPlan", "Row", "measure"]


@dataclass(frozen=True)
class BenchPlan:
    """Plan of a measurement; lengths in tokens.

    kv_types: a run for each. depths: tokens in the context before. sequences: concurrent answers.
    prompt, answer: timed tokens. repeats: samples of each figure. lora: adapter of all requests.
    """

    model: str | os.PathLike[str]
    kv_types: Sequence[str | tuple[str, str]] = ("f16",)
    depths: Sequence[int] = (0,)
    sequences: Sequence[int] = (1,)
    prompt: int = 512
    answer: int = 64
    repeats: int = 3
    n_threads: int | None = None
    n_gpu_layers: int | str = "auto"
    lora: LoraGiven | None = None

    def __post_init__(self) -> None:
        counts: dict[str, Sequence[int]] = {
            "prompt": [self.prompt],
            "answer": [self.answer],
            "repeats": [self.repeats],
        }
        counts |= {"sequences": self.sequences, "depths": self.depths}
        for name, numbers in counts.items():
            low, high = int(name != "depths"), 1 << 20
            if not numbers or min(numbers) < low or max(numbers) > high:
                given = ",".join(map(str, numbers))
                raise ConfigError(f"{name}={given}: give numbers from {low} to {high}")


@dataclass(frozen=True)
class Row:
    """One figure. test: "prompt" or "answer"; samples: tokens per second of all sequences together."""

    kv_type: str
    test: str
    depth: int
    sequences: int
    n_tokens: int
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Standard deviation of the samples; 0 for one sample."""
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0


Loading = Callable[[str | os.PathLike[str]], AbstractContextManager[Callable[[float], object] | None]]
"""Context manager around the load of a path; yields the callback for its progress."""


def measure(plan: BenchPlan, loading: Loading = lambda _: nullcontext()) -> Iterator[Row]:
    """Yield each row when it is measured; raise the errors of `LLM`."""
    for kv_type in plan.kv_types:
        name = kv_type if isinstance(kv_type, str) else ",".join(kv_type)
        with closing(_opened(plan, kv_type, loading)) as engine:
            for depth in plan.depths:
                samples = _prompt_samples(engine, plan, depth, plan.repeats)
                yield Row(name, "prompt", depth, 1, plan.prompt, samples)
                for n in plan.sequences:
                    yield Row(name, "answer", depth, n, plan.answer, _answer_samples(engine, plan, depth, n))


def _opened(plan: BenchPlan, kv_type: str | tuple[str, str], loading: Loading) -> Engine:
    """Return an engine with a pool for the largest test, after a pass that reads and packs the weights."""
    longest = max(plan.depths) + max(plan.prompt, plan.answer) + 2
    most = max(max(plan.sequences), 2)  # a prompt is measured after a copy of its beginning
    scan_model(os.fspath(plan.model))  # before C opens it
    with Model(plan.model, n_gpu_layers=0, deterministic=True) as model:  # mapped alone, not packed
        state_bytes = model.info.state_bytes
        geometry = make_geometry(str(plan.model), model.layers, kv_type, 32, state_bytes=state_bytes)
    n_tokens = most * (longest + 2 * geometry.block_size)
    snapshots = 2 * most * geometry.state_blocks * geometry.block_bytes
    with loading(plan.model) as progress:
        config = EngineConfig(
            model=plan.model,
            kv_type=kv_type,
            lora=plan.lora,
            n_ctx=longest,
            kv_cache_bytes=(n_tokens + 512) * geometry.token_bytes + snapshots,
            n_threads=plan.n_threads,
            n_gpu_layers=plan.n_gpu_layers,
            progress=progress,
        )
        try:
            engine = open_engine(config)
        except OutOfMemory as error:
            if not str(error).startswith("kv_cache_bytes="):
                raise
            what = f"{most} sequences of {longest} tokens need {config.kv_cache_bytes} bytes of KV cache"
            raise OutOfMemory(f"{what}, more than is free: measure fewer or shorter ones") from None
        try:
            _prompt_samples(engine, plan, 0, repeats=1)
        except BaseException:
            engine.close()
            raise
    return engine


def _prompt_samples(engine: Engine, plan: BenchPlan, depth: int, repeats: int) -> tuple[float, ...]:
    """Return the speeds of a prompt after `depth` tokens, up to its first token.

    The session has one token more: a fork computes the last one with what is appended.
    """
    draw = random.Random(depth)
    samples = []
    before = engine.processor.sequence(_tokens(engine, draw, depth + 1), "")
    with Session(engine, before) as there:
        for _ in range(repeats):
            with there.fork() as fork:
                if plan.prompt > 1:
                    fork.append(_tokens(engine, draw, plan.prompt - 1))
                start = now()
                fork.generate(_params(1))
                samples.append(plan.prompt / (now() - start))
    engine.reset_prefix_cache()
    return tuple(samples)


def _answer_samples(engine: Engine, plan: BenchPlan, depth: int, n: int) -> tuple[float, ...]:
    """Return the speeds of `n` concurrent answers, from the moment at which each has its first token."""
    draw = random.Random(depth)
    prompts = [_tokens(engine, draw, max(1, depth)) for _ in range(n)]
    _times(engine, prompts, 1)  # the context before
    samples = []
    for _ in range(plan.repeats):
        times = _times(engine, prompts, 1 + plan.answer)
        start = max(arrivals[0] for arrivals in times)
        later = [time for arrivals in times for time in arrivals if time > start]
        samples.append(len(later) / (max(later) - start))
    engine.reset_prefix_cache()
    return tuple(samples)


def _times(engine: Engine, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[list[float]]:
    """Return the arrival times of the tokens of each answer."""
    times = [list[float]() for _ in prompts]

    def watch(number: int) -> Callable[[StreamPiece], None]:
        return lambda _: times[number].append(now())

    submissions = [
        engine.processor.prepare(prompt, _params(n_tokens), watch(number))
        for number, prompt in enumerate(prompts)
    ]
    run_all(engine.loop, submissions)
    outputs_of(submissions)
    return times


def _params(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True)


def _tokens(engine: Engine, draw: random.Random, n: int) -> list[int]:
    """Return random tokens."""
    return [draw.randrange(engine.model.vocab.n_tokens) for _ in range(n)]
