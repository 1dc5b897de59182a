"""Models: loading, properties, and invalid files."""

from __future__ import annotations

import math
import os
import shutil
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from pyvelo.errors import Cancelled, ClosedError, ConfigError, ModelError, UnsupportedError
from pyvelo.native import Context, Model, Sampler, devices, quantize


def test_properties_of_a_model(model: Model) -> None:
    info = model.info
    assert info.arch == "llama"
    assert info.n_layer == len(model.layers) == int(model.meta["llama.block_count"])
    assert info.n_embd == int(model.meta["llama.embedding_length"])
    assert info.n_head == int(model.meta["llama.attention.head_count"])
    assert info.n_head_kv == int(model.meta["llama.attention.head_count_kv"])
    assert info.n_vocab == model.vocab.n_tokens
    assert info.n_ctx_train == int(model.meta["llama.context_length"])
    assert info.size_bytes == 4 * info.n_params
    assert "F32" in info.description
    assert info.can_page
    assert not info.has_recurrent
    assert model.refusal is None
    for layer in model.layers:
        assert (layer.n_head, layer.n_head_kv) == (info.n_head, info.n_head_kv)
        assert layer.head_dim_k == layer.head_dim_v
        assert (layer.window, layer.window_type) == (0, 0)
    assert [layer.layer for layer in model.layers] == list(range(info.n_layer))


def test_metadata_is_text_and_read_only(model: Model) -> None:
    assert model.meta["general.architecture"] == "llama"
    assert model.meta is model.meta
    with pytest.raises(TypeError):
        model.meta["general.architecture"] = "other"  # type: ignore[index]


def test_vocab_only_has_a_tokenizer_and_no_weights(tiny_model_f32: Path, model: Model) -> None:
    with Model(tiny_model_f32, vocab_only=True) as vocab:
        assert vocab.tokenize("Hello there") == model.tokenize("Hello there")
        assert vocab.info.n_vocab == model.info.n_vocab
        assert vocab.meta == model.meta
        assert vocab.layers == ()
        assert not vocab.info.can_page
        with pytest.raises(ConfigError, match="vocab_only"):
            Context(vocab, n_blocks=8, max_seq_len=32)


@pytest.mark.parametrize("setting", ["use_mmap", "check_tensors", "deterministic"])
def test_ways_to_load(tiny_model_f32: Path, model: Model, setting: str) -> None:
    with Model(tiny_model_f32, **{setting: setting != "use_mmap"}) as other:  # type: ignore[arg-type]
        assert other.info == model.info


# ---- files that are none ----


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file .*missing"):
        Model(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match="is a directory: name the GGUF file in it"):
        Model(tmp_path)
    with pytest.raises(ConfigError, match="the path is empty"):
        Model("")
    with pytest.raises(ConfigError, match="NUL"):
        Model("a\0b")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelError, match="is empty"):
        Model(tmp_path / "empty.gguf")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        Model(tmp_path / "pipe.gguf")


def test_a_name_beyond_ascii(tiny_model_f32: Path, tmp_path: Path, model: Model) -> None:
    path = tmp_path / "modèle 模型.gguf"
    shutil.copy(tiny_model_f32, path)
    with Model(path) as loaded:
        assert loaded.info == model.info


def test_a_file_that_is_not_gguf_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_bytes(b"PK\x03\x04 surely not a model" * 100)
    with pytest.raises(ModelError, match=r"text\.gguf cannot be loaded: invalid magic"):
        Model(path)


def test_truncated_files_are_refused(tiny_model_f32: Path, tmp_path: Path) -> None:
    data = tiny_model_f32.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [4, 8, 20, 24, 100, 1000, 5000, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"cannot be loaded: \w"):
            Model(path)


