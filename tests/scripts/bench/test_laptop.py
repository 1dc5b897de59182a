"""scripts/bench/laptop.py: what it reads from each program, its ratios, and the whole of it in small."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts._common import ScriptError
from scripts.bench import build_ik, laptop
from scripts.bench.laptop import CASES, Case, Plan
from tests import forks

BENCH = """#!{python}
import json, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
speeds = {{"prefill": 100.0, "decode": 10.0, "behind": 5.0}}
if "-rtr" in given:
    what = "behind" if "-gp" in given else "prefill" if given["-p"] != "0" else "decode"
    print(json.dumps([{{"samples_ts": [2 * speeds[what]]}}]))
else:
    decode = speeds["behind" if given["-d"] != "0" else "decode"]
    print(json.dumps([{{"n_gen": 0, "samples_ts": [100.0]}}, {{"n_gen": 3, "samples_ts": [decode]}}]))
"""
BATCHED = """#!{python}
import sys
n = int(sys.argv[sys.argv.index("-npl") + 1])
if "-rtr" in sys.argv:
    print("some log")
    print("|   PP |    TG |  B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | T s | S t/s |")
    print(f"| 16 | 3 | {{n}} | 99 | 0.1 | 1.0 | 0.1 | {{20.0 * n}} | 0.2 | 3.0 |")
else:
    print('{{"speed_tg": %f}}' % (n * (10.0 if "-kvu" in sys.argv else 8.0)))
"""


@pytest.fixture
def plan(tiny_model: Path, tmp_path: Path) -> Plan:
    for name, text in (("llama-bench", BENCH), ("llama-batched-bench", BATCHED)):
        program = tmp_path / name
        program.write_text(text.format(python=sys.executable))
        program.chmod(0o755)
    return Plan(tiny_model, tmp_path, threads=1, prompt=32, tokens=3, repeats=1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_program_is_read(plan: Plan, case: Case) -> None:
    one = 100.0 if case.what == "prefill" else 5.0 if case.depth else 10.0
    assert laptop.stock(plan, case) == one * case.sequences
    unmeasured = case.what == "prefill" and case.depth > 0
    assert laptop.ik(plan, case) == (None if unmeasured else 2 * one * case.sequences)


def test_ratios_are_of_rounds(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {
        "ours": iter([30.0, 20.0, 10.0]),
        "stock": iter([10.0, 10.0, 2.0]),
        "ik": iter([10.0, 5.0, 10.0]),
        "memory": iter([None] * 3),
    }
    order: list[str] = []
    for name, values in speeds.items():

        def measure(plan: Plan, case: Case, name: str = name, values: object = values) -> float | None:
            order.append(name)
            return next(values)  # type: ignore[call-overload, no-any-return]

        monkeypatch.setattr(laptop, name, measure)
    result = laptop.race(plan, plan.stock_bin, CASES[0], rounds=3)
    assert result.speeds == {"ours": 20.0, "stock": 10.0, "ik": 10.0}
    assert result.over == {"stock": 3.0, "ik": 3.0}
    turns = ["ours", "stock", "ik", "memory"]
    assert order == [*turns, *turns[1:], *turns[:1], *turns[2:], *turns[:2]]


def test_costs_of_steps_are_of_rounds(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([10.0, 20.0, 40.0, 40.0, 1.0, 1.0, 1.0, 1.0, 10.0, 40.0, 80.0, 160.0])
    monkeypatch.setattr(laptop, "ours", lambda plan, case: next(speeds))
    assert laptop.step_costs(plan, 3) == {4: 2.0, 8: 2.0, 16: 4.0}


@pytest.mark.slow
def test_the_whole_script(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(plan.stock_bin)
    command = [forks.PYTHON, laptop.__file__, str(plan.model), "--stock-bin", folder, "--ik-bin", folder]
    command += ["--rounds", "1", "--repeats", "1", "--threads", "1", "--prompt", "32", "--tokens", "3"]
    report = json.loads(forks.run([*command, "--depth", "0", "--json"], check=True).stdout)
    found, costs = report["cases"], {int(n): cost for n, cost in report["costs"].items()}
    assert [result["name"] for result in found][:2] == ["prefill", "decode, 1 sequence"]
    assert all(result["speeds"]["ours"] > 0 for result in found)
    with_limit = [result["name"] for result in found if "memory" in result["speeds"]]
    assert with_limit == ["decode, 1 sequence"]
    laptop.show([laptop.Result(**result) for result in found], costs, plan)
    assert "Cost of a step with several sequences over one: 4: " in capsys.readouterr().out


def test_output_without_a_table_is_one_sentence() -> None:
    with pytest.raises(ScriptError, match="printed no table: 'out of memory'"):
        laptop._last_speed("out of memory")


def test_other_folders_are_not_built(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"no sources of ik_llama\.cpp"):
        build_ik.build(tmp_path, "avx2")


@pytest.mark.parametrize("cpu", ["avx2", "avx-vnni"])
def test_ik_has_its_own_name_of_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: str) -> None:
    (tmp_path / "ggml/src/iqk").mkdir(parents=True)
    given: list[dict[str, str | bool]] = []
    monkeypatch.setattr(build_ik, "configure", lambda source, home, options: given.append(options))
    monkeypatch.setattr(build_ik, "build_targets", lambda home, targets: None)
    assert build_ik.build(tmp_path, cpu) == tmp_path / f"build-{cpu}/bin"
    assert given[0]["GGML_AVXVNNI"] == (cpu == "avx-vnni")
