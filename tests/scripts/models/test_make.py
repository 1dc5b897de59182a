"""Models of every shape come out as asked: valid, reproducible, or refused in one sentence."""

from __future__ import annotations

import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest

from pyvelo import native
from pyvelo.models.gguf_scan import scan
from scripts.models import _vocab, make
from scripts.models._shapes import ARCHS, PRESETS, Shape, ShapeError, check, tensors
from tests import forks

EXPERTS = {"gpt-oss": 4, "qwen3moe": 12}


def run_make(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return forks.run([forks.PYTHON, make.__file__, *arguments, str(path)], text=True)


def values(path: Path) -> dict[str, np.ndarray]:
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


def test_the_tiny_preset_is_small_and_quantized(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    done = run_make(path, "tiny")
    assert (done.returncode, done.stderr) == (0, "")
    summary = scan(path)
    assert summary.file_bytes < 5e6
    assert next(iter(summary.quantization)) == "q8_0"
    assert summary.of_architecture("attention.head_count") != summary.of_architecture(
        "attention.head_count_kv"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]


def test_the_same_arguments_make_the_same_file(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        make.write_model(Shape(), path, seed=seed)
    a, b, c = (path.read_bytes() for path in paths)
    assert a == b
    assert a != c
    assert len(a) == len(c)


def test_weights_do_not_depend_on_the_type(tmp_path: Path) -> None:
    exact, coarse = tmp_path / "f32.gguf", tmp_path / "q8_0.gguf"
    make.write_model(Shape(layers=1), exact)
    make.write_model(Shape(layers=1), coarse, type_name="q8_0")
    wanted, got = values(exact), values(coarse)
    assert wanted.keys() == got.keys()
    for name, expected in wanted.items():
        assert np.square(got[name] - expected).mean() <= 1e-4 * np.square(expected).mean(), name


def test_a_tensor_made_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole, pieces = tmp_path / "whole.gguf", tmp_path / "pieces.gguf"
    make.write_model(Shape(layers=1), whole)
    monkeypatch.setattr(make, "CHUNK_ELEMENTS", 1000)
    make.write_model(Shape(layers=1), pieces)
    assert whole.read_bytes() == pieces.read_bytes()


@pytest.mark.parametrize("type_name", make.DIRECT)
def test_types_that_are_written_directly(type_name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make.write_model(Shape(layers=1), path, type_name=type_name)
    summary = scan(path)
    assert set(summary.quantization) == {type_name, "f32"}
    with native.Model(str(path)) as model:
        assert model.info.n_layer == 1


@pytest.mark.parametrize("type_name", ["Q4_K_M", "Q6_K", "IQ4_NL"])
def test_types_that_the_library_quantizes(type_name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make.write_model(Shape(layers=1), path, type_name=type_name)
    assert type_name.removesuffix("_M").lower() in {name.lower() for name in scan(path).quantization}
    assert [p.name for p in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("arch", ARCHS)
def test_every_architecture_loads(arch: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    kv_heads = 4 if arch == "t5encoder" else 2
    shape = Shape(arch=arch, layers=3, kv_heads=kv_heads, experts=EXPERTS.get(arch, 0))
    make.write_model(shape, path)
    with native.Model(str(path)) as model:
        assert (model.info.arch, model.info.n_layer) == (arch, 3)
        assert (model.info.n_head, model.info.n_embd) == (shape.heads, shape.embd)
        recurrent = {"lfm2": [1], "granitehybrid": [1], "qwen35": [1], "mamba2": []}
        cached = {**recurrent, "deci": [0]}.get(arch, [0, 1, 2])
        assert [layer.layer for layer in model.layers] == cached
        assert (model.info.state_bytes > 0) == model.info.has_recurrent == (arch in recurrent)


def test_mla_has_the_widths_of_deepseek(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make.write_model(Shape(arch="deepseek2", layers=1, head_dim=128), path)
    summary = scan(path)
    assert summary.of_architecture("attention.key_length") == 576
    assert summary.of_architecture("attention.value_length") == 512


def test_experts_and_an_output_matrix(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make.write_model(Shape(layers=1, experts=3, tied=False), path)
    names = {tensor.name for tensor in scan(path).tensors}
    assert {"output.weight", "blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate_inp.weight"} <= names
    with native.Model(str(path)) as model:
        assert model.info.n_layer == 1


def test_the_presets_have_the_sizes_of_their_models() -> None:
    vocabularies = {"qwen2": 151936, "llama-bpe": 128256}
    counts = {
        name: sum(int(np.prod(t.shape)) for t in tensors(shape, vocabularies[shape.vocab]))
        for name, (shape, _) in PRESETS.items()
        if shape.vocab in vocabularies
    }
    assert counts == {
        "qwen3-0.6b": 596_049_920,
        "llama-3.2-1b": 1_235_814_400,
        "qwen3.5-0.8b": 653_695_808,  # these three: with Qwen3's vocabulary
        "lfm2-350m": 444_009_088,
        "granite-4-h-350m": 379_948_736,
    }


def test_own_vocabulary_knows_words_and_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    make.write_model(Shape(layers=1), path)
    with native.Model(str(path)) as model:
        words = [model.token_bytes(t) for t in model.tokenize("Once upon a time the fox", add_special=False)]
        assert words == [b" Once", b" upon", b" a", b" time", b" the", b" fox"]
        text = "zebra, \t\u00e9\u4e16\U0001f600\n"
        tokens = model.tokenize(text, add_special=False)
        assert b"".join(model.token_bytes(t) for t in tokens).decode() == " " + text
        assert model.vocab.n_tokens == _vocab.own_vocab().size


def test_a_vocabulary_of_upstream(tmp_path: Path) -> None:
    source = tmp_path / "models" / "ggml-vocab-mine.gguf"
    source.parent.mkdir()
    writer = gguf.GGUFWriter(source, "llama")
    for key, value in _vocab.own_vocab().fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    copied = _vocab.upstream_vocab("mine", tmp_path)
    assert copied.fields == _vocab.own_vocab().fields
    done = run_make(tmp_path / "model.gguf", "tiny", "--vocab", "yours", "--upstream", str(tmp_path))
    assert done.returncode == 1
    assert "there are: none (our own), mine" in done.stderr


REFUSED = {
    "do not divide among 3 KV heads": ("--kv-heads", "3"),
    "layers must be at least 1, not 0": ("--layers", "0"),
    "architecture 'gpt5' is not among": ("--arch", "gpt5"),
    "head_dim must be even": ("--head-dim", "63"),
    "qwen2 needs heads * head_dim = embd": ("--arch", "qwen2", "--heads", "8"),
    "llama has no sliding window": ("--window", "64"),
    "gpt-oss needs experts": ("--arch", "gpt-oss"),
    "experts are written for": ("--arch", "qwen3", "--experts", "4"),
    "is read as another model": ("--arch", "deepseek2", "--layers", "27"),
    "rows of 100, which q8_0 cannot cut": ("--ffn", "100"),
    "Q9_Z": ("--type", "Q9_Z"),
}


@pytest.mark.parametrize(("complaint", "arguments"), REFUSED.items(), ids=list(REFUSED))
def test_what_cannot_be_made_is_refused_in_a_line(
    complaint: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    done = run_make(tmp_path / "model.gguf", "tiny", *arguments)
    assert done.returncode == 1
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    done = run_make(tmp_path / "absent" / "model.gguf", "tiny")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_check_accepts_every_preset() -> None:
    for shape, _ in PRESETS.values():
        check(shape)
    with pytest.raises(ShapeError):
        check(Shape(ctx=0))
