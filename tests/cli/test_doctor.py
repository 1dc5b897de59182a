"""`pyvelo doctor` finds what a broken or a slow installation has."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pyvelo.cli import doctor
from pyvelo.cli.app import execute
from pyvelo.cli.doctor import EXTRAS, Finding, findings
from pyvelo.errors import LibraryError, ModelError


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pyvelo.memory.rate.read_rate", lambda *_, **__: 12.5e9)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))


def by_part() -> dict[str, Finding]:
    return {each.part: each for each in findings()}


def test_a_sound_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "problem" not in out
    assert "read at 12.5 GB/s" in out
    assert "answered in" in out
    assert not any(line.endswith(" ") for line in out.splitlines())
    assert execute(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {each["state"] for each in report["findings"]} <= {"ok", "note"}
    parts = [each["part"] for each in report["findings"]]
    assert parts == [line.split("  ")[1] for line in ("ok  " + part for part in parts)]
    assert {"package", "instructions", "library", "processor", "memory", "GPU", "demo model", "models"} < set(
        parts
    )


def test_a_library_that_cannot_be_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> str:
        raise LibraryError("this one lacks avx9")

    monkeypatch.setattr("pyvelo.native.system_info", fail)
    assert by_part()["library"] == Finding("library", "problem", "this one lacks avx9")
    assert "demo model" not in by_part()
    assert execute(["doctor"]) == 1
    assert "problem  library" in capsys.readouterr().out


def test_a_model_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DEMO_MODEL", Path("there is no such file.gguf"))
    found = by_part()["demo model"]
    assert found.state == "problem"
    assert "there is no such file.gguf" in found.text


@pytest.mark.parametrize(
    ("built", "has", "state", "said"),
    [
        ("avx2\nfma\n", "flags : avx2 fma", "ok", "built for avx2"),
        ("avx2\n", "flags : avx2 avx512f avx_vnni", "note", "this processor also has avx512f, avx_vnni"),
        (
            "pni\n",
            "flags : pni avx2",
            "note",
            "oldest processors of this kind; this processor also has",
        ),
        ("", "flags : avx2", "ok", "unknown, or chosen for this processor"),
        ("asimddp\n", "Features : asimddp i8mm", "note", "also has i8mm"),
        (None, "flags : avx2", "ok", "unknown"),
    ],
)
def test_instruction_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: str | None, has: str, state: str, said: str
) -> None:
    if built is not None:
        (tmp_path / "built").write_text(built)
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{has}\n")
    monkeypatch.setattr(doctor, "NEEDED", tmp_path / "built")
    monkeypatch.setattr(doctor, "CPUINFO", tmp_path / "cpuinfo")
    found = by_part()["instructions"]
    assert found.state == state
    assert said in found.text
    assert bool(found.remedy) is (state == "note")


@pytest.mark.parametrize("name", EXTRAS)
def test_an_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = importlib.util.find_spec

    def without(module: str, *rest: Any) -> Any:
        return None if module == EXTRAS[name][0] else real(module, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    found = by_part()
    assert found[f"extra {name}"].remedy == f'pip install "pyvelo[{name}]"'
    assert [part for part in found if part.startswith("extra") and found[part].state == "note"] == [
        f"extra {name}"
    ]


def test_a_cache_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ModelError("cannot read the cache")

    monkeypatch.setattr("pyvelo.models.hub.cached_models", fail)
    found = by_part()["models"]
    assert (found.state, found.text) == ("problem", "cannot read the cache")
    assert "HF_HOME" in found.remedy


def test_where_chats_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "not" / "there"))
    assert {by_part()[part].state for part in ("history", "chats")} == {"ok"}
    assert not (tmp_path / "not").exists()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert by_part()["models"].state == "note"
    assert "set HF_HOME to another one" in by_part()["models"].remedy
    for part in ("history", "chats"):
        found = by_part()[part]
        assert (found.state, "XDG_STATE_HOME" in found.remedy) == ("note", True)
        assert f"{tmp_path / 'not' / 'there'}" in found.text
    (tmp_path / "not").write_text("a file")
    assert by_part()["history"].state == "note"
    assert by_part()["chats"].state == "problem"  # it cannot be read either
