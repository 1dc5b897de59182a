"""scripts/bench/engine.py: its figures, and the verdict by minimum ratios."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts._common import ScriptError
from scripts.bench import engine
from scripts.bench.engine import Case, Plan, Speeds
from tests import forks

STOCK = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert given["-fa"] == "1" and given["-ctk"] == given["-ctv"]
print(json.dumps([
    {{"n_gen": 0, "samples_ts": [100.0, 300.0, 200.0]}},
    {{"n_gen": int(given["-n"]), "samples_ts": [1.0 + int(given["-d"])]}},
]))
"""


@pytest.fixture
def plan(tiny_model: Path, tmp_path: Path) -> Plan:
    program = tmp_path / "llama-bench"
    program.write_text(STOCK.format(python=sys.executable))
    program.chmod(0o755)
    return Plan(tiny_model, tmp_path, threads=1, prompt=600, tokens=3, repeats=1)


def test_stock_is_read_from_llama_bench(plan: Plan) -> None:
    assert engine.stock(plan, Case("q8_0", 40)) == Speeds(prefill=200.0, decode=41.0)


@pytest.mark.parametrize("depth", [0, 512])
def test_ours_measures_the_chunks_behind_the_depth(
    plan: Plan, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100000))
    monkeypatch.setattr(engine, "now", lambda: float(next(clock)))
    speeds = engine.measure(plan.model, Case("f16", depth), 1, plan.prompt, plan.tokens, 1)
    # a tick for each look at the clock: the step's end and, for a token, the arrival of its piece
    assert speeds == Speeds(prefill=600 / 2, decode=3 / (2 * 3))


def test_ratios_and_verdicts(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = iter([Speeds(97.0, 90.0), Speeds(96.0, 99.0), Speeds(98.0, 80.0)])
    monkeypatch.setattr(engine, "ours", lambda plan, case: next(mine))
    monkeypatch.setattr(engine, "stock", lambda plan, case: Speeds(100.0, 100.0))
    prefill, decode = engine.race(plan, Case("f16", 0), rounds=3)
    assert (prefill.what, prefill.ratio, prefill.least, prefill.most) == ("prefill", 0.97, 0.96, 0.98)
    assert (decode.what, decode.ratio, decode.ours, decode.stock) == ("decode", 0.9, 90.0, 100.0)
    assert (prefill.reached, decode.reached) == (True, False)


def test_the_whole_script(plan: Plan) -> None:
    arguments = ["--stock-bin", plan.stock_bin, "--kv-type", "f16", "--depth", "0", "--rounds", "2"]
    sizes = ["--prompt", "32", "--tokens", "4", "--repeats", "1", "--threads", "1", "--json"]
    command = [
        forks.PYTHON,
        engine.__file__,
        str(plan.model),
        *map(str, arguments),
        *sizes,
    ]
    results = json.loads(forks.run(command, check=True).stdout)
    assert [(r["what"], r["depth"], r["target"]) for r in results] == [
        ("prefill", 0, 0.97),
        ("decode", 0, 0.97),
    ]
    assert all(r["ours"] > 0 for r in results)
    assert [r["stock"] for r in results] == [200.0, 1.0]


def test_a_missing_program_is_one_sentence(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "llama-bench").write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    with pytest.raises(ScriptError, match="llama-bench failed: no such model"):
        engine.stock(plan, Case("f16", 0))


def test_busy_processes_end_with_the_race() -> None:
    with engine.busy_processes(2) as busy:
        assert [process.poll() for process in busy] == [None, None]
    assert None not in [process.poll() for process in busy]
