"""The fuzzer of requests: the same seed asks for the same, and what escapes is a finding."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pyvelo import LLM
from scripts.fuzz import params
from scripts.fuzz._hostile import Hostile, hostile
from tests import forks


def text_of(request: Hostile) -> str:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return f"{request.way} {sorted(request.params)} {str(request.prompt)[:200]}"
    finally:
        sys.set_int_max_str_digits(limit)


def test_the_same_seed_asks_for_the_same() -> None:
    one, again = ([text_of(hostile(3, index)) for index in range(200)] for _ in range(2))
    assert [text.split(" at 0x")[0] for text in one] == [text.split(" at 0x")[0] for text in again]
    assert len(set(one)) > 150


def test_requests_are_served_or_refused(tiny_model: Path) -> None:
    command = [forks.PYTHON, params.__file__, str(tiny_model), "--count", "60", "--seed", "5"]
    done = forks.run(command, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 requests of seed 5" in done.stdout
    assert " served" in done.stdout


def test_what_escapes_is_a_finding(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(LLM, "generate", fail)
    assert params.main([str(tiny_model), "--count", "40"]) == 1
    assert "escaped" in capsys.readouterr().out


def test_a_request_that_does_not_end_is_a_finding(tiny_model: Path) -> None:
    code = (
        "import sys, time\n"
        "from scripts.fuzz import params\n"
        "params.attempt = lambda *_: time.sleep(60)\n"
        "sys.exit(params.main(sys.argv[1:]))\n"
    )
    command = [forks.PYTHON, "-c", code, str(tiny_model), "--count", "1", "--limit", "0.5"]
    done = forks.run(command, text=True)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
