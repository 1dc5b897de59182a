"""Rates of the last five minutes, in rows of a second."""

from __future__ import annotations

import pytest

from pyvelo.server.rates import SECONDS, Rates


class Stats:
    queried_tokens = hit_tokens = completion_tokens = waiting = 0


def test_rates_of_each_second() -> None:
    rates, stats = Rates(), Stats()
    rates.sample(stats, 10.0)  # type: ignore[arg-type]
    assert rates.since(0) == [(None, None, None, None, 0.0, 0)]
    stats.queried_tokens, stats.hit_tokens, stats.completion_tokens, stats.waiting = 100, 25, 60, 3
    for n in range(1, 101):
        rates.between_tokens(n / 1000, 1)
    rates.first_token(0.5)
    rates.sample(stats, 12.0)  # type: ignore[arg-type]
    row = rates.since(1)[0]
    assert (row.hit_rate, row.tokens, row.waiting) == (0.25, 30.0, 3)
    assert row.first == pytest.approx(0.5, rel=0.05)
    assert row.between_50 == pytest.approx(0.05, rel=0.06)
    assert row.between_99 == pytest.approx(0.099, rel=0.06)
    for second in range(SECONDS + 5):
        rates.sample(stats, 13.0 + second)  # type: ignore[arg-type]
    assert len(rates.since(0)) == SECONDS
    assert len(rates.since(rates.n_rows - 3)) == 3
    assert rates.since(rates.n_rows) == []
    assert rates.since(0)[-1] == (None, None, None, None, 0.0, 3)
