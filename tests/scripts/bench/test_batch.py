"""The comparison of a batch with LLM.generate."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pyvelo.demo import DEMO_MODEL
from scripts._common import ROOT
from scripts.bench.batch import SIDES, drawn_rows


def test_rows_differ_and_are_the_same_each_time() -> None:
    rows = drawn_rows(200, 5, 16)
    assert rows == drawn_rows(200, 5, 16)
    assert len({prompt for prompt, _ in rows}) == 200
    assert {n for _, n in rows} == set(range(8, 25))


@pytest.mark.parametrize("side", SIDES)
def test_a_side_generates_what_is_asked(side: str) -> None:
    rows = drawn_rows(5, 3, 4)
    seconds, n_tokens = SIDES[side](DEMO_MODEL, rows, 1)
    assert n_tokens == sum(n for _, n in rows)
    assert 0 < seconds < 60


def test_the_ratio(capfd: pytest.CaptureFixture[str]) -> None:
    command = [
        sys.executable,
        str(ROOT / "scripts/bench/batch.py"),
        str(DEMO_MODEL),
        "--rows",
        "20",
        "--json",
    ]
    subprocess.run([*command, "--threads", "1"], check=True)
    found = json.loads(capfd.readouterr().out)
    [once] = found["rounds"]
    assert once["ratio"] == pytest.approx(once["batch"] / once["generate"])
    assert found["rows"] == 20
