"""Files that change under an engine, and what the fuzzer has found: an error, and a process that lives on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.engine import engine
from pyvelo.engine.model_files import ModelFiles
from pyvelo.errors import ModelError

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from gguf_document import read_document, write_document

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


def test_a_hybrid_whose_layers_keep_no_state(tmp_path: Path) -> None:
    path = tmp_path / "lfm2.gguf"
    script = Path(__file__).resolve().parents[2] / "scripts" / "make_model.py"
    options = ["--arch", "lfm2", "--embd", "64", "--ffn", "64", "--heads", "2", "--kv-heads", "1"]
    command = [sys.executable, str(script), *options, "--head-dim", "32", "--type", "f32", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    document = read_document(path)
    heads = document.find("lfm2.attention.head_count_kv")
    assert heads is not None
    heads.data = [1, 1]  # the first layer was a convolution
    attention = [e for e in document.tensors if e.name.startswith(b"blk.1.attn_")]
    document.tensors = [
        e for e in document.tensors if b".shortconv." not in e.name and e.name != b"blk.0.attn_norm.weight"
    ]
    document.tensors += [replace(e, name=e.name.replace(b"blk.1", b"blk.0")) for e in attention]
    path.write_bytes(write_document(document))
    with pytest.raises(ModelError, match="lfm2 has recurrent states, but no layer of this file keeps one"):
        LLM(path)


def test_a_vocabulary_without_tokens_for_a_text(tiny_model: Path, tmp_path: Path) -> None:
    document = read_document(tiny_model)
    tokens = document.find("tokenizer.ggml.tokens")
    assert tokens is not None
    tokens.data = [b"no byte " + t if t.startswith(b"<0x") else t for t in tokens.data]
    path = tmp_path / "model.gguf"
    path.write_bytes(write_document(document))
    with LLM(path) as llm:
        llm.generate("Once", ONE)
        with pytest.raises(ModelError, match="no tokens for a part of this text"):
            llm.generate("\u4f60", ONE)
        llm.generate("Once", ONE)
