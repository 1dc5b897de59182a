"""scripts/bench/kv.py runs, and finds times."""

from __future__ import annotations

from scripts.bench.kv import results


def test_every_cost_is_measured() -> None:
    found = list(results(40))
    assert len(found) == 5
    assert all(result.median > 0 for result in found)