def test_garbled_metadata_never_crashes(tiny_model_f32: Path, tmp_path: Path) -> None:
    """Change random bytes in the header: each file loads or is refused."""
    data = np.frombuffer(tiny_model_f32.read_bytes(), np.uint8)
    rng = np.random.default_rng(0)
    path = tmp_path / "garbled.gguf"
    refused = 0
    for _ in range(60):
        bad = data.copy()
        at = rng.integers(4, 1500, size=4)
        bad[at] = rng.integers(0, 256, size=4)
        path.write_bytes(bad.tobytes())
        try:
            Model(path).close()
        except ModelError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.layer_norm_rms_epsilon", struct.pack("<f", -1.0), "the epsilon of its normalization"),
        ("attention.layer_norm_rms_epsilon", struct.pack("<f", math.nan), "the epsilon of its normalization"),
        ("rope.dimension_count", struct.pack("<I", 2000), r"cannot be loaded: .*n_rot"),
        ("block_count", struct.pack("<I", 0), "n_layer_all > 0"),
        ("block_count", struct.pack("<I", 2**31), "n_layer_all"),
        ("attention.head_count", struct.pack("<I", 0), "cannot be loaded: "),
        ("attention.head_count_kv", struct.pack("<I", 3), "cannot be loaded: "),
        ("embedding_length", struct.pack("<I", 2**31), "cannot be loaded: "),
    ],
)
def test_hyperparameters_on_which_upstream_would_abort(
    tiny_model_f32: Path, tmp_path: Path, key: str, value: bytes, message: str
) -> None:
    path = damaged(tiny_model_f32, tmp_path, f"llama.{key}", value)
    with pytest.raises(ModelError, match=message):
        Model(path)


@pytest.mark.parametrize("value", [0, 7, 2000])
def test_rotary_positions_that_do_not_fit_the_heads(tmp_path: Path, value: int) -> None:
    """Some architectures check these numbers. With others, the computation would abort or not end."""
    script = Path(__file__).resolve().parents[2] / "scripts/models/make.py"
    options = ["tiny", "--arch", "gemma2", "--window", "64", "--type", "f32"]
    subprocess.run([sys.executable, str(script), *options, str(tmp_path / "gemma.gguf")], check=True)
    path = damaged(tmp_path / "gemma.gguf", tmp_path, "gemma2.rope.dimension_count", struct.pack("<I", value))
    with pytest.raises(ModelError, match="its rotary positions do not fit its heads"):
        Model(path)


def damaged(source: Path, folder: Path, key: str, value: bytes) -> Path:
    """Write a copy of a model with another number for a metadata key."""
    data = bytearray(source.read_bytes())
    name = struct.pack("<Q", len(key)) + key.encode()
    at = data.index(name) + len(name) + 4  # the type is in between
    data[at : at + 4] = value
    path = folder / "damaged.gguf"
    path.write_bytes(data)
    return path


def test_check_tensors_finds_weights_that_are_not_numbers(tiny_model_f32: Path, tmp_path: Path) -> None:
    data = bytearray(tiny_model_f32.read_bytes())
    data[-4096:] = b"\xff" * 4096
    path = tmp_path / "nan.gguf"
    path.write_bytes(data)
    Model(path).close()
    with pytest.raises(ModelError, match="invalid data"):
        Model(path, check_tensors=True)


# ---- settings ----


@pytest.mark.skipif(
    any(device.kind == "gpu" for device in devices()), reason="this build has a GPU to offload to"
)
def test_no_gpu_to_offload_to(tiny_model: Path) -> None:
    with pytest.raises(UnsupportedError, match="no GPU backend: use n_gpu_layers 0"):
        Model(tiny_model, n_gpu_layers=1)


def test_settings_out_of_range(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="n_gpu_layers is -2"):
        Model(tiny_model, n_gpu_layers=-2)
    with pytest.raises(ConfigError, match="does not fit in 32 bits"):
        Model(tiny_model, n_gpu_layers=2**40)


# ---- progress ----


def test_progress_runs_from_0_to_1(tiny_model: Path) -> None:
    seen: list[float] = []
    Model(tiny_model, progress=seen.append).close()
    assert seen[-1] == 1.0
    assert seen == sorted(seen)
    assert seen[0] >= 0.0


