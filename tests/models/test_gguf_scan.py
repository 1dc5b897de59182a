"""The scan accepts what upstream accepts, and turns every damage into one ModelError."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyvelo.errors import ModelError
from pyvelo.kv.types import TENSOR_TYPES
from pyvelo.models import gguf_scan
from pyvelo.models.gguf_scan import GgufArray, QuantShare, scan

U32, F32, STRING, ARRAY, U64 = 4, 6, 8, 9, 10


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value(key: str, kind: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + data


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARCHITECTURE = value("general.architecture", STRING, text("llama"))
CONTEXT = value("llama.context_length", U32, struct.pack("<I", 77))
WORDS = value(
    "tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("") + text("né")
)
SCORES = value("tokenizer.ggml.scores", ARRAY, struct.pack("<IQ", F32, 3) + bytes(12))


def document(
    values: tuple[bytes, ...] = (ARCHITECTURE, CONTEXT, WORDS, SCORES),
    tensors: tuple[bytes, ...] = (tensor("a", (32, 2), 8, 0), tensor("b", (5,), 0, 96)),
    *,
    data: int = 96 + 20,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_values: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(values) if n_values is None else n_values)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


@pytest.fixture
def save(tmp_path: Path) -> Any:
    def write(data: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return write


def test_summary(save: Any) -> None:
    summary = scan(save(document()))
    assert (summary.version, summary.architecture) == (3, "llama")
    assert summary.metadata == {"general.architecture": "llama", "llama.context_length": 77}
    assert summary.of_architecture("context_length") == 77
    assert summary.of_architecture("block_count") is None
    assert summary.arrays == {
        "tokenizer.ggml.tokens": GgufArray("string", 3),
        "tokenizer.ggml.scores": GgufArray("f32", 3),
    }
    assert [(t.name, t.type_name, t.shape, t.n_bytes) for t in summary.tensors] == [
        ("a", "q8_0", (32, 2), 68),
        ("b", "f32", (5,), 20),
    ]
    assert summary.tensors[1].offset == summary.data_offset + 96
    assert summary.quantization == {"q8_0": QuantShare(1, 64, 68), "f32": QuantShare(1, 5, 20)}
    assert (summary.n_params, summary.tensor_bytes) == (69, 88)
    assert summary.file_bytes == len(document())


def test_agrees_with_gguf_py(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_float32("qwen3.rope.freq_base", 1e6)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_int64("some.number", -(1 << 40))
    writer.add_array("tokenizer.ggml.tokens", [f"word{i}" for i in range(20000)])
    writer.add_array("tokenizer.ggml.token_type", [1] * 20000)
    writer.add_custom_alignment(64)
    rows = np.arange(96, dtype=np.float32).reshape(3, 32)
    for kind in ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"):
        quant = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(kind, gguf.quants.quantize(rows, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    reader, summary = gguf.GGUFReader(path), scan(path)
    assert summary.architecture == "qwen3"
    assert summary.metadata["qwen3.rope.freq_base"] == 1e6
    assert summary.metadata["tokenizer.ggml.add_bos_token"] is True
    assert summary.metadata["some.number"] == -(1 << 40)
    assert summary.arrays["tokenizer.ggml.tokens"].count == 20000
    assert [(t.name, t.offset, t.n_bytes, list(t.shape)) for t in summary.tensors] == [
        (t.name, t.data_offset, t.n_bytes, t.shape.tolist()) for t in reader.tensors
    ]


def test_sizes_of_types_agree_with_gguf_py() -> None:
    # gguf-py counts Q8_1, which no file holds, with wider scales than ggml
    known = {kind.value: sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items() if kind.name != "Q8_1"}
    ours = {kind: (t.group, t.group_bytes) for kind, t in TENSOR_TYPES.items()}
    assert known.items() <= ours.items()


DAMAGES = {
    "not a GGUF file: it is empty": b"",
    "not a GGUF file: it starts with b'GGU'": b"GGU",
    "not a GGUF file: it starts with b'PK": b"PK\x03\x04" + bytes(100),
    "wants 4 bytes, but only 0 are left": b"GGUF",
    "version 1": document(version=1),
    "version 4": document(version=4),
    "big-endian": document(version=3 << 24),
    "cannot fit": document(n_tensors=1 << 60),
    "metadata values and 2 tensors cannot fit": document(n_values=(1 << 64) - 1),
    "does not name its architecture": document((CONTEXT,)),
    "'general.architecture' appears twice": document((ARCHITECTURE, ARCHITECTURE)),
    "empty key": document((ARCHITECTURE, value("", U32, bytes(4)))),
    "unknown type 99": document((ARCHITECTURE, value("x", 99, bytes(8)))),
    "elements of the unknown type 9": document(
        (ARCHITECTURE, value("x", ARRAY, struct.pack("<IQ", ARRAY, 1)))
    ),
    "claims 1152921504606846976 strings": document(
        (ARCHITECTURE, value("x", ARRAY, struct.pack("<IQ", STRING, 1 << 60)))
    ),
    "metadata value 'x' at byte": document(
        (ARCHITECTURE, value("x", ARRAY, struct.pack("<IQ", U64, 1 << 61)))
    ),
    "metadata value 'y' at byte": document(
        (ARCHITECTURE, value("y", STRING, struct.pack("<Q", (1 << 64) - 1)))
    ),
    "the key of metadata value 1": document((ARCHITECTURE, struct.pack("<Q", 1 << 63))),
    "a power of two, not 0": document((ARCHITECTURE, value("general.alignment", U32, struct.pack("<I", 0)))),
    "a power of two, not 48": document(
        (ARCHITECTURE, value("general.alignment", U32, struct.pack("<I", 48)))
    ),
    "a power of two, not 'x'": document((ARCHITECTURE, value("general.alignment", STRING, text("x")))),
    "tensor 'a' appears twice": document(tensors=(tensor("a", (8,), 0, 0), tensor("a", (8,), 0, 32))),
    "longer than 63 bytes": document(tensors=(tensor("a" * 64, (8,), 0, 0),)),
    "has 5 dimensions": document(tensors=(tensor("a", (1, 1, 1, 1, 1), 0, 0),)),
    "tensor 'a' has the unknown type 4": document(tensors=(tensor("a", (32,), 4, 0),)),
    "no multiple of q8_0's group of 32": document(tensors=(tensor("a", (33,), 8, 0),)),
    "no multiple of q4_0's group of 32": document(tensors=(tensor("a", (), 2, 0),)),
    "is at offset 32, but 0 was expected": document(tensors=(tensor("a", (8,), 0, 32),)),
    "tensor 'b' is at offset 0, but 96": document(
        tensors=(tensor("a", (24,), 0, 0), tensor("b", (8,), 0, 0))
    ),
    "tensor 'a' of shape [32, 4294967296, 4294967296] ends": document(
        tensors=(tensor("a", (32, 1 << 32, 1 << 32), 0, 0),)
    ),
    "(is the download complete?)": document()[:-1],
}


@pytest.mark.parametrize(("complaint", "data"), DAMAGES.items(), ids=list(DAMAGES))
def test_damage_is_named(save: Any, complaint: str, data: bytes) -> None:
    with pytest.raises(ModelError) as caught:
        scan(save(data))
    assert complaint in str(caught.value)
    assert "model.gguf" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_string_that_leaves_the_file_inside_an_array(save: Any) -> None:
    words = struct.pack("<IQ", STRING, 2) + struct.pack("<Q", 1 << 50) + text("b")
    with pytest.raises(ModelError, match="metadata value 'w'"):
        scan(save(document((ARCHITECTURE, value("w", ARRAY, words)))))


def test_a_header_beyond_any_reason_is_not_read(save: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_scan, "MAX_HEADER_BYTES", 1 << 16)
    long = value("long", STRING, text("x" * (1 << 17)))
    with pytest.raises(ModelError, match="which no header does"):
        scan(save(document((ARCHITECTURE, long))))


def test_headers_longer_than_one_read(save: Any) -> None:
    words = [f"word {i} " + "x" * (i % 300) for i in range(5000)]
    array = struct.pack("<IQ", STRING, len(words)) + b"".join(text(word) for word in words)
    summary = scan(save(document((ARCHITECTURE, value("w", ARRAY, array), CONTEXT))))
    assert summary.arrays["w"].count == 5000
    assert summary.of_architecture("context_length") == 77


def test_no_file_and_no_regular_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        scan(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="is a directory: name the GGUF file in it"):
        scan(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes have no names here")
def test_pipes_and_sockets_are_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    os.mkfifo("pipe.gguf")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.gguf")
        for name in ("pipe.gguf", "socket.gguf", os.devnull):
            with pytest.raises(ModelError, match="is not a regular file"):
                scan(name)


def test_every_cut_is_noticed(save: Any) -> None:
    whole = document()
    for end in range(len(whole)):
        with pytest.raises(ModelError):
            scan(save(whole[:end]))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_damage_never_escapes(save: Any, data: st.DataObject) -> None:
    damaged = bytearray(document())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        summary = scan(save(bytes(damaged)))
    except ModelError:
        return
    assert all(t.offset + t.n_bytes <= summary.file_bytes for t in summary.tensors)
