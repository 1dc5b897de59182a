"""Servers that benchmarks compare: `pyvelo serve` and the modes of llama-server, over equal caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyvelo.kv.types import KVType
from scripts._common import ScriptError
from scripts._served import served
from scripts.bench._serving import Load
from scripts.bench._stock_server import ServerSettings, running

__all__ = ["GRAIN", "Mode", "Plan", "context_of", "our_server", "stock_modes", "stock_server"]

GRAIN = 256
"""Tokens; both sides' caches, and stock's slots, are multiples of it."""


@dataclass(frozen=True)
class Plan:
    """Settings that every run shares.

    `kv_bytes` is the cache's size, `batch` the tokens of a step; limits are in seconds.
    """

    model: Path
    kv_type: KVType
    kv_bytes: int
    threads: int
    batch: int
    load: Load
    ttft_limit: float
    tbt_limit: float
    tries: int
    gpu: bool = False
    """All layers, and the cache, on GPUs."""
    any_length: bool = False
    """Slots hold the longest request that the workload allows, not only the longest that was drawn."""
    http: bool = False
    """Also serve over HTTP."""


def context_of(load: Load) -> int:
    """Return the context for the longest request that may be drawn, with what a server adds to it."""
    return -(-(2 * load.longest + 2) // GRAIN) * GRAIN


@dataclass(frozen=True)
class Mode:
    """Mode of llama-server; `context` in tokens over all slots."""

    name: str
    slots: int
    context: int
    unified: bool


def stock_modes(n_cache: int, longest: int, unified_slots: list[int]) -> list[Mode]:
    """Return fixed streams for the longest request, and unified buffers, of at most `n_cache` tokens."""
    least = -(-(longest + 2) // GRAIN) * GRAIN  # a server stops one token before its slot is full
    slots = n_cache // least
    if not slots:
        raise ScriptError(
            f"the cache holds {n_cache} tokens, a request takes {longest}: give more --kv-bytes"
        )
    slot = n_cache // slots // GRAIN * GRAIN
    found = [Mode(f"streams, {slots} slots of {slot}", slots, slots * slot, unified=False)]
    for n in unified_slots or [slots, 2 * slots]:
        found.append(Mode(f"unified, {n} slots", n, n_cache // GRAIN * GRAIN, unified=True))
    return found


@contextmanager
def our_server(plan: Plan, n_requests: int, n_tokens: int) -> Iterator[int]:
    """Yield the port of `pyvelo serve` with a queue for requests with so many tokens in their prompts."""
    options = {
        "--ctx": context_of(plan.load),
        "--kv-type": plan.kv_type,
        "--kv-cache-bytes": plan.kv_bytes,
        "--threads": plan.threads,
        "--max-batch-tokens": plan.batch,
        "--n-gpu-layers": -1 if plan.gpu else 0,
        "--max-queue": n_requests,
        "--max-queued-tokens": n_tokens + 1,
    }
    with served(str(plan.model), *(str(each) for pair in options.items() for each in pair)) as server:
        yield server.port


def stock_server(plan: Plan, program: Path, mode: Mode, connections: int) -> AbstractContextManager[int]:
    """Return a context with the port of llama-server in a mode."""
    return running(
        ServerSettings(
            program, plan.model, plan.kv_type, mode.context, mode.slots, mode.unified,
            plan.threads, plan.batch, connections, plan.gpu,
        )
    )  # fmt: skip
