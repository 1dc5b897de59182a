"""The pressure benchmark: demand that adds up, answers that agree, and what it calls a livelock."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.bench import pressure
from scripts.bench.pressure import Case, Result, Run, bound, sizes, wrong
from tests import forks


def case(load: str = "mixed", smallest: int = 256) -> Case:
    return Case("f16", load, smallest, 0.1, batch=64, threads=1, token_bytes=1)


@pytest.mark.parametrize("load", pressure.LOADS)
def test_requests_store_what_was_demanded(load: str) -> None:
    work = sizes(case(load))
    stored = [n_prompt + n_new - 1 for n_prompt, n_new in work]
    assert sum(stored) == pytest.approx(2560, abs=2)
    assert max(stored) <= 256
    assert min(map(min, work)) >= 1
    assert work == sizes(case(load))
    if load == "adversarial":
        assert max(stored) == 256
        assert {tokens % 32 for tokens in stored[:4]} == {0, 1}


def test_one_after_the_other_is_the_bound() -> None:
    assert bound([(64, 10), (1, 1)], 64) == (10 + 2 * 2 + 2) + (1 + 2 + 2)


def test_verdicts() -> None:
    def verdict(**changes: float) -> str:
        fine = {"wrong": 0, "most_steps": 0.5, "ratio": 1.1}
        numbers = {"preemptions": 1, "swaps": 1, "measured": 1.0, "swap": 1.0, "recompute": 1.0}
        return Result("mixed", 0.5, **{**fine, **numbers, **changes}).verdict  # type: ignore[arg-type]

    assert verdict() == ""
    assert verdict(ratio=1.2) == "above 1.10"
    assert verdict(wrong=2) == "2 wrong"
    assert verdict(most_steps=1.01) == "livelock"
    expected = Run(1.0, 1, 0, 0, [[1, 2], [3]])
    assert wrong(expected, Run(1.0, 1, 0, 0, [[1, 2], []])) == 1


@pytest.mark.slow
def test_the_whole_script(tiny_model_f32: Path) -> None:
    sizes = ["--load", "mixed", "--share", "0.15", "--smallest", "256", "--threads", "1", "--rounds", "1"]
    command = [forks.PYTHON, pressure.__file__, str(tiny_model_f32), "--json", *sizes]
    (found,) = json.loads(forks.run(command, check=True).stdout)
    assert found["preemptions"] > 0
    assert found["wrong"] == 0
    assert 0 < found["most_steps"] <= 1
    assert found["recompute"] > 0


def test_without_preemption_one_policy_is_timed(
    tiny_model_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def in_worker(model: Path, case: Case, share: float, policies: list[str], exact: bool) -> list[Run]:
        asked.append(policies)
        return [Run(1.0, 5, 0, 0, [[1]]) for _ in policies]

    monkeypatch.setattr(pressure, "in_worker", in_worker)
    (found,) = pressure.results(tiny_model_f32, case(), [0.5], rounds=3)
    assert (found.swap, found.recompute, found.ratio, found.wrong) == (None, None, 1.0, 0)
    assert asked[-1] == ["measured", "measured"]
