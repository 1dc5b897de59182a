"""Output of --json: one object, as docs/cli.schema.json says. Tests of the hub check pull, list and rm."""

from __future__ import annotations

from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, ValidationError

from tests.cli_schema import SCHEMA, check

from .test_info import run_cli


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code, out, _ = run_cli(capsys, *arguments, "--json")
    assert code == 0
    return out


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    names = {
        "batch",
        "bench",
        "doctor",
        "embed",
        "info",
        "list",
        "models",
        "pull",
        "report",
        "rm",
        "run",
        "simulate",
    }
    assert set(SCHEMA["$defs"]) == names


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "-p", "What is 12 + 30?"),
        ("run", "-p", "1", "-n", "1", "--stop", "x"),
        ("embed", "-p", "one", "-p", "two", "--pooling", "mean"),
        ("bench", "--prompt-tokens", "8", "--answer-tokens", "4", "-r", "1"),
        ("info",),
        ("models",),
        ("doctor",),
        ("simulate", "--requests", "3"),
    ],
    ids=lambda arguments: " ".join(arguments[:4]),
)
def test_a_command_prints_what_the_schema_says(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    check(arguments[0], printed(capsys, *arguments))


def test_a_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, picture = str(tmp_path / "trace.jsonl"), str(tmp_path / "picture.svg")
    check("simulate", printed(capsys, "simulate", "--requests", "3", "--record", trace))
    check("report", printed(capsys, "report", trace))
    check("report", printed(capsys, "report", trace, "-o", picture))


def test_a_field_that_is_not_documented_is_found() -> None:
    with pytest.raises(ValidationError, match="'more' was unexpected"):
        check("list", '{"models": [], "more": 1}')
