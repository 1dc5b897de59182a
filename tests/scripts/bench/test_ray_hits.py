"""The benchmark of the hit rate on Ray: its prompts, and the whole script where Ray is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from scripts._common import ROOT
from scripts.bench import ray_hits
from scripts.bench.ray_hits import N_OWN, N_SHARED, prompts


def test_prompts_share_beginnings() -> None:
    made = prompts(3, 50)
    assert made == prompts(3, 50)
    assert {len(prompt) for prompt in made} == {N_SHARED + N_OWN}
    assert len({tuple(prompt[:N_SHARED]) for prompt in made}) == 3
    assert len({tuple(prompt) for prompt in made}) == 50


def test_the_whole_script() -> None:
    pytest.importorskip("ray", reason="needs pip install 'ray[serve]'")
    command = [sys.executable, ray_hits.__file__, "--prefixes", "4", "--requests", "24", "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, check=True
    )
    rates = json.loads(done.stdout)
    assert list(rates) == ["one engine", "affinity", "round-robin"]
    assert all(0 < rate < N_SHARED / (N_SHARED + N_OWN) for rate in rates.values())
    assert rates["affinity"] <= rates["one engine"]
