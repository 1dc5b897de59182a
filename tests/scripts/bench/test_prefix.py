"""scripts/bench/prefix.py: blocks that samples hold, and a run of it from end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts.bench import prefix


def test_a_run(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tiny_model), "--shared", "128", "--rounds", "1", "--threads", "1", "--json"]
    monkeypatch.setattr(sys, "argv", ["prefix.py", *arguments])
    assert prefix.main() == 0
    answer = json.loads(capsys.readouterr().out)
    first, many, blocks, no_hits = answer["results"]
    # a prompt of 256 tokens: 8 blocks, and 16 answers of 32 tokens, each in a block of its own
    assert blocks["with_it"] <= 8 + 16
    assert blocks["without"] == 16 * -(-(256 + 31) // 32)
    for row in (first, many, no_hits):
        assert row["with_it"] > 0 < row["without"]
    assert -1 < answer["share_of_a_step_at_no_hits"] < 1
