"""Adapter files that do not fit their model, or are damaged, are refused before C opens them."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyvelo.errors import ArgumentError, ModelError, UnsupportedError, VeloError
from pyvelo.models.gguf_parts import scan_model
from pyvelo.models.lora import AdaptedModel, LoraFile, check_lora
from scripts.models import lora, make

Q = "blk.0.attn_q.weight"
GOOD = {Q: ((8, 256), (256, 8)), "blk.1.ffn_down.weight": ((8, 256), (256, 8))}
Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "untied.gguf"
    assert make.main(["tiny", "--untied", "--type", "f32", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def adapted(model: Path) -> AdaptedModel:
    return AdaptedModel.of(scan_model(model))


def write(path: Path, shapes: Shapes, arch: str = "llama", type_name: str = "f32", **metadata: Any) -> Path:
    pairs = {
        name: (np.full(a, 0.01, np.float32), np.full(b, 0.01, np.float32)) for name, (a, b) in shapes.items()
    }
    keys = {key.replace("__", "."): value for key, value in metadata.items()}
    alpha = keys.pop("alpha", 8.0)
    lora.write_adapter(path, arch, pairs, alpha=alpha, type_name=type_name, metadata=keys)
    return path


def test_a_good_adapter(adapted: AdaptedModel, tmp_path: Path) -> None:
    path = write(tmp_path / "good.gguf", GOOD)
    found = check_lora(path, adapted)
    assert (found.rank, found.n_weights, found.alpha) == (8, 2, 8.0)
    assert found.n_bytes == 2 * (8 * 256 + 256 * 8) * 4
    assert check_lora(path, adapted) == found
    other = write(tmp_path / "other.gguf", GOOD, alpha=9.0)
    assert check_lora(other, adapted).digest != found.digest


@pytest.mark.parametrize("type_name", ["f16", "bf16", "q8_0"])
def test_types(type_name: str, adapted: AdaptedModel, tmp_path: Path) -> None:
    assert check_lora(write(tmp_path / "a.gguf", GOOD, type_name=type_name), adapted).n_weights == 2


def test_without_alpha(adapted: AdaptedModel, tmp_path: Path) -> None:
    assert check_lora(write(tmp_path / "a.gguf", GOOD, alpha=None), adapted).alpha == 0.0


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({Q: ((8, 128), (256, 8))}, r"attn_q.weight.lora_a' has the shape \[128, 8\].* need \[256, 8\]"),
        ({Q: ((8, 256), (128, 8))}, r"attn_q.weight.lora_b' has the shape \[8, 128\].* need \[8, 256\]"),
        ({Q: ((4, 256), (256, 8))}, r"lora_a' has the shape \[256, 4\], but rank 8"),
        ({Q: ((256, 8), (8, 256))}, "lora_a' has the shape"),
        ({Q: ((2, 8, 256), (2, 256, 8))}, r"\[256, 8, 2\]"),
        ({Q: ((8, 256), (2, 256, 8))}, r"lora_b' has the shape \[8, 256, 2\]"),
        ({Q: ((1, 256), (256,))}, "lora_a' has the shape"),
        ({"blk.9.attn_q.weight": GOOD[Q]}, "blk.9.attn_q.weight.lora_a' is for a weight that the model"),
        ({"blk.0.attn_qkv.weight": GOOD[Q]}, "lacks"),
        ({"blk.0.attn_norm.weight": ((8, 256), (1, 8))}, "is a vector"),
        ({"token_embd.weight": ((8, 256), (1096, 8))}, "lora_a' has the shape"),
        ({"token_embd.weight": ((1096, 8), (256, 4))}, "lora_a' has the shape"),
        ({"blk.0.attn_q.lora_a.weight": GOOD[Q]}, "neither A nor B"),
        ({}, "no LoRA tensor"),
    ],
)  # fmt: skip
def test_names_and_shapes(shapes: Shapes, message: str, adapted: AdaptedModel, tmp_path: Path) -> None:
    path = write(tmp_path / "wrong.gguf", shapes)
    with pytest.raises(ModelError, match=message) as refused:
        check_lora(path, adapted)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("metadata", "kind", "message"),
    [
        ({"general__type": "model"}, UnsupportedError, "is no adapter: it is a model"),
        ({"general__type": None}, UnsupportedError, "is no adapter: it is a model"),
        ({"general__type": "imatrix"}, UnsupportedError, "of the kind 'imatrix'"),
        ({"general__type": 3}, UnsupportedError, "of the kind 3"),
        ({"adapter__type": "control"}, UnsupportedError, "adapter.type is 'control'"),
        ({"adapter__type": None}, UnsupportedError, "adapter.type is None"),
        ({"adapter__type": 7}, UnsupportedError, "adapter.type is 7"),
        ({"adapter__alora__invocation_tokens": [1, 2]}, UnsupportedError, "activated LoRA"),
        ({"arch": "qwen3"}, ModelError, "for the architecture 'qwen3', but the model is 'llama'"),
        ({"adapter__lora__alpha": 16}, ModelError, "alpha must be a 32-bit float"),
        ({"adapter__lora__alpha": "16"}, ModelError, "alpha must be a 32-bit float"),
        ({"adapter__lora__alpha": [1.0, 2.0]}, ModelError, "alpha must be a 32-bit float"),
        ({"adapter__lora__alpha": float("nan")}, ModelError, "alpha is nan"),
        ({"adapter__lora__alpha": float("inf")}, ModelError, "alpha is inf"),
        ({"split__count": 2}, UnsupportedError, "split into parts"),
    ],
)
def test_metadata(
    metadata: dict[str, Any], kind: type[VeloError], message: str, adapted: AdaptedModel, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message):
        check_lora(write(tmp_path / "wrong.gguf", GOOD, **metadata), adapted)


def tensors(path: Path, *shapes: tuple[str, tuple[int, ...], str]) -> Path:
    gguf = make.import_gguf()
    writer = gguf.GGUFWriter(path, "llama")
    make.add_metadata(writer, {"general.type": "adapter", "adapter.type": "lora"})
    for name, shape, type_name in shapes:
        kind = gguf.GGMLQuantizationType[type_name]
        size = int(np.prod(shape)) // gguf.GGML_QUANT_SIZES[kind][0] * gguf.GGML_QUANT_SIZES[kind][1]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_dtype=kind)
        writer.tensors[-1][name].tensor = np.zeros(size, np.uint8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([(f"{Q}.lora_a", (8, 256), "F32")], "it has .*lora_a, but not .*lora_b"),
        ([(f"{Q}.lora_b", (256, 8), "F32")], "it has .*lora_b, but not .*lora_a"),
        ([(Q, (256, 256), "F32")], "neither A nor B"),
        ([(f"{Q}.lora_a", (8, 256), "I32"), (f"{Q}.lora_b", (256, 8), "F32")], "of type i32, which is no"),
        ([(f"{Q}.lora_a", (8, 256), "F32"), (f"{Q}.lora_b", (256, 8), "F64")], "of type f64"),
        ([(f"{Q}.lora_a", (8, 256), "IQ1_S"), (f"{Q}.lora_b", (256, 8), "F32")], "of type iq1_s"),
        ([("blk.9.attn_norm.weight", (256,), "F32")], "lacks"),
    ],
)  # fmt: skip
def test_tensors(files: Any, message: str, adapted: AdaptedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        check_lora(tensors(tmp_path / "wrong.gguf", *files), adapted)


def test_norms_are_ignored_with_a_warning(
    adapted: AdaptedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = [(f"{Q}.lora_a", (8, 256), "F32"), (f"{Q}.lora_b", (256, 8), "F32")]
    path = tensors(tmp_path / "norms.gguf", *pair, ("blk.0.attn_norm.weight", (256,), "F32"))
    assert check_lora(path, adapted).n_weights == 1
    assert "1 norm vectors are ignored, such as blk.0.attn_norm.weight" in caplog.text


def test_tied_embeddings(tiny_model_f32: Path, tmp_path: Path) -> None:
    """Upstream would multiply with A and B of the embeddings in the output layer, and abort."""
    tied = AdaptedModel.of(scan_model(tiny_model_f32))
    path = write(tmp_path / "tied.gguf", {"token_embd.weight": ((1096, 8), (256, 8))})
    with pytest.raises(UnsupportedError, match="also uses as its output layer"):
        check_lora(path, tied)


def test_embeddings_of_an_untied_model(adapted: AdaptedModel, tmp_path: Path) -> None:
    path = write(tmp_path / "embd.gguf", {"token_embd.weight": ((1096, 8), (256, 8))})
    assert check_lora(path, adapted).n_weights == 1


def test_other_files(adapted: AdaptedModel, model: Path, tmp_path: Path) -> None:
    for path, message in (
        (tmp_path, "is a directory"),
        (tmp_path / "absent.gguf", "No such file"),
        (model, "is no adapter: it is a model"),
        (Path(__file__), "is not a GGUF file"),
    ):
        with pytest.raises((ModelError, UnsupportedError), match=message):
            check_lora(path, adapted)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="not a regular file"):
        check_lora(tmp_path / "pipe", adapted)
    with pytest.raises(ArgumentError):
        check_lora(3, adapted)  # type: ignore[arg-type]


def test_a_file_that_changes(adapted: AdaptedModel, tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", GOOD)
    found = check_lora(path, adapted)
    found.check_unchanged()
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(ModelError, match="was changed while it was loaded"):
        found.check_unchanged()
    path.unlink()
    with pytest.raises(ModelError, match="cannot read"):
        found.check_unchanged()


def test_scales_that_overflow(adapted: AdaptedModel, tmp_path: Path) -> None:
    found = check_lora(write(tmp_path / "a.gguf", GOOD, alpha=1e35), adapted)
    found.check_scale(100.0)
    with pytest.raises(ModelError, match="overflows"):
        found.check_scale(1e6)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return the file with bytes changed, cut, repeated or inserted, mostly in its header."""
    kind, end = rng.randrange(6), min(len(data), 1200)
    at = rng.randrange(end)
    if kind == 0:
        return data[: rng.randrange(len(data))]
    if kind == 1:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if kind == 2:
        number = rng.choice((0, 1, 2, 255, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1))
        return data[:at] + struct.pack("<Q", number) + data[at + 8 :]
    if kind == 3:
        return data[:at] + data[at : at + rng.randrange(64)] + data[at:]
    if kind == 4:
        return data[:at] + data[at + rng.randrange(1, 64) :]
    words = (
        b"lora_a",
        b"lora_b",
        b"attn_q",
        b"attn_k",
        b"ffn_down",
        b"blk.0",
        b"blk.1",
        b"llama",
        b"adapter",
    )
    old, new = rng.sample(words, 2)
    return data.replace(old, new[: len(old)].ljust(len(old), b"a"), rng.choice((1, 2, -1)))


def attempts(path: Path, adapted: AdaptedModel, good: bytes, seeds: range) -> list[tuple[int, LoraFile]]:
    """Return the damaged files that pass the checks; any other error than ours fails."""
    passed = []
    for seed in seeds:
        path.write_bytes(damaged(good, random.Random(seed)))
        with suppress(ModelError, UnsupportedError):
            passed.append((seed, check_lora(path, adapted)))
    return passed


@pytest.mark.parametrize("make_good", [lambda p: write(p, GOOD), lambda p: write(p, GOOD, type_name="q8_0")])
def test_damaged_files(make_good: Callable[[Path], Path], adapted: AdaptedModel, tmp_path: Path) -> None:
    good = make_good(tmp_path / "good.gguf").read_bytes()
    passed = attempts(tmp_path / "bad.gguf", adapted, good, range(600))
    assert len(passed) < 400
    assert all(found.rank >= 1 and found.n_bytes < 10 * len(good) for _, found in passed)