def test_progress_cancels(tiny_model: Path) -> None:
    calls: list[float] = []

    def stop(value: float) -> bool:
        calls.append(value)
        return False

    with pytest.raises(Cancelled, match="was cancelled"):
        Model(tiny_model, progress=stop)
    assert len(calls) == 1


def test_an_exception_of_progress_is_raised(tiny_model: Path) -> None:
    def fail(value: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Model(tiny_model, progress=fail)


# ---- the end ----


def test_a_closed_model_raises(tiny_model: Path) -> None:
    model = Model(tiny_model)
    assert not model.closed
    model.close()
    model.close()
    assert model.closed
    assert "closed" in repr(model)
    for use in (
        lambda: model.tokenize("a"),
        lambda: model.token_bytes(1),
        lambda: model.detokenize([1]),
        lambda: model.is_end(1),
        lambda: model.meta,
        lambda: Context(model, n_blocks=8, max_seq_len=32),
        lambda: Sampler(model, seed=0),
    ):
        with pytest.raises(ClosedError):
            use()


def test_contexts_and_samplers_outlive_their_model(tiny_model: Path) -> None:
    with Model(tiny_model) as model:
        context = Context(model, n_blocks=8, max_seq_len=32, max_batch_tokens=8, n_threads=1)
        sampler = Sampler(model, seed=0, repetition_penalty=1.5)
        text = model.tokenize("Hello")
    assert context.info.n_blocks == 8
    sampler.see_prompt(text)
    context.close()
    sampler.close()


def test_many_threads_use_one_model(model: Model) -> None:
    expected = model.tokenize("The quick brown fox")
    wrong: list[object] = []

    def use() -> None:
        for _ in range(50):
            if model.tokenize("The quick brown fox") != expected or not model.token_bytes(expected[-1]):
                wrong.append(1)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- quantize ----


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "Q4_K_M", "BF16"])
def test_quantize(tiny_model_f32: Path, tmp_path: Path, model: Model, type: str) -> None:
    target = tmp_path / "out.gguf"
    quantize(tiny_model_f32, target, type, n_threads=1)
    with Model(target) as quantized:
        assert quantized.info.size_bytes < model.info.size_bytes
        assert quantized.info.n_params == model.info.n_params
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_quantize_refuses(tiny_model_f32: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    with pytest.raises(ConfigError, match=r'"Q9_Z" is not a type to quantize to: use one of F32, .*Q4_K_M'):
        quantize(tiny_model_f32, target, "Q9_Z")
    with pytest.raises(ConfigError, match="same file"):
        quantize(tiny_model_f32, tiny_model_f32, "Q8_0")
    link = tmp_path / "link.gguf"
    link.symlink_to(tiny_model_f32)
    with pytest.raises(ConfigError, match="same file"):
        quantize(tiny_model_f32, link, "Q8_0")
    with pytest.raises(ModelError, match="there is no file"):
        quantize(tmp_path / "missing.gguf", target, "Q8_0")
    with pytest.raises(ConfigError, match=r"folder of the target .* does not exist"):
        quantize(tiny_model_f32, tmp_path / "no" / "out.gguf", "Q8_0")
    with pytest.raises(ConfigError, match="is a directory"):
        quantize(tiny_model_f32, tmp_path, "Q8_0")
    with pytest.raises(ConfigError, match="path of the target is empty"):
        quantize(tiny_model_f32, "", "Q8_0")


def test_a_failed_quantization_leaves_the_target(tmp_path: Path) -> None:
    source, target = tmp_path / "bad.gguf", tmp_path / "out.gguf"
    source.write_bytes(b"not a model at all")
    target.write_bytes(b"precious")
    with pytest.raises(ModelError, match="cannot be quantized to Q8_0: invalid magic"):
        quantize(source, target, "Q8_0")
    assert target.read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.gguf", "out.gguf"]
