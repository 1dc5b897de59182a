"""Clock of the benchmarks that time Python alone; imports the standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter as now


def microseconds(rounds: int, prepare: Callable[[], Callable[[], object]]) -> float:
    """Return the median time of the function that `prepare` returns anew for every round."""
    times = []
    for _ in range(rounds):
        run = prepare()
        start = now()
        run()
        times.append((now() - start) * 1e6)
    return statistics.median(times)
