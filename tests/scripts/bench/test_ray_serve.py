"""The benchmark of Ray Serve: ratios, and the whole script where Ray is installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from pyvelo.demo import DEMO_MODEL
from scripts._common import ROOT
from scripts.bench import ray_serve
from scripts.bench.ray_serve import Row, processor_seconds


def test_a_ratio_is_of_the_servers_by_hand() -> None:
    row = Row(added_first_ms=1.0, by_hand=200.0, with_ray=150.0, by_hand_cpu_ms=4.0, with_ray_cpu_ms=5.0)
    assert (row.ratio, row.limit) == (0.75, 0.8)


def test_the_time_of_children_counts() -> None:
    busy = "while True: pass"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    with subprocess.Popen([sys.executable, "-c", child], start_new_session=True) as process:
        try:
            end = time.monotonic() + 60
            while processor_seconds([process.pid]) < 0.5:
                assert time.monotonic() < end
                time.sleep(0.05)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


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
