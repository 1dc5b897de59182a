"""scripts/build/cross_compile.py reports what another system's compiler says about our sources."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from scripts._common import ScriptError
from scripts.build import cross_compile


def compilation(folder: Path, text: str) -> dict[str, str]:
    """An entry of a compilation database for a C source with this text."""
    source = folder / "source.c"
    source.write_text(text, encoding="utf-8")
    return {"directory": str(folder), "command": f"cc -Wall -c {source} -o source.o", "file": str(source)}


def test_a_good_source_gives_no_message_and_no_object(tmp_path: Path) -> None:
    assert cross_compile.parse(compilation(tmp_path, "int one(void) { return 1; }\n")) == ""
    assert not (tmp_path / "source.o").exists()


@pytest.mark.parametrize("text", ["int one(void) { int unused; return 1; }\n", "int one(void) { return }\n"])
def test_warnings_and_errors_are_reported(tmp_path: Path, text: str) -> None:
    assert "source.c" in cross_compile.parse(compilation(tmp_path, text))


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["cross_compile.py", "x86_64-windows-gnu"])
    with pytest.raises(ScriptError, match="pip install ziglang"):
        cross_compile.main()


def test_an_unknown_system_is_refused_with_the_known_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cross_compile.py", "x86_64-beos"])
    with pytest.raises(SystemExit):
        cross_compile.main()
    assert "aarch64-macos" in capsys.readouterr().err
