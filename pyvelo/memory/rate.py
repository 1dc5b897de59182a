"""Rate at which the processor reads memory, measured."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter as now

import numpy as np

__all__ = ["read_rate"]

MOST_BYTES = 1 << 30  # more than any processor caches
MOST_OF_FREE = 0.25


def read_rate(n_threads: int, free: int | None, seconds: float = 2.0) -> float:
    """Return the bytes that so many threads read in a second: the median of rounds over one array.

    Args:
        free: bytes of free memory, of which the array takes at most a quarter; None: unknown.
        seconds: duration of the rounds, of which there are at least three.
    """
    n_bytes = MOST_BYTES if free is None else min(MOST_BYTES, int(free * MOST_OF_FREE))
    words = np.ones(max(n_threads, n_bytes // 8), np.uint64)
    shares = np.array_split(words, n_threads)
    rates: list[float] = []
    with ThreadPoolExecutor(n_threads) as pool:
        end = now() + seconds
        while len(rates) < 3 or now() < end:
            begin = now()
            list(pool.map(np.add.reduce, shares))
            rates.append(words.nbytes / (now() - begin))
    return statistics.median(rates)
