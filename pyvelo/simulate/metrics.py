"""Metrics of a simulated run: memory over time, and the times of its tokens."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

__all__ = ["Meter", "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """Results of a simulated run. Times are in seconds, shares from 0 to 1, means over the time of all steps.

    `ttft` is the time from arrival to the first token, `tbt` the time between two tokens of a sequence.
    `waste` is the share of the allocated slots without a token; reserved blocks are not allocated yet, and
    still serve as hits. `saved` is the share of slots that sharing saved. `hit_rate` is the share of hits
    among the tokens of started sequences; a sequence that starts again after a preemption counts again.
    `refused` requests do not fit into an empty pool.
    """

    scheme: str
    requests: int
    refused: int
    seconds: float
    peak_running: int
    mean_running: float
    peak_slots: int
    mean_slots: float
    waste: float
    saved: float
    ttft_p50: float
    ttft_p99: float
    tbt_p50: float
    tbt_p99: float
    preemptions: int
    swaps: int
    hit_rate: float
    tokens_per_second: float


class Meter:
    """Sums and peaks of a run."""

    def __init__(self) -> None:
        self.refused = 0
        self.preemptions = 0
        self.swaps = 0
        self.hit_rate = 0.0
        self.first = array("d")  # seconds from arrival to the first token, of every sequence
        self._between = array("d")
        self._last: dict[tuple[int, int], float] = {}
        self._seconds = self._running = self._slots = self._stored = self._unshared = 0.0
        self._peak_running = self._peak_slots = 0

    def step(self, seconds: float, running: int, slots: int, stored: int, unshared: int) -> None:
        """Add a step.

        Args:
            seconds: of the step.
            running: sequences.
            slots: allocated slots.
            stored: tokens in these slots.
            unshared: slots that the sequences would hold without sharing.
        """
        self._seconds += seconds
        self._running += seconds * running
        self._slots += seconds * slots
        self._stored += seconds * stored
        self._unshared += seconds * unshared
        self._peak_running = max(self._peak_running, running)
        self._peak_slots = max(self._peak_slots, slots)

    def token(self, sequence: tuple[int, int], arrival: float, now: float) -> None:
        """Add a token of a sequence that arrived at `arrival`."""
        before = self._last.get(sequence)
        if before is None:
            self.first.append(now - arrival)
        else:
            self._between.append(now - before)
        self._last[sequence] = now

    def outcome(self, scheme: str, requests: int, seconds: float) -> Outcome:
        """Return the results of the whole run, which took `seconds`."""
        n_tokens = len(self.first) + len(self._between)
        time = self._seconds or 1.0
        return Outcome(
            scheme=scheme,
            requests=requests,
            refused=self.refused,
            seconds=seconds,
            peak_running=self._peak_running,
            mean_running=self._running / time,
            peak_slots=self._peak_slots,
            mean_slots=self._slots / time,
            waste=_missing(self._stored, self._slots),
            saved=_missing(self._slots, self._unshared),
            ttft_p50=_percentile(self.first, 50),
            ttft_p99=_percentile(self.first, 99),
            tbt_p50=_percentile(self._between, 50),
            tbt_p99=_percentile(self._between, 99),
            preemptions=self.preemptions,
            swaps=self.swaps,
            hit_rate=self.hit_rate,
            tokens_per_second=n_tokens / seconds if seconds else 0.0,
        )


def _missing(part: float, whole: float) -> float:
    return 1.0 - part / whole if whole else 0.0


def _percentile(values: array[float], q: int) -> float:
    return float(np.percentile(values, q)) if values else 0.0
