"""The benchmark of Ray Serve: ratios, and the whole script where Ray is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pyvelo.demo import DEMO_MODEL
from scripts._common import ROOT
from scripts.bench import ray_serve
from scripts.bench.ray_serve import Row


def test_a_ratio_is_of_the_servers_by_hand() -> None:
    assert Row(added_first_ms=1.0, by_hand=200.0, with_ray=150.0).ratio == 0.75


def test_the_whole_script() -> None:
    pytest.importorskip("ray", reason="needs pip install 'ray[serve]'")
    options = ["--streams", "3", "--tokens", "8", "--rounds", "1", "--json"]
    command = [sys.executable, ray_serve.__file__, str(DEMO_MODEL), *options]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, check=True
    )
    (row,) = json.loads(done.stdout)["rows"]
    assert row["by_hand"] > 0
    assert row["with_ray"] > 0
