"""The start-up benchmark: when a run counts as begun, what fails, and the whole of it in small."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from scripts._common import ScriptError
from scripts.bench import startup
from scripts.bench.startup import Figure, load_seconds, measures, race, show, to_first_byte, whole
from tests import forks

ENVIRONMENT = dict(os.environ)


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_the_first_byte_stops_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program goes on only once the clock was looked at for the second time."""
    stopped = tmp_path / "stopped"
    times = iter((100.0, 103.5))

    def look() -> float:
        time = next(times)
        if time == 103.5:
            stopped.touch()
        return time

    monkeypatch.setattr("scripts.bench.startup.now", look)
    program = f"""
import os, sys, time
os.write(1, b"a")
for _ in range(1000):
    if os.path.exists({str(stopped)!r}):
        os.write(1, b"b" * 100_000)
        sys.exit(0)
    time.sleep(0.01)
sys.exit("nobody saw the first byte")
"""
    assert to_first_byte(python(program), ENVIRONMENT) == 3.5


@pytest.mark.parametrize("measure", [whole, to_first_byte, load_seconds])
def test_failures_are_reported(measure: object) -> None:
    assert callable(measure)
    with pytest.raises(ScriptError, match="failed"):
        measure(python("import sys; sys.exit('no such model')"), ENVIRONMENT)


def test_no_answer_is_a_failure() -> None:
    with pytest.raises(ScriptError, match="wrote no answer"):
        to_first_byte(python("pass"), ENVIRONMENT)


def test_the_first_round_is_not_counted_and_byte_code_is_kept(tmp_path: Path) -> None:
    seen: list[str] = []

    def measure(command: object, environment: object) -> float:
        assert isinstance(environment, dict)
        assert "PYTHONDONTWRITEBYTECODE" not in environment
        seen.append(environment["PYTHONPYCACHEPREFIX"])
        return float(len(seen))

    figures = race({"one": (measure, []), "two": (measure, [])}, rounds=2)
    assert figures == [Figure("one", (3.0, 5.0)), Figure("two", (4.0, 6.0))]
    assert figures[0].median == 4.0
    assert len(set(seen)) == 1


def test_the_table_stands_beside_python(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show([Figure("python -c pass", (0.01, 0.03, 0.02)), Figure("other", (0.1, 0.3, 0.2))], tiny_model)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "| python -c pass | 20 | 10 | 30 | 1.0 |",
        "| other | 200 | 100 | 300 | 10.0 |",
    ]


def test_both_are_asked_the_same(tiny_model: Path, tmp_path: Path) -> None:
    wanted = measures(tiny_model, "Hello", 3, 128, tmp_path / "llama-completion")
    (_, ours), (_, theirs) = (command for name, command in wanted.items() if "first token" in name)
    assert ours[ours.index(str(tiny_model)) :][:6] == theirs[theirs.index(str(tiny_model)) :][:6]
    assert (ours[-2:], theirs[theirs.index("-c") :][:2]) == (["--ctx", "128"], ["-c", "128"])


@pytest.mark.slow
def test_the_whole_script(tiny_model: Path, tmp_path: Path) -> None:
    stock = tmp_path / "llama-completion"
    stock.write_text(f"#!{sys.executable}\nprint('Hello')\n")
    stock.chmod(0o755)
    options = ["--rounds", "1", "--tokens", "8", "--ctx", "256", "--stock-bin", str(tmp_path), "--json"]
    command = [forks.PYTHON, startup.__file__, str(tiny_model), *options]
    found = json.loads(forks.run(command, check=True).stdout)
    assert len(found) == 8
    assert all(entry["median"] > 0 and len(entry["seconds"]) == 1 for entry in found)


def test_a_missing_program_is_one_line(tmp_path: Path) -> None:
    command = [forks.PYTHON, startup.__file__, "--stock-bin", str(tmp_path)]
    done = forks.run(command, text=True)
    assert done.returncode == 1
    assert "build/stock.py --completion" in done.stderr
    assert done.stderr.count("\n") == 1
