"""The latency benchmark: which times count, and the whole of it in small."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from scripts._common import ScriptError
from scripts.bench import latency
from scripts.bench.latency import Case, Result, gaps, steps_of
from tests import forks


def test_times_count_where_their_token_comes() -> None:
    stamps = [[0.0, 1.0, 3.0], [0.5, 2.5]]
    assert gaps(stamps, 0.0, 1.0) == [1.0]
    assert gaps(stamps, 1.0, 3.0) == [2.0, 2.0]
    assert Result(64, 10, 20, 1.0, 2.0, 1.0, 3.0, 9.0).ratio == 1.5


def test_streams_leave_tokens_to_the_prompt() -> None:
    assert steps_of(100, 13, 8) == 50 + 1
    assert steps_of(8000, 512, 8) == 4000 + 63
    with pytest.raises(ScriptError, match="leaves no room"):
        steps_of(100, 8, 8)


def test_a_prompt_comes_beside_streams(tiny_model: Path) -> None:
    case = Case("f16", batch=16, threads=1, streams=2, prompt=8, tokens=4, long=200, most=400)
    found = asyncio.run(latency.measure(tiny_model, case))
    assert 0 < found.alone_p50 <= found.alone_p99
    assert 0 < found.beside_p50 <= found.beside_p99
    assert found.long_ttft > 0


def test_the_whole_script(tiny_model: Path) -> None:
    sizes = ["--streams", "2", "--prompt", "8", "--tokens", "4", "--long", "100", "--threads", "1"]
    command = [forks.PYTHON, latency.__file__, str(tiny_model), "--batch", "16", "64", *sizes]
    found = json.loads(forks.run([*command, "--json"], check=True).stdout)
    assert [entry["batch"] for entry in found] == [16, 64]
