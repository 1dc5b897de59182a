"""The way of a token stays short: few modules, and few calls from the step to C."""

from __future__ import annotations

import subprocess
import sys

from scripts._common import ROOT

MODULES = 20
"""Most modules from `LLM.generate` to a token."""

CALLS = 4
"""Most calls from the step to C, C included."""


def test_few_modules_and_calls_between_generate_and_a_token() -> None:
    command = [sys.executable, str(ROOT / "scripts/check/token_path.py"), "--limit", str(MODULES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *modules, calls = done.stdout.splitlines()
    names = [line.split()[1].removesuffix(":") for line in modules]
    ends = {"llm", "engine.step", "engine.scheduler", "engine.output", "kv.manager", "native.context"}
    assert {f"pyvelo.{name}" for name in ends} <= set(names), "the profiler saw the whole way"
    way = calls.removeprefix("from the step to C: ").split(" > ")
    assert way[-1] == "velo_context_run"
    assert len(way) <= CALLS


def test_a_longer_way_is_refused() -> None:
    command = [sys.executable, str(ROOT / "scripts/check/token_path.py"), "--limit", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "modules, more than 5" in done.stderr
