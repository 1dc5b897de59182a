"""scripts/upstream/run_tests.py tells a test that passed from one that failed or tested nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.upstream import run_tests
from scripts.upstream.run_tests import Check, Outcome, core_tests, count, other_tests

PASSED = r"^ *(\d+)/(\d+) tests passed"


@pytest.fixture(autouse=True)
def _logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "BUILD", tmp_path / "build")


def run(tmp_path: Path, code: str, test: Check, quick: bool = False) -> Outcome:
    return run_tests.run(test, [sys.executable, "-c", code], quick, tmp_path)


def test_a_test_that_passes(tmp_path: Path) -> None:
    outcome = run(tmp_path, r"print('\033[1m  3/3 tests passed')", Check("test-x", counts=PASSED, cut="two"))
    assert (outcome.failure, outcome.notes) == ("", ["3 passed"])


def test_the_quick_run_says_what_was_cut(tmp_path: Path) -> None:
    outcome = run(
        tmp_path, "print('3/3 tests passed')", Check("test-x", counts=PASSED, cut="two"), quick=True
    )
    assert outcome.notes == ["3 passed", "cut: two"]


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("raise SystemExit(3)", "exit status 3"),
        ("print('2/3 tests passed')", "2 of 3 cases passed"),
        ("print('0/0 tests passed')", "0 of 0 cases passed"),
        ("print('nothing to do')", "0 of 0 cases passed"),
    ],
)
def test_a_test_that_fails_or_tests_nothing(tmp_path: Path, code: str, failure: str) -> None:
    outcome = run(tmp_path, code, Check("test-x", counts=PASSED))
    assert outcome.failure == failure
    assert str(tmp_path / "build" / "logs" / "test-x.log") in outcome.notes[0]


def test_a_test_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tests, "TIMEOUT", 0.5)
    outcome = run(tmp_path, "import time; time.sleep(60)", Check("test-x"))
    assert outcome.failure == "not done after 0.5 s"


def test_counts_numbers_or_places() -> None:
    assert count(PASSED, "  2/3 tests passed\n4/4 tests passed\n") == (6, 7)
    assert count(r"\|\s*OK", "| a | OK |\n| b | SKIP |\n| c |  OK\n") == (2, 2)


def test_every_run_has_a_name_of_its_own(tmp_path: Path) -> None:
    names = [test.name for test in core_tests(tmp_path) + other_tests(tmp_path, tmp_path)]
    assert len(set(names)) == len(names)
