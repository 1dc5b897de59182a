"""Rates of the last five minutes, one row a second."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pyvelo.engine.stats import EngineStats

__all__ = ["SECONDS", "RateRow", "Rates"]

SECONDS = 300
_SHORTEST, _RATIO = 1e-5, 1.1
"""Times are counted in classes, each 10 % longer than the one before."""
_CLASSES = 1.0 / math.log(_RATIO)


class RateRow(NamedTuple):
    """Rates of one second; None if there was no measurement. Times are in seconds.

    first: median time to the first token; between_50, between_99: percentiles of the time between tokens.
    """

    hit_rate: float | None
    first: float | None
    between_50: float | None
    between_99: float | None
    tokens: float
    waiting: int


class Rates:
    """Ring of SECONDS rows; `sample` closes one. It belongs to the event loop.

    n_rows: rows since the start, of which the ring has the last.
    """

    def __init__(self) -> None:
        self.n_rows = 0
        self._rows: deque[RateRow] = deque(maxlen=SECONDS)
        self._first: Counter[int] = Counter()
        self._between: Counter[int] = Counter()
        self._last: tuple[float, int, int, int] | None = None

    def first_token(self, seconds: float) -> None:
        """Count the time to the first token of a request."""
        self._first[_class(seconds)] += 1

    def between_tokens(self, seconds: float, n_tokens: int) -> None:
        """Count the time between tokens of a stream, before each of `n_tokens`."""
        self._between[_class(seconds)] += n_tokens

    def sample(self, stats: EngineStats, now: float) -> None:
        """Close the row of the time since the last call.

        Args:
            now: seconds.
        """
        totals = (now, stats.queried_tokens, stats.hit_tokens, stats.completion_tokens)
        before, self._last = self._last or totals, totals
        seconds, queried, hits, new = (b - a for a, b in zip(before, totals, strict=True))
        self._rows.append(
            RateRow(
                hits / queried if queried else None,
                _percentile(self._first, 0.5),
                _percentile(self._between, 0.5),
                _percentile(self._between, 0.99),
                new / seconds if seconds else 0.0,
                stats.waiting,
            )
        )
        self.n_rows += 1
        self._first.clear()
        self._between.clear()

    def since(self, n_rows: int) -> Sequence[RateRow]:
        """Return the rows after the first `n_rows`, as far as the ring has them."""
        n = min(len(self._rows), self.n_rows - n_rows)
        return list(islice(self._rows, len(self._rows) - n, None))


def _class(seconds: float) -> int:
    return round(math.log(max(seconds, _SHORTEST) / _SHORTEST) * _CLASSES)


def _percentile(counts: Counter[int], share: float) -> float | None:
    """Return the time that a share of the counted times does not exceed, within 5 %."""
    left = share * sum(counts.values())
    for number in sorted(counts):
        left -= counts[number]
        if left <= 0:
            return float(f"{_SHORTEST * _RATIO**number:.3g}")
    return None
