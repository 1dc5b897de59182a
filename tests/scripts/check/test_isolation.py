"""scripts/check/isolation.py in small: it finds nothing wrong, and sees what is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.check import isolation


def test_no_request_changes_another(
    tiny_model_f32: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VELO_DEBUG", "1")
    assert isolation.run(tiny_model_f32, 36, 3, 2) == 0
    out = capsys.readouterr().out
    for happened in ("tokens shared", "copies", "preemptions", "evictions", "cancelled"):
        counts = re.findall(rf"([1-9]\d*) (?:of \d+ )?{happened}", out)
        assert len(counts) == 2, happened  # in both schedules


def test_a_wrong_answer_is_seen(tiny_model_f32: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VELO_DEBUG", "1")
    alone = isolation.alone

    def changed(*args: object) -> list[list[tuple[int, ...]]]:
        answers = list(alone(*args))  # type: ignore[arg-type]
        answers[3] = [(*answers[3][0][:-1], 1), *answers[3][1:]]
        return answers

    monkeypatch.setattr(isolation, "alone", changed)
    assert isolation.run(tiny_model_f32, 12, 5, 2) == 2, "one in each schedule"
