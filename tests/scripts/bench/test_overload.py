"""The benchmark under overload: loads, refusals and goodput."""

from __future__ import annotations

import json

from pyvelo.demo import DEMO_MODEL
from scripts.bench import overload
from scripts.bench.overload import Row, share_of_best
from tests import forks


def test_the_share_is_of_the_best_load() -> None:
    rows = [Row(times, 0.0, good, 0, 0, 0, 0.0, 0.0) for times, good in ((10, 6.0), (0.5, 4.0), (1, 8.0))]
    assert share_of_best(rows) == 0.75
    assert share_of_best([Row(1, 0.0, 0.0, 0, 0, 0, 0.0, 0.0)]) == 0.0


def test_requests_beyond_the_queue_are_refused() -> None:
    options = ["--times", "40", "--seconds", "0.05", "--tokens", "40", "--seqs", "2", "--queue", "0"]
    command = [forks.PYTHON, overload.__file__, str(DEMO_MODEL), *options, "--threads", "1", "--json"]
    found = json.loads(forks.run(command, check=True).stdout)
    (row,) = found["rows"]
    assert found["share_of_best"] == 1
    assert row["failed"] == 0
    assert row["good"] > 0
    assert row["refused"] > 0
    assert row["refusal_p99_ms"] > 0
