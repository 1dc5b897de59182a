"""`pyvelo embed`: what it prints, and what it refuses."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from pyvelo import LLM
from tests import forks

from .ptys import PYVELO
from .test_info import run_cli

TEXTS = ["Once upon a time", "the old king"]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> np.ndarray:
    with LLM(tiny_model, n_threads=1) as llm:
        return llm.embed(TEXTS, pooling="mean", normalize=False)


def close(out: str, expected: np.ndarray) -> bool:
    rows = np.array([[float(number) for number in line.split()] for line in out.splitlines()])
    return rows.shape == expected.shape and bool(
        np.abs(rows - expected).max() < 1e-2 * np.abs(expected).max()
    )


def test_a_line_for_each_text(
    capsys: pytest.CaptureFixture[str],
    tiny_model: Path,
    expected: np.ndarray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ("--pooling", "mean", "--raw", "--threads", "1")
    code, out, err = run_cli(capsys, "embed", tiny_model, "-p", TEXTS[0], "-p", TEXTS[1], *options)
    assert (code, err) == (0, "")
    assert close(out, expected)
    assert not close(out, expected[::-1])
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS), encoding="utf-8")
    assert run_cli(capsys, "embed", tiny_model, "-f", file, *options)[1] == out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(TEXTS).encode())))
    assert run_cli(capsys, "embed", tiny_model, "-p", "-", *options)[1] == out


def test_json_and_a_length_of_one(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, expected: np.ndarray
) -> None:
    code, out, _ = run_cli(
        capsys, "embed", tiny_model, "-p", TEXTS[0], "--pooling", "mean", "--json", "--threads", "1"
    )
    answer = json.loads(out)
    vector = np.array(answer["vectors"])
    assert (answer["model"], answer["dimensions"]) == (str(tiny_model), expected.shape[1])
    assert (code, vector.shape) == (0, (1, expected.shape[1]))
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


def test_a_text_in_place_of_the_model_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("The KV cache", "hi"):
        code, out, err = run_cli(capsys, "embed", text)
        assert (code, out) == (2, "")
        assert err == f"pyvelo: '{text}' is read as MODEL: give a text with -p TEXT, or lines with -f FILE\n"


def test_a_missing_pooling_names_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_cli(capsys, "embed", "-p", "The KV cache")
    assert (code, out) == (1, "")
    assert "give --pooling mean, cls or last" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "which texts?"),
        (["-p", "a", "-f", "b"], "not both"),
        (["-p", "a", "-p", "-"], "not both, and - alone"),
        (["-p", "a"], "does not say how its embeddings are pooled"),
        (["-p", "a", "--pooling", "max"], "--pooling 'max'"),
    ],
)
def test_bad_input_is_a_line(
    capsys: pytest.CaptureFixture[str],
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    code, out, err = run_cli(capsys, "embed", tiny_model, *options)
    assert (code, out) == (1 if "does not say" in message else 2, "")
    assert message in err
    assert err.count("\n") == 1


def test_lines_come_through_a_pipe(tiny_model: Path) -> None:
    command = [*PYVELO, "embed", str(tiny_model), "--pooling", "mean"]
    piped = forks.run(command, input=b"one\ntwo\n")
    assert (piped.returncode, piped.stderr, piped.stdout.count(b"\n")) == (0, b"", 2)
    assert piped.stdout == forks.run([*command, "-p", "one", "-p", "two"]).stdout


def test_a_line_ends_only_at_a_line_feed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "lines").write_bytes("one\u2028text\r\nanother\ftext\n".encode())
    code, out, _ = run_cli(capsys, "embed", tiny_model, "-f", tmp_path / "lines", "--pooling", "mean")
    assert (code, out.count("\n")) == (0, 2)


def test_an_empty_line_is_named_by_its_number(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("one\n\nthree\n", encoding="utf-8")
    code, out, err = run_cli(capsys, "embed", "-f", tmp_path / "lines", "--pooling", "mean")
    assert (code, out) == (1, "")
    assert err.endswith("lines, line 2 has no tokens; give at least one\n")
    assert "text 2 has no tokens" in run_cli(capsys, "embed", "-p", "a", "-p", "", "--pooling", "mean")[2]
