"""Files that change under an engine, and what the fuzzer has found: an error, and a process that lives on."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pyvelo import LLM, SamplingParams
from pyvelo.engine import engine
from pyvelo.errors import ModelError
from pyvelo.models.files import ModelFiles
from scripts.fuzz._document import read_document, write_document

from .conftest import MakeModel

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


@pytest.mark.parametrize("grown", [0, 4096], ids=["same size", "larger"])
def test_a_file_that_is_cut_and_grows_again_is_another(copy: Path, grown: int) -> None:
    with LLM(copy) as llm:
        llm.generate("Once", ONE)
        size = copy.stat().st_size
        os.truncate(copy, 0)
        os.truncate(copy, size + grown)
        for _ in range(2):
            with pytest.raises(ModelError, match=f"was written to while it was in use .{size + grown} bytes"):
                llm.generate("Once", ONE)
        assert llm.stats().blocks_used == 0


def test_a_file_that_is_overwritten(copy: Path) -> None:
    with LLM(copy) as llm:
        llm.generate("Once", ONE)
        with copy.open("r+b") as file:
            file.seek(-4096, os.SEEK_END)
            file.write(bytes(64))
        with pytest.raises(ModelError, match="was written to while it was in use"):
            llm.generate("Once", ONE)


def test_a_file_that_is_replaced_while_it_is_loaded(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = engine._load

    def replace_and_load(*arguments: object) -> object:
        other = Path(shutil.copy(copy, copy.with_name("other.gguf")))
        os.replace(other, copy)
        return load(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "_load", replace_and_load)
    with pytest.raises(ModelError, match="was replaced while it was loaded"):
        LLM(copy)


@pytest.mark.skipif(sys.platform != "linux", reason="the handler of SIGBUS is Linux's")
def test_a_file_that_shrinks_within_a_step(tiny_model: Path, copy: Path) -> None:
    code = (
        "import os, sys\n"
        "from pyvelo import LLM, SamplingParams\n"
        "from pyvelo.models.files import ModelFiles\n"
        "from pyvelo.errors import ModelError\n"
        "ModelFiles.check = lambda self: None  # it looked a moment before\n"
        "sound, path = sys.argv[1:]\n"
        "with LLM(path, deterministic=True) as llm, LLM(sound, deterministic=True) as other:\n"
        "    before = other.generate('Once')[0].usage\n"
        "    stream = llm.stream('Once', SamplingParams(max_tokens=50, ignore_eos=True))\n"
        "    next(stream)\n"
        "    os.truncate(path, 4096)\n"
        "    for call in (lambda: list(stream), lambda: llm.generate('Once')):\n"
        "        try: call()\n"
        "        except ModelError as error: print('became shorter while it was in use' in str(error))\n"
        "    assert llm.stats().blocks_used == 0\n"
        "    assert other.generate('Once')[0].usage.completion_tokens == before.completion_tokens\n"
    )
    command = [sys.executable, "-c", code, str(tiny_model), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes and sockets have no names here")
def test_what_is_no_model_is_refused_with_what_it_is(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    os.mkdir("folder.gguf")
    os.mkfifo("pipe.gguf")
    Path("empty.gguf").touch()
    Path("text.gguf").write_text("once upon a time")
    os.symlink("nowhere.gguf", "link.gguf")
    os.symlink("loop.gguf", "loop.gguf")
    complaints = {
        "folder.gguf": "is a directory: name the GGUF file in it",
        "pipe.gguf": "is not a regular file",
        "socket.gguf": "is not a regular file",
        "/dev/zero": "is not a regular file",
        "empty.gguf": "is not a GGUF file: it is empty",
        "text.gguf": "is not a GGUF file: it starts with b'once'",
        "link.gguf": "there is no model at link.gguf",
        "loop.gguf": "there is no model at loop.gguf",
        "absent.gguf": "there is no model at absent.gguf",
    }
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.gguf")
        for name, complaint in complaints.items():
            with pytest.raises(ModelError) as caught:
                LLM(name)
            assert complaint in str(caught.value)
            assert name in str(caught.value)


def test_cut_files_are_refused_with_what_is_left(tiny_model: Path, tmp_path: Path) -> None:
    data = tiny_model.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (1, 3, 4, 23, 24, 25, 1000, 20_000, len(data) // 2, len(data) - 40):
        path.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf is (damaged|not a GGUF file): "):
            LLM(path)


@pytest.mark.skipif(not hasattr(os, "seteuid"), reason="everybody may read everything")
def test_a_file_that_may_not_be_read(tiny_model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(tiny_model, tmp_path / "secret.gguf"))
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o005 == 0o005:
            break
        folder.chmod(0o755)
    copy.chmod(0)
    code = (
        "import os, sys, pyvelo.llm\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        "from pyvelo.errors import ModelError\n"
        "try: pyvelo.llm.LLM(sys.argv[1])\n"
        "except ModelError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(copy)], capture_output=True, text=True, check=True)
    assert done.stdout == f"cannot read {copy}: Permission denied\n"


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


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    path = tmp_path / "lfm2.gguf"
    script = Path(__file__).resolve().parents[2] / "scripts/models/make.py"
    options = ["--arch", "lfm2", "--embd", "64", "--ffn", "64", "--heads", "2", "--kv-heads", "1"]
    command = [sys.executable, str(script), *options, "--head-dim", "32", "--type", "f32", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return path


def test_a_hybrid_that_rotates_nothing(hybrid: Path) -> None:
    document = read_document(hybrid)
    value = document.find("lfm2.rope.dimension_count")
    assert value is not None
    value.data = 0
    hybrid.write_bytes(write_document(document))
    with pytest.raises(ModelError, match="its rotary positions do not fit its heads"):
        LLM(hybrid)


def test_a_hybrid_whose_layers_keep_no_state(hybrid: Path) -> None:
    path = hybrid
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


def test_a_convolution_without_a_bias(make_model: MakeModel, tmp_path: Path) -> None:
    """The loader of llama.cpp accepts it, and its graph reads the bias."""
    document = read_document(make_model("--arch", "granitehybrid", "--layers", "2"))
    document.tensors = [e for e in document.tensors if e.name != b"blk.0.ssm_conv1d.bias"]
    path = tmp_path / "model.gguf"
    path.write_bytes(write_document(document))
    with pytest.raises(ModelError, match="a convolution of its recurrent layers has no bias"):
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
