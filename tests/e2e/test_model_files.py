"""Files that change under an engine, and what the fuzzer has found: an error, and a process that lives on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.engine import engine
from pyvelo.engine.model_files import ModelFiles
from pyvelo.errors import ModelError

ONE = SamplingParams(max_tokens=1, temperature=0)


@pytest.fixture
def copy(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(tiny_model, tmp_path / "copy.gguf"))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_file_that_shrinks_while_it_is_mapped(copy: Path, deterministic: bool) -> None:
    with LLM(copy, deterministic=deterministic) as llm:
        llm.generate("Once", ONE)
        os.truncate(copy, 4096)
        for _ in range(2):
            with pytest.raises(ModelError, match="became shorter while it was in use: 4096 bytes of"):
                llm.generate("Once", ONE)
        assert llm.stats().blocks_used == 0


def test_a_file_that_is_replaced_or_removed_stays_what_it_was(copy: Path) -> None:
    with LLM(copy) as llm:
        before = llm.generate("Once", ONE)[0].token_ids
        other = copy.with_name("other.gguf")
        other.write_bytes(b"shorter")
        os.replace(other, copy)
        assert llm.generate("Once", ONE)[0].token_ids == before
        copy.unlink()
        assert llm.generate("Once", ONE)[0].token_ids == before


def test_a_file_that_shrinks_while_it_is_loaded(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = engine._load

    def load_and_cut(*arguments: object) -> object:
        model = load(*arguments)  # type: ignore[arg-type]
        os.truncate(copy, 4096)
        return model

    monkeypatch.setattr(engine, "_load", load_and_cut)
    with pytest.raises(ModelError, match="became shorter"):
        LLM(copy)


def test_a_file_that_changes_between_scan_and_load(copy: Path) -> None:
    with pytest.raises(ModelError, match="was changed while it was opened"):
        ModelFiles([str(copy)], copy.stat().st_size + 1)
    with pytest.raises(ModelError, match="cannot read"):
        ModelFiles([str(copy) + ".absent"], 1)


def test_closing_lets_go_of_the_file(copy: Path) -> None:
    files = ModelFiles([str(copy)], copy.stat().st_size)
    files.check()
    files.close()
    files.close()
    files.check()
