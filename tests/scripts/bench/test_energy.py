"""scripts/bench/energy.py: its differences and counters, and the whole of it in small."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from scripts.bench import energy
from scripts.bench.energy import Spent, energy_counters, joules_between, spent_by
from tests import forks

STOCK = """#!{python}
import sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert int(given["-c"]) == int(given["-npl"]) * (int(given["-npp"]) + int(given["-ntg"]))
"""


def test_the_load_is_in_both() -> None:
    assert Spent(9.0, 5.0, 30.0).minus(Spent(5.0, 4.0, 20.0), 10) == Spent(0.4, 0.1, 1.0)
    assert Spent(9.0, 5.0, None).minus(Spent(5.0, 4.0, None), 10) == Spent(0.4, 0.1, None)


def test_counters_start_again() -> None:
    assert joules_between([10, 90], [2_000_010, 9], [10_000_000, 99]) == pytest.approx(2.000019)


def test_counters_of_packages_alone(tmp_path: Path) -> None:
    zones = {"0": "package-0", "0:0": "core", "1": "psys", "10": "package-1"}
    for number, name in zones.items():
        zone = f"intel-rapl:{number}"
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "name").write_text(name + "\n")
        (tmp_path / zone / "energy_uj").write_text("5")
    assert [path.name for path in energy_counters(tmp_path)] == ["intel-rapl:0", "intel-rapl:10"]
    assert energy_counters(tmp_path / "nowhere") == []


def test_processor_time_is_of_the_program() -> None:
    busy = "import time; end = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    cost = spent_by([sys.executable, "-c", busy])
    assert 0.2 <= cost.processor < 2.0
    assert spent_by([sys.executable, "-c", "import time; time.sleep(0.3)"]).wall >= 0.3


def test_the_whole_script(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "llama-batched-bench"
    program.write_text(STOCK.format(python=sys.executable))
    program.chmod(0o755)
    command = [forks.PYTHON, energy.__file__, str(tiny_model), "--stock-bin", str(tmp_path), "--json"]
    command += ["--sequences", "1", "--tokens", "8", "--rounds", "1", "--threads", "1"]
    (found,) = json.loads(forks.run(command, check=True).stdout)
    assert found["sequences"] == 1
    result = energy.Result(1, Spent(**found["ours"]), Spent(**found["stock"]))
    energy.show([result], tiny_model, 1)
    assert "| 1 | PyVelo |" in capsys.readouterr().out
