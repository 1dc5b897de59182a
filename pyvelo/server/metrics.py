"""Metrics of a server in Prometheus' text format: the engine's statistics, and histograms of requests."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pyvelo.server.rates import Rates

if TYPE_CHECKING:
    from pyvelo.engine.stats import EngineStats
    from pyvelo.outputs import RequestTimes
    from pyvelo.server.admission import Admission

__all__ = ["Metrics"]

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    600.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Histogram:
    """Counts of values up to each bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulative counts by bound, and the sum."""
        total, found = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return found, self._sum


class Metrics(Collector):
    """Counters of a server. `text` writes them; the other methods count.

    Args:
        with_vllm: also name them as vLLM does, for its dashboards and routers.
    """

    def __init__(self, model_name: str, with_vllm: bool = False) -> None:
        self.rates = Rates()
        self._label = {"model_name": model_name}
        self._prefixes = ("pyvelo:", "vllm:") if with_vllm else ("pyvelo:",)
        self._first = Histogram(_SECONDS)
        self._between = Histogram(_SECONDS)
        self._whole = Histogram(_SECONDS)
        self._prompts = Histogram(_TOKENS)
        self._answers = Histogram(_TOKENS)
        self._answered: Counter[tuple[str, str]] = Counter()
        self._reasons: Counter[str] = Counter()
        self._stats: EngineStats | None = None
        self._admission: Admission | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def text(self, stats: EngineStats | None, admission: Admission) -> bytes:
        """Return all metrics."""
        self._stats, self._admission = stats, admission
        return generate_latest(self._registry)

    def answered(self, path: str, status: int) -> None:
        """Count an answer."""
        self._answered[path, str(status)] += 1

    def step_of_stream(self, seconds: float, n_pieces: int, first: bool) -> None:
        """Count the time since the last pieces of a stream."""
        if not first:
            self._between.add(seconds / n_pieces, n_pieces)
            self.rates.between_tokens(seconds / n_pieces, n_pieces)

    def ended(self, times: RequestTimes, n_prompt: int, n_new: int, reasons: Iterable[str]) -> None:
        """Count a request that has ended."""
        if times.first_token is not None:
            self._first.add(times.first_token - times.queued)
            self.rates.first_token(times.first_token - times.queued)
        self._whole.add(times.end - times.queued)
        self._prompts.add(n_prompt)
        self._answers.add(n_new)
        self._reasons.update(reasons)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as prometheus_client asks for them."""
        for prefix in self._prefixes:
            yield from self._engine(prefix)
            yield from self._requests(prefix)

    def _engine(self, prefix: str) -> Iterator[Metric]:
        stats = self._stats
        if stats is None:
            return
        used = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        yield self._gauge(prefix, "num_requests_running", "Requests that take part in steps.", stats.running)
        yield self._gauge(prefix, "num_requests_waiting", "Requests in the queue.", stats.waiting)
        yield self._gauge(prefix, "num_requests_swapped", "Waiting requests in host memory.", stats.swapped)
        yield self._gauge(prefix, "kv_cache_usage_perc", "Share of the pool's blocks in use, 0 to 1.", used)
        yield self._gauge(prefix, "num_idle_sessions", "Idle sequences that keep blocks.", stats.idle)
        states = GaugeMetricFamily(
            f"{prefix}kv_blocks", "Blocks of the pool.", labels=("model_name", "state")
        )
        for state, n in (
            ("used", stats.blocks_used),
            ("cached", stats.blocks_cached),
            ("free", stats.blocks_free),
        ):
            states.add_metric((self._label["model_name"], state), n)
        yield states
        counters = (
            ("prompt_tokens", "Prompt tokens computed or found in the cache.", stats.prompt_tokens),
            ("generation_tokens", "Generated tokens.", stats.completion_tokens),
            ("prefix_cache_queries", "Prompt tokens that were looked up.", stats.queried_tokens),
            ("prefix_cache_hits", "Prompt tokens that were a prefix hit.", stats.hit_tokens),
            ("kv_store_loaded_tokens", "Tokens loaded from the KV store.", stats.loaded_tokens),
            ("kv_store_host_tokens", "Loaded tokens that were in host memory.", stats.host_loaded_tokens),
            ("kv_store_saved_blocks", "Blocks and states saved in the KV store.", stats.saved_blocks),
            ("kv_store_failures", "Failed calls and damaged records of it.", stats.store_failures),
            ("num_preemptions", "Preemptions.", stats.preemptions),
            ("num_swaps", "Preemptions that swapped out.", stats.swaps),
            ("block_copies", "Blocks copied on write.", stats.block_copies),
            ("block_evictions", "Cached blocks that were evicted.", stats.block_evictions),
            ("steps", "Steps of the engine.", stats.steps),
            ("step_seconds", "Seconds in steps.", stats.step_seconds),
        )
        for name, text, value in counters:
            yield self._counter(prefix, name, text, value)

    def _requests(self, prefix: str) -> Iterator[Metric]:
        model = self._label["model_name"]
        reasons = CounterMetricFamily(
            f"{prefix}request_success", "Samples that ended.", labels=("model_name", "finished_reason")
        )
        for reason, n in self._reasons.items():
            reasons.add_metric((model, reason), n)
        yield reasons
        yield self._histogram(
            prefix, "time_to_first_token_seconds", "From the call to the first token.", self._first
        )
        yield self._histogram(
            prefix, "inter_token_latency_seconds", "Between tokens of a stream.", self._between
        )
        yield self._histogram(prefix, "e2e_request_latency_seconds", "From the call to the end.", self._whole)
        yield self._histogram(prefix, "request_prompt_tokens", "Tokens of a prompt.", self._prompts)
        yield self._histogram(prefix, "request_generation_tokens", "Tokens of all samples.", self._answers)
        answers = CounterMetricFamily(f"{prefix}http_requests", "Answers.", labels=("path", "status"))
        for (path, status), n in self._answered.items():
            answers.add_metric((path, status), n)
        yield answers
        if self._admission is not None:
            yield self._gauge(
                prefix, "http_requests_open", "Requests that were admitted.", len(self._admission)
            )
            yield self._gauge(
                prefix, "queued_prompt_tokens", "Prompt tokens that wait.", self._admission.queued_tokens()
            )
            refusals = CounterMetricFamily(
                f"{prefix}admission_rejections", "Requests refused.", labels=("reason",)
            )
            for reason, n in self._admission.refusals.items():
                refusals.add_metric((reason,), n)
            yield refusals

    def _gauge(self, prefix: str, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(prefix + name, text, labels=("model_name",))
        family.add_metric(tuple(self._label.values()), value)
        return family

    def _counter(self, prefix: str, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(prefix + name, text, labels=("model_name",))
        family.add_metric(tuple(self._label.values()), value)
        return family

    def _histogram(self, prefix: str, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(prefix + name, text, labels=("model_name",))
        buckets, total = histogram.buckets()
        family.add_metric(tuple(self._label.values()), buckets, total)
        return family
